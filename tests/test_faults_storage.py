"""Training meets full disks, damaged checkpoints and folders that it must not touch."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
from conftest import ROOT, TINY_RUN, torchrun
from forked import assert_refused

from runtime.checkpoint import (
    latest_checkpoint,
    load_model,
    read_model_config,
    verify_checkpoint,
)
from runtime.files import lock_folder
from runtime.metrics import read_metrics
from train_gpt2 import main
from training.run_dir import parse_config

TIMEOUT_S = 600  # ends a process that hangs; none that is slow
FILES = ("model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json")


@pytest.fixture
def flags(tiny_flags):
    return [*tiny_flags, "--run-name=a"]


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "runs" / "a"


@pytest.fixture(scope="module")
def two_saved(tiny_data, tmp_path_factory):
    """A run with two checkpoints, of steps 4 and 8, and its flags; to be copied."""
    out_dir = tmp_path_factory.mktemp("two")
    flags = [f"--data-dir={tiny_data}", *TINY_RUN, "--run-name=a"]
    main([*flags, f"--out-dir={out_dir}"])
    return out_dir / "a"


@pytest.fixture
def copied(two_saved, run_dir):
    return shutil.copytree(two_saved, run_dir)


def losses(run_dir):
    records = [r for r in read_metrics(run_dir / "metrics.jsonl") if "lr" in r]
    by_step = {r["step"]: r["train_loss"] for r in records}
    assert len(by_step) == len(records)
    return by_step


def train(*args, largest_file):
    """Run train_gpt2.py to its end; no file can grow beyond `largest_file` bytes."""
    return run([sys.executable, str(ROOT / "train_gpt2.py"), *args], largest_file)


def run(command, largest_file):
    def fill_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    options = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
    return subprocess.run(command, preexec_fn=fill_disk, **options)


def identity(path):
    """Which file it is, and when it was changed; reading it may change its other time."""
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def names(folder):
    return sorted(os.listdir(folder))


# --- a full disk ------------------------------------------------------------------------------


def test_full_disk_at_a_checkpoint_warns_each_time_and_training_goes_on(flags, run_dir):
    # The checkpoint of 6.5 MB has no room, every other file has.
    result = train(*flags, "--max-steps=9", largest_file=1_000_000)
    warned = [line for line in result.stdout.splitlines() if line.startswith("warning: ")]
    assert [line.split("step_")[1][:8] for line in warned] == ["00000004", "00000008"]
    assert all("was not saved: " in line for line in warned)
    assert sorted(losses(run_dir)) == list(range(1, 10))
    # A warning would not be enough at the end: the last steps would be lost.
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "step_00000009 was not saved" in result.stderr
    assert names(run_dir / "checkpoints") == []


def test_full_disk_stops_all_ranks_together_if_asked_to(flags, run_dir):
    flags += ["--stop-on-write-error", "--checkpoint-every=2", "--val-every=0", "--max-steps=500"]
    result = run(torchrun("train_gpt2.py", *flags, "--micro-batch-size=2"), largest_file=1_000_000)
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if "was not saved" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert "is gone" not in result.stderr  # the ranks stopped together
    assert 2 <= max(losses(run_dir)) < 20
    assert names(run_dir / "checkpoints") == []


def test_full_disk_at_metrics_leaves_whole_lines(flags, run_dir):
    result = train(*flags, "--checkpoint-every=0", largest_file=1_500)
    assert result.stdout.count("metrics.jsonl was not written: ") > 1
    log = (run_dir / "metrics.jsonl").read_bytes()
    assert 0 < len(log) <= 1_500
    assert log.endswith(b"}\n")
    records = [json.loads(line) for line in log.splitlines()]
    assert read_metrics(run_dir / "metrics.jsonl") == [r for r in records if "step" in r]
    assert result.returncode == 2  # the last checkpoint had no room either


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_at_the_console_log_does_not_end_the_run(flags, run_dir):
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(ROOT / "train_gpt2.py"), *flags]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT_S)
    assert sorted(losses(run_dir)) == list(range(1, 9))
    verify_checkpoint(latest_checkpoint(run_dir))
    assert b"Traceback" not in result.stderr


def test_folders_whose_names_are_not_utf8_are_as_any_other(commands, flags, tiny_data, tmp_path):
    data, out_dir = tmp_path / os.fsdecode(b"data\xff"), tmp_path / os.fsdecode(b"runs\xff")
    shutil.copytree(tiny_data, data)
    flags += [f"--data-dir={data}", f"--out-dir={out_dir}", "--micro-batch-size=2"]
    assert commands.run("train_gpt2", *flags, "--max-steps=4").code == 0
    for done in (
        commands.run_ranks(2, "train_gpt2", *flags, "--resume=auto"),
        commands.run("train_gpt2", f"--resume={out_dir / 'a'}", "--max-steps=9"),
        commands.run("sample", f"--model={out_dir / 'a'}", "--max-new-tokens=2"),
        commands.run("export", f"--model={out_dir / 'a'}", f"--out={out_dir / 'export'}"),
        commands.run("sample", f"--model={out_dir / 'export'}", "--max-new-tokens=2"),
        commands.run("plot", out_dir / "a"),
    ):
        assert done.code == 0, done.stderr
    assert sorted(losses(out_dir / "a")) == list(range(1, 10))
    assert (out_dir / "a/figures/loss.png").exists()


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_verify_finds_any_flipped_byte_and_names_the_file(two_saved, tmp_path, name):
    checkpoint = shutil.copytree(two_saved / "checkpoints/step_00000008", tmp_path / "copy")
    path, chance = checkpoint / name, random.Random(0)
    data = path.read_bytes()
    places = range(len(data))
    if len(data) >= 2000:  # head, tail and a sample of the bytes between
        places = [*places[:16], *places[-16:], *chance.sample(places, 20)]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        named = f"/copy/{name}" if path.suffix != ".json" else "/copy/"
        with pytest.raises(ValueError, match=named):
            verify_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "manifest.json"])
def test_auto_passes_a_damaged_checkpoint_over_and_a_path_refuses_it(
    flags, run_dir, copied, capsys, name
):
    latest = run_dir / "checkpoints/step_00000008"
    path = latest / name
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=name):
        main([*flags, f"--resume={latest}", "--max-steps=10"])
    whole = losses(run_dir)
    main([*flags, "--resume=auto"])
    output = capsys.readouterr().out
    assert f"warning: {path}" in output
    assert f"resumed from {run_dir}/checkpoints/step_00000004\n" in output
    assert losses(run_dir) == whole  # bit for bit
    verify_checkpoint(latest)  # the run has saved it again


def test_resume_auto_hashes_each_file_once(flags, run_dir, copied, monkeypatch):
    monkeypatch.chdir(run_dir.parent.parent)
    flags = [*flags, "--out-dir=runs"]  # relative, as by default
    run_dir = run_dir.relative_to(run_dir.parent.parent)
    latest, opened, counting = run_dir / "checkpoints/step_00000008", Counter(), [True]

    def count(event, args):  # Python's reads; safetensors reads the tensors by itself
        if counting and event == "open":
            opened[str(args[0])] += 1

    sys.addaudithook(count)
    main([*flags, "--resume=auto"])
    counting.clear()  # a hook cannot be removed
    assert opened[str(latest / "model.safetensors")] == 1
    assert opened[str(latest / "optimizer.safetensors")] == 1


def test_checkpoint_without_its_manifest_is_passed_over_with_a_line(flags, run_dir, copied, capsys):
    latest = run_dir / "checkpoints/step_00000008"
    (latest / "manifest.json").unlink()
    main([*flags, "--resume=auto"])
    output = capsys.readouterr().out
    assert f"warning: {latest} has no manifest.json, so it is not complete" in output
    assert f"resumed from {run_dir}/checkpoints/step_00000004\n" in output


def test_users_copies_of_checkpoints_are_neither_resumed_from_nor_rotated(
    flags, run_dir, copied, capsys
):
    folder = run_dir / "checkpoints"
    copies = ("step_best", "step_00000004_keep", "step_4", "step_00000099")
    for name in copies:
        shutil.copytree(folder / "step_00000004", folder / name)
    main([*flags, "--resume=auto", "--max-steps=10", "--keep-checkpoints=1"])
    output = capsys.readouterr().out
    assert f"warning: {folder}/step_00000099 is not taken: it holds the state of step 4" in output
    assert f"resumed from {folder}/step_00000008\n" in output
    assert names(folder) == sorted(["set_aside", "step_00000010", *copies[:3]])
    assert names(folder / "set_aside") == ["step_00000099"]
    main([f"--resume={folder}/step_best", "--max-steps=6"])  # if it is asked for
    assert losses(run_dir).keys() == {1, 2, 3, 4, 5, 6}


def test_folder_with_checkpoints_is_a_run_whatever_else_is_missing(flags, run_dir, copied):
    (run_dir / "config.json").unlink()
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=f"{run_dir} already holds a run: give another --run-name"):
        main([*flags, "--keep-checkpoints=1"])
    assert names(run_dir / "checkpoints") == ["step_00000004", "step_00000008"]


def test_checkpoints_that_are_set_aside_are_never_overwritten(flags, run_dir, copied, capsys):
    folder = run_dir / "checkpoints"
    for _ in range(2):
        main([f"--resume={folder}/step_00000004", "--max-steps=8"])
        assert f"set aside in {folder}/set_aside: step_00000008" in capsys.readouterr().out
    assert names(folder / "set_aside") == ["step_00000008", "step_00000008.2"]
    for checkpoint in (folder / "set_aside").iterdir():
        verify_checkpoint(checkpoint)


def test_resume_through_an_alias_is_of_the_same_run_and_saves_nothing_twice(
    flags, run_dir, copied, tmp_path
):
    (tmp_path / "alias").symlink_to(run_dir)
    shutil.rmtree(run_dir / "checkpoints/step_00000004")
    saved = identity(run_dir / "checkpoints/step_00000008")
    alias = [f"--resume={tmp_path}/alias", "--checkpoint-every=0"]
    main([*alias, "--max-steps=9"])
    main([*flags, *alias, "--max-steps=10"])  # named by its own path, too
    steps = ["step_00000008", "step_00000009", "step_00000010"]
    assert names(run_dir / "checkpoints") == steps
    assert identity(run_dir / "checkpoints/step_00000008") == saved


def test_complete_checkpoint_that_only_lacks_its_name_gets_it(flags, run_dir, copied, capsys):
    """As after a kill just before the rename, when the step's older checkpoint is moved away."""
    folder = run_dir / "checkpoints"
    (folder / "step_00000008").rename(folder / ".step_00000008.tmp")
    shutil.rmtree(folder / "step_00000004")
    main([*flags, "--resume=auto", "--max-steps=9"])
    assert f"resumed from {folder}/step_00000008\n" in capsys.readouterr().out


def test_auto_refuses_a_run_whose_checkpoints_are_all_damaged(flags, run_dir, copied):
    for checkpoint in (run_dir / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"")
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=f"every checkpoint in {run_dir} is damaged"):
        main([*flags, "--resume=auto"])
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_keep_checkpoints_deletes_the_oldest_only_once_a_newer_one_is_complete(flags, run_dir):
    flags += ["--checkpoint-every=1", "--val-every=0"]
    main([*flags, "--keep-checkpoints=3"])
    assert names(run_dir / "checkpoints") == [f"step_{step:08d}" for step in (6, 7, 8)]
    # There is no room for another one: the older ones stay.
    result = train(
        *flags, "--keep-checkpoints=1", "--resume=auto", "--max-steps=10", largest_file=1_000_000
    )
    assert result.returncode == 2
    assert names(run_dir / "checkpoints") == [f"step_{step:08d}" for step in (6, 7, 8)]
    for checkpoint in (run_dir / "checkpoints").iterdir():
        verify_checkpoint(checkpoint)
    main([*flags, "--keep-checkpoints=1", "--resume=auto", "--max-steps=10"])
    assert names(run_dir / "checkpoints") == ["step_00000010"]
    verify_checkpoint(latest_checkpoint(run_dir))


# --- folders that are not ours ----------------------------------------------------------------


def test_output_folder_that_cannot_be_written_is_refused_at_start(flags, tmp_path):
    (tmp_path / "file").write_text("")
    for out_dir in (tmp_path / "file", "/proc/nothing"):  # even root cannot make folders there
        if os.path.exists(os.path.dirname(out_dir)):
            with pytest.raises(ValueError, match="the run folder cannot be written: "):
                main([*flags, f"--out-dir={out_dir}"])
    assert names(tmp_path) == ["file"]


def test_second_trainer_in_a_run_folder_is_refused_and_the_first_goes_on(flags, run_dir):
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *flags, "--max-steps=100000"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in first.stdout:
            if " | saved " in line:
                break
        with pytest.raises(ValueError, match="another trainer is at work in"):
            main([*flags, "--resume=auto"])
        assert first.poll() is None
    finally:
        first.terminate()
        first.communicate()
    assert first.returncode == 0
    verify_checkpoint(latest_checkpoint(run_dir))


def test_second_trainer_is_refused_though_the_lock_was_deleted(flags, run_dir):
    with lock_folder(run_dir, ".lock"):
        (run_dir / ".lock").unlink()
        with pytest.raises(ValueError, match="another trainer is at work in"):
            main(flags)


def test_readers_find_a_checkpoint_however_fast_they_rotate(flags, run_dir):
    flags += ["--checkpoint-every=1", "--keep-checkpoints=1", "--val-every=0"]
    flags.append("--max-steps=100000")  # until it is stopped
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *flags]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in trainer.stdout:
            if " | saved " in line:
                break
        drain = threading.Thread(target=trainer.stdout.read)
        drain.start()
        seen, deadline = set(), time.monotonic() + TIMEOUT_S
        while len(seen) < 15:  # checkpoints, of which only one is there at a time
            load_model(run_dir)
            read_model_config(run_dir)
            parse_config(["--resume=auto", f"--out-dir={run_dir.parent}", "--run-name=a"])
            seen.add(latest_checkpoint(run_dir))
            assert trainer.poll() is None
            assert time.monotonic() < deadline
        trainer.terminate()
        drain.join()
        assert trainer.wait(TIMEOUT_S) == 0
    finally:
        trainer.kill()
        trainer.communicate()


@pytest.mark.parametrize("garbage", ["", "garbage", None])
def test_any_preempted_mark_lets_the_run_go_on(flags, run_dir, copied, capsys, garbage):
    if garbage is None:
        (run_dir / "PREEMPTED").mkdir()
    else:
        (run_dir / "PREEMPTED").write_text(garbage)
    main([*flags, "--resume=auto", "--max-steps=9"])
    assert f"done: {run_dir}" in capsys.readouterr().out
    assert (run_dir / "PREEMPTED").exists() == (garbage is None)


def test_resume_lists_every_difference_and_lets_steps_intervals_and_paths_change(
    flags, run_dir, copied, tiny_data, tmp_path, capsys
):
    flags += ["--resume=auto", "--max-steps=10"]
    with pytest.raises(ValueError, match="is of another run") as refused:
        main([*flags, "--n-layer=3", "--block-size=16", "--seed=5"])
    for change in ("n_layer 2 -> 3", "block_size 32 -> 16", "seed 1337 -> 5"):
        assert change in str(refused.value)
    moved = shutil.copytree(tiny_data, tmp_path / "moved")
    shutil.move(run_dir, tmp_path / "elsewhere/b")
    changed = ["--max-steps=10", "--val-every=5", "--checkpoint-every=1", "--log-every=2"]
    main([f"--resume={tmp_path}/elsewhere/b", f"--data-dir={moved}", *changed, "--warmup-steps=1"])
    assert sorted(losses(tmp_path / "elsewhere/b")) == list(range(1, 11))


# --- every rank alike -------------------------------------------------------------------------


def test_ranks_with_other_files_are_refused_with_the_first_difference(
    commands, flags, tiny_data, tmp_path
):
    """Two machines, each with a data folder of its own under the same name."""
    for rank, change in (("0", None), ("1", "train_000002.npy")):
        folder = shutil.copytree(tiny_data, tmp_path / rank / "data")
        if change:
            np.save(folder / change, np.load(folder / change)[:-5])
    script = tmp_path / "at_home.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])\n"
        "import train_gpt2\nfrom runtime.cli import run_command\nrun_command(train_gpt2.main)\n"
    )
    flags = (*flags, "--data-dir=data", "--micro-batch-size=4")
    done = commands.run_ranks(2, script, *flags)
    assert_refused(
        done,
        "rank 1 has data/train_000002.npy of 10,995 tokens",
        "rank 0 has data/train_000002.npy of 11,000 tokens",
    )

    (tmp_path / "1/data/train_000002.npy").write_bytes(b"junk")  # seen by one rank only
    done = commands.run_ranks(2, script, *flags)
    assert_refused(done, "error: on rank 1: data/train_000002.npy cannot be read")
    assert not (tmp_path / "runs").exists()


# --- loss spikes ------------------------------------------------------------------------------


def spiky_data(folder):
    """Tokens that are easy to learn, but for those of step 70."""
    tokens = np.tile(np.arange(32, dtype=np.uint16), 2 * 90 + 1)
    tokens[69 * 2 * 32 : 70 * 2 * 32] = 40_000
    folder.mkdir()
    np.save(folder / "train_1.npy", tokens)
    np.save(folder / "val_0.npy", tokens[:500])
    return folder


def test_loss_spike_is_skipped_logged_and_skipped_again_after_a_resume(
    flags, run_dir, tmp_path, capsys
):
    flags += [f"--data-dir={spiky_data(tmp_path / 'data')}", "--no-shuffle", "--val-every=0"]
    flags += ["--skip-grad-norm-zscore=6", "--checkpoint-every=68", "--lr-schedule=wsd"]
    flags += ["--max-lr=3e-3", "--min-lr=3e-3", "--grad-clip=1000"]
    flags += ["--total-batch-size=64", "--micro-batch-size=2"]
    main([*flags, "--max-steps=75"])
    records = [r for r in read_metrics(run_dir / "metrics.jsonl") if "lr" in r]
    assert [r["step"] for r in records if r.get("update_skipped")] == [70]
    assert "step 70 | update skipped: gradient norm " in capsys.readouterr().out
    whole = losses(run_dir)
    shutil.rmtree(run_dir / "checkpoints/step_00000075")
    main([*flags, "--max-steps=75", "--resume=auto"])  # from 68: the norms come back
    assert "step 70 | update skipped: gradient norm " in capsys.readouterr().out
    assert losses(run_dir) == whole

    main([*flags, "--run-name=b", "--max-steps=75", "--skip-grad-norm-zscore=0"])
    followed = losses(run_dir.parent / "b")
    assert followed[70] == whole[70]
    assert followed[71] != whole[71]  # that update was made
