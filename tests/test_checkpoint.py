import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from model import GPT, GPTConfig
from runtime.checkpoint import (
    CheckpointWriter,
    TrainerState,
    find_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    read_state,
    rng_states,
    save_checkpoint,
    verify_checkpoint,
)

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
    from runtime.huggingface import save_pretrained

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


def saved_tensors(path):
    return {name: load_file(path / name) for name in ("model.safetensors", "optimizer.safetensors")}


def tensors_now(model, optimizer):
    """What a checkpoint must hold, read off model and optimizer without our code."""
    moments = {
        f"{key}.{name}": value.clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"model.safetensors": parameters, "optimizer.safetensors": moments}


def assert_same(found, expected):
    for file, tensors in expected.items():
        assert found[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[file][name], tensor), name


def test_writer_saves_each_step_as_it_was_though_training_goes_on(tmp_path):
    torch.manual_seed(0)
    # Large enough that the changes below come while the file is being written.
    model, optimizer = new_training(GPTConfig(16, 20_000, n_layer=1, n_head=2, n_embd=128))
    expected = []
    with CheckpointWriter(tmp_path) as writer:
        for step in (1, 2):
            train(model, optimizer, 1)
            expected.append(tensors_now(model, optimizer))
            writer.save(trainer_state(step), model, optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    optimizer.state[parameter]["exp_avg_sq"].add_(1.0)
                    parameter.mul_(2.0)
    for step, tensors in zip((1, 2), expected, strict=True):
        assert_same(saved_tensors(tmp_path / f"step_{step:08d}"), tensors)


def test_writer_says_saved_once_the_checkpoint_is_complete_and_lets_training_go_on(tmp_path):
    model, optimizer = new_training()
    train(model, optimizer, 1)
    events, may_end = [], threading.Event()

    def on_saved(path):
        verify_checkpoint(path)
        events.append(path.name)
        may_end.wait(30)
        events.append("written")

    with CheckpointWriter(tmp_path) as writer:
        writer.save(trainer_state(1), model, optimizer, on_saved)
        events.append("training")
        while len(events) < 2:
            time.sleep(0.001)
        writer.check()  # nothing is wrong, and nothing is waited for
        assert sorted(events) == ["step_00000001", "training"]
        threading.Timer(0.2, may_end.set).start()
        writer.save(trainer_state(2), model, optimizer)
        events.append("second save")
    assert events[2:] == ["written", "second save"]


@contextmanager
def largest_file(size):
    """As a full disk: a file of this process may not grow beyond `size` bytes."""
    resource = pytest.importorskip("resource")  # POSIX has it
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def check_for(writer, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        writer.check()


@pytest.mark.parametrize("surface", ["check", "wait", "save"])
def test_writer_that_fails_says_so_and_leaves_the_older_checkpoint(saved, surface):
    path, model, optimizer = saved
    before = saved_tensors(path)
    surfaces = {
        "check": lambda writer: check_for(writer, seconds=10),
        "wait": lambda writer: writer.wait(),
        "save": lambda writer: writer.save(trainer_state(5), model, optimizer),
    }
    with CheckpointWriter(path.parent) as writer:
        with largest_file(10_000):
            writer.save(trainer_state(4), model, optimizer)
            with pytest.raises(OSError, match=r"step_00000004 was not saved: .*too large"):
                surfaces[surface](writer)
        assert os.listdir(path.parent) == [path.name]
        verify_checkpoint(path)
        assert_same(saved_tensors(path), before)
        writer.save(trainer_state(6), model, optimizer)  # there is room again
    assert latest_checkpoint(path.parent.parent).name == "step_00000006"


def save_and_stop(folder, stop):
    """Begin to save, then leave the writer's body at once, by `stop` if there is one."""
    model, optimizer = new_training()
    train(model, optimizer, 1)
    with CheckpointWriter(folder) as writer:
        writer.save(trainer_state(1), model, optimizer)
        if stop is not None:
            raise stop


@pytest.mark.parametrize("stop", [KeyboardInterrupt, FloatingPointError])
def test_writer_finishes_though_training_is_stopped(tmp_path, stop):
    with pytest.raises(stop):
        save_and_stop(tmp_path, stop)
    assert os.listdir(tmp_path) == ["step_00000001"]
    verify_checkpoint(tmp_path / "step_00000001")


def test_writer_that_fails_says_so_at_its_end(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    with pytest.raises(OSError, match="step_00000001 was not saved"):
        save_and_stop(folder, None)
    with (  # but does not hide what stopped training
        pytest.warns(UserWarning, match="step_00000001 was not saved"),
        pytest.raises(FloatingPointError, match="loss nan"),
    ):
        save_and_stop(folder, FloatingPointError("loss nan"))


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
