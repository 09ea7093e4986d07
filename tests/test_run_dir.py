import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._inductor.runtime.triton_compat import OutOfResources

from model import GPT, GPTConfig
from runtime.checkpoint import TrainerState
from runtime.cli import RunStopped
from runtime.distributed import DistInfo
from runtime.files import read_json, write_json
from runtime.huggingface import save_pretrained
from training.config import TrainConfig
from training.run_dir import (
    check_resume_compatible,
    choose_run_dir,
    explain_failures,
    is_finished,
    label_run,
    last_run,
    model_dimensions,
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


def open_named(run_dir, checkpoint=None, **settings):
    """`open_run` of a configuration whose flags name this folder."""
    flags = {"out_dir": run_dir.parent, "run_name": run_dir.name} | settings
    args = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return open_run(args, TrainConfig(**flags), checkpoint, DIST_INFO)


def test_open_run_locks_and_label_run_writes_the_configuration(tmp_path):
    run_dir = tmp_path / "a"
    with open_named(run_dir) as (folder, config, checkpoint):
        assert (folder.path, checkpoint) == (run_dir, None)
        label_run(run_dir, config, checkpoint, DIST_INFO)
        assert read_json(run_dir / "config.json") == config.saved()
        saved = fake_checkpoint(run_dir, 1)
        with (
            pytest.raises(ValueError, match="another trainer is at work"),
            open_named(run_dir, saved, resume="auto"),
        ):
            pass
    with open_named(run_dir, saved, resume=run_dir):  # free again
        pass


@pytest.mark.parametrize("left", ["config.json", "metrics.jsonl", "checkpoints/step_00000003"])
def test_open_run_refuses_a_folder_that_has_anything_of_another_run(tmp_path, left):
    (tmp_path / "a" / left).mkdir(parents=True)
    other = fake_checkpoint(tmp_path / "b", 3)
    for checkpoint in (None, other):
        resume = {} if checkpoint is None else {"resume": other}
        with (
            pytest.raises(ValueError, match="already holds a run"),
            open_named(tmp_path / "a", checkpoint, **resume),
        ):
            pass


def test_open_run_refuses_a_link_whose_disk_is_gone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoints").symlink_to("/gone/scratch")
    with pytest.raises(ValueError, match="is a link to /gone/scratch, which is not there: mount"):
        open_named(tmp_path / "a", resume="auto").__enter__()


def test_open_run_that_writes_nothing_leaves_nothing(tmp_path):
    with open_named(tmp_path / "runs" / "a"):
        pass
    assert os.listdir(tmp_path) == []


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path):
    config = TrainConfig(out_dir=tmp_path)
    with (
        open_run([], config, None, DIST_INFO) as (first, _, _),
        open_run([], config, None, DIST_INFO) as (second, _, _),
    ):
        assert sorted(tmp_path.iterdir()) == sorted([first.path, second.path])
        assert first.path != second.path


def test_open_run_cleans_up_after_a_killed_save(tmp_path):
    checkpoint = fake_checkpoint(tmp_path, 3)
    for name in (".step_00000004.tmp", ".step_00000002.deleted"):
        leftover = tmp_path / "checkpoints" / name
        leftover.mkdir()
        (leftover / "model.safetensors").write_text("half")
    with open_named(tmp_path, checkpoint, resume=tmp_path):
        assert list((tmp_path / "checkpoints").iterdir()) == [checkpoint]


def test_last_run_is_the_one_where_something_happened_last(tmp_path):
    assert last_run(tmp_path) is None
    events = {
        "preempted": mark_preempted(tmp_path / "preempted"),
        "saved": fake_checkpoint(tmp_path / "saved", 5),
        "crashed": tmp_path / "crashed/metrics.jsonl",
    }
    events["crashed"].parent.mkdir()
    events["crashed"].touch()
    whats = {"preempted": "was stopped", "saved": "saved step_00000005", "crashed": "logged a step"}
    for seconds, name in enumerate([*events, *reversed(events)]):
        os.utime(events[name], (2e9 + seconds, 2e9 + seconds))
        found, what = last_run(tmp_path)
        assert (found, what.split(" on 2033-05-1")[0]) == (name, whats[name])


def test_last_run_passes_over_a_folder_that_it_may_not_read(tmp_path, monkeypatch):
    mark_preempted(tmp_path / "mine")
    mark_preempted(tmp_path / "private").parent.chmod(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the folders above it are closed to other users
    user = os.geteuid()
    if user == 0:  # who may read everything
        try:
            os.seteuid(65534)
        except OSError:
            pytest.skip("this container has no user but root")
    try:
        name, _ = last_run(Path())
    finally:
        os.seteuid(user)
        (tmp_path / "private").chmod(0o755)
    assert name == "mine"


def test_run_is_finished_when_its_last_step_is_saved_and_it_was_not_preempted(tmp_path):
    checkpoint = fake_checkpoint(tmp_path, 8)
    assert not is_finished(None, TrainConfig(max_steps=8))
    assert [is_finished(checkpoint, TrainConfig(max_steps=n)) for n in (9, 8, 7)] == [0, 1, 1]
    mark_preempted(tmp_path)
    assert [is_finished(checkpoint, TrainConfig(max_steps=n)) for n in (9, 8, 7)] == [0, 0, 1]


def test_choose_run_dir(tmp_path):
    old = fake_checkpoint(tmp_path / "old", 1)
    here = TrainConfig(out_dir=tmp_path)
    assert choose_run_dir(here, old) == tmp_path / "old"
    assert choose_run_dir(replace(here, run_name="x"), None) == tmp_path / "x"
    first = choose_run_dir(here, None)
    assert first.name.startswith("gpt2-20")
    first.mkdir()
    assert choose_run_dir(here, None) != first  # in the same second
    # The run may have been moved since its configuration was saved.
    moved = TrainConfig(out_dir=tmp_path / "elsewhere", run_name="old", resume="auto")
    assert choose_run_dir(moved, old) == tmp_path / "old"
    fork = replace(moved, resume=str(old), run_name="fork")
    assert choose_run_dir(fork, old) == tmp_path / "elsewhere/fork"


def test_resume_auto_says_which_run_it_takes(tmp_path, capsys):
    old = fake_checkpoint(tmp_path / "old", 1, max_lr=0.1)
    os.utime(old, (1e9, 1e9))  # a clock of 10 ms may give the mark the same time
    mark_preempted(tmp_path / "last")  # before its first checkpoint
    write_json(tmp_path / "last/config.json", {"max_lr": 0.2})
    config, checkpoint = parse_config(["--resume=auto", f"--out-dir={tmp_path}", "--seed=3"])
    assert (config.run_name, config.max_lr, config.seed, checkpoint) == ("last", 0.2, 3, None)
    output = capsys.readouterr().out
    expected = f"--resume auto takes {tmp_path}/last, the last run that was at work: it was stopped"
    assert output.startswith(expected)
    assert output.endswith("; --run-name chooses another run\n")


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
        ([], "config.json is neither a recipe nor a run's config.json"),
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


NCCL_ERROR = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\n"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.AcceleratorError("CUDA error: out of memory"), ValueError, "--micro-batch-size"),
        (
            dist.DistBackendError(f"{NCCL_ERROR}Cuda failure 2 'out of memory'"),
            ValueError,
            "--micro-batch-size",
        ),
        (
            dist.DistBackendError(f"{NCCL_ERROR}Connection closed by remote peer"),
            RunStopped,
            "another process of this run is gone; no checkpoint yet",
        ),
        (OutOfResources(2, 1, "shared memory"), ValueError, "or add --no-compile"),
    ],
)
def test_explain_failures_tells_memory_from_a_lost_process(tmp_path, error, kind, said):
    with pytest.raises(kind, match=re.escape(said)), explain_failures(tmp_path):
        raise error


def test_init_from_takes_the_models_context_unless_another_is_given(tmp_path, capsys):
    own = GPTConfig(block_size=48, n_layer=1, n_head=2, n_embd=8)
    save_pretrained(GPT(own), tmp_path / "model")
    init = [f"--init-from={tmp_path}/model", f"--out-dir={tmp_path}/runs"]
    recipe = tmp_path / "recipe.json"
    write_json(recipe, {"block_size": 128, "max_steps": 60})
    for flags in ([], ["--resume=auto"], [f"--config={recipe}"]):
        config, _ = parse_config([*init, *flags])
        assert model_dimensions(config, None) == own
        assert config.saved()["block_size"] == 48
    assert capsys.readouterr().out == ""

    config, _ = parse_config([*init, "--block_size", "32"])
    assert model_dimensions(config, None) == replace(own, block_size=32)
    said = f"--block-size 32: of {tmp_path}/model, positions 32 to 47 are cut\n"
    assert capsys.readouterr().out == said
    write_json(tmp_path / "config.json", config.saved())  # of a run that began so
    assert parse_config([f"--config={tmp_path}/config.json", *init])[0].block_size == 32
    config, _ = parse_config([*init, "--block-size=128"])
    with pytest.raises(ValueError, match="128 is beyond this model's 48: give --block-size 48 or"):
        model_dimensions(config, None)


def test_init_from_is_not_read_where_a_checkpoint_is_resumed(tmp_path):
    fake_checkpoint(tmp_path / "run", 5, block_size=512)
    flags = [f"--resume={tmp_path}/run", f"--init-from={tmp_path}/gone"]
    assert parse_config(flags)[0].block_size == 512
