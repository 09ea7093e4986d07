"""Training speed: the ladder, peers and switches, each a command that trains in a fresh process.

The commands are `train_gpt2.py`, and the plain trainer of `bench.plain` with some optimizations.
The ladder adds one optimization at a time, up to the product's defaults; a peer is one trainer
next to the product; a switch changes one of the product's defaults.
"""

import shutil
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from bench.config import BenchConfig
from bench.measurement import Measure, run_python
from bench.plain import HUGGING_FACE, OPTIMIZATIONS
from formats.metrics import read_metrics
from runtime.cli import as_flags
from runtime.device import cpu_flops, device_name, prepare_compiler, select_dtype
from runtime.gpus import flops_per_token, mfu, peak_flops

PRODUCT, ACCUMULATION = "product defaults", "gradient accumulation"
TRAIN_GPT2, PLAIN = ("train_gpt2.py",), ("-m", "bench.plain")
EAGER = ("TF32", "bfloat16", "flash attention")
PEERS = {  # a plain trainer; and Hugging Face's model, as its users would tune it
    "eager": EAGER,
    "transformers": (*EAGER, "compile", "fused AdamW", HUGGING_FACE),
}
SWITCHES = {  # one change to the product's defaults; some are the default of a device
    "not compiled": "--no-compile",
    "float32": "--dtype=float32",
    "logits in one chunk": "--loss-chunks=1",
    "logits in 4 chunks": "--loss-chunks=4",
    "selective recomputation": "--activation-checkpointing=selective",
    "deterministic": "--deterministic",
}
MICRO_BATCHES = 4  # of a step with accumulation, at least
TRAINING = {  # a constant rate; nothing but training
    **{"max_lr": 3e-4, "min_lr": 3e-4, "warmup_steps": 0, "checkpoint_every": 0},
    **{"val_every": 0, "hellaswag_every": 0, "sample_every": 0},
}


def training_measures(config: BenchConfig, scratch: Path) -> dict[str, Measure]:
    """What the config compares, by name, with files in `scratch`."""
    available = available_optimizations(config.torch_device)
    train = partial(measure_training, config, scratch)
    one, tokens = config.micro_batch_tokens, config.step_tokens
    if config.peer in PEERS:
        on = [name for name in PEERS[config.peer] if name in (*available, HUGGING_FACE)]
        return {
            config.peer: partial(train, (*PLAIN, ",".join(on)), tokens),
            PRODUCT: partial(train, TRAIN_GPT2, tokens),
        }
    # The product takes the micro-batch that it would choose.
    auto = () if config.micro_batch_size else ("--micro-batch-size=auto",)
    if config.peer == "switches":
        changes = {PRODUCT: (), **{name: (flag,) for name, flag in SWITCHES.items()}}
        return {
            name: partial(train, TRAIN_GPT2, tokens, *auto, *change)
            for name, change in changes.items()
        }
    tokens = max(tokens, MICRO_BATCHES * one)
    measures: dict[str, Measure] = {"float32": partial(train, (*PLAIN, ""), one)}
    for count, name in enumerate(available, 1):
        measures[name] = partial(train, (*PLAIN, ",".join(available[:count])), one)
    measures[ACCUMULATION] = partial(train, (*PLAIN, ",".join(available)), tokens)
    return measures | {PRODUCT: partial(train, TRAIN_GPT2, tokens, *auto)}


def available_optimizations(device: torch.device) -> list[str]:
    """The plain trainer's optimizations that this device has; prints which it lacks."""
    lacking = {
        "TF32": device.type != "cuda",
        "bfloat16": select_dtype("auto", device) == torch.float32,
        "compile": prepare_compiler(device),
    }
    print("not on this device:", *(name for name in lacking if lacking[name]), flush=True)
    return [name for name in OPTIMIZATIONS if not lacking.get(name)]


def measure_training(
    config: BenchConfig,
    scratch: Path,
    trainer: Sequence[str],
    tokens: int,
    *flags: str,
) -> dict[str, float]:
    """Train once, in a fresh process, with `tokens` in a step and `flags` on top of the usual ones.

    The first step, which compiles, is not timed. `scratch` gets the run, and compiled code, which
    later runs find.
    """
    device = config.torch_device
    timed_steps = config.steps or (20 if device.type == "cuda" else 4)
    # On a CPU, MFU is the share of the speed of a matrix product in the same dtype.
    is_cpu = device.type == "cpu"
    peak = cpu_flops(select_dtype("auto", device)) if is_cpu else peak_flops(device_name(device))
    shutil.rmtree(scratch / "runs", ignore_errors=True)
    settings = config.shared_settings() | {
        **{"out_dir": scratch / "runs", "run_name": "run", "max_steps": timed_steps + 1},
        **{"micro_batch_size": config.sequences, "total_batch_size": tokens},
    }
    args = [*trainer, *as_flags(settings | TRAINING), "--no-shuffle", *flags]
    run_python(*args, TORCHINDUCTOR_CACHE_DIR=str(scratch / "compiled"))
    records = read_metrics(scratch / "runs" / "run" / "metrics.jsonl")
    first, *steps = [record for record in records if "train_loss" in record]
    speed = tokens / (statistics.median(step["step_time_ms"] for step in steps) / 1000)
    values = {
        "tokens/s": speed,
        "MFU": mfu(speed, flops_per_token(config.model_config()), peak),
        "peak GiB": steps[-1]["peak_memory_gib"],
        "first step s": first["step_time_ms"] / 1000,
        f"loss after {len(steps)} steps": steps[-1]["train_loss"],
    }
    return {unit: value for unit, value in values.items() if value is not None}
