import os

import pytest
import torch
from filelock import FileLock

from distributed import DistributedContext
from files import read_json
from runs import choose_run_dir, find_resumable, open_run, settings_as_args
from train_config import TrainConfig

CONTEXT = DistributedContext(torch.device("cpu"))
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
    with open_run(run_dir, NEW, None, CONTEXT):
        assert read_json(run_dir / "config.json") == NEW.saved()
        checkpoint = fake_checkpoint(run_dir, 1)
        with (
            pytest.raises(ValueError, match="another trainer is at work"),
            open_run(run_dir, RESUMED, checkpoint, CONTEXT),
        ):
            pass
    with open_run(run_dir, RESUMED, checkpoint, CONTEXT):  # free again
        pass


def test_open_run_gives_way_to_another_process(tmp_path):
    run_dir = tmp_path / "a"
    run_dir.mkdir()
    lock = FileLock(run_dir / ".lock")
    with (
        lock.acquire(),
        pytest.raises(ValueError, match="another trainer is at work"),
        open_run(run_dir, NEW, None, CONTEXT),
    ):
        pass


def test_open_run_refuses_a_folder_with_another_run(tmp_path):
    with open_run(tmp_path / "a", NEW, None, CONTEXT):
        pass
    other = fake_checkpoint(tmp_path / "b", 3)
    for config, checkpoint in ((NEW, None), (RESUMED, other)):
        with (
            pytest.raises(ValueError, match="already holds a run"),
            open_run(tmp_path / "a", config, checkpoint, CONTEXT),
        ):
            pass


def test_open_run_restarts_a_run_that_died_before_its_first_checkpoint(tmp_path):
    with open_run(tmp_path / "a", NEW, None, CONTEXT):
        pass
    with open_run(tmp_path / "a", RESUMED, None, CONTEXT):
        assert (tmp_path / "a" / "config.json").is_file()


def test_open_run_cleans_up_after_a_killed_save(tmp_path):
    checkpoint = fake_checkpoint(tmp_path, 3)
    leftover = tmp_path / "checkpoints" / ".step_00000004.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half")
    with open_run(tmp_path, RESUMED, checkpoint, CONTEXT):
        assert list((tmp_path / "checkpoints").iterdir()) == [checkpoint]


def test_find_resumable_auto_takes_the_named_run_else_the_last_saved(tmp_path):
    assert find_resumable("auto", tmp_path, None) is None
    old = fake_checkpoint(tmp_path / "old", 900)
    new = fake_checkpoint(tmp_path / "new", 5)
    os.utime(old, (1000, 1000))
    assert find_resumable("auto", tmp_path, None) == new
    assert find_resumable("auto", tmp_path, "old") == old
    assert find_resumable("auto", tmp_path, "none") is None
    assert find_resumable(str(tmp_path / "old"), tmp_path, None) == old
    with pytest.raises(FileNotFoundError, match="nowhere is neither"):
        find_resumable("nowhere", tmp_path, None)


def test_choose_run_dir(tmp_path):
    checkpoint = fake_checkpoint(tmp_path / "old", 1)
    assert choose_run_dir(tmp_path, None, "gpt2", checkpoint, CONTEXT) == tmp_path / "old"
    assert choose_run_dir(tmp_path, "x", "gpt2", None, CONTEXT) == tmp_path / "x"
    assert choose_run_dir(tmp_path, None, "gpt2", None, CONTEXT).name.startswith("gpt2-20")


def test_settings_as_args_of_every_kind():
    settings = {"max_lr": 6e-4, "compile": False, "shuffle": True, "n_layer": None, "size": "gpt2"}
    assert settings_as_args(settings) == [
        "--max-lr=0.0006",
        "--no-compile",
        "--shuffle",
        "--size=gpt2",
    ]
