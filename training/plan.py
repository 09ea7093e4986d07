"""The plan of a run: a table of its memory, batch and time, printed before it starts.

Memory is estimated from shapes. Time is measured on this machine or, for `--gpus`, estimated from
data sheets.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from statistics import median_low
from time import perf_counter

from runtime.threads import usable_cores

import torch
from torch.optim import AdamW

from corpus.shards import Manifest, TokenShards, open_shards
from lr_schedule import position_at
from model import GPT
from ops import checkpoint_activations
from runtime.cli import format_duration
from runtime.device import synchronize, tune_malloc
from runtime.distributed import DistInfo, all_reduce_max, print0, read_dist_env
from runtime.files import read_json
from runtime.flops import flops_per_token, peak_flops
from runtime.precision import autocast
from training import memory
from training.config import TrainConfig

MFU = 0.4  # fraction of its peak FLOP/s that a GPU is assumed to reach
MIN_PARAMETERS = 1e8  # fewest that keep a GPU busy; the MFU of smaller models is unknown
TIMED_FLOPS = {"cpu": 6e11, "mps": 3e12, "cuda": 3e13}  # per timed step, for a few seconds


def print_plan(config: TrainConfig, start_step: int = 0) -> None:
    """Print a run's plan, for this machine or for `--gpus`; `start_step` updates are done."""
    planned = DistInfo(torch.device("cuda"), world_size=config.gpus or 1)
    device = memory.find_device(config, planned if config.gpus else read_dist_env(config.device))
    split, folder, train_shards = memory.split_batch(config, device), config.data_dir, None
    if (manifest := Manifest.load(folder)) is None or manifest.complete:  # else it is being made
        # A plan does not need data, so the folder may be missing or empty.
        train_shards = open_shards(folder, "train", is_optional=not any(folder.glob("[!.]*")))
    measured = None if config.gpus else measure_seconds(config, device, split)
    print0(describe_plan(config, device, split, train_shards, start_step, measured))


def measure_seconds(
    config: TrainConfig, device: memory.Device, split: memory.BatchSplit
) -> float | None:
    """Return the seconds per token of two real steps: uncompiled, with AdamW, on random tokens.

    If the model is large, they have fewer tokens than a micro-batch. If they do not fit into
    memory, return None.
    """
    model_config, here = config.model_config(), device.dist_info.device
    max_tokens = 1 + int(TIMED_FLOPS[here.type] / flops_per_token(model_config))
    n_tokens = min(split.micro_batch_size * config.block_size, max_tokens)
    alone = replace(config, parallel="ddp", cpu_offload=False, compile=False)
    needed = memory.plan_memory(alone, device, split.loss_chunks).total(n_tokens)
    if needed > memory.MEMORY_FRACTION[here.type] * (device.memory_gib or 0) * 2**30:
        return None
    tune_malloc()  # as in training
    T = min(n_tokens, config.block_size)
    with here:
        model = GPT(model_config, split.loss_chunks)
        idx = torch.randint(model_config.vocab_size, (n_tokens // T, T + 1))
    checkpoint_activations(model.transformer.h, config.activation_checkpointing)
    optimizer = AdamW(model.parameters(), fused=True)

    def step() -> None:
        with autocast(here, device.dtype):
            loss = model(idx[:, :-1], idx[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return time_call(step, here, min_calls=2) / idx[:, 1:].numel()


def time_call(
    work: Callable[[], object], device: torch.device, min_seconds: float = 0.0, min_calls: int = 1
) -> float:
    """Return the median seconds of a call; every process must call this.

    The first call is not counted, because it compiles and allocates memory. After it, every process
    makes the same number of calls: at least `min_calls`, which take at least `min_seconds`.
    """
    seconds = list[float]()
    while all_reduce_max(len(seconds) <= min_calls or sum(seconds[1:]) < min_seconds):
        begun = perf_counter()
        work()
        synchronize(device)
        seconds.append(perf_counter() - begun)
    return median_low(seconds[1:])


def describe_plan(
    config: TrainConfig,
    device: memory.Device,
    split: memory.BatchSplit,
    train_shards: TokenShards | None,
    start_step: int = 0,
    seconds_per_token: float | None = None,
) -> str:
    """Return a run's plan as a table; the time is for the steps after `start_step`."""
    model_config = config.model_config()
    n_params, block_size = model_config.n_params, config.block_size
    world_size = device.dist_info.world_size
    micro_steps = config.total_batch_size // (split.micro_batch_size * block_size * world_size)
    planned = memory.plan_memory(config, device, split.loss_chunks)
    state = planned.state / 2**30
    activations = planned.per_token * split.micro_batch_size * block_size / 2**30
    rows = {
        "model": f"{n_params:,} parameters: layers {model_config.n_layer}, heads "
        f"{model_config.n_head}, width {model_config.n_embd}, context {block_size:,}",
        "device": f"{world_size} x {device.name}, {str(device.dtype).removeprefix('torch.')}",
        "batch": f"{config.total_batch_size:,} tokens = micro-batch size {split.micro_batch_size} "
        f"x block size {block_size:,} x accumulation {micro_steps} x world size {world_size}",
        "memory": f"about {state + activations:.1f} GiB per device: {state:.1f} weights, "
        f"gradients, moments + {activations:.1f} activations, without Python and libraries",
        "checkpoint": f"{memory.CHECKPOINT_BYTES_PER_PARAMETER * n_params / 2**30:.2f} GiB each",
    }
    cores = usable_cores() if device.dist_info.device.type == "cpu" else 1
    limits = [n for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if os.environ.get(n) == "1"]
    if limits and torch.get_num_threads() == 1 and "RANK" not in os.environ and cores > 1:
        names = " and ".join(limits)
        rows["threads"] = f"note: one for {cores} cores, by {names}=1: use {cores} instead"
    if device.memory_gib is not None and state + activations > device.memory_gib:
        rows["memory"] += f"; the device has {device.memory_gib:.0f}"
    if config.max_minutes is None:  # otherwise, the number of steps is not known yet
        tokens = position_at(config, config.max_steps) * block_size
        rows["tokens"] = (
            f"{tokens:,}, max steps {config.max_steps:,}, {tokens / n_params:.3g} per parameter"
        )
        if train_shards is not None and (total := train_shards.total_tokens):
            rows["passes"] = f"{tokens / total:.3g} over the dataset's {total:,} tokens"
        rows["schedule"] = f"{config.lr_schedule}, warm-up steps {config.warmup}"
        decay = config.embedding_weight_decay
        rows["AdamW"] = f"beta2 {config.adam_beta2:.6g}, embedding decay {decay:g}"
        left = tokens - position_at(config, start_step) * block_size
        rows["time"] = describe_time(config, device, left, seconds_per_token)
    if config.config is not None and (about := read_json(config.config).get("about")):
        rows["recipe"] = about
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def describe_time(
    config: TrainConfig, device: memory.Device, tokens: int, seconds_per_token: float | None
) -> str:
    """Return the duration of training on this number of tokens, without evaluations."""
    model_config, dist_info = config.model_config(), device.dist_info
    how = "measured in two uncompiled steps with AdamW"
    if seconds_per_token is None:
        how = f"at {MFU:.0%} MFU, an assumption"
        peak = peak_flops(device.name, float32=device.dtype == torch.float32)
        if peak is None or model_config.n_params <= MIN_PARAMETERS:
            return "unknown for this model on this device; see the eta after the first steps"
        seconds_per_token = flops_per_token(model_config) / (MFU * peak)
    duration = format_duration(seconds_per_token * tokens / dist_info.world_size)
    return f"about {duration} to step {config.max_steps:,}, {how}; without evaluations"
