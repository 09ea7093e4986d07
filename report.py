"""Write an HTML page about runs, with curves, settings and samples, that needs no network.

    python plot.py runs/a runs/b --report             # runs/a/report.html

`assets/report.html` is the template, into which `write_report` inserts the runs' data as JSON. The
page's script adds all data as text, so samples and names are never interpreted as HTML.
"""

import ast
import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from formats import metrics
from lr_schedule import default_warmup_steps
from runtime.cli import print_error
from runtime.files import atomic_write, read_json

TEMPLATE = Path(__file__).parent / "assets" / "report.html"
MAX_POINTS = 1000  # per series
NOISY = ("train_loss", "grad_norm", "tokens_per_second")  # drawn with a running mean
SERIES = (*NOISY, "val_loss", "val_bpb", "hellaswag_acc_norm", "lr", "peak_memory_gib")
SAMPLE_LINE = re.compile(r"^step (\d+) \| sample: (['\"].*)$", re.MULTILINE)


def write_report(run_dirs: Sequence[Path], folder: Path | None = None) -> Path:
    """Write a page about runs, finished or not, to `folder` or the first run's folder."""
    path, names = (folder or run_dirs[0]) / "report.html", unique_names(run_dirs)
    runs = [collect_run(run) | {"name": name} for run, name in zip(run_dirs, names, strict=True)]
    is_fineweb = all("fineweb-edu" in str(run["settings"].get("data_dir")) for run in runs)
    totals = [run["hellaswag_total"] for run in runs if run["hellaswag_total"]]
    # Published values that are comparable with these runs.
    losses = metrics.FINEWEB_EDU_LOSSES if is_fineweb else {}
    accuracies = metrics.hellaswag_references(min(totals, default=0))
    references = {"val_loss": losses, "hellaswag_acc_norm": accuracies}
    page = {"written": time.time(), "references": references, "runs": runs}
    data = json.dumps(page, separators=(",", ":")).replace("<", "\\u003c")  # no </script> in data
    with atomic_write(path) as file:
        file.write(TEMPLATE.read_text(encoding="utf-8").replace("RUNS_AS_JSON", data).encode())
    return path


def unique_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the name of each run, or its path if another run has the same name."""
    names = [run_dir.resolve().name for run_dir in run_dirs]
    pairs = zip(names, run_dirs, strict=True)
    return [name if names.count(name) == 1 else str(run_dir) for name, run_dir in pairs]


def warn_if_not_comparable(run_dirs: Sequence[Path]) -> None:
    """Warn about each run whose data or validation differs from the first run's."""
    first = what_is_measured(run_dirs[0])
    for run_dir in run_dirs:
        for name, value in what_is_measured(run_dir).items():
            if value != first[name] and None not in (value, first[name]):
                found = f"{run_dir} has {name} {value}, {run_dirs[0]} has {first[name]}"
                print_error(f"warning: the losses are not comparable: {found}")


def what_is_measured(run_dir: Path) -> dict[str, Any]:
    """Return what comparable runs have in common: data and settings, or None if not known."""
    settings = read_settings(run_dir)
    measured = {name: settings.get(name) for name in ("block_size", "val_tokens")}
    for name in ("data_fingerprint", "val_fingerprint"):
        logged = metrics.logged_values(run_dir / metrics.METRICS_NAME, name)
        measured[name] = logged[-1] if logged else None
    return measured


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings in a run's `config.json`; none if it does not exist."""
    path = run_dir / "config.json"
    return read_json(path) if path.is_file() else {}


def collect_run(run_dir: Path) -> dict[str, Any]:
    """Collect what the page shows about a run, as JSON values."""
    records, path = metrics.read_run(run_dir), run_dir / metrics.METRICS_NAME
    resumed = [step for step in metrics.logged_values(path, "resumed_from") if step]  # 0: a new run
    settings = read_settings(run_dir)
    if settings.get("warmup_steps") is None and "max_steps" in settings:
        settings["warmup_steps"] = default_warmup_steps(settings["max_steps"])
    step, tokens = records[-1]["step"], records[-1]["tokens_seen"]
    names = (*SERIES, *metrics.user_metrics(records))
    resumed_from = ", ".join(f"{step:,}" for step in resumed) or "never"
    environment = {"folder": str(run_dir.resolve()), "resumed from step": resumed_from}
    for name in ("environment", "data_fingerprint", "val_fingerprint"):
        sessions = dict.fromkeys(map(str, metrics.logged_values(path, name)))
        environment[name.replace("_", " ")] = "; then ".join(sessions) or "unknown"
    return {
        "step": step,
        "max_steps": settings.get("max_steps", step),
        "tokens": tokens,
        "last_write": path.stat().st_mtime,
        "series": {name: downsample(records, name) for name in names},
        "hellaswag_total": max(record.get("hellaswag_total", 0) for record in records),
        "resumed": [each * tokens / max(step, 1) for each in resumed if each <= step],
        "settings": settings,
        "environment": environment,
        "samples": read_samples(run_dir / "samples.txt", records),
    }


def downsample(records: metrics.Records, name: str) -> dict[str, list[float]]:
    """Return a series as the page draws it: tokens, values and, if it is noisy, a running mean.

    A long series is split into `MAX_POINTS / 2` chunks, of which the minimum and maximum are kept,
    so that no spike is lost. The first and last points are also kept. Values have six digits.
    """
    series = metrics.Series.of(records, name)
    kept = np.arange(len(series.values))
    if len(kept) > MAX_POINTS:
        chunks = np.array_split(kept[1:-1], MAX_POINTS // 2 - 1)
        lowest = [chunk[series.values[chunk].argmin()] for chunk in chunks]
        highest = [chunk[series.values[chunk].argmax()] for chunk in chunks]
        kept = np.unique([0, *lowest, *highest, kept[-1]])
    columns = {"tokens": series.tokens, "values": series.values}
    if name in NOISY:
        columns["mean"] = series.smoothed().values
    return {key: [float(f"{x:.6g}") for x in column[kept]] for key, column in columns.items()}


def read_samples(path: Path, records: metrics.Records) -> list[dict[str, Any]]:
    """Return the texts sampled at each step, in the order of steps; skip incomplete lines.

    `records` has the number of samples at each step, which are the last ones in the file. Earlier
    ones were repeated, or belong to steps that were dropped when the run resumed from an earlier
    step.
    """
    lines = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    by_step = defaultdict[int, list[str]](list)
    for step, quoted in SAMPLE_LINE.findall(lines):
        with suppress(ValueError, SyntaxError):
            by_step[int(step)].append(str(ast.literal_eval(quoted)))
    sampled = [r for r in records if r.get("samples") and by_step[r["step"]]]
    return [{"step": r["step"], "texts": by_step[r["step"]][-r["samples"] :]} for r in sampled]
