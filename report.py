"""The report: one HTML page about runs, with curves, settings and samples, that needs no network.

    python plot.py runs/a runs/b --report             # runs/a/report.html

`assets/report.html` is the page. `write_report` puts the runs' data into it, as JSON. The page's
script inserts all of them as text, so that no sample or name can be taken for HTML.
"""

import ast
import json
import math
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from runtime.files import atomic_write, read_json
from runtime.metrics import (
    HELLASWAG_EXAMPLES,
    HELLASWAG_REFERENCES,
    METRICS_NAME,
    Series,
    format_duration,
    logged_values,
    read_run,
)

Records = list[dict[str, Any]]

TEMPLATE = Path(__file__).parent / "assets" / "report.html"
DATA_MARK = "RUNS_AS_JSON"  # where the template wants them
MAX_POINTS = 1000  # of a series in the page
MAX_SAMPLED_STEPS = 60
NOISY = ("train_loss", "grad_norm", "tokens_per_second")  # drawn with their running mean
SERIES = (*NOISY, "val_loss", "hellaswag_acc_norm", "lr", "peak_memory_gib")
VOCAB_SIZE = 50257
# Validation losses on FineWeb-Edu that others published.
FINEWEB_EDU_LOSSES = {"OpenAI's GPT-2 124M": 3.29, "124M after 10B tokens": 3.07}
SAMPLE_LINE = re.compile(r"^step (\d+) \| sample: (['\"].*)$", re.MULTILINE)
SILENCE = 3600.0  # seconds without a record, after which a run has probably died


def write_report(run_dirs: Sequence[Path], path: Path) -> None:
    """Write the page of one or more runs, finished or in progress."""
    now = time.time()
    runs = [collect_run(run_dir, now) for run_dir in run_dirs]
    if len({run["name"] for run in runs}) < len(runs):
        runs = [run | {"name": str(folder)} for run, folder in zip(runs, run_dirs, strict=True)]
    page = {"written": now, "references": references_for(runs), "runs": runs}
    data = json.dumps(page, separators=(",", ":")).replace("<", "\\u003c")  # no </script> in it
    with atomic_write(path) as file:
        file.write(TEMPLATE.read_text(encoding="utf-8").replace(DATA_MARK, data).encode())


def collect_run(run_dir: Path, now: float) -> dict[str, Any]:
    """What the page shows of a run, as JSON values; `now` is in seconds since the epoch."""
    records, path = read_run(run_dir), run_dir / METRICS_NAME
    resumed = [step for step in logged_values(path, "resumed_from") if step]  # 0: it began
    config_path = run_dir / "config.json"
    settings = read_json(config_path) if config_path.is_file() else {}
    step, tokens = records[-1]["step"], records[-1]["tokens_seen"]
    max_steps = settings.get("max_steps", step)
    return {
        "name": run_dir.resolve().name,
        "step": step,
        "max_steps": max_steps,
        "tokens": tokens,
        "last_write": path.stat().st_mtime,
        "state": run_state(run_dir, step, max_steps, now),
        "time_left": _time_left(records, max_steps - step),
        "series": {name: thinned_series(records, name) for name in SERIES},
        "hellaswag_total": max(record.get("hellaswag_total", 0) for record in records),
        "resumed": [each * tokens / max(step, 1) for each in resumed if each <= step],
        "settings": settings,
        "environment": _environment(run_dir, records, resumed),
        "samples": read_samples(run_dir / "samples.txt"),
    }


def references_for(runs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Published values, by series, that these runs can be compared with."""
    uniform = {"a uniform guess": round(math.log(VOCAB_SIZE), 2)}
    references = {"train_loss": uniform, "val_loss": uniform}
    if all("fineweb-edu" in str(run["settings"].get("data_dir")) for run in runs):
        references["val_loss"] = uniform | FINEWEB_EDU_LOSSES
    accuracies = {"chance": 1 / 4}
    if all(run["hellaswag_total"] in (0, HELLASWAG_EXAMPLES) for run in runs):
        accuracies |= HELLASWAG_REFERENCES
    return references | {"hellaswag_acc_norm": accuracies}


def thinned_series(records: Records, name: str) -> dict[str, list[float]]:
    """A series as the page draws it: tokens, values and, of a noisy one, the running mean.

    Of a long series, the least and the greatest value of each of `MAX_POINTS / 2` parts are left,
    and the ends, so that no spike is lost. All values have six digits.
    """
    series = Series.of(records, name)
    kept = np.arange(len(series.values))
    if len(kept) > MAX_POINTS:
        parts = np.array_split(kept[1:-1], MAX_POINTS // 2 - 1)
        extremes = [
            part[pick(series.values[part])] for part in parts for pick in (np.argmin, np.argmax)
        ]
        kept = np.unique([0, *extremes, kept[-1]])
    columns = {"tokens": series.tokens, "values": series.values}
    if name in NOISY:
        columns["mean"] = series.smoothed().values
    return {key: [float(f"{x:.6g}") for x in column[kept]] for key, column in columns.items()}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The texts sampled at each step, in order of the steps: `MAX_SAMPLED_STEPS` of them at most.

    Lines that are torn are skipped, and so are texts that a resumed run wrote again as they were.
    """
    lines = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    by_step: dict[int, dict[str, None]] = {}  # a dict as a set that keeps the order
    for step, quoted in SAMPLE_LINE.findall(lines):
        with suppress(ValueError, SyntaxError):
            text = str(ast.literal_eval(quoted))
            by_step.setdefault(int(step), {})[text] = None
    steps = sorted(by_step)
    if len(steps) > MAX_SAMPLED_STEPS:
        chosen = np.linspace(0, len(steps) - 1, MAX_SAMPLED_STEPS).round().astype(int)
        steps = [steps[index] for index in chosen]
    return [{"step": step, "texts": [*by_step[step]]} for step in steps]


def run_state(run_dir: Path, step: int, max_steps: int, now: float) -> str:
    """Whether a run was `finished`, `stopped`, `in progress` or `silent` at the time `now`."""
    if step >= max_steps:
        return "finished"
    last_write = (run_dir / METRICS_NAME).stat().st_mtime
    mark = run_dir / "PREEMPTED"  # it stays until a resumed run has saved
    if mark.is_file() and mark.stat().st_mtime >= last_write:
        return "stopped"
    return "in progress" if now - last_write < SILENCE else "silent"


def _time_left(records: Records, steps: int) -> str:
    """The training time that so many steps will take, as the last ones did; empty if unknown."""
    recent = Series.of(records, "step_time_ms").values[-50:]
    return format_duration(steps * statistics.median(recent) / 1000) if len(recent) else ""


def _environment(run_dir: Path, records: Records, resumed: Sequence[int]) -> dict[str, str]:
    """What the run's folder tells of data, devices and faults, by name."""
    found = {"folder": str(run_dir.resolve())}
    for name in ("environment", "data_fingerprint"):
        logged = map(str, logged_values(run_dir / METRICS_NAME, name))
        found[name.replace("_", " ")] = "; then ".join(dict.fromkeys(logged)) or "unknown"
    manifests = sorted(run_dir.glob("checkpoints/step_*/manifest.json"))
    found["newest checkpoint"] = manifests[-1].parent.name if manifests else "none"
    utilisation = Series.of(records, "mfu").values
    if len(utilisation):
        found["median MFU"] = f"{np.median(utilisation):.1%}"
    found["resumed from step"] = ", ".join(f"{step:,}" for step in resumed) or "never"
    return found
