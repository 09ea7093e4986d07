"""Run measurements alternately; report them as a table and as one JSON file per device.

The file has the last results of each measurement (`ladder`, `peer_transformers`, `gpu`, …), each
with its date, commit and versions. The files can be committed: they contain neither host names nor
folders.
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
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from runtime.threads import usable_cores

import torch
from torch.backends import cudnn

from runtime.cli import flag_of, parse_flags
from runtime.device import device_name
from runtime.errors import UserError
from runtime.files import read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.1  # between checks of a child process
RUN_SECONDS = 600.0  # time limit of a run
LEAST_SECONDS = 30.0  # a run that has less cannot end
STOP_SECONDS = 45.0  # that torchrun takes at most to end its processes
REASON = re.compile(r"^(?:\[rank\d+\]: )?(?:error: )?((?<=error: ).+|\w+Error: .+)$", re.MULTILINE)
TORCHRUN = "torch.distributed.run"
Measure = Callable[[float], dict[str, float]]  # makes one run with a time limit; values by unit
Results = dict[str, dict[str, list[float]]]  # values of all runs, by label and unit


def split_flags(config_class: type[Any]) -> tuple[Any, list[str]]:
    """Return a configuration from this process's flags, and all other flags."""
    names = {flag_of(field.name) for field in fields(config_class)} | {"--help"}
    own, others = list[str](), list[str]()
    target = own
    for arg in sys.argv[1:]:
        if arg.startswith("-"):
            flag = arg.partition("=")[0].replace("_", "-").replace("--no-", "--")
            target = own if flag in names else others
        target.append(arg)
    return parse_flags(config_class, own), others


def measure_in_turn(
    measures: Mapping[str, Measure], rounds: int, seconds: float = math.inf
) -> Iterator[tuple[Results, dict[str, str]]]:
    """Run each measurement once per round (A B A B …), and print a line for each run.

    Runs alternate because machine speed drifts. A run may take half of `seconds`, at most what is
    left and at most `RUN_SECONDS`; one for which no time is left is a failure. A measurement that
    raises UserError is not run again. After each run, yield the results so far and the reasons of
    failures, by label.
    """
    results, failures = Results(), dict[str, str]()
    end = monotonic() + seconds
    runs = list(measures) * rounds
    for number, label in enumerate(runs):
        if label in failures:
            continue
        left = end - monotonic()
        try:
            if left < LEAST_SECONDS:
                raise UserError("not run: no time was left")
            values = measures[label](min(RUN_SECONDS, seconds / 2, left))
            line = ", ".join(f"{value:,.5g} {unit}" for unit, value in values.items())
        except UserError as error:
            for output in getattr(error, "__notes__", ()):
                print(output, flush=True)
            # Results are published, so hide the folders of this machine.
            line = re.sub(r"(/[\w.+-]+){2,}", "PATH", str(error))[:160]
            values, failures[label] = {}, line
        for unit, value in values.items():
            results.setdefault(label, {}).setdefault(unit, []).append(value)
        print(f"run {number + 1}/{len(runs)} | {label:<24} | {line}", flush=True)
        yield results, failures


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
    folder: Path | None = None,
    is_done: Callable[[str], bool] = lambda _: False,
    environment: Mapping[str, str] = {},
) -> str:
    """Run Python in a child process, which is killed when `seconds` have passed or it is done.

    Args:
        args: arguments of Python.
        seconds: time limit.
        folder: working directory; default: the one of this process.
        is_done: called with the output so far; returns whether to kill the child.
        environment: environment variables to set.

    Returns:
        Standard output and standard error, in the order in which they were printed.

    Raises:
        UserError: the child failed; the message is its last error, and the output is a note.
    """
    end = monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch, open(f"{scratch}/output", "wb") as file:

        def output() -> str:
            return Path(file.name).read_text(encoding="utf-8", errors="replace")

        command = [sys.executable, *args]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        child = subprocess.Popen(
            command, cwd=folder, env=env, stdout=file, stderr=file, process_group=0
        )
        try:
            while (code := child.poll()) is None and not is_done(output()) and monotonic() < end:
                sleep(POLL_SECONDS)
        finally:
            if TORCHRUN in args:  # its processes are in other groups, and it ends them itself
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(STOP_SECONDS)
            with suppress(ProcessLookupError):  # also kill the processes that the child started
                os.killpg(child.pid, signal.SIGKILL) if os.name == "posix" else child.kill()
            child.wait()
        if code:
            reasons = REASON.findall(output()) or output().strip().splitlines() or ["no output"]
            killed = f"killed by signal {-code}: out of memory?"
            error = UserError(reasons[-1] if code > 0 else killed)
            error.add_note(output())
            raise error
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


def store_results(out_dir: Path, device: str, name: str, measured: Mapping[str, Any]) -> Path:
    """Replace a measurement in the device's results file; return the file's path."""
    path = out_dir / f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    file = read_json(path) if path.exists() else {"device": device}
    write_json(path, file | {name: {**provenance(), **measured}})
    return path


def provenance() -> dict[str, Any]:
    """Return the date, the commit and the versions of a measurement."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    commit, describe = "unknown", ("git", "describe", "--always", "--exclude=*", "--dirty")
    with suppress(OSError, subprocess.CalledProcessError):
        for command in (("git", "ls-files", "--error-unmatch", __file__), describe):
            output = subprocess.check_output(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        commit = output.decode().strip()
    # torch's version has its build, as in 2.13.0+cu130.
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    cudnn_version = cudnn.version() or 0  # type: ignore[no-untyped-call]  # 0 on a CPU
    return {"date": date, "commit": commit, "versions": versions | {"cudnn": cudnn_version}}
