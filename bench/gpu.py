"""What `python -m bench --gpu` measures: everything, the most important first, in half an hour.

Each part is another call of `python -m bench`, in a process with its own time limit. A part that
was measured with the same code and settings is not measured again.
"""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

from bench.config import ROOT, BenchConfig
from bench.measurement import error_line, tokenize_stdlib
from bench.report import (
    device_label,
    markdown_tables,
    read_results,
    results_path,
    stored_section,
)
from runtime.files import atomic_write

PARTS: tuple[tuple[dict[str, Any], float], ...] = (  # flags, and minutes at most
    ({"component": "tests"}, 6),
    ({"peer": "transformers", "rounds": 1}, 6),
    ({"peer": "switches", "rounds": 1}, 16),
    ({"peer": "gpus", "rounds": 1}, 12),
    ({"rounds": 1}, 12),  # the ladder
    ({"component": "context"}, 8),
    ({"component": "optimizer"}, 3),
    ({"component": "checkpoint"}, 3),
    ({"component": "sample"}, 3),
    ({"component": "hellaswag"}, 3),
    ({"component": "data"}, 3),
    ({"component": "startup", "rounds": 1}, 5),
    ({"peer": "eager", "rounds": 1}, 5),
    ({"component": "train"}, 120),
)
STEPS = 10  # timed, of each training run


def measure_everything(config: BenchConfig) -> None:
    """Measure each part that is not measured yet; print what happened to each, and the tables.

    Raises:
        ValueError: there is no GPU, and no other --device was asked for.
    """
    if config.device == "auto" and config.torch_device.type != "cuda":
        raise ValueError("--gpu: this machine has no usable GPU; --device cpu only rehearses it")
    label, deadline = device_label(config.torch_device), monotonic() + 60 * config.minutes
    if config.fresh:
        results_path(config, label).unlink(missing_ok=True)
    outcomes = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        text = config.data_dir or tokenize_stdlib(Path(folder) / "data")
        for changes, minutes in PARTS:
            name = " ".join(str(value) for key, value in changes.items() if key != "rounds")
            outcome = measure_part(config, changes, text, min(60 * minutes, deadline - monotonic()))
            outcomes.append(f"{name or 'ladder':<14} {outcome}")
            print(f"--- {outcomes[-1]}", flush=True)
    path = results_path(config, label)
    tables = markdown_tables(read_results(config, label))
    with atomic_write(path.with_suffix(".md")) as file:
        file.write(tables.encode())
    print("", tables, *outcomes, f"results, chart and tables: {path.with_suffix('.*')}", sep="\n")


def measure_part(config: BenchConfig, changes: dict[str, Any], text: Path, seconds: float) -> str:
    """Measure one part in `seconds`; returns in one line what came of it."""
    common = {"gpu": False, "fresh": False, "steps": config.steps or STEPS}
    try:
        part = replace(config, **common | changes)
    except ValueError as error:  # a package or a flag that this part needs
        return f"skipped: {error}"
    if part.peer == "gpus" and part.processes < 2:
        return "skipped: there is one GPU only"
    label = device_label(config.torch_device)
    if stored_section(part, label, complete=True):
        return "measured before"
    if seconds <= 0:
        return f"skipped: no time left of --minutes {config.minutes:g}; the same command goes on"
    start = monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "bench", *flags(replace(part, data_dir=text))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # to end the part's own processes, too
    )
    try:
        _, stderr = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds / 60:.1f} minutes; the same command goes on"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    if child.returncode:
        return f"failed: {error_line(stderr)}"
    return f"measured in {monotonic() - start:.0f} s"


def flags(config: BenchConfig) -> list[str]:
    """The command line of a config: what is not the default."""
    return [
        f"--{name.replace('_', '-')}={value}"
        for name, value in asdict(config).items()
        if value != getattr(BenchConfig, name) and not isinstance(value, bool)
    ]
