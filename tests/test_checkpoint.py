import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from checkpoint import (
    TrainerState,
    find_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    read_state,
    rng_states,
    save_checkpoint,
)
from model import GPT, GPTConfig

TINY = GPTConfig(block_size=16, vocab_size=100, n_layer=2, n_head=2, n_embd=16)


def trainer_state(step, config=TINY):
    return TrainerState(
        step=step,
        tokens_seen=step * 64,
        model_config=vars(config),
        train_config={"seed": 1},
        data_fingerprint="abc",
        rng_states=rng_states(),
        grad_scaler={},
    )


def new_training(config=TINY):
    model = GPT(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model, optimizer, steps):
    for _ in range(steps):
        tokens = torch.randint(0, 100, (4, 17))  # the global generator's state matters
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model, optimizer = new_training()
    train(model, optimizer, 3)
    path = save_checkpoint(tmp_path / "run" / "checkpoints", trainer_state(3), model, optimizer)
    return path, model, optimizer


def test_load_checkpoint_continues_bit_for_bit(saved):
    path, model, optimizer = saved
    train(model, optimizer, 3)
    torch.manual_seed(99)
    other, other_optimizer = new_training()
    state = load_checkpoint(path, other, other_optimizer)
    train(other, other_optimizer, 3)
    assert (state.step, state.tokens_seen, state.train_config) == (3, 192, {"seed": 1})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_save_checkpoint_writes_no_pickle_and_plain_names(saved):
    path, _, _ = saved
    names = {"manifest.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"}
    assert {file.name for file in path.iterdir()} == names
    assert path.name == "step_00000003"
    header_size = int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((path / "model.safetensors").read_bytes()[8 : 8 + header_size])
    assert "transformer.h.1.attn.c_attn.weight" in header
    assert not any("_orig_mod" in name or "module." in name for name in header)


def test_latest_checkpoint_ignores_one_without_a_manifest(saved):
    path, model, optimizer = saved
    later = save_checkpoint(path.parent, trainer_state(12), model, optimizer)
    assert latest_checkpoint(path.parent.parent) == later
    (later / "manifest.json").unlink()
    assert latest_checkpoint(path.parent.parent) == path
    assert find_checkpoint(path.parent.parent) == path
    assert find_checkpoint(path) == path


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json"]
)
def test_load_checkpoint_refuses_a_flipped_byte_and_names_the_file(saved, name):
    path, model, optimizer = saved
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        load_checkpoint(path, model, optimizer)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        load_model(path)


def test_load_checkpoint_refuses_another_shape(saved):
    path, _, _ = saved
    model, optimizer = new_training(GPTConfig(16, 100, n_layer=3, n_head=2, n_embd=16))
    with pytest.raises(ValueError, match=r"transformer\.h\.2\..* is missing there"):
        load_checkpoint(path, model, optimizer)


def test_load_model_takes_run_folder_and_checkpoint(saved):
    path, model, _ = saved
    idx = torch.arange(16)[None]
    expected = model(idx).logits
    for source in (path, path.parent.parent, str(path)):
        assert torch.equal(load_model(source)(idx).logits, expected)


def test_load_model_takes_what_save_pretrained_wrote(saved, tmp_path):
    from pretrained import save_pretrained

    config = GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=16)
    model = GPT(config)
    save_pretrained(model, tmp_path / "hf")
    idx = torch.arange(16)[None]
    assert torch.allclose(load_model(tmp_path / "hf")(idx).logits, model(idx).logits, atol=1e-6)


def test_load_model_of_nothing_says_so(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="neither a checkpoint nor a run folder"):
        load_model(tmp_path / "run")


def test_read_state_refuses_another_format(saved):
    path, _, _ = saved
    state = json.loads((path / "trainer_state.json").read_text())
    (path / "trainer_state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        read_state(path)


def test_save_checkpoint_replaces_an_older_attempt_at_the_same_step(saved):
    path, model, optimizer = saved
    train(model, optimizer, 1)
    assert save_checkpoint(path.parent, trainer_state(3), model, optimizer) == path
    assert torch.equal(
        load_model(path).transformer.wte.weight, model.transformer.wte.weight.detach()
    )


SAVE_FOR_EVER = """
import sys, torch
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from test_checkpoint import new_training, train, trainer_state, save_checkpoint
torch.manual_seed(0)
model, optimizer = new_training()
train(model, optimizer, 1)
for step in range(1, 10**6):
    save_checkpoint(Path({folder!r}), trainer_state(step), model, optimizer)
    print(step, flush=True)
"""


def test_save_checkpoint_killed_at_any_moment_leaves_a_valid_latest(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    code = SAVE_FOR_EVER.format(root=str(ROOT), tests=str(ROOT / "tests"), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    done = 0
    for line in process.stdout:
        done = int(line)
        if done == 5:
            os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    latest = latest_checkpoint(tmp_path / "run")
    model, optimizer = new_training()
    assert load_checkpoint(latest, model, optimizer).step >= done
    save_checkpoint(folder, trainer_state(10**6), model, optimizer)
    assert not list(folder.glob(".*"))
