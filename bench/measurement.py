"""Measured quantities, runs that alternate, and the child processes that are measured."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.config import ROOT
from runtime.device import synchronize

# A busy loop that ends with the process that started it, even if that one was killed.
BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@dataclass(frozen=True)
class Measurement:
    """One measured quantity, over several runs."""

    label: str
    unit: str
    runs: list[float]

    @property
    def median(self) -> float:
        """The middle run."""
        return statistics.median(self.runs)

    @property
    def spread(self) -> float:
        """The difference between the extreme runs, as a fraction of the median."""
        return (max(self.runs) - min(self.runs)) / self.median if self.median else 0.0


def alternate(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Take each measure once per round (A B A B …), as machines drift; returns each one's runs."""
    runs: list[list[float]] = [[] for _ in measures]
    for _ in range(rounds):
        for values, measure in zip(runs, measures, strict=True):
            values.append(measure())
    return runs


def seconds_of(work: Callable[[], object], device: torch.device | None = None) -> float:
    """The time that `work` takes, including what it started on `device`."""
    start = time.perf_counter()
    work()
    if device is not None:
        synchronize(device)
    return time.perf_counter() - start


def run_python(*args: str | Path, **environment: str) -> str:
    """Run Python in a child process that can import this repository; returns its output.

    Raises:
        ValueError: the child failed; the message is a line of its standard error.
    """
    child = subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode < 0:
        raise ValueError(f"ended by signal {-child.returncode}: out of memory?")
    if child.returncode:
        raise ValueError(error_line(child.stderr))
    return child.stdout


def error_line(stderr: str) -> str:
    """What a failed process said: its first line of ours (torchrun writes more), else its last."""
    lines = ["no error message", *stderr.strip().splitlines()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return ours[0] if ours else lines[-1]


def tokenize_stdlib(data_dir: Path) -> Path:
    """Write shards of Python's standard library into `data_dir`, to train on."""
    print("tokenizing Python's standard library to train on", flush=True)
    run_python(ROOT / "fineweb.py", "--source=stdlib", f"--data-dir={data_dir}")
    return data_dir


@contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` processes that compute all the time, for the length of the body."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
