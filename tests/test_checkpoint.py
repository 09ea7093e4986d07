import math
import os
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoints import (
    OPTIMIZERS,
    TENSOR_FILES,
    assert_same_parameters,
    contents,
    load,
    new_trainer,
    rewrite_state,
    run_state,
    save,
    saved_tensors,
    train,
    write_manifest,
)
from conftest import ROOT, check_on_ranks, fake_checkpoint
from run_files import append_records
from safetensors.torch import load_file, save_file

from formats import checkpoint
from formats.checkpoint import (
    CheckpointWriter,
    find_nonfinite_on_ranks,
    verify_checkpoint,
)
from formats.huggingface import save_pretrained
from formats.load import (
    describe_best,
    find_checkpoint,
    latest_valid_checkpoint,
    load_model,
    model_config_of,
    newest_run,
)
from model import GPT, GPTConfig
from runtime.errors import UserError
from runtime.files import read_json, write_json


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    trainer = new_trainer()
    train(trainer, 3)
    return save(tmp_path / "run" / "checkpoints", 3, trainer), trainer


# --- saving and loading -------------------------------------------------------------------------


@pytest.mark.gpt2
@pytest.mark.parametrize(
    ("kind", "stateless"),
    [*((kind, []) for kind in OPTIMIZERS), ("AdamW", ["transformer.wpe.weight"])],
)
def test_load_checkpoint_continues_bit_for_bit(tmp_path, kind, stateless):
    torch.manual_seed(0)
    trainer = new_trainer(kind=kind)
    train(trainer, 3, without_gradient=stateless)
    path = save(tmp_path, 3, trainer)
    train(trainer, 3)
    torch.manual_seed(99)
    other = new_trainer(kind=kind)
    state = load(path, other)
    assert (state.step, state.tokens_seen, state.train_config) == (3, 192, {"seed": 1})
    train(other, 3)
    assert_same_parameters(trainer.raw_model, other.raw_model)


SHARDED_CHECK = f"""
import pytest, torch
from pathlib import Path
from torch.distributed.fsdp import fully_shard
sys.path.append({str(ROOT / "tests")!r})
from checkpoints import *
from formats.checkpoint import copy_weights, restore_rng_states
from parallel import FSDP

def sharded():
    trainer = new_trainer()
    model = trainer.raw_model
    for module in (*model.transformer.h, model):
        fully_shard(module)
    trainer.optimizers = muon_and_adamw(model)
    return trainer

def check(dist_info):
    ranks, folder = FSDP(**vars(dist_info)), Path("FOLDER")
    torch.manual_seed(0)
    trainer = sharded()
    train(trainer, 2)
    torch.rand(dist_info.rank)  # from here on each rank has random numbers of its own
    with CheckpointWriter(folder if ranks.rank == 0 else None, ranks=ranks) as writer:
        writer.save(run_state(2, trainer), contents(trainer))
    barrier()
    train(trainer, 2)
    other, model = sharded(), trainer.raw_model
    state = load(folder / "step_00000002", other, ranks)
    train(other, 2)
    for name, parameter in other.raw_model.named_parameters():
        assert torch.equal(parameter.to_local(), model.get_parameter(name).to_local()), name
    before = torch.get_rng_state()
    restore_rng_states(state.rng_states[:1], ranks.rank)  # of a run of one rank
    assert dist_info.rank == 0 or torch.equal(torch.get_rng_state(), before)
    # Muon's step communicates: a file that one rank cannot read must end both before that step.
    path = folder / ("step_00000002" if dist_info.rank == 0 else "nothing")
    error, message = (ValueError, "rank 1: .*nothing") if dist_info.rank == 0 else (SystemExit, "2")
    with pytest.raises(error, match=message):
        restore(Checkpoint(path, state), other, ranks)
    torch.manual_seed(1)  # the same on each rank
    source = GPT(GPTConfig(32, 100, n_layer=2, n_head=2, n_embd=16))
    copy_weights(source, model, ranks)
    for name, parameter in model.named_parameters():
        whole = source.get_parameter(name)
        assert torch.equal(ranks.gather(parameter), whole[:16] if "wpe" in name else whole), name
"""


def test_sharded_models_continue_bit_for_bit_load_into_one_process_and_fail_together(
    commands, tmp_path
):
    sharded = tmp_path / "sharded"
    check_on_ranks(commands, SHARDED_CHECK.replace("FOLDER", str(sharded)), tmp_path)
    torch.manual_seed(0)
    trainer = new_trainer(kind="Muon")
    train(trainer, 2)
    path = save(tmp_path / "one", 2, trainer)
    # Muon's bfloat16 products round in another way on each kind of CPU.
    torch.testing.assert_close(
        saved_tensors(sharded / path.name), saved_tensors(path), rtol=1e-3, atol=3e-3
    )
    load(sharded / path.name, new_trainer(kind="Muon"))


def test_checkpoint_has_plain_names_and_a_manifest(saved):
    path, _ = saved
    assert path.name == "step_00000003"
    assert sorted(os.listdir(path)) == ["manifest.json", *TENSOR_FILES, "trainer_state.json"]
    tensors = saved_tensors(path)
    assert "transformer.h.1.attn.c_attn.weight" in tensors["model.safetensors"]
    assert "exp_avg.transformer.wte.weight" in tensors["optimizer.safetensors"]
    verify_checkpoint(path)
    write_json(path / "manifest.json", read_json(path / "manifest.json") | {"format": 2})
    with pytest.raises(ValueError, match="format differs"):
        verify_checkpoint(path)


def test_find_nonfinite_names_the_tensor():
    trainer = new_trainer()
    train(trainer, 1)
    assert find_nonfinite_on_ranks(contents(trainer)) is None
    trainer.optimizers[0].state[trainer.raw_model.lm_head.weight]["exp_avg_sq"][3, 4] = -math.inf
    assert find_nonfinite_on_ranks(contents(trainer)) == f"exp_avg_sq.{WTE}"


def test_writer_warns_of_an_old_checkpoint_that_it_cannot_delete(saved, capsys):
    path, trainer = saved
    path.with_name(f".{path.name}.deleted").touch()  # no folder can be renamed to a file's name
    with CheckpointWriter(path.parent, keep=1) as writer:
        writer.save(run_state(4, trainer), contents(trainer))
        writer.wait()
        assert writer.error is None
        assert "step_00000003' -> " in capsys.readouterr().out.removeprefix("warning: ")
        path.with_name(".step_00000005.tmp").touch()  # nor is one made where a file is
        writer.save(run_state(5, trainer), contents(trainer))
        writer.wait()
        assert "step_00000005 was not saved" in str(writer.error)


# --- what is refused ----------------------------------------------------------------------------


WTE = "transformer.wte.weight"


def test_load_checkpoint_refuses_the_tensors_of_another_model(saved):
    path, trainer = saved
    tensors = load_file(path / "model.safetensors")
    del tensors[WTE]
    save_file(tensors, path / "model.safetensors")
    write_manifest(path)
    for load_from in (lambda path: load(path, trainer), load_model):
        with pytest.raises(
            ValueError, match=r"step_00000003 does not fit .*wte\.weight is missing"
        ):
            load_from(path)


def test_checkpoint_that_is_damaged_or_incomplete_is_not_taken(saved, capsys):
    path, trainer = saved
    run_dir, damaged = path.parent.parent, save(path.parent, 4, trainer)
    assert find_checkpoint(run_dir) == damaged
    (damaged / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"step_00000004/model\.safetensors is damaged"):
        load_model(run_dir)
    path.with_name("step_00000007").mkdir()  # without a manifest it is none
    assert latest_valid_checkpoint(run_dir) == path
    assert "step_00000004/model.safetensors is damaged" in capsys.readouterr().out
    assert save(path.parent, 4, trainer) == damaged  # in its place
    assert_same_parameters(load_model(damaged), trainer.raw_model)


# --- loading a model ----------------------------------------------------------------------------


@pytest.mark.gpt2
def test_load_model_takes_run_folder_checkpoint_and_export(saved, tmp_path):
    path, model = saved[0], saved[1].raw_model
    unknown = {"z_loss": 0.5}  # a setting that the model no longer has
    rewrite_state(path, lambda s: s | {"model_config": s["model_config"] | unknown})
    exported = GPT(GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=16))
    save_pretrained(exported, tmp_path / "hf")
    idx = torch.arange(16)[None]
    sources = {path: model, path.parent.parent: model, tmp_path / "hf": exported}
    for source, expected in sources.items():
        loaded = load_model(str(source))
        assert not loaded.training
        assert torch.equal(loaded(idx).logits, expected(idx).logits)
        assert model_config_of(source) == expected.config


def test_load_model_lists_the_runs_where_there_is_no_model(saved, tmp_path, monkeypatch):
    """By one line, and never by asking the hub."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs/large/checkpoints")
    os.rename("run", "runs/small")
    os.mkdir("docs")
    Path("docs/a.md").touch()
    for source, message in {
        "runs/large": "runs/large has no checkpoint yet: wait for .* that started it and",
        "runs/smal": "runs/smal does not exist: the runs in runs are large, small",
        "runs": "runs is not a run, .*: the runs in runs are large, small",
        "runs/small/checkpoints/step_7": "step_7 does not exist: the runs in runs are large, small",
        "docs": "docs is not a run, .*: the runs in runs are large, small",
        "docs/a.md": "docs is not a run, .*: the runs in runs are large, small",
    }.items():
        with pytest.raises(UserError, match=message):
            load_model(source)
    assert find_checkpoint(Path("small")) == find_checkpoint(Path("runs/small"))


def test_newest_run_is_the_one_that_saved_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, time in (("b", 2), ("a", 3), ("c", 1)):
        os.utime(fake_checkpoint(Path("runs", name), 4).path, (time, time))
    Path("runs/d/checkpoints").mkdir(parents=True)
    assert newest_run() == Path("runs/a")
    assert "the model is runs/a, the newest run" in capsys.readouterr().err


def test_name_of_a_run_means_the_run_in_runs_and_not_a_folder_here(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree("run", "runs/docs")
    os.mkdir("docs")
    Path("docs/tsconfig.json").touch()  # is not the configuration of a model
    expected = find_checkpoint("runs/docs")
    assert find_checkpoint("docs") == expected
    assert_same_parameters(load_model("docs"), saved[1].raw_model)
    shutil.copytree("run", "docs", dirs_exist_ok=True)  # now both are runs
    assert find_checkpoint("docs") == expected
    for path in ("./docs", "docs/", tmp_path / "docs"):
        assert find_checkpoint(path).resolve() == (
            tmp_path / "docs" / expected.relative_to("runs/docs")
        )
    shutil.move("run", "exp/docs")
    assert find_checkpoint("docs", Path("exp")) == "exp" / expected.relative_to("runs")


def test_the_best_checkpoint_is_kept_and_named_and_found(tmp_path, monkeypatch):
    """Beside the newest; `RUN@best` is that one, `RUN` and a resume take the latest."""
    monkeypatch.chdir(tmp_path)
    run_dir, trainer = Path("runs/r"), new_trainer()
    folder = run_dir / "checkpoints"
    append_records(run_dir, {"step": 1, "train_loss": 9.0}, {"step": 1, "val_loss": None})
    save(folder, 1, trainer)
    assert describe_best(run_dir) == ""
    with pytest.raises(UserError, match=r"with a validation loss: use .*0001$"):
        load_model("r@best")
    for step, loss in {2: 5.0, 3: 3.0, 4: 4.0, 5: 3.9, 6: 4.2}.items():
        append_records(run_dir, {"step": step, "val_loss": loss})
        save(folder, step, trainer, keep=2)
    assert [int(path.name[-1]) for path in sorted(folder.iterdir())] == [3, 5, 6]
    assert find_checkpoint(Path("runs/r@best")) == folder / "step_00000003"
    assert find_checkpoint(Path("r")) == folder / "step_00000006"
    assert isinstance(load_model("r@best"), GPT)
    line, warning = describe_best(run_dir).splitlines()
    assert line == "best val_loss 3.0000 at step 3"
    assert "higher: use the best saved checkpoint (--model runs/r@best), " in warning
    assert warning.endswith(" a smaller --max-steps, or more data")
    append_records(run_dir, {"resumed_from": 6}, {"step": 7, "val_loss": 3.04})  # 0.04 is chance
    assert describe_best(run_dir) == "best val_loss 3.0000 at step 3\n"
    append_records(run_dir, {"step": 8, "val_loss": 2.5, "val_bpb": 1.25})
    assert describe_best(run_dir) == "best val_loss 2.5000 at step 8, 1.2500 bits per byte\n"
    monkeypatch.chdir(run_dir)
    assert find_checkpoint(Path()) == Path("checkpoints/step_00000006")


# --- writing while training goes on -------------------------------------------------------------


def test_writer_saves_each_step_as_it_was_though_training_goes_on(tmp_path):
    # Large enough that the changes below come while the file is being written.
    trainer = new_trainer(GPTConfig(16, 20_000, n_layer=1, n_head=2, n_embd=128))
    expected = []
    with CheckpointWriter(tmp_path) as writer:
        for step in (1, 2):
            train(trainer, 1)
            tensors = dict(trainer.raw_model.named_parameters())
            for name, parameter in trainer.raw_model.named_parameters():
                tensors[f"exp_avg_sq.{name}"] = trainer.optimizers[0].state[parameter]["exp_avg_sq"]
            expected.append({name: value.detach().clone() for name, value in tensors.items()})
            writer.save(run_state(step, trainer), contents(trainer))
            with torch.no_grad():
                for value in tensors.values():
                    value.add_(1.0)
    for step, tensors in zip((1, 2), expected, strict=True):
        parameters, state = saved_tensors(tmp_path / f"step_{step:08d}").values()
        for name, value in tensors.items():
            assert torch.equal((parameters | state)[name], value), name


def test_writer_says_saved_once_the_checkpoint_is_complete_and_is_waited_for(tmp_path):
    trainer = new_trainer()
    train(trainer, 1)
    events, goes_on = [], threading.Event()

    def on_saved(step, path):
        verify_checkpoint(path)
        goes_on.wait(600)  # training goes on while the checkpoint is written
        events.append(step)

    writer = CheckpointWriter(tmp_path, on_saved=on_saved)
    with pytest.raises(KeyboardInterrupt), writer:  # noqa: PT012
        writer.save(run_state(1, trainer), contents(trainer))
        events.append("training")
        goes_on.set()
        writer.save(run_state(2, trainer), contents(trainer))
        raise KeyboardInterrupt  # which the second save survives
    assert events == ["training", 1, 2]


# --- what an edit may store -------------------------------------------------------------------


class Keeping(torch.optim.Optimizer):
    """SGD that keeps values of any kind in its state, as edits of an optimizer do."""

    def __init__(self, params, kept, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.kept = kept

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update(self.kept(parameter))
            parameter.sub_(parameter.grad, alpha=1e-2)


def keeping(kept, **buffers):
    """A trainer whose optimizer keeps what `kept` returns, and whose model has the buffers."""
    trainer = new_trainer()
    for name, value in buffers.items():
        trainer.raw_model.register_buffer(name, value)
    trainer.optimizers = (Keeping(trainer.raw_model.parameters(), kept),)
    return trainer


@pytest.mark.parametrize(
    "kept",
    [
        lambda p: {"momentum": torch.rand_like(p).bfloat16()},
        lambda p: {"count": torch.full(p.shape[:1], 2**24 + 1)},
        lambda p: {"momentum.fast": torch.rand_like(p), "100% slow.": torch.rand_like(p)},
        lambda p: {"seen": 2**60, "name": "a.b", "scale": 0.1, "nothing": None},
        lambda p: {"phase": torch.rand_like(p).to(torch.complex64), "is_on": p > 0},
        lambda p: {"trainer": torch.rand_like(p), "%74rainer": torch.rand_like(p)},
        lambda p: {"trainer": 7, "trainer.": torch.rand_like(p)},
    ],
)
def test_optimizer_state_of_any_kind_comes_back_in_its_dtype(kept, tmp_path):
    trainer, other = keeping(kept), keeping(kept)
    train(trainer, 1)
    load(save(tmp_path, 1, trainer), other)
    states = [
        [optimizer.state[p] for p in each.raw_model.parameters()]
        for each in (trainer, other)
        for optimizer in each.optimizers
    ]
    for before, after in zip(*states, strict=True):
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert type(value) is type(after[key])
            if isinstance(value, torch.Tensor):
                assert value.dtype == after[key].dtype
                assert torch.equal(value, after[key])
            else:
                assert value == after[key]


def test_optimizer_state_named_trainer_and_own_state_of_the_same_name_both_come_back(tmp_path):
    name = "transformer.wte.weight"
    trainer, other = (keeping(lambda p: {"trainer": torch.rand_like(p)}) for _ in range(2))
    train(trainer, 1)
    trainer.state[name], other.state[name] = torch.rand(2, 3), torch.zeros(2, 3)
    load(save(tmp_path, 1, trainer), other)
    assert torch.equal(other.state[name], trainer.state[name])
    states = [
        each.optimizers[0].state[each.raw_model.get_parameter(name)] for each in (trainer, other)
    ]
    assert torch.equal(states[0]["trainer"], states[1]["trainer"])


@pytest.mark.parametrize(
    "buffer",
    [
        torch.ones(4, 4, dtype=torch.bool).tril(),
        torch.tensor(2**40),
        torch.tensor([1j, 2]),
        torch.full((4, 4), float("-inf")).triu(1),
        torch.rand(3).bfloat16(),
    ],
)
def test_a_buffer_of_any_dtype_comes_back_and_need_not_be_finite(buffer, tmp_path):
    trainer = keeping(lambda _: {}, mine=buffer.clone())
    other = keeping(lambda _: {}, mine=torch.zeros_like(buffer))
    assert find_nonfinite_on_ranks(contents(trainer)) is None
    path = save(tmp_path, 1, trainer)
    load(path, other)
    assert torch.equal(other.raw_model.mine, buffer)
    kind = torch.float64 if buffer.dtype == torch.int64 else torch.int64
    with pytest.raises(UserError, match=f"mine is {buffer.dtype}, expected {kind}"):
        load(path, keeping(lambda _: {}, mine=torch.zeros(buffer.shape, dtype=kind)))


class WithExtraState(torch.nn.Module):
    def get_extra_state(self):
        return {"a": 1}


def add_extra_state(trainer):
    trainer.raw_model.add_module("mine", WithExtraState())


def store_by_text(trainer):
    trainer.optimizers[0].state["all"]["count"] = 1


def store_by_number(trainer):
    trainer.optimizers[0].state[trainer.raw_model.lm_head.weight][0] = 1


def share_a_tensor(trainer):
    states, count = [*trainer.optimizers[0].state.values()], torch.zeros(())
    states[0]["count"] = states[1]["count"] = count


def store_for_another_parameter(trainer):
    trainer.optimizers[0].state[torch.nn.Parameter(torch.zeros(2))]["count"] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.state.update(seen=torch.zeros(3)), r"restore trainer\.seen, .*shape \(2,\)"),
        (lambda t: t.state.update(seen=1), r"trainer\.seen, .* is a number or text now"),
        (lambda t: t.state.update(more=1), r"trainer\.more, which was missing before"),
        (lambda t: t.state.pop("seen"), r"trainer\.seen, .* is missing now"),
        (lambda t: t.state.update(seen=[1]), r"cannot hold trainer\.seen, a list"),
        (lambda t: t.state.update({3: 1}), r"Trainer\.state has the key 3: use a text"),
        (lambda t: t.state.update(seen=torch.zeros(2).to_sparse()), r"cannot hold trainer\.seen"),
        (lambda t: t.raw_model.register_buffer("late", torch.zeros(1)), "restore late, .* missing"),
        (add_extra_state, r"cannot hold mine\._extra_state, a dict"),
        (store_by_text, "cannot hold AdamW.state of 'all'"),
        (store_by_number, "AdamW.state of transformer.wte.weight"),
        (store_for_another_parameter, "AdamW.state of Parameter"),
        (share_a_tensor, "and count.* are one tensor: give each parameter its own"),
    ],
)
def test_writer_refuses_what_a_resume_could_not_restore(change, message, tmp_path):
    trainer = new_trainer()
    trainer.state["seen"] = torch.zeros(2)
    with CheckpointWriter(tmp_path) as writer:
        writer.check(contents(trainer))
        train(trainer, 1)
        writer.check(contents(trainer))
        change(trainer)
        with pytest.raises(UserError, match=message):
            writer.save(run_state(1, new_trainer()), contents(trainer))
    assert not [*tmp_path.iterdir()]


def test_writer_refuses_a_dtype_that_no_file_can_hold(tmp_path):
    trainer = keeping(lambda _: {}, mine=torch.zeros(2, dtype=torch.complex128))
    with (
        CheckpointWriter(tmp_path) as writer,
        pytest.raises(UserError, match="mine, a complex"),
    ):
        writer.check(contents(trainer))


def test_writer_asks_to_stop_after_a_mistake_in_the_code_and_not_for_a_full_disk(
    tmp_path, monkeypatch
):
    asked, trainer = [], new_trainer()
    for error in (OSError(28, "No space left"), KeyError("a mistake")):
        monkeypatch.setattr(checkpoint, "save_file", Mock(side_effect=error))
        with CheckpointWriter(tmp_path, on_failed=lambda: asked.append(1)) as writer:
            writer.save(run_state(1, trainer), contents(trainer))
        assert (writer.error is error) == isinstance(error, KeyError)
        assert len(asked) == isinstance(error, KeyError)


def test_writer_asks_to_stop_after_a_mistake_in_what_follows_a_save(tmp_path):
    asked, mistake = [], KeyError("a mistake")
    saved, on_failed = Mock(side_effect=mistake), lambda: asked.append(1)
    with CheckpointWriter(tmp_path, on_saved=saved, on_failed=on_failed) as writer:
        writer.save(run_state(1, trainer := new_trainer()), contents(trainer))
    assert (writer.error, asked) == (mistake, [1])
    verify_checkpoint(tmp_path / "step_00000001")
