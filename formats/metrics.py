"""Find a run's folder, and read its metrics from `metrics.jsonl`.

`training.run_log` writes the file: one JSON object per line, one line per event. Figures are drawn
from this file alone.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.errors import UserError
from runtime.files import read_json

Records = list[dict[str, Any]]
Values = npt.NDArray[np.float64]
# Published values, which figures show next to a run's: see assets/README.md.
PUBLISHED_PATH = Path(__file__).parents[1] / "assets/published.json"
FINEWEB_EDU_LOSSES, HELLASWAG_REFERENCES = read_json(PUBLISHED_PATH).values()
HELLASWAG_EXAMPLES = 10042  # the full validation set, on which the reference models were scored
METRICS_NAME = "metrics.jsonl"
RUNS = Path("runs")  # default of --out-dir
BEST_SUFFIX = "@best"  # after a run's name: its checkpoint with the lowest validation loss
LOG_METRICS = {  # which the run's log itself sets
    *("step", "tokens_seen", "step_time_ms", "tokens_per_second"),
    *("mfu", "peak_memory_gib", "evaluation_seconds"),
}
STANDARD_METRICS = LOG_METRICS | {  # logged by an unmodified trainer
    *("train_loss", "lr", "grad_norm", "val_loss", "val_bpb", "samples"),
    *("hellaswag_acc", "hellaswag_acc_norm", "hellaswag_total"),
}
SMOOTHING = 0.02  # window of the running mean, as a fraction of the records


def find_run(source: str | Path, runs: Path = RUNS) -> Path:
    """Return the folder of the run that `source` names in the folder `runs`, or the path itself.

    If `runs` has a run of the name, the name does not mean a path in the working directory, unlike
    `./NAME`.
    """
    path = Path(source)
    is_name = path.name == str(source) and is_run(runs / path)
    return runs / path if is_name or (not path.exists() and (runs / path).is_dir()) else path


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's folder."""
    # Path.is_dir would raise an error in another user's folder.
    return os.path.isdir(path / "checkpoints") or os.path.isfile(path / METRICS_NAME)


def read_metrics(path: str | Path) -> Records:
    """Read a metrics file, possibly while a run is writing to it.

    Incomplete lines, left by a killed process, are skipped. Where a run resumed from a step, the
    earlier records of later steps are dropped, because these steps were repeated. If an evaluation
    was repeated at the step itself, its new values replace the earlier ones. If a run changed
    its validation windows, the validation losses before that are left out.

    Returns:
        The records in the order they were logged, each with its `step`: at most one training record
        and one evaluation record per step.
    """
    records: dict[tuple[int, bool], dict[str, Any]] = {}
    validated = None
    for record in read_lines(path):
        before, validated = validated, record.get("val_fingerprint", validated)
        if before not in (None, validated):
            for earlier in records.values():
                for name in ("val_loss", "val_bpb"):
                    earlier.pop(name, None)
        if isinstance(start := record.get("resumed_from"), int):
            records = {key: earlier for key, earlier in records.items() if key[0] <= start}
        elif isinstance(step := record.get("step"), int):
            key = (step, "train_loss" in record)
            records[key] = records.get(key, {}) | record
    return list(records.values())


def read_run(run_dir: Path) -> Records:
    """Return a run's records with `tokens_seen`; raise if none of them has a loss."""
    if not (path := run_dir / METRICS_NAME).is_file():
        raise UserError(f"{path} does not exist: pass a run folder, such as runs/NAME")
    records = [record for record in read_metrics(path) if "tokens_seen" in record]
    if not any(len(Series.of(records, name).values) for name in ("train_loss", "val_loss")):
        raise UserError(f"{path} has no losses yet: wait for the run's first step")
    return records


def user_metrics(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the numbers that only a modified trainer logs."""
    numbers = {name for r in records for name, x in r.items() if isinstance(x, int | float)}
    return sorted(numbers - STANDARD_METRICS)


def hellaswag_references(total: int) -> dict[str, float]:
    """Return scores that are comparable with scores of `total` examples, in ascending order."""
    return {"chance": 1 / 4} | (HELLASWAG_REFERENCES if total == HELLASWAG_EXAMPLES else {})


def logged_values(path: Path, name: str) -> list[Any]:
    """Return every value logged under a name, in the order of logging."""
    return [record[name] for record in read_lines(path) if name in record]


def validations(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return a run's records that have a `val_loss`, by step."""
    records = read_metrics(run_dir / METRICS_NAME)
    return {r["step"]: r for r in records if r.get("val_loss") is not None}


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a metrics file, if it exists; skip incomplete lines."""
    for line in Path(path).read_bytes().splitlines() if Path(path).is_file() else ():
        with suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(line), dict):
                yield record


class Series(NamedTuple):
    """One metric over the course of a run."""

    tokens: Values
    values: Values

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], name: str) -> "Series":
        """Collect a metric from the records that have it, in their order."""
        points = [(r["tokens_seen"], r[name]) for r in records if r.get(name) is not None]
        tokens, values = np.array(points, float).reshape(-1, 2).T
        return cls(tokens, values)

    def smoothed(self) -> "Series":
        """Return the running mean over `SMOOTHING` of the records, centered, less at the ends."""
        index = np.arange(len(self.values))
        half = np.minimum(len(index) * SMOOTHING / 2, index).astype(int)
        first, last = index - half, np.minimum(index + half, len(index) - 1)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        return Series(self.tokens, (sums[last + 1] - sums[first]) / (last + 1 - first))
