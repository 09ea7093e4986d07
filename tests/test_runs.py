import os
from dataclasses import replace

import pytest
import torch
from filelock import FileLock

from runtime.distributed import DistInfo
from runtime.files import read_json
from training.config import TrainConfig
from training.run_dir import (
    Preemption,
    choose_run_dir,
    clear_preemption,
    find_resumable,
    last_run,
    open_run,
    read_preemption,
    settings_as_args,
)

DIST_INFO = DistInfo(torch.device("cpu"))
NEW, RESUMED = TrainConfig(), TrainConfig(resume="auto")


def fake_checkpoint(run_dir, step):
    """A folder that counts as a checkpoint by its files' names."""
    path = run_dir / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    for name in ("trainer_state.json", "manifest.json"):
        (path / name).write_text("{}")
    return path


def test_open_run_writes_the_configuration_and_locks(tmp_path):
    run_dir = tmp_path / "a"
    with open_run(run_dir, NEW, None, DIST_INFO):
        assert read_json(run_dir / "config.json") == NEW.saved()
        checkpoint = fake_checkpoint(run_dir, 1)
        with (
            pytest.raises(ValueError, match="another trainer is at work"),
            open_run(run_dir, RESUMED, checkpoint, DIST_INFO),
        ):
            pass
    with open_run(run_dir, RESUMED, checkpoint, DIST_INFO):  # free again
        pass


def test_open_run_gives_way_to_another_process(tmp_path):
    run_dir = tmp_path / "a"
    run_dir.mkdir()
    lock = FileLock(run_dir / ".lock")
    with (
        lock.acquire(),
        pytest.raises(ValueError, match="another trainer is at work"),
        open_run(run_dir, NEW, None, DIST_INFO),
    ):
        pass


def test_open_run_refuses_a_folder_with_another_run(tmp_path):
    with open_run(tmp_path / "a", NEW, None, DIST_INFO):
        pass
    other = fake_checkpoint(tmp_path / "b", 3)
    for config, checkpoint in ((NEW, None), (RESUMED, other)):
        with (
            pytest.raises(ValueError, match="already holds a run"),
            open_run(tmp_path / "a", config, checkpoint, DIST_INFO),
        ):
            pass


def test_open_run_restarts_a_run_that_died_before_its_first_checkpoint(tmp_path):
    with open_run(tmp_path / "a", NEW, None, DIST_INFO):
        pass
    with open_run(tmp_path / "a", RESUMED, None, DIST_INFO):
        assert (tmp_path / "a" / "config.json").is_file()


def test_open_run_cleans_up_after_a_killed_save(tmp_path):
    checkpoint = fake_checkpoint(tmp_path, 3)
    leftover = tmp_path / "checkpoints" / ".step_00000004.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half")
    with open_run(tmp_path, RESUMED, checkpoint, DIST_INFO):
        assert list((tmp_path / "checkpoints").iterdir()) == [checkpoint]


def test_last_run_was_preempted_or_else_saved_last(tmp_path):
    assert last_run(tmp_path) is None
    old = fake_checkpoint(tmp_path / "old", 900)
    fake_checkpoint(tmp_path / "new", 5)
    os.utime(old, (1000, 1000))
    assert last_run(tmp_path) == "new"
    Preemption(900, "SIGTERM", True).save(tmp_path / "old")
    assert last_run(tmp_path) == "old"
    Preemption(0, "SIGUSR1", False).save(tmp_path / "newest")  # before its first checkpoint
    os.utime(tmp_path / "old/PREEMPTED", (1000, 1000))
    assert last_run(tmp_path) == "newest"
    clear_preemption(tmp_path / "newest")
    assert last_run(tmp_path) == "old"


def test_find_resumable_of_a_path_and_of_auto(tmp_path):
    assert find_resumable("auto", tmp_path, "none") is None
    assert find_resumable("auto", tmp_path, None) is None
    old = fake_checkpoint(tmp_path / "old", 900)
    assert find_resumable(str(tmp_path / "old"), tmp_path, None) == old
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        find_resumable("nowhere", tmp_path, None)


def test_read_preemption_returns_what_was_saved(tmp_path):
    assert read_preemption(tmp_path) is None
    mark = Preemption(7, "SIGTERM", False)
    mark.save(tmp_path)
    assert read_preemption(tmp_path) == mark
    (tmp_path / "PREEMPTED").write_text('{"step": 7}')
    with pytest.raises(ValueError, match="PREEMPTED is not what this code writes"):
        read_preemption(tmp_path)


def test_choose_run_dir(tmp_path):
    old = fake_checkpoint(tmp_path / "old", 1)
    here = TrainConfig(out_dir=tmp_path)
    assert choose_run_dir(here, old, DIST_INFO) == tmp_path / "old"
    assert choose_run_dir(replace(here, run_name="x"), None, DIST_INFO) == tmp_path / "x"
    assert choose_run_dir(here, None, DIST_INFO).name.startswith("gpt2-20")
    # The run may have been moved since its configuration was saved.
    moved = TrainConfig(out_dir=tmp_path / "elsewhere", run_name="old", resume="auto")
    assert choose_run_dir(moved, old, DIST_INFO) == tmp_path / "old"
    fork = replace(moved, resume=str(old), run_name="fork")
    assert choose_run_dir(fork, old, DIST_INFO) == tmp_path / "elsewhere/fork"


def test_settings_as_args_of_every_kind():
    settings = {"max_lr": 6e-4, "compile": False, "shuffle": True, "n_layer": None, "size": "gpt2"}
    assert settings_as_args(settings) == [
        "--max-lr=0.0006",
        "--no-compile",
        "--shuffle",
        "--size=gpt2",
    ]
