import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY_MODEL
from test_bench import fork_runs

from bench import __main__ as bench_main
from bench import gpu
from bench.config import BenchConfig
from bench.gpu import PARTS, measure_part
from runtime.cli import parse_flags

TINY_BENCH = (
    *("--gpu", *TINY_MODEL, "--n-layer=1", "--block-size=64", "--device=cpu", "--minutes=1000"),
    *("--steps=1", "--rounds=1", "--micro-batch-size=1", "--total-batch-size=256"),
    "--train-steps=2",
)


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """A working folder where no compiler is found and git is none."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("PATH", "/nonexistent"), ("CXX", ""), ("PYTHONPATH", str(ROOT))):
        monkeypatch.setenv(name, value)


def start(*flags):
    """The command, as a process."""
    command = [sys.executable, "-m", "bench", *TINY_BENCH, "--out-dir=.", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def measure(monkeypatch, *flags):
    """The command, in this process."""
    monkeypatch.setattr(sys, "argv", ["bench", *TINY_BENCH, "--out-dir=.", *flags])
    bench_main.main()


def measure_parts_here(monkeypatch, commands, folder):
    """Let the parts be calls in this process, with their own flags, and their runs forks."""

    class Part:
        def __init__(self, command, **_):
            assert command[:3] == [sys.executable, "-m", "bench"]
            monkeypatch.setattr(sys, "argv", command[2:])
            self.returncode, self.stderr = 0, ""
            try:
                bench_main.main()
            except (ValueError, OSError) as error:
                self.returncode, self.stderr = 2, f"error: {error}"

        def communicate(self, timeout):
            return None, self.stderr

        def poll(self):
            return self.returncode

    fork_runs(monkeypatch, commands, folder)
    stand_in = SimpleNamespace(Popen=Part, PIPE=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu, "subprocess", stand_in)


def outcomes(stdout):
    """What came of each part, by its name."""
    lines = [line.removeprefix("--- ") for line in stdout.splitlines() if line.startswith("--- ")]
    return dict(line.split(maxsplit=1) for line in lines)


@pytest.mark.usefixtures("in_folder")
def test_command_measures_everything_and_goes_on_after_an_interrupt(
    commands, tiny_data, tmp_path, monkeypatch, capfd
):
    """The rehearsal of the first hour on a GPU, on a CPU, of a tiny model."""
    first = start(f"--data-dir={tiny_data}")
    for line in first.stdout:
        if line.startswith("run 1/1 | masked padding"):  # in the middle of a part: 3 runs to go
            first.send_signal(signal.SIGINT)
    assert first.wait(600) == 130, first.stderr.read()
    (path,) = tmp_path.glob("*.json")
    before = json.loads(path.read_text())
    assert [before[name]["complete"] for name in ("peer_transformers", "peer_switches")] == [1, 0]

    measure_parts_here(monkeypatch, commands, tmp_path)
    measure(monkeypatch, f"--data-dir={tiny_data}")
    stdout, stderr = capfd.readouterr()
    came = outcomes(stdout)
    assert len(came) == len(PARTS), stdout + stderr
    assert came["transformers"] == came["tests"] == "measured before"
    rest = [came[name] for name in came if name not in ("transformers", "tests")]
    assert all(outcome.startswith("measured in") for outcome in rest), stdout
    after = json.loads(path.read_text())
    assert after["peer_transformers"] == before["peer_transformers"]
    runs_before, runs = (
        [result["runs"] for result in results["peer_switches"]["results"]]
        for results in (before, after)
    )
    assert len(runs) > len(runs_before) > 0
    assert runs[: len(runs_before)] == runs_before  # not measured again
    assert all(section["complete"] for section in after.values() if isinstance(section, dict))
    speeds = {result["name"]: result for result in after["peer_gpus"]["results"]}
    assert speeds["2 processes"]["batch"] == "1 x 2"
    tables = path.with_suffix(".md").read_text()
    for row in ("| masked padding |", "| optimize_ddp off | not measured: for GPUs", "--component"):
        assert row in tables
    assert tables in stdout
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert path.with_suffix(".loss.png").stat().st_size > 10_000
    measure(monkeypatch, f"--data-dir={tiny_data}", "--fresh", "--minutes=0")
    assert not path.exists()


@pytest.mark.usefixtures("in_folder")
def test_command_says_what_it_skipped_and_why(monkeypatch, capfd):
    measure(monkeypatch, "--minutes=0")
    came = outcomes(capfd.readouterr().out)
    assert came.pop("train") == "skipped: --component train needs shards of text: --data-dir DIR"
    assert set(came.values()) == {
        "skipped: no time left of --minutes 0; the same command goes on",
    }
    assert len(came) == len(PARTS) - 1


def test_part_is_stopped_with_its_processes_after_its_time(tiny_data, tmp_path, monkeypatch):
    survived, python = tmp_path / "survived", tmp_path / "python"
    python.write_text(f"#!/bin/sh\n(sleep 60; touch '{survived}') & wait\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    config = parse_flags(BenchConfig, [*TINY_MODEL, "--device=cpu", f"--out-dir={tmp_path}"])
    outcome = measure_part(config, {"peer": "eager"}, tiny_data, 1)
    assert outcome == "stopped after 0.0 minutes; the same command goes on"
    assert not survived.exists()  # it would have held the part's stderr until then


@pytest.mark.usefixtures("in_folder")
def test_command_refuses_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as if there was none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^--gpu: this machine has no usable"):
        measure(monkeypatch, "--device=auto")
