"""Training speed: the ladder, peers and switches, each a command that trains in a fresh process.

The commands are `train_gpt2.py`, and the plain trainer of `bench.plain` with some optimizations.
The ladder adds one optimization at a time, up to the product's defaults; a peer is one trainer
next to the product; a switch changes one of the product's defaults.
"""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from bench.config import BenchConfig
from bench.measurement import Measure, run_python, seconds_of
from bench.plain import HUGGING_FACE, OPTIMIZATIONS
from bench.report import PRODUCT
from runtime.cli import as_flags
from runtime.device import device_name, prepare_compiler, select_dtype
from runtime.metrics import flops_per_token, mfu, peak_flops, read_metrics
from training.config import TrainConfig

ACCUMULATION = "gradient accumulation"
TRAIN_GPT2, PLAIN = ("train_gpt2.py",), ("-m", "bench.plain")
LADDER = ("float32", *OPTIMIZATIONS, ACCUMULATION)  # and then the product
EAGER = ("TF32", "bfloat16", "flash attention")
PEERS = {  # a plain trainer; and Hugging Face's model, as its users would tune it
    "eager": EAGER,
    "transformers": (*EAGER, "compile", "fused AdamW", HUGGING_FACE),
}
MICRO_BATCHES = 4  # of a step with accumulation, except on a GPU
TRAINING = {  # a constant rate; nothing but training
    **{"max_lr": 3e-4, "min_lr": 3e-4, "warmup_steps": 0, "checkpoint_every": 0},
    **{"val_every": 0, "hellaswag_every": 0, "sample_every": 0},
}
MATMUL_SIZE, MATMUL_REPEATS = 2048, 10


class Switch(NamedTuple):
    """One change to the product's defaults."""

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    device: str = ""
    """The only kind that it changes anything on."""


SWITCHES = {
    PRODUCT: Switch(),
    "not compiled": Switch(("--no-compile",)),
    "float32": Switch(("--dtype=float32",)),
    "logits not in chunks": Switch(("--loss-chunks=1",), device="cpu"),
    "logits in 4 chunks": Switch(("--loss-chunks=4",), device="cuda"),
    "selective recomputation": Switch(("--activation-checkpointing=selective",)),
    "OpenMP's own spinning": Switch((), {"GOMP_SPINCOUNT": "300000"}, "cpu"),
    "deterministic": Switch(("--deterministic",), device="cuda"),  # a CPU always is
    "coordinate descent": Switch((), {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}, "cuda"),
    "max-autotune": Switch((), {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}, "cuda"),
}


def training_measures(config: BenchConfig, scratch: Path) -> dict[str, Measure]:
    """What the config compares, by name, with files in `scratch`."""
    device, one = config.torch_device, config.micro_batch_tokens
    lacking, train = lacking_optimizations(device), partial(measure_training, config, scratch)
    tokens = config.total_batch_size or (
        TrainConfig.total_batch_size if device.type == "cuda" else one
    )
    if config.peer in PEERS:
        on = [name for name in PEERS[config.peer] if name not in lacking]
        return {
            config.peer: partial(train, (*PLAIN, ",".join(on)), tokens),
            PRODUCT: partial(train, TRAIN_GPT2, tokens),
        }
    # The product takes the micro-batch that it would choose.
    auto = () if config.micro_batch_size else ("--micro-batch-size=auto",)
    if config.peer == "switches":
        return {
            name: partial(train, TRAIN_GPT2, tokens, *auto, *switch.flags, **switch.environment)
            for name, switch in SWITCHES.items()
            if switch.device in ("", device.type)
        }
    if not config.total_batch_size and device.type != "cuda":
        tokens = MICRO_BATCHES * one
    measures: dict[str, Measure] = {}
    on = []
    for name in LADDER:
        if name in lacking:
            measures[name] = partial(refuse, lacking[name])
            continue
        on += [name] if name in OPTIMIZATIONS else []
        step_tokens = tokens if name == ACCUMULATION else one
        measures[name] = partial(train, (*PLAIN, ",".join(on)), step_tokens)
    return measures | {PRODUCT: partial(train, TRAIN_GPT2, tokens, *auto)}


def lacking_optimizations(device: torch.device) -> dict[str, str]:
    """The optimizations that this device does not have, and why."""
    lacking = {}
    if device.type != "cuda":
        lacking["TF32"] = "a number format of NVIDIA GPUs"
    if select_dtype("auto", device) == torch.float32:
        lacking["bfloat16"] = "this device has no native bfloat16"
    if problem := prepare_compiler(device):
        lacking["compile"] = problem
    return lacking


def refuse(reason: str) -> dict[str, float]:
    """The measure of what cannot be measured."""
    raise ValueError(reason)


def measure_training(
    config: BenchConfig,
    scratch: Path,
    trainer: Sequence[str],
    tokens: int,
    *flags: str,
    **environment: str,
) -> dict[str, float]:
    """Train once, in a fresh process; the first step, which compiles, is not timed.

    Args:
        config: the model, data, device and number of steps.
        scratch: gets the run, and compiled code, which later runs find.
        trainer: what Python runs.
        tokens: in a step.
        flags: on top of the usual ones.
        environment: the process's, on top of this one's.

    Raises:
        ValueError: it failed, in one line.
    """
    assert config.data_dir is not None
    device, model_config = config.torch_device, config.model_config()
    peak = device_flops(device)
    shutil.rmtree(scratch / "runs", ignore_errors=True)
    settings = {
        **{name: getattr(model_config, name) for name in ("n_layer", "n_head", "n_embd")},
        **{"block_size": config.block_size, "device": config.device},
        **{"data_dir": config.data_dir, "out_dir": scratch / "runs", "run_name": "run"},
        **{"micro_batch_size": config.sequences, "total_batch_size": tokens},
        **{"max_steps": config.timed_steps + 1, "shuffle": False},
    }
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "compiled")
    run_python(*trainer, *as_flags(settings | TRAINING), *flags, **environment)
    records = read_metrics(scratch / "runs" / "run" / "metrics.jsonl")
    first, *steps = [record for record in records if "train_loss" in record]
    speed = tokens / (statistics.median(step["step_time_ms"] for step in steps) / 1000)
    values = {
        "tokens/s": speed,
        "MFU": mfu(speed, flops_per_token(model_config), peak),
        "peak GiB": steps[-1]["peak_memory_gib"],
        "first step s": first["step_time_ms"] / 1000,
        f"loss after {len(steps)} steps": steps[-1]["train_loss"],
    }
    return {unit: value for unit, value in values.items() if value is not None}


def device_flops(device: torch.device) -> float | None:
    """The peak that MFU is relative to, in FLOP/s: a GPU's data sheet, or a CPU's fastest product.

    On a CPU it is measured, with two square matrices in the dtype that training uses.
    """
    if device.type != "cpu":
        return peak_flops(device_name(device))
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE).to(select_dtype("auto", device))
    seconds = min(seconds_of(lambda: a @ b) for _ in range(MATMUL_REPEATS))
    return 2 * MATMUL_SIZE**3 / seconds
