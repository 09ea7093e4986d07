import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import fake_checkpoint
from run_files import append_records
from torch._inductor.runtime.triton_compat import OutOfResources
from torch.distributed import DistBackendError

from formats.checkpoint import Checkpoint, read_state
from runtime.errors import RunStopped, UserError
from training.config import TrainConfig
from training.folder import choose_run_dir, explain_failures, lock_run_folder
from training.stopping import StopRequest


def open_named(run_dir, checkpoint=None, **settings):
    """`lock_run_folder` of a configuration whose flags name this folder."""
    flags = {"out_dir": run_dir.parent, "run_name": run_dir.name} | settings
    return lock_run_folder(TrainConfig(**flags), checkpoint)


def assert_refused(message, run_dir, checkpoint=None, **settings):
    with (
        pytest.raises(ValueError, match=message),
        open_named(run_dir, checkpoint, **settings),
    ):
        pass


# --- the folder ---------------------------------------------------------------------------------


def test_lock_run_folder_lets_one_trainer_in(tmp_path):
    run_dir = tmp_path / "runs" / "a"
    with open_named(run_dir):
        pass
    assert not run_dir.exists()  # nothing was written
    with open_named(run_dir) as folder:
        assert folder == run_dir
        saved = fake_checkpoint(run_dir, 1)
        assert_refused("another process is at work in", run_dir, saved, resume="auto")
    with open_named(run_dir, saved, resume="auto"):  # free again
        pass
    (tmp_path / "file").touch()  # as on a read-only disk, no folder can be created in it
    resume = f"--resume {saved.path} with another --run-name and --out-dir"
    for checkpoint, remedy in ((None, "another --run-name or --out-dir"), (saved, resume)):
        message = rf"file/a cannot be written and locked \(.*\): use {re.escape(remedy)}$"
        with pytest.raises(UserError, match=message), open_named(tmp_path / "file/a", checkpoint):
            pass


@pytest.mark.parametrize("left", ["config.json", "metrics.jsonl", "checkpoints/step_00000003"])
def test_lock_run_folder_refuses_a_folder_that_has_anything_of_another_run(tmp_path, left):
    path = tmp_path / "a" / left
    path.parent.mkdir(parents=True)
    path.touch() if path.suffix else path.mkdir()
    other = fake_checkpoint(tmp_path / "b", 3)
    for checkpoint, resume in ((None, None), (other, str(other.path))):
        message = "a exists but has no checkpoint: use another --run-name"
        assert_refused(message, tmp_path / "a", checkpoint, resume=resume)


def test_run_that_continues_another_and_was_killed_in_its_first_save_starts_again(tmp_path):
    other, run_dir = fake_checkpoint(tmp_path / "other", 3), tmp_path / "a"
    (run_dir / "checkpoints/.step_00000004.tmp").mkdir(parents=True)
    (run_dir / "config.json").write_text("{}")
    append_records(run_dir, {"resumed_from": 2}, {"step": 3})  # the other run is at step 3 now
    said = "a continued another run's step 2, but .*: use --resume with the other run, or start"
    assert_refused(said, run_dir, resume="auto")
    assert_refused("a exists but has no checkpoint: use another --run-name", run_dir)
    with open_named(run_dir, other, resume=str(other.path)):
        assert not any((run_dir / "checkpoints").iterdir())
    append_records(run_dir, {"saved_step": 4})  # its checkpoints were lost, so they may be restored
    assert_refused("a saved step 4, but its checkpoints are missing", run_dir, resume="auto")
    assert_refused("exists but has no checkpoint", run_dir, other, resume=str(other.path))


def test_lock_run_folder_cleans_up_after_a_killed_save(tmp_path):
    saved = fake_checkpoint(tmp_path / "a", 3)
    for name in (".step_00000004.tmp", ".step_00000002.deleted"):
        leftover = saved.path.with_name(name)
        leftover.mkdir()
        (leftover / "model.safetensors").write_text("half")
    with open_named(tmp_path / "a", saved, resume="auto"):
        assert list((tmp_path / "a/checkpoints").iterdir()) == [saved.path]


def test_choose_run_dir(tmp_path):
    old = fake_checkpoint(tmp_path / "old", 1)
    here = TrainConfig(out_dir=tmp_path)
    assert choose_run_dir(here, old) == tmp_path / "old"  # wherever the run was moved
    assert choose_run_dir(replace(here, run_name="x"), old) == tmp_path / "x"
    assert choose_run_dir(replace(here, run_name="x"), None) == tmp_path / "x"
    copy = Checkpoint(tmp_path / "copy of step 1", old.state)
    for checkpoint in (None, copy):
        assert choose_run_dir(here, checkpoint).match("gpt2-20*-*")
    with lock_run_folder(here, None) as folder:
        assert list(tmp_path.glob("gpt2-20*")) == [folder]


# --- failures -----------------------------------------------------------------------------------


def explain(run_dir, stop=None):
    return explain_failures(run_dir, TrainConfig(), stop or StopRequest())


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (DistBackendError("NCCL error: out of memory"), ValueError, "--micro-batch-size"),
        (DistBackendError("NCCL error: closed by remote peer"), RunStopped, "reached: the"),
        (RuntimeError("gloo: closed by peer"), RunStopped, "; last checkpoint step_00000004"),
        (OutOfResources(2, 1, "shared memory"), ValueError, "or add --no-compile"),
    ],
)
def test_explain_failures_tells_memory_from_a_lost_process(tmp_path, error, kind, said):
    fake_checkpoint(tmp_path, 4)
    with pytest.raises(kind, match=re.escape(said)), explain(tmp_path):
        raise error


def test_compilers_error_is_an_interrupt_if_a_signal_came_before(tmp_path):
    stop = StopRequest()
    with pytest.raises(KeyboardInterrupt, match="no checkpoint yet"), explain(tmp_path, stop), stop:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise OutOfResources(2, 1, "shared memory")
    with pytest.raises(ValueError, match="out of memory"), explain(tmp_path, stop):
        raise RuntimeError("out of memory")  # no signal does that


def test_run_folder_of_a_resumed_checkpoint_is_relative_if_its_path_is(tmp_path, monkeypatch):
    path = fake_checkpoint(tmp_path / "runs/a", 4).path
    for folder, given, expected in (
        (tmp_path, path, tmp_path / "runs/a"),
        (tmp_path, path.relative_to(tmp_path), Path("runs/a")),
        (path.parent, Path(path.name), Path("..")),
    ):
        monkeypatch.chdir(folder)
        assert choose_run_dir(TrainConfig(), Checkpoint(given, read_state(path))) == expected
