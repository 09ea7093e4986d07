"""Each check of `--preflight` meets the fault it is for, on real processes."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, copy_code
from forked import free_port

from train_gpt2 import main

CHECKS = ["network", "software", "clocks", "data", "disk"]


@pytest.fixture
def homes(tiny_data, tmp_path):
    """Two machines: a working directory for each rank, its data in it, `runs` shared."""
    (tmp_path / "runs").mkdir()
    for rank in "01":
        shutil.copytree(tiny_data, tmp_path / rank / "data")
        (tmp_path / rank / "runs").symlink_to(tmp_path / "runs")
    return [tmp_path / rank for rank in "01"]


def preflight(homes, flags, scripts=(ROOT / "train_gpt2.py",) * 2):
    """Run rank 0 and rank 1, each in its home, from a script of its own; both as they ended."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    flags = [*flags, "--data-dir=data", "--out-dir=runs", "--preflight"]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=home,
            env=os.environ | place | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, (home, script) in enumerate(zip(homes, scripts, strict=True))
    ]
    outputs = [rank.communicate(timeout=90) for rank in ranks]
    return [rank.returncode for rank in ranks], *zip(*outputs, strict=True)


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


def test_preflight_refuses_a_run_that_is_there(tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=a", "--max-steps=1", "--val-every=0"])
    with pytest.raises(ValueError, match="already holds a run: give another --run-name"):
        main([*tiny_flags, "--run-name=a", "--preflight"])
    main([*tiny_flags, "--run-name=a", "--preflight", "--resume=auto"])


def test_preflight_of_two_ranks_measures_bandwidth_and_finds_the_clocks_together(homes, tiny_flags):
    codes, stdout, stderr = preflight(homes, tiny_flags)
    assert codes == [0, 0], stderr
    assert passed(stdout[0]) == CHECKS
    assert stdout[1] == ""
    timed = re.search(r"2 x cpu, .* of 64 MiB in (\S+) ms, (\S+) GB/s", stdout[0])
    milliseconds, bandwidth = map(float, timed.groups())  # 2 (n - 1) / n is 1
    assert bandwidth == pytest.approx(64 * 2**20 / milliseconds / 1e6, rel=0.05)
    assert float(re.search(r"(\S+) s from rank 0's", stdout[0])[1]) < 1
    assert not list((homes[0] / "runs").iterdir())


def test_preflight_refuses_one_changed_file(homes, tiny_flags, tmp_path):
    copy = copy_code(tmp_path / "copy")
    with (copy / "model.py").open("a") as file:
        file.write("# changed\n")
    scripts = (ROOT / "train_gpt2.py", copy / "train_gpt2.py")
    result = preflight(homes, tiny_flags, scripts)
    assert_refused(result, "software", "rank 1 has model.py of SHA-256", "install the same")


def test_preflight_refuses_other_data(homes, tiny_flags):
    path = homes[1] / "data/train_000002.npy"
    np.save(path, np.load(path)[:-5])
    difference = "rank 1 has data/train_000002.npy of 10,995 tokens"
    assert_refused(preflight(homes, tiny_flags), "data", difference, "--data-dir")


def test_preflight_refuses_an_out_dir_that_is_not_shared(homes, tiny_flags):
    (homes[1] / "runs").unlink()
    seen = "on rank 1: rank 0 wrote to runs, and this rank does not see it"
    assert_refused(preflight(homes, tiny_flags), "disk", seen, "give an --out-dir")
    assert not list((homes[0] / "runs").iterdir())


def altered(tmp_path, lines):
    """train_gpt2.py with something done before it."""
    script = tmp_path / "altered.py"
    script.write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n{lines}\n"
        "import train_gpt2\nfrom runtime.cli import run_command\nrun_command(train_gpt2.main)\n"
    )
    return script


def test_preflight_refuses_a_clock_that_is_two_minutes_ahead(homes, tiny_flags, tmp_path):
    ahead = altered(tmp_path, "now = time.time_ns\ntime.time_ns = lambda: now() + 120 * 10**9")
    result = preflight(homes, tiny_flags, (ROOT / "train_gpt2.py", ahead))
    assert_refused(result, "clocks", "rank 1's is 120.0", "more than 60 s", "NTP")


def test_preflight_ends_where_a_process_never_answers(homes, tiny_flags, tmp_path):
    # The patience is short only once both processes are there, however long that takes.
    lines = """
from training import preflight
check = preflight.check_network
def check_network(dist_info):
    preflight.PATIENCE_SECONDS = 3 + 10 * int(os.environ["RANK"])  # rank 0 ends first
    return check(dist_info)
preflight.check_network = check_network
if os.environ["RANK"] == "1":
    preflight.check_same_on_all_ranks = lambda *_: time.sleep(60)
"""
    script = altered(tmp_path, lines)
    codes, stdout, stderr = preflight(homes, tiny_flags, (script, script))
    assert codes == [1, 1]
    assert passed(stdout[0]) == ["network"]
    assert stderr[0].startswith("stopped: software: waited 3 s for another process: ")
    assert stderr[0].count("\n") == 1


def test_preflight_says_that_a_process_is_gone(homes, tiny_flags, tmp_path):
    lines = "from training import preflight\npreflight.check_software = lambda *_: os._exit(9)"
    scripts = (ROOT / "train_gpt2.py", altered(tmp_path, lines))
    codes, _, stderr = preflight(homes, tiny_flags, scripts)
    assert codes == [1, 9]
    assert stderr[0].startswith("stopped: software: another process is gone: ")


def test_preflight_refuses_an_out_dir_that_cannot_be_written(tiny_flags):
    with pytest.raises(ValueError, match=r"^disk: .*: give an --out-dir that all machines share"):
        main([*tiny_flags, "--out-dir=/proc/nothing", "--preflight"])  # even root cannot make it


def test_preflight_refuses_a_disk_without_room_for_a_checkpoint(tiny_flags, tmp_path):
    huge = ["--n-layer=16", f"--n-embd={2**20}"]  # 2 * 10^15 bytes
    with pytest.raises(ValueError, match=r"^disk: .* GiB free, a checkpoint takes \d{7,}"):
        main([*tiny_flags, *huge, "--preflight"])
    assert not list((tmp_path / "runs").iterdir())
