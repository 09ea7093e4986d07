import json
import os
import signal
import subprocess
import sys

from conftest import ROOT, TINY_MODEL

from bench.config import BenchConfig
from bench.gpu import PARTS, measure_part
from runtime.cli import parse_flags

TINY_BENCH = (
    *(sys.executable, "-m", "bench", "--gpu", *TINY_MODEL, "--n-layer=1", "--block-size=64"),
    "--device=cpu",
    *("--steps=1", "--rounds=1", "--micro-batch-size=1", "--total-batch-size=256"),
    "--train-steps=2",
)


def start(folder, *flags):
    """The command in `folder`, where no compiler is found and git is none."""
    environment = {**os.environ, "PATH": "/nonexistent", "CC": "", "PYTHONPATH": str(ROOT)}
    command = [*TINY_BENCH, f"--out-dir={folder}", *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **streams)


def outcomes(stdout):
    """What came of each part, by its name."""
    lines = [line.removeprefix("--- ") for line in stdout.splitlines() if line.startswith("--- ")]
    return dict(line.split(maxsplit=1) for line in lines)


def test_command_measures_everything_and_goes_on_after_an_interrupt(tiny_data, tmp_path):
    """The rehearsal of the first hour on a GPU, on a CPU, of a tiny model."""
    first = start(tmp_path, f"--data-dir={tiny_data}")
    for line in first.stdout:
        if line.startswith("run 1/1 | 2 loss chunks"):  # in the middle of a part
            first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130, first.stderr.read()
    (path,) = tmp_path.glob("*.json")
    before = json.loads(path.read_text())
    assert [before[name]["complete"] for name in ("peer_transformers", "peer_switches")] == [1, 0]

    stdout, stderr = start(tmp_path, f"--data-dir={tiny_data}").communicate(timeout=1800)
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
    start(tmp_path, f"--data-dir={tiny_data}", "--fresh", "--minutes=0").communicate(timeout=60)
    assert not path.exists()


def test_command_says_what_it_skipped_and_why(tiny_data, tmp_path):
    done = start(tmp_path, "--minutes=0")
    stdout, stderr = done.communicate(timeout=60)
    assert not done.returncode, stderr
    came = outcomes(stdout)
    assert came.pop("train") == "skipped: --component train needs shards of text: --data-dir DIR"
    assert set(came.values()) == {
        "skipped: no time left of --minutes 0; the same command goes on",
    }
    assert len(came) == len(PARTS) - 1


def test_part_is_stopped_with_its_processes_after_its_time(tiny_data, tmp_path, monkeypatch):
    survived, python = tmp_path / "survived", tmp_path / "python"
    python.write_text(f"#!/bin/sh\n(sleep 10; touch {survived}) & wait\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    config = parse_flags(BenchConfig, [*TINY_MODEL, "--device=cpu", f"--out-dir={tmp_path}"])
    outcome = measure_part(config, {"peer": "eager"}, tiny_data, 2)
    assert outcome == "stopped after 0.0 minutes; the same command goes on"
    assert not survived.exists()  # it would have held the part's stderr until then


def test_command_refuses_a_machine_without_a_gpu(tmp_path):
    done = start(tmp_path, "--device=auto")
    assert done.communicate(timeout=60)[1].startswith("error: --gpu: this machine has no usable")
    assert done.returncode == 2
