"""Run measurements alternately; report them as a table and as one JSON file per device.

The file has the last results of each measurement (`ladder`, `peer_transformers`, `muon`, …), each
with its date, commit and package versions. The files can be committed: they contain neither host
names nor folders.
"""

import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from runtime.threads import usable_cores

import torch

from bench.config import DIMENSIONS, ROOT, BenchConfig
from runtime.device import cudnn_version, device_name
from runtime.files import read_json, write_json

PACKAGES = ("triton", "transformers", "numpy", "tiktoken", "gigatoken")
POLL_SECONDS = 0.1  # between checks of a child process
Measure = Callable[[], dict[str, float]]  # makes one run; returns values by unit
Results = dict[str, dict[str, list[float]]]  # values of all runs, by label and unit


def measure_in_turn(
    measures: Mapping[str, Measure], rounds: int
) -> Iterator[tuple[Results, dict[str, str]]]:
    """Run each measurement once per round (A B A B …), and print a line for each run.

    Runs alternate because machine speed drifts. A measurement that raises ValueError is not run
    again. After each run, yield the results so far and the reasons of failures, by label.
    """
    results: Results = {}
    failures: dict[str, str] = {}
    for turn in range(1, rounds + 1):
        for label in [label for label in measures if label not in failures]:
            try:
                values = measures[label]()
                line = ", ".join(f"{value:,.5g} {unit}" for unit, value in values.items())
            except ValueError as error:
                # Results are published, so hide the folders of this machine.
                line = re.sub(r"(/[\w.+-]+){2,}", "PATH", str(error))[:160]
                values, failures[label] = {}, line
            for unit, value in values.items():
                results.setdefault(label, {}).setdefault(unit, []).append(value)
            print(f"run {turn}/{rounds} | {label:<24} | {line}", flush=True)
            yield results, failures
    if failures and not results:
        raise ValueError(f"nothing was measured: {line}")


def format_results(results: Results, failures: Mapping[str, str]) -> str:
    """Format a line per label: the median of each unit, and its ratio to the first label's."""
    lines, first = [], dict[str, float]()
    for label, values in results.items():
        medians = {unit: statistics.median(runs) for unit, runs in values.items()}
        first = medians | first
        shown = [f"{m:,.4g} {unit} ({m / (first[unit] or 1):.2f}x)" for unit, m in medians.items()]
        lines.append(f"{label:<24} | {', '.join(shown)}")
    return "\n".join([*lines, *(f"{label:<24} | {why}" for label, why in failures.items())])


def run_python(
    *args: str | Path,
    seconds: float = math.inf,
    folder: Path = ROOT,
    log: Path | None = None,
    is_done: Callable[[str], bool] = lambda _: False,
    **environment: str,
) -> str:
    """Run Python in a child process.

    Args:
        args: arguments of Python.
        seconds: time limit, after which the child and the processes that it started are killed.
        folder: working directory.
        log: file to append the output to.
        is_done: called with the output so far; the child is killed when it returns True.
        environment: environment variables to set.

    Returns:
        Standard output and standard error, in the order in which they were printed.

    Raises:
        ValueError: the child failed (the message is its last line) or ran out of time.
    """
    if seconds <= 0:
        raise ValueError("no time was left")
    end = monotonic() + seconds
    with open(log, "ab", 0) if log else tempfile.NamedTemporaryFile(buffering=0) as file:
        file.write(f"$ python {' '.join(map(str, args))}\n".encode())
        start = file.tell()

        def output() -> str:
            return Path(file.name).read_bytes()[start:].decode(errors="replace")

        child = subprocess.Popen(
            [sys.executable, *args],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
            stdout=file,
            stderr=file,
            process_group=0,
        )
        try:
            while (code := child.poll()) is None and not is_done(output()):
                if monotonic() >= end:
                    raise ValueError(f"stopped at its time limit, after {seconds:.0f} s")
                sleep(POLL_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL) if os.name == "posix" else child.kill()
            child.wait()
        if code:
            last_line = output().strip().rpartition("\n")[2].removeprefix("error: ")
            raise ValueError(last_line if code > 0 else f"killed by signal {-code}: out of memory?")
        return output()


# --- the file of a device ---------------------------------------------------------------------


def device_label(device: torch.device) -> str:
    """Return the model name of a device, as in `NVIDIA H100 80GB HBM3` or `AMD EPYC, 2 cores`."""
    if device.type == "cuda":
        return device_name(device)
    cpuinfo = Path("/proc/cpuinfo")  # on Linux
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {usable_cores()} cores" + (", MPS" if device.type == "mps" else "")


def results_path(config: BenchConfig) -> Path:
    """Return the path of the device's results file.

    A model or batch other than the default has a separate file, so that results in one file are
    comparable.
    """
    words = [device_label(config.torch_device)]
    for name in (*DIMENSIONS, "micro_batch_size"):
        if (value := getattr(config, name)) != getattr(BenchConfig, name):
            words.append(f"{name}-{value}")
    file_name = re.sub("[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    return config.out_dir / f"{file_name}.json"


def store_results(
    path: Path, config: BenchConfig, name: str, results: Results, failures: Mapping[str, str]
) -> None:
    """Replace a measurement in the device's results file."""
    file = read_json(path) if path.exists() else {"device": device_label(config.torch_device)}
    measured = {"model": asdict(config.model_config()), "not_measured": failures}
    write_json(path, file | {name: provenance() | measured | {"results": results}})


def provenance() -> dict[str, Any]:
    """Return the date, the commit and the package versions of a measurement."""
    # `torch.__version__` includes the build, as in 2.13.0+cu130.
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= {package: version(package) for package in PACKAGES if find_spec(package)}
    if torch.cuda.is_available():
        versions["cudnn"] = str(cudnn_version())
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": subprocess.getoutput("git describe --always --exclude=* --dirty"),  # noqa: S605, S607 - a fixed command
        "versions": versions,
    }
