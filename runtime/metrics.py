"""What a run has measured: reading `metrics.jsonl`; FLOPs, the peaks of GPUs, MFU.

`training.run_log` writes the file: one JSON object per line, one line per event. Figures are drawn
from this file alone.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # importing it takes torch, which plot.py does without
    from model import GPTConfig

Values = npt.NDArray[np.float64]


class Gpu(NamedTuple):
    """A kind of GPU."""

    pattern: str  # of the driver's name
    memory_gib: int  # that a program can have
    peak_flops: float


# By the name in `--gpu`; the first whose pattern matches counts. Dense bfloat16 peaks in FLOP/s
# (float16 on the T4 and V100, which have no bfloat16) with float32 accumulation, from NVIDIA's data
# sheets; where these quote the sparse rate, half of it.
GPUS = {
    "B200": Gpu(r"\bB200$", 178, 2250e12),
    "H200-NVL": Gpu(r"\bH200 NVL$", 139, 835e12),
    "H200": Gpu(r"\bG?H200\b", 139, 989e12),
    "H100-PCIe": Gpu(r"\bH100 PCIe$", 79, 756e12),
    "H100-NVL": Gpu(r"\bH100 NVL$", 93, 835e12),
    "H100": Gpu(r"\bH100 .*HBM3$", 79, 989e12),
    "A100-40GB": Gpu(r"\bA100.*-40GB$", 39, 312e12),
    "A100": Gpu(r"\bA100\b", 79, 312e12),
    "A10": Gpu(r"\bA10$", 22, 125e12),
    "A10G": Gpu(r"\bA10G$", 22, 70e12),
    "L4": Gpu(r"\bL4$", 22, 121e12),
    "L40S": Gpu(r"\bL40S$", 44, 362e12),
    "T4": Gpu(r"\bT4$", 14, 65e12),
    "A6000": Gpu(r"\bRTX A6000$", 47, 155e12),
    "4090": Gpu(r"\bRTX 4090$", 23, 165e12),
    "3090": Gpu(r"\bRTX 3090$", 23, 71e12),
    "V100": Gpu(r"\bV100-SXM2-", 15, 125e12),
}
BEFORE_AMPERE = ("T4", "V100")  # no bfloat16, and float32 matrices without TF32
HELLASWAG_EXAMPLES = 10042  # the whole validation set, which the references were scored on
# Completion style: OpenAI's weights scored by this code's method; GPT-3 paper, table H.1.
HELLASWAG_REFERENCES = {
    "GPT-2 124M": 0.2945,
    "GPT-3 124M": 0.337,
    "GPT-2 350M": 0.3752,
    "GPT-2 774M": 0.4320,
    "GPT-2 1558M": 0.4889,
}
METRICS_NAME = "metrics.jsonl"
LOGGED = {  # by every run
    *("step", "tokens_seen", "train_loss", "lr", "grad_norm", "step_time_ms", "tokens_per_second"),
    *("mfu", "peak_memory_gib", "val_loss", "hellaswag_acc", "hellaswag_acc_norm", "samples"),
    *("hellaswag_total", "evaluation_seconds", "overall_tokens_per_second"),
}
CLEARLY_ABOVE = 0.05  # nats per token: more than a validation loss goes up and down by chance
SMOOTHING = 0.02  # window of the running mean, as a share of the records


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics file, which a run may be writing to at this moment.

    Lines that a dying process tore are skipped. Where a run resumed from a step, the records of
    later steps that precede it are dropped, since these steps were done again; what was evaluated
    again at that step itself replaces the earlier values.

    Returns:
        The records in the order they were logged: of a step at most one of training and one of
        evaluation, each with its `step`.
    """
    records: dict[tuple[int, bool], dict[str, Any]] = {}
    for record in _read_lines(path):
        if isinstance(start := record.get("resumed_from"), int):
            records = {key: earlier for key, earlier in records.items() if key[0] <= start}
        elif isinstance(step := record.get("step"), int):
            key = (step, "train_loss" in record)
            records[key] = records.get(key, {}) | record
    return list(records.values())


def read_run(run_dir: Path) -> list[dict[str, Any]]:
    """A run's records with their `tokens_seen`; refused unless one of them has a loss."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run folder {run_dir}: python plot.py runs/NAME")
    path = run_dir / METRICS_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir} has no {METRICS_NAME}, so it is not a run folder")
    records = [r for r in read_metrics(path) if isinstance(r.get("tokens_seen"), int)]
    if not any(len(Series.of(records, name).values) for name in ("train_loss", "val_loss")):
        raise ValueError(f"{path} has no losses yet: wait for the run's first step")
    return records


def own_measures(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the numbers that a changed trainer logs besides those of every run."""
    numbers = {name for record in records for name, x in record.items() if isinstance(x, float)}
    return sorted(name for name in numbers - LOGGED if name.isidentifier())  # a file's name, too


def logged_values(path: Path, name: str) -> list[Any]:
    """Every value of a name, in the order they were logged."""
    return [record[name] for record in _read_lines(path) if name in record]


def describe_best(run_dir: Path) -> str:
    """The last lines of a run: its best validation loss, and a warning if the last is above it.

    Each ends its line. Empty if the run was never validated.
    """
    records = read_metrics(run_dir / METRICS_NAME)
    losses = {r["step"]: r["val_loss"] for r in records if r.get("val_loss") is not None}
    if not losses:
        return ""
    best, last = min(losses, key=losses.__getitem__), max(losses)
    line = f"best val_loss {losses[best]:.4f} at step {best}"
    if losses[last] - losses[best] < CLEARLY_ABOVE:
        return f"{line}\n"
    checkpoint = run_dir / "checkpoints" / f"step_{best:08d}"
    remedy = "use fewer --max-steps, or more data"
    if checkpoint.is_dir():
        remedy = f"sample and export with --model {shlex.quote(str(checkpoint))}"
    return f"{line}\nwarning: the last, {losses[last]:.4f}, is clearly above it: {remedy}\n"


def last_saved_step(path: Path) -> int:
    """The last step that a metrics file says was saved; 0 if there is none, or no file."""
    records = _read_lines(path) if path.exists() else ()
    steps = (record.get("saved_step", record.get("resumed_from")) for record in records)
    return max((step for step in steps if isinstance(step, int)), default=0)


def _read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a metrics file; torn lines are skipped."""
    for line in Path(path).read_bytes().splitlines():
        with suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(line), dict):
                yield record


class Series(NamedTuple):
    """One measured quantity over a run."""

    tokens: Values
    values: Values

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], name: str) -> "Series":
        """The records that have a value of that name, in their order."""
        points = [(r["tokens_seen"], r[name]) for r in records if r.get(name) is not None]
        tokens, values = np.array(points, float).reshape(-1, 2).T
        return cls(tokens, values)

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
        device_name: the driver's name of the GPU, or its name in `--gpu`.
        float32: whether matrix products are of float32, in TF32, and not of 16 bits.
    """
    if "MIG" in device_name:  # a slice of the GPU, with a share of its peak
        return None
    for name, gpu in GPUS.items():
        if device_name == name or re.search(gpu.pattern, device_name):
            tf32 = None if name in BEFORE_AMPERE else gpu.peak_flops / 2
            return tf32 if float32 else gpu.peak_flops
    return None


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
