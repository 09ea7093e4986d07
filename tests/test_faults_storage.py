"""Training meets full disks, damaged checkpoints and folders that it must not touch."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys

import pytest
from checkpoints import save_run
from conftest import ROOT, TINY_RUN, series

from formats.checkpoint import verify_checkpoint
from formats.load import latest_checkpoint
from train_gpt2 import main

TIMEOUT_S = 600  # ends a process that hangs; none that is slow
TRAIN = (sys.executable, ROOT / "train_gpt2.py")
FILES = ("model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json")


@pytest.fixture
def flags(tiny_flags):
    return [*tiny_flags, "--run-name=a"]


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "runs" / "a"


@pytest.fixture(scope="module")
def two_saved(tiny_data, tmp_path_factory):
    """A finished run with two checkpoints, of steps 4 and 8, to be copied."""
    out_dir = tmp_path_factory.mktemp("two")
    main([f"--data-dir={tiny_data}", *TINY_RUN, "--run-name=a", f"--out-dir={out_dir}"])
    return out_dir / "a"


@pytest.fixture
def copied(two_saved, run_dir):
    return shutil.copytree(two_saved, run_dir)


def losses(run_dir):
    return series(run_dir, "train_loss")


def run_on_small_disk(*command, largest_file):
    """Run a command to its end; no file can grow beyond `largest_file` bytes."""

    def fill_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    options = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
    return subprocess.run(command, preexec_fn=fill_disk, **options)


def names(folder):
    return sorted(os.listdir(folder))


# --- a full disk ------------------------------------------------------------------------------


def test_full_disk_at_a_checkpoint_warns_each_time_and_leaves_the_older_ones(
    flags, run_dir, copied
):
    flags += ["--resume=auto", "--max-steps=11", "--checkpoint-every=1", "--keep-checkpoints=1"]
    # Less than a checkpoint, more than all else.
    result = run_on_small_disk(*TRAIN, *flags, largest_file=1_000_000)
    warned = [line for line in result.stdout.splitlines() if "was not saved: " in line]
    steps = ["00000009", "00000010", "00000011"]
    assert [line.split("step_")[1][:8] for line in warned] == steps
    assert all(line.startswith("warning: ") for line in warned)
    assert sorted(losses(run_dir)) == list(range(1, 12))
    # A warning would not be enough at the end: the last steps would be lost.
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "step_00000011 was not saved" in result.stderr
    assert names(run_dir / "checkpoints") == ["step_00000004", "step_00000008"]
    main(flags)  # there is room again
    # 8 was the best until the last validation, which may come before old ones are deleted.
    assert {*names(run_dir / "checkpoints")} - {"step_00000008"} == {"step_00000011"}
    verify_checkpoint(latest_checkpoint(run_dir))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_at_the_console_log_does_not_end_the_run(flags, run_dir):
    with open("/dev/full", "w") as full:
        options = {"stdout": full, "stderr": subprocess.PIPE, "timeout": TIMEOUT_S}
        result = subprocess.run([*TRAIN, *flags], **options)
    assert sorted(losses(run_dir)) == list(range(1, 9))
    verify_checkpoint(latest_checkpoint(run_dir))
    assert b"Traceback" not in result.stderr


# --- a kill while an export is written ------------------------------------------------------------

KILLED_EXPORT = """
import os, signal, export
os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
export.main()
"""


def test_export_that_is_killed_leaves_none_and_can_be_repeated(commands, tmp_path):
    out, script = tmp_path / "exports" / "out", tmp_path / "killed.py"
    flags = (f"--model={tmp_path}/run", f"--out={out}")
    save_run(tmp_path / "run")
    script.write_text(KILLED_EXPORT)
    assert commands.run(script, *flags).code == -signal.SIGKILL
    assert not out.exists()
    assert commands.run("export", *flags).code == 0
    assert names(out.parent) == ["out"]


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_verify_finds_any_flipped_byte_and_names_the_checkpoint(two_saved, tmp_path, name):
    checkpoint = shutil.copytree(two_saved / "checkpoints/step_00000008", tmp_path / "copy")
    path, chance = checkpoint / name, random.Random(0)
    data = path.read_bytes()
    for place in [0, len(data) - 1, *chance.sample(range(len(data)), 40)]:
        flipped = bytearray(data)
        flipped[place] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="/copy/"):
            verify_checkpoint(checkpoint)


def test_auto_passes_a_damaged_checkpoint_over_and_saves_it_again(flags, run_dir, copied, capsys):
    latest = run_dir / "checkpoints/step_00000008"
    path = latest / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    whole = losses(run_dir)
    main([*flags, "--resume=auto"])
    output = capsys.readouterr().out
    assert f"warning: {path}" in output
    assert f"resumed from {run_dir}/checkpoints/step_00000004\n" in output
    assert losses(run_dir) == whole  # bit for bit
    verify_checkpoint(latest)  # the run has saved it again


@pytest.mark.parametrize("way", ["damaged", "deleted"])
def test_auto_never_begins_a_run_again_that_had_saved(flags, run_dir, copied, way):
    for checkpoint in (run_dir / "checkpoints").iterdir():
        if way == "damaged":
            (checkpoint / "model.safetensors").write_bytes(b"")
        else:
            shutil.rmtree(checkpoint)
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="saved step 8, but its checkpoints are missing or damag"):
        main([*flags, "--resume=auto"])
    assert (run_dir / "metrics.jsonl").read_bytes() == before


# --- folders and files that are not the run's -----------------------------------------------------


def test_users_copies_of_checkpoints_are_neither_resumed_from_nor_rotated(
    flags, run_dir, copied, tmp_path, capsys
):
    folder = run_dir / "checkpoints"
    copies = ("step_00000004_keep", "step_4", "step_best")
    for name in copies:
        shutil.copytree(folder / "step_00000004", folder / name)
    (folder / "step_00000004").rename(tmp_path / "archived")
    (folder / "step_00000004").symlink_to(tmp_path / "archived")
    main([*flags, "--resume=auto", "--max-steps=10", "--keep-checkpoints=1"])
    assert f"resumed from {folder}/step_00000008\n" in capsys.readouterr().out
    kept = {path.name for path in folder.glob("[!.]*")}
    assert kept - {"step_00000008"} == {"step_00000010", *copies}  # 8 was the best until now
    assert names(tmp_path / "archived") == sorted(FILES)  # only the link to it went


def test_resume_through_links_is_of_the_same_run_and_leaves_them(flags, run_dir, copied, tmp_path):
    (run_dir / "checkpoints").rename(tmp_path / "scratch")
    (run_dir / "checkpoints").symlink_to(tmp_path / "scratch")
    (tmp_path / "alias").symlink_to(run_dir)
    saved = (tmp_path / "scratch/step_00000008").stat().st_ctime_ns
    main([f"--resume={tmp_path}/alias", "--max-steps=9"])
    main([*flags, f"--resume={tmp_path}/alias", "--max-steps=10"])  # named by its own path, too
    steps = ["step_00000004", "step_00000008", "step_00000009", "step_00000010"]
    assert names(tmp_path / "scratch") == steps
    assert (tmp_path / "scratch/step_00000008").stat().st_ctime_ns == saved
    assert (run_dir / "checkpoints").is_symlink()


def test_resume_of_a_finished_run_changes_nothing(flags, run_dir, copied, capsys):
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    main([*flags, "--resume=auto"])
    assert "run is finished: use a larger --max-steps to continue\n" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_resume_lets_steps_intervals_and_paths_change(run_dir, copied, tiny_data, tmp_path):
    moved = shutil.copytree(tiny_data, tmp_path / "moved")
    shutil.move(run_dir, tmp_path / "elsewhere/b")
    changed = ["--max-steps=10", "--val-every=5", "--checkpoint-every=1", "--log-every=2"]
    main([f"--resume={tmp_path}/elsewhere/b", f"--data-dir={moved}", *changed, "--warmup-steps=1"])
    assert sorted(losses(tmp_path / "elsewhere/b")) == list(range(1, 11))
