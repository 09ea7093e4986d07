"""What a run measures: the JSONL log, the clock, throughput and MFU.

`metrics.jsonl` has one JSON object per line, one line per event, and is only ever appended to.
Figures are drawn from this file alone.
"""

import json
import math
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from runtime.files import append_atomically

if TYPE_CHECKING:  # importing it takes torch, which plot.py does without
    from model import GPTConfig

Values = npt.NDArray[np.float64]

# Dense bfloat16 peaks in FLOP/s (float16 on the T4, which has no bfloat16) with float32
# accumulation, from NVIDIA's data sheets; where these quote the sparse rate, half of it. The keys
# are patterns for the driver's name of the GPU; the first that matches counts.
PEAK_FLOPS = {
    r"\bB200$": 2250e12,
    r"\bH200 NVL$": 835e12,
    r"\bG?H200\b": 989e12,
    r"\bH100 PCIe$": 756e12,
    r"\bH100 NVL$": 835e12,
    r"\bH100 .*HBM3$": 989e12,
    r"\bA100\b": 312e12,
    r"\bA10$": 125e12,
    r"\bA10G$": 70e12,
    r"\bL4$": 121e12,
    r"\bL40S$": 362e12,
    r"\bT4$": 65e12,
    r"\bRTX A6000$": 155e12,
    r"\bRTX 4090$": 165e12,
    r"\bRTX 3090$": 71e12,
}
WITHOUT_TF32 = r"\bT4$"  # the others above multiply float32 matrices in TF32, at half their peak
HELLASWAG_EXAMPLES = 10042  # the whole validation set, which the references were scored on
# Completion style: OpenAI's weights scored by this code's method; GPT-3 paper, table H.1.
HELLASWAG_REFERENCES = {
    "GPT-2 124M": 0.2945,
    "GPT-3 124M": 0.337,
    "GPT-2 350M": 0.3752,
    "GPT-2 774M": 0.4320,
    "GPT-3 350M": 0.436,
    "GPT-2 1558M": 0.4889,
    "GPT-3 760M": 0.510,
    "GPT-3 1.3B": 0.547,
}
METRICS_NAME = "metrics.jsonl"
SMOOTHING = 0.02  # window of the running mean, as a share of the records
LINE_COLUMNS = 100  # of the console
ETA_WINDOW = 50  # laps that the time left is estimated from
NORM_WINDOW = 128
LEAST_NORMS = NORM_WINDOW // 2  # fewer norms give no limit: the first of a run vary too much


class MetricsLogger:
    """Append records to a JSONL file, each at once and whole; a context manager.

    A missing folder is created. Without a path nothing is logged, for the ranks that do not write.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: FileIO | None = None
        self._lock = threading.Lock()  # the thread that writes checkpoints logs, too
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(path, "a")
        if path.read_bytes()[-1:] not in (b"", b"\n"):  # an earlier process died in a line
            append_atomically(self._file, b"\n")

    def log(self, **values: float | str | None) -> None:
        """Append one record; a float that is not finite becomes null, for JSON has no NaN.

        A training or evaluation record has `step` and `tokens_seen`. A resumed run logs
        `resumed_from=step` once, before anything else, and every run `saved_step=step` for each
        checkpoint that is complete.

        Raises:
            OSError: the disk is full; nothing of the record is in the file.
        """
        if self._file is None:
            return
        record = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        line = json.dumps(record, allow_nan=False) + "\n"
        with self._lock:
            append_atomically(self._file, line.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file, which a run may be writing to at this moment.

    Lines that a dying process tore are skipped. Where a run resumed from a step, the records of
    later steps that precede it are dropped, since these steps were done again.

    Returns:
        The records in the order they were logged, each with a `step`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    records: list[dict[str, Any]] = []
    for record in _read_lines(path):
        if isinstance(step := record.get("resumed_from"), int):
            records = [earlier for earlier in records if earlier["step"] <= step]
        elif isinstance(record.get("step"), int):
            records.append(record)
    return records


def read_run(run_dir: Path) -> list[dict[str, Any]]:
    """A run's records with their `tokens_seen`, at least one of them with a loss.

    Raises:
        FileNotFoundError: there is no such folder, or no metrics in it.
        ValueError: nothing has been measured yet.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run folder {run_dir}: python plot.py runs/NAME")
    path = run_dir / METRICS_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} has no {METRICS_NAME}, so it is not a run folder")
    records = [r for r in read_metrics(path) if isinstance(r.get("tokens_seen"), int)]
    if not any(len(Series.of(records, name).values) for name in ("train_loss", "val_loss")):
        raise ValueError(f"{path} has no losses yet: wait for the run's first step")
    return records


def logged_values(path: Path, name: str) -> list[Any]:
    """Every value of a name, in the order they were logged."""
    return [record[name] for record in _read_lines(path) if name in record]


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a metrics file; torn lines are skipped."""
    for line in path.read_bytes().splitlines():
        with suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(line), dict):
                yield record


def last_saved_step(path: Path) -> int:
    """The last step that a metrics file says was saved; 0 if there is none, or no file."""
    records = _read_lines(path) if path.exists() else ()
    steps = (record.get("saved_step", record.get("resumed_from")) for record in records)
    return max((step for step in steps if isinstance(step, int)), default=0)


def logged_metrics(path: Path, step: int) -> set[str]:
    """The names of the metrics that a file has for a step (after `step` updates).

    A resumed run skips the evaluations at its first step that are logged already. No file has none.
    """
    records = read_metrics(path) if path.exists() else []
    names = {name for record in records if record["step"] == step for name in record}
    return names - {"step", "tokens_seen"}


class Series(NamedTuple):
    """One measured quantity over a run."""

    tokens: Values
    values: Values

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], name: str) -> "Series":
        """The records that have a value of that name; of each step, its last value."""
        points = {
            record["tokens_seen"]: record[name]
            for record in records
            if "tokens_seen" in record
            and isinstance(value := record.get(name), int | float)
            and math.isfinite(value)
        }
        tokens = sorted(points)
        return cls(np.array(tokens, float), np.array([points[token] for token in tokens], float))

    def smoothed(self) -> "Series":
        """The running mean over `SMOOTHING` of the records, centred, narrower at the ends."""
        index = np.arange(len(self.values))
        half = np.minimum(len(index) * SMOOTHING / 2, index).astype(int)
        first, last = index - half, np.minimum(index + half, len(index) - 1)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        return Series(self.tokens, (sums[last + 1] - sums[first]) / (last + 1 - first))


def flops_per_token(model_config: "GPTConfig") -> int:
    """Floating-point operations to train on one token, forward and backward.

    Six for each parameter; twelve for each product of attention scores and values, whose masked
    half counts too. Source: PaLM (Chowdhery et al. 2022), appendix B.
    """
    attention = 12 * model_config.n_layer * model_config.n_embd * model_config.block_size
    return 6 * model_config.n_params + attention


def peak_flops(device_name: str, *, float32: bool = False) -> float | None:
    """The dense peak of a GPU in FLOP/s; None where unknown.

    Args:
        device_name: the driver's name of the GPU.
        float32: whether matrix products are of float32, in TF32, and not of 16 bits.
    """
    if "MIG" in device_name:  # a slice of the GPU, with a share of its peak
        return None
    peak = next((PEAK_FLOPS[name] for name in PEAK_FLOPS if re.search(name, device_name)), None)
    if peak is None or not float32:
        return peak
    return None if re.search(WITHOUT_TF32, device_name) else peak / 2


def mfu(
    tokens_per_second: float,
    flops_per_token: int,
    device_peak_flops: float | None,
    world_size: int = 1,
) -> float | None:
    """Model FLOPs utilisation: the share of the devices' peak that went into the model.

    `tokens_per_second` is over all `world_size` devices, `device_peak_flops` of one of them in
    FLOP/s; None if that is not known. Source: PaLM (Chowdhery et al. 2022), section 4.1.
    """
    if device_peak_flops is None:
        return None
    return tokens_per_second * flops_per_token / (device_peak_flops * world_size)


class Timing(NamedTuple):
    """What one lap of the `StepTimer` took."""

    step_time_ms: float
    """Mean over the lap's steps."""
    tokens_per_second: float
    eta_seconds: float | None
    """Training time left; None in the first lap, which compiles."""


@dataclass
class StepTimer:
    """Measure optimizer steps; what happens inside `paused()` is not counted.

    The clock starts at once. A GPU works on after the call that started it, so wait for it (read
    the loss) before each lap.
    """

    step: int
    """Updates done so far."""
    max_steps: int
    tokens_per_step: int
    """Over all ranks."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds, from any origin."""
    synchronize: Callable[[], object] = lambda: None
    """Waits for the device, before a pause."""

    def __post_init__(self) -> None:
        self._recent: deque[tuple[int, float]] | None = None  # steps and seconds of each lap
        self._begun = self._start = self.clock()
        self._first_step = self.step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for evaluation, sampling and saving."""
        self.synchronize()  # a step's last work is not to fall into the pause
        pause_start = self.clock()
        try:
            yield
        finally:
            self._start += self.clock() - pause_start

    def overall_tokens_per_second(self) -> float:
        """The rate so far, with compiling, evaluations and saves."""
        tokens = (self.step - self._first_step) * self.tokens_per_step
        return tokens / (self.clock() - self._begun)

    def lap(self, step: int) -> Timing:
        """Time the steps since the last lap; `step` updates are done by now."""
        now = self.clock()
        steps, seconds = step - self.step, now - self._start
        self.step, self._start = step, now
        eta_seconds = None
        if self._recent is None:  # the first lap compiles and allocates: no measure of the others
            self._recent = deque(maxlen=ETA_WINDOW)
        else:
            self._recent.append((steps, seconds))
            recent_steps, recent_seconds = map(sum, zip(*self._recent, strict=True))
            eta_seconds = (self.max_steps - step) * recent_seconds / recent_steps
        tokens_per_second = steps * self.tokens_per_step / seconds
        return Timing(1000 * seconds / steps, tokens_per_second, eta_seconds)


def format_step(record: Mapping[str, Any], max_steps: int, eta_seconds: float | None) -> str:
    """One console line of a training record; what is missing or None is left out."""
    speed, share, peak = (record.get(n) for n in ("tokens_per_second", "mfu", "peak_memory_gib"))
    device = [
        *([f"{format_count(speed)} tok/s"] if speed is not None else []),
        *([f"mfu {share:.0%}"] if share is not None else []),
        *([f"{peak:.3g} GiB"] if peak is not None else []),
    ]
    lr, norm = f"{record['lr']:.1e}".replace("e-0", "e-"), record["grad_norm"]
    parts = [
        f"step {record['step']:>{len(str(max_steps))}}/{max_steps}",
        f"loss {record['train_loss']:.4f}",
        f"lr {lr}, norm {norm:{'.3g' if norm < 1000 else '.0f'}}",
        ", ".join(device),
        f"eta {format_duration(eta_seconds)}",
    ]
    return " | ".join(filter(None, parts))


def format_evaluation(step: int, record: Mapping[str, float]) -> str:
    """The console lines of an evaluation's metrics: as many as keep each in `LINE_COLUMNS`."""
    lines = [f"step {step}"]
    for name, value in record.items():
        part = f" | {name} {value:.5g}"
        if len(lines[-1] + part) > LINE_COLUMNS:
            lines.append(f"step {step}")
        lines[-1] += part
    return "\n".join(lines)


def format_count(count: float) -> str:
    """A count to three digits, in thousands, millions or billions: `250M`, `2.46B`."""
    count = float(f"{count:.3g}")
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"


def format_duration(seconds: float | None) -> str:
    """Seconds in the two largest units that matter: `43s`, `5m07s`, `1h43m`, `2d04h`."""
    if seconds is None:
        return "n/a"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m{rest:02d}s"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h" if days else f"{hours}h{minutes:02d}m"


class RecentNorms:
    """The last `NORM_WINDOW` gradient norms, with outliers, so that the limit follows a change.

    A norm `zscore` standard deviations above their mean is an outlier; 0 = never.
    """

    def __init__(self, zscore: float) -> None:
        self._zscore = zscore
        self._norms: deque[float] = deque(maxlen=NORM_WINDOW)

    def limit(self) -> float:
        """The largest norm that is no outlier; infinite below `LEAST_NORMS` norms."""
        if not self._zscore or len(self._norms) < LEAST_NORMS:
            return math.inf
        return statistics.fmean(self._norms) + self._zscore * statistics.pstdev(self._norms)

    def extend(self, norms: Iterable[float]) -> None:
        """Add norms; those that are not finite do not count."""
        self._norms.extend(norm for norm in norms if math.isfinite(norm))

    def as_list(self) -> list[float]:
        """The norms, for a checkpoint."""
        return list(self._norms)
