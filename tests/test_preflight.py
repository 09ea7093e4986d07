"""Ranks that differ, and each check of `--preflight`, on real processes."""

import shutil
import sys

import pytest
from conftest import ROOT, copy_code
from forked import assert_refused

from train_gpt2 import main

CHECKS = ["network", "ranks", "data", "disk"]
ALONE = {  # a machine with one process
    "LOCAL_WORLD_SIZE": "1",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
}
MACHINE = """
import os, shutil, sys
sys.path.insert(0, {root!r})
from pathlib import Path
import numpy as np, train_gpt2
from runtime.cli import run_command
from formats import code_hashes
os.chdir({folder!r} + "/" + os.environ["RANK"])
os.environ["LOCAL_RANK"] = "0"
if os.environ["RANK"] == "1":
    {change}
run_command(train_gpt2.main)
"""
OTHER_DATA = "np.save('data/train_000002.npy', np.load('data/train_000002.npy')[:-5])"
MANIFEST = "runs/a/checkpoints/step_00000004/manifest.json"
OTHER_CHECKPOINT = (
    "os.unlink('runs'); shutil.copytree('../runs', 'runs'); "
    f"Path('{MANIFEST}').write_text(Path('{MANIFEST}').read_text() + ' ')"
)


@pytest.fixture
def two_machines(commands, tiny_data, tiny_flags, tmp_path):
    """What runs train_gpt2.py on two machines, after a line of code on the second.

    Each has its own copy of the data in its working folder, and they share `runs`.
    """
    (tmp_path / "runs").mkdir()
    for rank in "01":
        shutil.copytree(tiny_data, tmp_path / rank / "data")
        (tmp_path / rank / "runs").symlink_to(tmp_path / "runs")

    def run(change, *flags):
        script = tmp_path / "machine.py"
        script.write_text(MACHINE.format(root=str(ROOT), folder=str(tmp_path), change=change))
        flags = [*tiny_flags, "--data-dir=data", "--out-dir=runs", *flags]
        before = list((tmp_path / "runs").iterdir())
        done = commands.run_ranks(2, script, *flags, **ALONE)
        assert list((tmp_path / "runs").iterdir()) == before
        return done

    return run


def passed(stdout):
    return [word for line in stdout.splitlines() if (word := line.split()[0]) in CHECKS]


def test_preflight_of_one_process_passes_and_makes_no_run(tiny_flags, tmp_path, capsys):
    main([*tiny_flags, "--preflight"])
    assert passed(capsys.readouterr().out) == CHECKS
    assert not list((tmp_path / "runs").iterdir())


def test_preflight_of_two_machines_passes(two_machines):
    done = two_machines("pass", "--preflight")
    assert done.codes == [0, 0], done.stderr
    assert passed(done.stdout) == CHECKS
    assert "2 x cpu, 1 per machine" in done.stdout


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        ("sys.argv.append('--max-lr=0.001')", "ranks", "rank 1 has --max-lr 0.001, rank 0 --max-l"),
        (OTHER_DATA, "ranks", "rank 1 has train tokens "),
        ("os.unlink('runs')", "disk", "rank 0 wrote a file to runs that this rank does not see:"),
    ],
    ids=["flag", "data", "disk"],
)
def test_preflight_refuses_machines_that_differ(two_machines, change, check, message):
    done = two_machines(change, "--preflight", "--run-name=a", "--resume=auto")
    assert_refused(done, message)
    assert done.codes == [2, 2]
    assert passed(done.stdout) == CHECKS[: CHECKS.index(check)]


def test_training_does_not_begin_with_other_code_on_a_machine(two_machines, tmp_path):
    copy = copy_code(tmp_path / "code")
    with (copy / "lr_schedule.py").open("a") as file:
        file.write("CHANGED = 1\n")
    done = two_machines(f"code_hashes.ROOT = Path({str(copy)!r})")
    assert_refused(done, "rank 1 has lr_schedule.py with code")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("os.unlink('runs')", "rank 1 has no checkpoint, rank 0 runs/a/checkpoints/step_00"),
        (OTHER_CHECKPOINT, "rank 1 has runs/a/checkpoints/step_00000004 ("),
    ],
)
def test_training_does_not_go_on_from_two_checkpoints(two_machines, tiny_flags, change, message):
    main([*tiny_flags, "--run-name=a", "--max-steps=4"])
    assert_refused(two_machines(change, "--run-name=a", "--resume=auto"), message)


def test_preflight_refuses_a_run_that_is_there(tiny_flags):
    main([*tiny_flags, "--run-name=a", "--max-steps=1", "--val-every=0"])
    with pytest.raises(ValueError, match="already holds a run: use another --run-name"):
        main([*tiny_flags, "--run-name=a", "--preflight"])
    main([*tiny_flags, "--run-name=a", "--preflight", "--resume=auto"])


def test_preflight_refuses_a_disk_that_takes_no_checkpoint(tiny_flags):
    message = r"GiB free, a checkpoint needs \d{7,}.* GiB: use an --out-dir with more space"
    with pytest.raises(ValueError, match=message):
        main([*tiny_flags, "--n-layer=16", f"--n-embd={2**20}", "--preflight"])  # 2 * 10^15 bytes
