import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT, check_on_ranks
from safetensors.torch import load_file
from test_files import largest_file
from torch import nn

from model import GPT, GPTConfig, Transformer
from runtime.checkpoint import (
    CheckpointWriter,
    TrainerState,
    copy_weights,
    find_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    read_model_config,
    rng_states,
    verify_checkpoint,
)
from runtime.files import read_json, sha256_of, write_json
from runtime.huggingface import save_pretrained

TINY = GPTConfig(block_size=16, vocab_size=100, n_layer=2, n_head=2, n_embd=16)


class Counting(torch.optim.Optimizer):
    """SGD whose state is a number and a None, no tensor."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["updates"] = state.get("updates", 0) + 1
            state["momentum"] = None
            parameter.sub_(parameter.grad, alpha=0.1 / state["updates"])


def muon_and_adamw(model):
    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)


OPTIMIZERS = {
    "AdamW": lambda model: (torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),),
    "SGD": lambda model: (torch.optim.SGD(model.parameters(), lr=1e-2),),
    "momentum": lambda model: (torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),),
    "Adafactor": lambda model: (torch.optim.Adafactor(model.parameters()),),
    "Counting": lambda model: (Counting(model.parameters()),),
    "Muon": muon_and_adamw,
}


def new_training(config=TINY, kind="AdamW"):
    model = GPT(config)
    return model, OPTIMIZERS[kind](model)


def trainer_state(step, model):
    return TrainerState(
        step=step,
        tokens_seen=step * 64,
        model_config=vars(model.config),
        train_config={"seed": 1},
        data_fingerprint="abc",
        rng_states=rng_states(),
        grad_scaler={},
    )


def save(folder, step, model, optimizers):
    """Save a checkpoint, wait for it and return its folder."""
    Path(folder).parent.mkdir(exist_ok=True)
    with CheckpointWriter(Path(folder)) as writer:
        writer.save(trainer_state(step, model), model, optimizers)
    return Path(folder) / f"step_{step:08d}"


def train(model, optimizers, steps, without_gradient=()):
    for _ in range(steps):
        tokens = torch.randint(0, 100, (4, 17))  # the global generator's state matters
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        for name in without_gradient:
            model.get_parameter(name).grad = None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_same_parameters(model, other):
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model, optimizers = new_training()
    train(model, optimizers, 3)
    path = save(tmp_path / "run" / "checkpoints", 3, model, optimizers)
    return path, model, optimizers


@pytest.mark.parametrize(
    ("kind", "stateless"),
    [*((kind, []) for kind in OPTIMIZERS), ("AdamW", ["transformer.wpe.weight"])],
)
def test_load_checkpoint_continues_bit_for_bit(tmp_path, kind, stateless):
    torch.manual_seed(0)
    model, optimizers = new_training(kind=kind)
    train(model, optimizers, 3, without_gradient=stateless)
    path = save(str(tmp_path), 3, model, optimizers)
    train(model, optimizers, 3)
    torch.manual_seed(99)
    other, other_optimizers = new_training(kind=kind)
    state = load_checkpoint(str(path), other, other_optimizers)
    assert (state.step, state.tokens_seen, state.train_config) == (3, 192, {"seed": 1})
    assert kind == "SGD" or state.stateless == stateless
    train(other, other_optimizers, 3)
    assert_same_parameters(model, other)


SHARDED_CHECK = f"""
import torch
from pathlib import Path
from torch.distributed.fsdp import fully_shard
sys.path.append({str(ROOT / "tests")!r})
from test_checkpoint import *

def sharded(kind):
    model = GPT(TINY)
    for module in (*model.transformer.h, model):
        fully_shard(module)
    return model, OPTIMIZERS[kind](model)

def check(dist_info):
    for kind in ("AdamW", "momentum", "Muon"):
        torch.manual_seed(0)
        model, optimizers = sharded(kind)
        train(model, optimizers, 2)
        folder = Path("FOLDER") / kind
        with CheckpointWriter(folder if dist_info.is_main else None) as writer:
            writer.save(trainer_state(2, model), model, optimizers)
        barrier()
        train(model, optimizers, 2)
        other, other_optimizers = sharded(kind)
        load_checkpoint(folder / "step_00000002", other, other_optimizers)
        train(other, other_optimizers, 2)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.to_local(), other.get_parameter(name).to_local()), name
    # Muon's step communicates: a file that one rank cannot read must end both before that step.
    path = folder / ("step_00000002" if dist_info.is_main else "nothing")
    error, message = (ValueError, "rank 1: .*nothing") if dist_info.is_main else (SystemExit, "2")
    with pytest.raises(error, match=message):
        load_checkpoint(path, other, other_optimizers)
    source = GPT(GPTConfig(32, 100, n_layer=2, n_head=2, n_embd=16))  # the same on each rank
    copy_weights(source, model)
    for name, parameter in model.named_parameters():
        whole = source.get_parameter(name)
        assert torch.equal(full_tensor(parameter), whole[:16] if "wpe" in name else whole), name
"""


def test_sharded_models_continue_bit_for_bit_load_into_one_process_and_fail_together(
    commands, tmp_path
):
    check_on_ranks(commands, SHARDED_CHECK.replace("FOLDER", str(tmp_path)), tmp_path)
    for kind in ("AdamW", "momentum", "Muon"):
        torch.manual_seed(0)
        model, optimizers = new_training(kind=kind)
        train(model, optimizers, 2)
        path = save(tmp_path, 2, model, optimizers)
        whole, gathered = (saved_tensors(p) for p in (path, tmp_path / kind / path.name))
        for file, tensors in whole.items():
            assert gathered[file].keys() == tensors.keys()
            for name, tensor in tensors.items():
                # Muon's bfloat16 products round in another way on each kind of CPU.
                torch.testing.assert_close(gathered[file][name], tensor, rtol=1e-3, atol=3e-3)
        load_checkpoint(tmp_path / kind / path.name, *new_training(kind=kind))


def rewrite_state(path, change):
    """Change a checkpoint's trainer state, and its manifest with it."""
    state = path / "trainer_state.json"
    write_json(state, change(read_json(state)))
    manifest = read_json(path / "manifest.json")
    manifest["files"][state.name] = {"bytes": state.stat().st_size, "sha256": sha256_of(state)}
    write_json(path / "manifest.json", manifest)


def test_checkpoint_from_before_optimizers_were_named_is_adamws(saved):
    path, model, _ = saved
    new = {"optimizers", "optimizer_values", "stateless"}
    rewrite_state(path, lambda state: {k: v for k, v in state.items() if k not in new})
    other, optimizers = new_training()
    assert load_checkpoint(path, other, optimizers).optimizers == ["AdamW"]
    assert_same_parameters(model, other)
    with pytest.raises(ValueError, match=r"trained by AdamW, and this run builds SGD: .*--init"):
        load_checkpoint(path, *new_training(kind="momentum"))


MISFITS = {  # what is done to the model and the optimizer that are to be filled
    r"exp_avg\..* is unexpected": lambda _, adamw: adamw.param_groups[0]["params"].pop(0),
    "max_exp_avg_sq.* is missing": lambda _, adamw: adamw.param_groups[0].update(amsgrad=True),
    r"ln\.weight is missing": lambda model, _: model.add_module("ln", nn.LayerNorm(4)),
    r"h\.1\..* is unexpected": lambda model, _: model.transformer.h.pop(1),
}


@pytest.mark.parametrize("message", MISFITS)
def test_load_checkpoint_refuses_state_that_does_not_fit(saved, message):
    path, _, _ = saved
    model, [optimizer] = new_training()
    MISFITS[message](model, optimizer)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path, model, [optimizer])


@pytest.mark.parametrize(
    "change",
    [
        *({"step": -5}, {"step": True}, {"train_config": 7}, {"model_config": {"n_layer": 0}}),
        *({"rng_states": {}}, {"rng_states": {"cpu": "AAAA"}}, {"grad_norms": ["x"]}),
        *({"surprise": 1}, {"format": 99}, {"optimizers": [{}]}, {"optimizer_values": {"x": 1}}),
    ],
    ids=str,
)
def test_load_checkpoint_refuses_a_forged_state(saved, change):
    path, model, optimizers = saved
    rewrite_state(path, lambda state: state | change)
    with pytest.raises(ValueError, match=str(path)):
        load_checkpoint(path, model, optimizers)


def test_save_checkpoint_refuses_state_that_it_cannot_hold(tmp_path):
    model, [optimizer] = new_training()
    optimizer.state[model.transformer.wte.weight]["history"] = [1]
    with pytest.raises(ValueError, match=r"history\.transformer\.wte\.weight is a list"):
        save(tmp_path, 1, model, [optimizer])


def test_save_writes_no_pickle_and_plain_names(saved):
    path, _, _ = saved
    names = {"manifest.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"}
    assert {file.name for file in path.iterdir()} == names
    assert path.name == "step_00000003"
    tensors = saved_tensors(path)
    assert "transformer.h.1.attn.c_attn.weight" in tensors["model.safetensors"]
    assert "exp_avg.transformer.wte.weight" in tensors["optimizer.safetensors"]


def test_save_sets_one_of_the_same_step_aside_and_one_without_a_manifest_counts_not(saved):
    path, model, optimizers = saved
    before = [path.read_bytes() for path in sorted(path.iterdir())]
    for place in ("step_00000003", "step_00000003.2"):
        train(model, optimizers, 1)
        assert save(path.parent, 3, model, optimizers) == path
        assert_same_parameters(load_model(path), model)
        aside = path.parent / "set_aside" / place
        assert [file.read_bytes() for file in sorted(aside.iterdir())] == before
        before = [file.read_bytes() for file in sorted(path.iterdir())]
    later = save(path.parent, 12, model, optimizers)
    assert latest_checkpoint(path.parent.parent) == later
    (later / "manifest.json").unlink()
    assert latest_checkpoint(path.parent.parent) == path
    assert find_checkpoint(path.parent.parent) == path
    assert find_checkpoint(path) == path


def test_latest_checkpoint_is_there_at_every_moment_of_a_rotation(saved, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # 2000 would take a hard disk a minute
    newest, state = saved[0], read_json(saved[0] / "trainer_state.json")

    def rotate():
        oldest = newest
        for step in range(4, 400):
            write_json(newest.parent / ".new" / "trainer_state.json", state | {"step": step})
            write_json(newest.parent / ".new" / "manifest.json", {})
            checkpoint = newest.with_name(f"step_{step:08d}")
            (newest.parent / ".new").rename(checkpoint)
            shutil.rmtree(oldest.rename(newest.parent / ".old"))
            oldest = checkpoint

    with ThreadPoolExecutor() as pool:
        rotating = pool.submit(rotate)
        while not rotating.done():
            assert latest_checkpoint(newest.parent.parent) is not None
        rotating.result()


def test_load_refuses_a_damaged_file_unless_its_hash_was_checked_before(saved):
    path, model, optimizers = saved
    manifest = read_json(path / "manifest.json")
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64
    write_json(path / "manifest.json", manifest)
    for load in (load_model, lambda path: load_checkpoint(path, model, optimizers)):
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
            load(path)
    load_checkpoint(path, model, optimizers, verified=True)


def test_load_model_takes_run_folder_checkpoint_and_export(saved, tmp_path):
    path, model, _ = saved
    idx = torch.arange(16)[None]
    exported = GPT(GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=16))
    save_pretrained(exported, str(tmp_path / "hf"))
    before = torch.get_rng_state()
    sources = {path: model, path.parent.parent: model, str(path): model, tmp_path / "hf": exported}
    for source, expected in sources.items():
        assert torch.equal(load_model(source)(idx).logits, expected(idx).logits)
        assert read_model_config(source) == expected.config
    assert torch.equal(torch.get_rng_state(), before)


def test_load_model_lists_the_runs_where_there_is_no_model(saved, tmp_path, monkeypatch):
    """By one line, and never by asking the hub."""
    monkeypatch.chdir(tmp_path)
    os.rename("run", "small")
    os.makedirs("runs/large/checkpoints")
    os.rename("small", "runs/small")
    for source, message in {
        "runs/large": "the run runs/large has no checkpoint yet: .*--resume auto .*-name large",
        "runs/smal": "runs/smal does not exist: the runs there are runs/small, ",
        "runs": "runs is no run, .*: the runs there are .*runs/small",
        "./nothing": "nothing does not exist: give a run's folder",
        "no/such/folder": "no/such/folder does not exist",
        "runs/small/checkpoints/step_7": "step_7 does not exist",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            load_model(source)
    for name in "abcdefgh":
        os.makedirs(f"runs/{name}/checkpoints")
    with pytest.raises(FileNotFoundError, match=r"are runs/small, (runs/\w+, ){3}.* and 5 more"):
        load_model("runs/smal")


def test_load_model_refuses_a_checkpoint_of_other_code(saved, monkeypatch):
    class Changed(Transformer):
        def __init__(self, config):
            super().__init__(config)
            del self.wpe

    monkeypatch.setattr("model.Transformer", Changed)
    with pytest.raises(ValueError, match=r"wpe\.weight is unexpected"):
        load_model(saved[0])


def sized(block_size):
    return GPT(GPTConfig(block_size, 100, n_layer=2, n_head=2, n_embd=16))


def test_copy_weights_crops_the_position_embeddings():
    source, target = sized(16), sized(8)
    copy_weights(source, target)
    idx = torch.randint(0, 100, (2, 8))
    assert torch.equal(target(idx).logits, source(idx).logits)
    with pytest.raises(ValueError, match=r"wpe\.weight has shape \(16, 16\), not \(17, 16\)"):
        copy_weights(source, sized(17))
    with pytest.raises(ValueError, match=r"h\.2\..* is missing"):
        copy_weights(source, GPT(GPTConfig(16, 100, n_layer=3, n_head=2, n_embd=16)))


# --- writing while training goes on -------------------------------------------------------------


def saved_tensors(path):
    return {name: load_file(path / name) for name in ("model.safetensors", "optimizer.safetensors")}


def tensors_now(model, optimizers):
    """What a checkpoint must hold, read from model and optimizer without our code."""
    state = {
        f"{key}.{name}": value.clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizers[0].state[parameter].items()
    }
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"model.safetensors": parameters, "optimizer.safetensors": state}


def assert_same(found, expected):
    for file, tensors in expected.items():
        assert found[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[file][name], tensor), name


def test_writer_saves_each_step_as_it_was_though_training_goes_on(tmp_path):
    torch.manual_seed(0)
    # Large enough that the changes below come while the file is being written.
    model, optimizers = new_training(GPTConfig(16, 20_000, n_layer=1, n_head=2, n_embd=128))
    expected = []
    with CheckpointWriter(tmp_path) as writer:
        for step in (1, 2):
            train(model, optimizers, 1)
            expected.append(tensors_now(model, optimizers))
            writer.save(trainer_state(step, model), model, optimizers)
            with torch.no_grad():
                for parameter in model.parameters():
                    optimizers[0].state[parameter]["exp_avg_sq"].add_(1.0)
                    parameter.mul_(2.0)
    for step, tensors in zip((1, 2), expected, strict=True):
        assert_same(saved_tensors(tmp_path / f"step_{step:08d}"), tensors)


def test_writer_says_saved_once_the_checkpoint_is_complete_and_lets_training_go_on(tmp_path):
    model, optimizers = new_training()
    train(model, optimizers, 1)
    events, may_end = [], threading.Event()

    def on_saved(path):
        verify_checkpoint(path)
        events.append(path.name)
        may_end.wait(600)
        events.append("written")

    with CheckpointWriter(tmp_path) as writer:
        writer.save(trainer_state(1, model), model, optimizers, on_saved)
        events.append("training")
        while len(events) < 2:
            time.sleep(0.001)
        writer.check()  # nothing is wrong, and nothing is waited for
        assert sorted(events) == ["step_00000001", "training"]
        threading.Timer(0.2, may_end.set).start()
        writer.save(trainer_state(2, model), model, optimizers)
        events.append("second save")
    assert events[2:] == ["written", "second save"]


@pytest.mark.parametrize("surface", ["check", "save"])
def test_writer_that_fails_says_so_and_leaves_the_older_checkpoint(saved, surface):
    path, model, optimizers = saved
    before = saved_tensors(path)
    with CheckpointWriter(path.parent) as writer:
        with largest_file(10_000):
            writer.save(trainer_state(4, model), model, optimizers)
            with pytest.raises(OSError, match=r"step_00000004 was not saved: .*too large"):  # noqa: PT012
                if surface == "save":
                    writer.save(trainer_state(5, model), model, optimizers)
                for _ in range(300_000):
                    writer.check()
                    time.sleep(0.001)
        assert os.listdir(path.parent) == [path.name]
        verify_checkpoint(path)
        assert_same(saved_tensors(path), before)
        writer.save(trainer_state(6, model), model, optimizers)  # there is room again
    assert latest_checkpoint(path.parent.parent).name == "step_00000006"


def save_and_stop(folder, stop):
    """Begin to save, then leave the writer's body at once, by `stop` if there is one."""
    model, optimizers = new_training()
    train(model, optimizers, 1)
    with CheckpointWriter(folder) as writer:
        writer.save(trainer_state(1, model), model, optimizers)
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
