"""Each check of `--preflight` meets the fault it is for, on real processes."""

import shutil
import sys

import numpy as np
import pytest
from conftest import ROOT, copy_code

from train_gpt2 import main

CHECKS = ["network", "ranks", "data", "disk"]
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@pytest.fixture
def homes(tiny_data, tmp_path):
    """Two machines: a working directory for each rank, its data in it, `runs` shared."""
    (tmp_path / "runs").mkdir()
    for rank in "01":
        shutil.copytree(tiny_data, tmp_path / rank / "data")
        (tmp_path / rank / "runs").symlink_to(tmp_path / "runs")
    return [tmp_path / rank for rank in "01"]


def preflight(commands, homes, flags, before=""):
    """Run rank 0 and rank 1, each in its home as on a machine of its own; both as they ended.

    Args:
        before: code that rank 1 runs first.
    """
    script = homes[0].parent / "ranks.py"
    script.write_text(
        f"import os, runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"rank = int(os.environ['RANK'])\nos.chdir({[*map(str, homes)]!r}[rank])\n"
        "os.environ['LOCAL_RANK'] = '0'\n"
        "for descriptor, name in ((1, 'stdout'), (2, 'stderr')):\n"
        "    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)\n"
        f"if rank == 1:\n    exec({before!r})\n"
        f"runpy.run_path({str(ROOT / 'train_gpt2.py')!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    flags = [*flags, "--data-dir=data", "--out-dir=runs", "--preflight"]
    place = {"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    done = commands.run_ranks(2, script, *flags, **place)
    stdout, stderr = (
        [(home / name).read_text("utf-8") for home in homes] for name in ("stdout", "stderr")
    )
    return done.codes, stdout, stderr


def passed(stdout):
    return [line.split()[0] for line in stdout.splitlines()]


def assert_refused(result, check, *parts):
    """Both ranks end, one line says why, and the checks before have passed."""
    codes, stdout, stderr = result
    assert codes == [2, 2], stderr
    assert passed(stdout[0]) == CHECKS[: CHECKS.index(check)]
    assert stderr[0].startswith(f"error: {check}: ")
    assert stderr[0].count("\n") == 1
    for part in parts:
        assert part in stderr[0]
    assert stdout[1] == ""
    assert "error: " not in stderr[1]


def test_preflight_of_one_process_passes_and_makes_no_run(tiny_flags, tmp_path, capsys):
    main([*tiny_flags, "--preflight"])
    assert passed(capsys.readouterr().out) == CHECKS
    assert not list((tmp_path / "runs").iterdir())


def test_preflight_of_two_ranks_passes(commands, homes, tiny_flags):
    codes, stdout, stderr = preflight(commands, homes, tiny_flags)
    assert codes == [0, 0], stderr
    assert passed(stdout[0]) == CHECKS
    assert "2 x cpu, 1 per machine" in stdout[0]
    assert stdout[1] == ""
    assert not list((homes[0] / "runs").iterdir())


def test_preflight_refuses_a_run_that_is_there(tiny_flags):
    main([*tiny_flags, "--run-name=a", "--max-steps=1", "--val-every=0"])
    with pytest.raises(ValueError, match="already holds a run: give another --run-name"):
        main([*tiny_flags, "--run-name=a", "--preflight"])
    main([*tiny_flags, "--run-name=a", "--preflight", "--resume=auto"])


def test_preflight_refuses_one_changed_file(commands, homes, tiny_flags, tmp_path):
    copy = copy_code(tmp_path / "copy")
    with (copy / "model.py").open("a") as file:
        file.write("# changed\n")
    script = copy / "training/preflight.py"  # it looks at the scripts beside its own
    changed = f"import training.preflight\ntraining.preflight.__file__ = {str(script)!r}"
    result = preflight(commands, homes, tiny_flags, changed)
    assert_refused(result, "ranks", "rank 1 has model.py of SHA-256", "give all machines the same")


def test_preflight_refuses_other_data(commands, homes, tiny_flags):
    path = homes[1] / "data/train_000002.npy"
    np.save(path, np.load(path)[:-5])
    assert_refused(preflight(commands, homes, tiny_flags), "ranks", "rank 1 has train tokens ")


def test_preflight_refuses_an_out_dir_that_is_not_shared(commands, homes, tiny_flags):
    (homes[1] / "runs").unlink()
    seen = "on rank 1: rank 0 wrote to runs, and this rank does not see it"
    assert_refused(preflight(commands, homes, tiny_flags), "disk", seen, "give an --out-dir")
    assert not list((homes[0] / "runs").iterdir())


def test_preflight_says_that_a_process_is_gone(commands, homes, tiny_flags):
    gone = "from training import preflight\npreflight.check_hashes = lambda *_: os._exit(9)"
    codes, _, stderr = preflight(commands, homes, tiny_flags, gone)
    assert codes == [1, 9]
    assert stderr[0].startswith("stopped: disk: another process is gone: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # Even root cannot make it.
        (["--out-dir=/proc/nothing"], "disk: .*: give an --out-dir that all machines share"),
        # 2 * 10^15 bytes
        (["--n-layer=16", f"--n-embd={2**20}"], r"disk: .* GiB free, a checkpoint takes \d{7,}"),
    ],
)
def test_preflight_refuses_a_disk_that_takes_no_checkpoint(tiny_flags, flags, message):
    with pytest.raises(ValueError, match=message):
        main([*tiny_flags, *flags, "--preflight"])
