import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from model import GPTConfig
from runtime.checkpoint import TrainerState
from runtime.distributed import DistInfo
from runtime.files import read_json, write_json
from training.config import TrainConfig
from training.run_dir import (
    check_resume_compatible,
    choose_run_dir,
    is_finished,
    last_run,
    open_run,
    parse_config,
)

DIST_INFO = DistInfo(torch.device("cpu"))
NEW, RESUMED = TrainConfig(), TrainConfig(resume="auto")


def fake_checkpoint(run_dir, step, **settings):
    """A folder that counts as a checkpoint by its files' names."""
    path = run_dir / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    state = TrainerState(step, 0, asdict(GPTConfig()), settings, "", {}, {})
    write_json(path / "trainer_state.json", asdict(state))
    return path


def mark_preempted(run_dir):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "PREEMPTED").write_text("{}")
    return run_dir / "PREEMPTED"


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
    for config in (NEW, RESUMED):
        with open_run(tmp_path / "a", config, None, DIST_INFO):
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
    os.utime(mark_preempted(tmp_path / "old"), (1000, 1000))
    assert last_run(tmp_path) == "old"
    mark_preempted(tmp_path / "newest")  # before its first checkpoint
    assert last_run(tmp_path) == "newest"


def test_run_is_finished_when_its_last_step_is_saved_and_it_was_not_preempted(tmp_path):
    checkpoint = fake_checkpoint(tmp_path, 8)
    assert not is_finished(None, TrainConfig(max_steps=8))
    assert [is_finished(checkpoint, TrainConfig(max_steps=n)) for n in (9, 8, 7)] == [0, 1, 1]
    mark_preempted(tmp_path)
    assert [is_finished(checkpoint, TrainConfig(max_steps=n)) for n in (9, 8, 7)] == [0, 0, 1]


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


def test_resume_auto_says_which_run_it_takes(tmp_path, capsys):
    fake_checkpoint(tmp_path / "old", 1, max_lr=0.1)
    mark_preempted(tmp_path / "last")  # before its first checkpoint
    write_json(tmp_path / "last/config.json", {"max_lr": 0.2})
    config, checkpoint = parse_config(["--resume=auto", f"--out-dir={tmp_path}", "--seed=3"])
    assert (config.run_name, config.max_lr, config.seed, checkpoint) == ("last", 0.2, 3, None)
    hint = f"--resume auto takes {tmp_path}/last; --run-name chooses another run\n"
    assert capsys.readouterr().out == hint


def test_resume_of_a_path_and_of_runs_that_are_not_there(tmp_path):
    old = fake_checkpoint(tmp_path / "old", 900, max_lr=0.1)
    config, checkpoint = parse_config([f"--resume={tmp_path}/old"])
    assert (config.max_lr, checkpoint) == (0.1, old)
    for flags in (["--run-name=none"], [f"--out-dir={tmp_path}/none"]):
        assert parse_config(["--resume=auto", f"--out-dir={tmp_path}", *flags])[1] is None
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        parse_config(["--resume=nowhere"])


def test_other_data_is_refused_and_auto_names_the_flag_of_another_run(tmp_path):
    checkpoint = fake_checkpoint(tmp_path / "last", 1, **NEW.saved())
    for config, choice in ((NEW, ""), (RESUMED, ", choose another run by --run-name,")):
        expected = re.escape(f"{checkpoint} is of another run (data_fingerprint  -> b): leave ")
        with pytest.raises(ValueError, match=f"{expected}these as they were{choice} or start"):
            check_resume_compatible(checkpoint, GPTConfig(), config, "b")


@pytest.mark.parametrize(
    ("args", "warmup"),
    [
        ([], 715),
        (["--max-steps=2000"], 200),
        (["--max-steps=9"], 0),
        (["--max-steps=2000", "--warmup-steps=2000"], None),
        (["--max-steps=10", "--warmup-steps=715", "--resume=auto"], None),
    ],
)
def test_warmup_is_shorter_than_the_run(args, warmup, tmp_path):
    args = [*args, f"--out-dir={tmp_path}"]
    if warmup is None:
        with pytest.raises(ValueError, match=r"--warmup-steps \d+ is not shorter than --max-steps"):
            parse_config(args)
    else:
        assert parse_config(args)[0].saved()["warmup_steps"] == warmup


@pytest.mark.parametrize(
    ("saved", "new", "resumed"),
    [
        ({"max_steps": 5000, "warmup_steps": 500}, 300, 500),  # 500 was the default
        ({"max_steps": 5000, "warmup_steps": 100}, 100, 100),
        ({"max_steps": 10, "warmup_steps": 715}, 300, 715),  # the default of earlier versions
    ],
)
def test_warmup_of_saved_settings(saved, new, resumed, tmp_path):
    write_json(tmp_path / "config.json", saved)
    config, _ = parse_config([f"--config={tmp_path}/config.json", "--max-steps=3000"])
    assert config.warmup == new
    # A resumed run keeps the schedule that it began with, however short it becomes.
    checkpoint = fake_checkpoint(tmp_path, 1, **saved)
    for steps in (3000, 90):
        config, _ = parse_config([f"--resume={checkpoint}", f"--max-steps={steps}"])
        assert (config.warmup, config.max_steps) == (resumed, steps)
    with pytest.raises(ValueError, match="--warmup-steps 90 is not shorter than --max-steps 90"):
        parse_config([f"--resume={checkpoint}", "--max-steps=90", "--warmup-steps=90"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": True}, "config.json: max_steps is True, expected int"),
        ({"size": ["gpt2"]}, r"size is \['gpt2'\], expected Literal\['gpt2',"),
        ({"data_dir": None}, "data_dir is None, expected Path"),
        ({"max_lr": -1}, "config.json: --max-lr must be above 0, not -1"),
        ({"layers": 3}, "has the setting 'layers', which this version does not know"),
        ([], "config.json is not a run's config.json"),
    ],
)
def test_saved_setting_that_is_none_is_refused(settings, message, tmp_path):
    write_json(tmp_path / "config.json", settings)
    with pytest.raises(ValueError, match=message):
        parse_config([f"--config={tmp_path}/config.json"])


def test_flags_are_laid_over_settings_of_earlier_versions(tmp_path):
    settings = {"data_dir": "d", "max_lr": 1, "micro_batch_size": 4, "n_layer": None}
    write_json(tmp_path / "config.json", settings)
    config, _ = parse_config([f"--config={tmp_path}/config.json", "--micro-batch-size=auto"])
    assert (config.data_dir, config.max_lr, config.micro_batch_size) == (Path("d"), 1, "auto")
