"""Training speed: the ladder and peers. Each is a command that trains in a fresh process.

The commands are `train_gpt2.py`, the plain trainer in `bench.plain` with some optimizations, and
another project's script. The ladder adds one optimization at a time, up to the defaults of
`train_gpt2.py`. A peer is a single trainer to compare these defaults with.
"""

import math
import re
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch

from bench.config import BenchConfig
from bench.measurement import Measure, run_python
from bench.plain import HUGGING_FACE, OPTIMIZATIONS
from formats.metrics import read_metrics
from runtime.cli import as_flags
from runtime.compiler import prepare_compiler
from runtime.device import device_name
from runtime.flops import cpu_flops, flops_per_token, mfu, peak_flops
from runtime.precision import select_dtype

PRODUCT = "product defaults"
TRAIN_GPT2, AUTO, PLAIN = ("train_gpt2.py",), "--micro-batch-size=auto", ("-m", "bench.plain")
EAGER = ("TF32", "bfloat16", "flash attention")
PEERS = {  # a plain trainer, and Hugging Face's model, tuned
    "eager": EAGER,
    "transformers": (*EAGER, "compile", "fused AdamW", HUGGING_FACE),
}
TRAINING = {  # constant learning rate, no evaluation, no checkpoints
    **{"max_lr": 3e-4, "min_lr": 3e-4, "warmup_steps": 0, "checkpoint_every": 0},
    **{"val_every": 0, "hellaswag_every": 0, "sample_every": 0},
}
PLANNED = re.compile(r"^memory +about ([\d.]+) GiB", re.MULTILINE)  # in the plan of train_gpt2.py
UNIT, NUMBER = r"tok(?:ens?)?[ _]?(?:/|per)[ _]?s(?:ec(?:ond)?s?)?\b", r"(\d(?:[\d.,]*\d)?)(k?)"
RATE = re.compile(rf"{UNIT}[^\w\n]*{NUMBER}\b|{NUMBER} ?{UNIT}(?!\s*[:=])", re.IGNORECASE)
Rows = dict[str, tuple[str, ...]]  # commands of the plain trainer, by name
UNTIMED_STEPS, SCRIPT_SECONDS = 3, 600.0  # first steps and time limit of another project's script


class Workspace(NamedTuple):
    """Scratch folder, log file and deadline of the child processes of a measurement."""

    scratch: Path
    log: Path | None = None
    deadline: float = math.inf  # on the clock of time.monotonic()

    def run(self, *args: str | Path, seconds: float = math.inf, **options: Any) -> str:  # noqa: ANN401 - of run_python
        """Call `run_python` with the deadline, the log and a shared compile cache."""
        options |= {"log": self.log, "seconds": min(seconds, self.deadline - monotonic())}
        return run_python(*args, TORCHINDUCTOR_CACHE_DIR=str(self.scratch / "compiled"), **options)


def training_measures(config: BenchConfig, work: Workspace) -> dict[str, Measure]:
    """Return the measurements that the configuration compares, by name."""
    train, tokens = partial(measure_training, config, work), config.step_tokens
    flags = () if config.micro_batch_size else (AUTO,)
    measures = dict[str, Measure]()
    if isinstance(config.peer, Path):
        measures[config.peer.name] = partial(measure_script, config, work, config.peer.resolve())
    elif config.peer:
        rows, flags = ladder_rows(config.torch_device), ()  # both trainers use the same micro-batch
        names = [name for name in PEERS[config.peer] if name in (*rows, HUGGING_FACE)]
        measures[config.peer] = partial(train, (*PLAIN, ",".join(names)), tokens)
    else:
        measures = ladder_measures(config, work, ladder_rows(config.torch_device))
    return measures | {PRODUCT: partial(train, TRAIN_GPT2, tokens, *flags)}


def ladder_rows(device: torch.device) -> Rows:
    """Return the plain trainer's command for each row; print which optimizations are missing."""
    missing = {
        "TF32": device.type != "cuda",
        "bfloat16": select_dtype("auto", device) == torch.float32,
        "compile": prepare_compiler(device),
    }
    print("not on this device:", *(name for name in missing if missing[name]), flush=True)
    available = [name for name in OPTIMIZATIONS if not missing.get(name)]
    names = ["float32", *available]
    return {name: (*PLAIN, ",".join(available[:count])) for count, name in enumerate(names)}


def ladder_measures(config: BenchConfig, work: Workspace, rows: Rows) -> dict[str, Measure]:
    """Return the measurements of the plain trainer's rows; a step is one micro-batch."""
    train = partial(measure_training, config, work)
    return {name: partial(train, row, config.micro_batch_tokens) for name, row in rows.items()}


def measure_training(
    config: BenchConfig, work: Workspace, trainer: Sequence[str], tokens: int, *flags: str
) -> dict[str, float]:
    """Train once in a fresh process, with `tokens` per step and additional `flags`.

    The first step, which compiles, is not timed. The process is killed after the last step, because
    its checkpoint is not needed.
    """
    device = config.torch_device
    timed_steps = config.steps or (20 if device.type == "cuda" else 4)
    # On a CPU, MFU is the fraction of the speed of a matmul in the same dtype.
    is_cpu = device.type == "cpu"
    peak = cpu_flops(select_dtype("auto", device)) if is_cpu else peak_flops(device_name(device))
    out_dir = Path(tempfile.mkdtemp(dir=work.scratch))
    settings = config.shared_settings() | {
        **{"out_dir": out_dir, "run_name": "run", "max_steps": timed_steps + 1},
        **{"micro_batch_size": config.sequences, "total_batch_size": tokens},
    }
    args = [*trainer, *as_flags(settings | TRAINING), "--no-shuffle", *flags]
    path = out_dir / "run/metrics.jsonl"
    output = work.run(*args, is_done=lambda _: len(read_steps(path)) > timed_steps)
    first, *steps = read_steps(path)
    step_time_ms = statistics.median(step["step_time_ms"] for step in steps)
    speed, planned = tokens / (step_time_ms / 1000), PLANNED.search(output)
    values = {
        "tokens/s": speed,
        "MFU": mfu(speed, flops_per_token(config.model_config()), peak),
        "peak GiB": steps[-1]["peak_memory_gib"],
        "planned GiB": float(planned[1]) if planned else None,
        "first step s": first["step_time_ms"] / 1000,
        "ms per step": step_time_ms,
        f"loss after {len(steps)} steps": steps[-1]["train_loss"],
    }
    return {unit: value for unit, value in values.items() if value is not None}


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the records of the training steps so far."""
    return [r for r in read_metrics(path) if "train_loss" in r] if path.exists() else []


def measure_script(config: BenchConfig, work: Workspace, script: Path) -> dict[str, float]:
    """Run another project's training script; return the median of the speeds that it prints.

    The script finds the shards in the folder `edu_fineweb10B`, where build-nanogpt expects them. It
    is killed after `config.steps` timed steps (by default 20) or at the time limit.
    """
    folder, steps = Path(tempfile.mkdtemp(dir=work.scratch)), UNTIMED_STEPS + (config.steps or 20)
    (folder / "edu_fineweb10B").symlink_to(config.shared_settings()["data_dir"])
    end = min(work.deadline, monotonic() + SCRIPT_SECONDS)

    def is_done(output: str) -> bool:
        return len(read_rates(output)) >= steps or monotonic() >= end

    options: dict[str, Any] = {"folder": folder, "is_done": is_done, "PYTHONPATH": ""}
    rates = read_rates(work.run(script, seconds=SCRIPT_SECONDS, **options))
    if len(rates) <= UNTIMED_STEPS:
        raise ValueError(f"printed {len(rates)} speeds such as `tok/sec: 1000`, which is too few")
    return {"tokens/s": statistics.median(rates[UNTIMED_STEPS:])}


def read_rates(output: str) -> list[float]:
    """Return the tokens per second that the output of a training script contains."""
    found = ((a or c, b or d) for a, b, c, d in RATE.findall(output))
    return [float(number.replace(",", "")) * (1000 if kilo else 1) for number, kilo in found]
