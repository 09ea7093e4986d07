"""The plan of a run: a table of its memory, batch and time, printed before it starts.

The estimates follow from shapes and data sheets; for a CPU, from the measured speed of a matmul.
"""

import os
from contextlib import suppress

from runtime.threads import usable_cores

import torch

from corpus.shards import TokenShards, open_shards
from lr_schedule import position_at
from runtime.cli import format_duration
from runtime.distributed import DistInfo, print0, read_dist_env
from runtime.errors import UserError
from runtime.files import read_json
from runtime.flops import cpu_flops, flops_per_token, peak_flops
from training import memory
from training.config import TrainConfig

MFU = 0.4  # fraction of its peak FLOP/s that a device is assumed to reach
MIN_PARAMETERS = 1e8  # fewest that keep a GPU busy; the MFU of smaller models is unknown


def print_plan(config: TrainConfig) -> None:
    """Print a run's plan on rank 0, for this machine or for `--gpus`."""
    if config.gpus:
        dist_info = DistInfo(torch.device("cuda"), world_size=config.gpus)
    else:
        dist_info = read_dist_env(config.device)
    device, train_shards = memory.find_device(config, dist_info), None
    split = memory.split_batch(config, device)
    with suppress(OSError, UserError):  # a plan does not need data
        train_shards = open_shards(config.data_dir, "train")
    print0(describe_plan(config, device, split, train_shards))


def describe_plan(
    config: TrainConfig,
    device: memory.Device,
    split: memory.BatchSplit,
    train_shards: TokenShards | None,
) -> str:
    """Return a run's plan as a table."""
    model_config = config.model_config()
    n_params, block_size = model_config.n_params, config.block_size
    world_size = device.dist_info.world_size
    micro_steps = config.total_batch_size // (split.micro_batch_size * block_size * world_size)
    planned = memory.plan_memory(config, device, split.loss_chunks)
    state = planned.state / 2**30
    activations = planned.per_token * split.micro_batch_size * block_size / 2**30
    rows = {
        "model": f"{n_params:,} parameters: {model_config.n_layer} layers, {model_config.n_head} "
        f"heads, width {model_config.n_embd}, context {block_size:,}",
        "device": f"{world_size} x {device.name}, {str(device.dtype).removeprefix('torch.')}",
        "batch": f"{config.total_batch_size:,} tokens = {split.micro_batch_size} sequences x "
        f"{block_size:,} tokens x {micro_steps} micro-steps x world size {world_size}",
        "memory": f"about {state + activations:.1f} GiB per device: {state:.1f} weights, "
        f"gradients, moments + {activations:.1f} activations, without Python and libraries",
        "checkpoint": f"{memory.CHECKPOINT_BYTES_PER_PARAMETER * n_params / 2**30:.2f} GiB each",
    }
    cores = usable_cores() if device.dist_info.device.type == "cpu" else 1
    if os.environ.get("OMP_NUM_THREADS") == "1" and "RANK" not in os.environ and cores > 1:
        rows["threads"] = f"note: one for {cores} cores, by OMP_NUM_THREADS=1: use {cores} instead"
    if device.memory_gib is not None and state + activations > device.memory_gib:
        rows["memory"] += f"; the device has {device.memory_gib:.0f}"
    if config.max_minutes is None:  # otherwise, the number of steps is not known yet
        tokens = position_at(config, config.max_steps) * block_size
        rows["tokens"] = (
            f"{tokens:,} in {config.max_steps:,} steps, {tokens / n_params:.3g} per parameter"
        )
        if train_shards is not None:
            total = train_shards.total_tokens
            rows["passes"] = f"{tokens / total:.3g} over the dataset's {total:,} tokens"
        rows["schedule"] = f"{config.lr_schedule} after {config.warmup} steps of warm-up"
        decay = config.embedding_weight_decay
        rows["AdamW"] = f"beta2 {config.adam_beta2:.6g}, embedding decay {decay:g}"
        rows["time"] = describe_time(config, device, tokens)
    if config.config is not None and (about := read_json(config.config).get("about")):
        rows["recipe"] = about
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def describe_time(config: TrainConfig, device: memory.Device, tokens: int) -> str:
    """Return the duration of training on this number of tokens, without evaluations."""
    model_config, dist_info = config.model_config(), device.dist_info
    peak = None
    if dist_info.device.type == "cpu":
        peak = cpu_flops(device.dtype)
    elif dist_info.device.type == "cuda" and model_config.n_params > MIN_PARAMETERS:
        peak = peak_flops(device.name, float32=device.dtype == torch.float32)
    if peak is None:
        return "unknown for this model on this device; see the eta after the first steps"
    seconds = flops_per_token(model_config) * tokens / (MFU * peak * dist_info.world_size)
    time = f"about {format_duration(seconds)}, at {MFU:.0%} MFU"
    if dist_info.device.type == "cpu":  # may be wrong by a factor of two
        time += "; the eta after the first steps is more accurate"
    return time
