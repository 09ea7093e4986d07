"""Measures that are taken in turn, their table, and the child processes that are measured."""

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bench.config import ROOT
from runtime.device import synchronize

Measure = Callable[[], dict[str, float]]  # what one run measured, by unit
Results = dict[str, dict[str, list[float]]]  # every run's values, by label and unit


def measure_in_turn(
    measures: Mapping[str, Measure],
    rounds: int,
    store: Callable[[Results, dict[str, str]], object],
) -> tuple[Results, dict[str, str]]:
    """Take each measure once per round (A B A B …), as machines drift; print a line for each.

    Args:
        measures: by label. One that raises ValueError is not taken again.
        rounds: how often.
        store: gets what is returned, as far as it is measured, after each run.

    Returns:
        The results; and, by label, why there are none.

    Raises:
        ValueError: every measure failed.
    """
    results: Results = {}
    failures: dict[str, str] = {}
    for turn in range(1, rounds + 1):
        for label, measure in measures.items():
            if label in failures:
                continue
            try:
                values = measure()
            except ValueError as error:
                # Results are published, so they name no folders of this machine.
                failures[label] = line = re.sub(r"(/[\w.+-]+){2,}", "PATH", str(error))[:160]
            else:
                line = ", ".join(f"{value:,.5g} {unit}" for unit, value in values.items())
                for unit, value in values.items():
                    results.setdefault(label, {}).setdefault(unit, []).append(value)
            print(f"run {turn}/{rounds} | {label:<24} | {line}", flush=True)
            store(results, failures)
    if not results:
        raise ValueError(f"nothing was measured: {next(iter(failures.values()))}")
    return results, failures


def format_results(results: Results, failures: Mapping[str, str]) -> str:
    """A line per label: the median of each unit, and its ratio to that of the first label."""
    units = list(dict.fromkeys(unit for values in results.values() for unit in values))
    rows = [["", *units]]
    first: dict[str, float] = {}
    for label, values in results.items():
        rows.append([label])
        for unit in units:
            if unit in values:
                median = statistics.median(values[unit])
                ratio = median / first.setdefault(unit, median) if median else 1.0
                rows[-1].append(f"{median:,.4g} ({ratio:.2f}x)")
            else:
                rows[-1].append("-")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{label}: {why}" for label, why in failures.items())])


def seconds_of(work: Callable[[], object], device: torch.device | None = None) -> float:
    """The time that `work` takes, including what it started on `device`."""
    start = time.perf_counter()
    work()
    if device is not None:
        synchronize(device)
    return time.perf_counter() - start


def run_python(*args: str | Path, **environment: str) -> None:
    """Run Python in this repository's folder, in a child process.

    Raises:
        ValueError: the child failed; the message is a line of its standard error.
    """
    child = subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode < 0:
        raise ValueError(f"ended by signal {-child.returncode}: out of memory?")
    if child.returncode:
        raise ValueError(error_line(child.stderr))


def error_line(stderr: str) -> str:
    """What a failed process said: its first line of ours, else its last one."""
    lines = ["no error message", *stderr.strip().splitlines()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return ours[0] if ours else lines[-1]
