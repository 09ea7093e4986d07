"""Estimate what a run needs before it starts: memory, micro-batch size, time.

The estimates follow from shapes and data sheets; for a CPU, from the measured speed of a matmul.
"""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

import torch

from corpus.shards import TokenShards, open_shards
from lr_schedule import position_at, windows_at
from model import GPTConfig
from ops import ActivationCheckpointing
from runtime.cli import format_duration
from runtime.device import cudnn_version, device_name, memory_gib, synchronize
from runtime.distributed import DistInfo, all_reduce_max, is_main, print0, read_dist_env
from runtime.files import read_json
from runtime.flops import BEFORE_AMPERE, GPUS, cpu_flops, flops_per_token, peak_flops
from runtime.precision import DTYPES, select_dtype
from training.config import TrainConfig

CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32: a parameter and two moments
MEMORY_FRACTION = {"cuda": 0.9, "mps": 0.8, "cpu": 0.8}  # usable part of device memory
MAX_MICRO_BATCH_TOKENS = {"cuda": 131_072, "mps": 8192, "cpu": 4096}  # larger ones are not faster
MAX_CHUNKS = 8  # more chunks save little memory
# On GPUs, fewer chunks are faster as long as a chunk has fewer than 2**31 logits; with more logits,
# compiled kernels need 64-bit indices.
MAX_CHUNK_TOKENS = 32_768
MIN_PARAMETERS = 1e8  # fewest that keep a GPU busy; the MFU of smaller models is unknown
# Values that a block saves for its backward pass, per token and channel: a number in the residual
# stream's dtype and a number in the matmul dtype.
#   none  two residual inputs; two normalized copies, q, k, v, attention's output, and the hidden
#         layer before and after GELU
#   full  the block's input
SAVED_VALUES: dict[ActivationCheckpointing, tuple[int, int]] = {
    "none": (2, 2 + 4 + 8),
    "full": (1, 0),
}
# Fitted to peaks of torch's allocator (docs/memory.md), which are up to 12 % below the estimates.
HEAD_BYTES = 10  # per LM head weight: its gradients as LM head and as embedding
HEAD_REDUCE_BYTES = 10  # per LM head weight, while its gradient is reduced to shards
EMBED_AND_NORM_BYTES = 12  # per token and channel: embedding, final LayerNorm
TIMED_SECONDS = 5.0
STEP_DEPENDENT_ROWS = ("tokens", "FLOPs", "passes", "time")  # in a plan
HOPPER_MIN_CUDNN = 91500  # 9.15; with an older cuDNN, torch uses FlashAttention-2 on Hopper


class Device(NamedTuple):
    """Device that a process computes on."""

    name: str
    memory_gib: float | None  # available to the process; None if unknown
    dtype: torch.dtype  # for matrix multiplications


def find_device(config: TrainConfig, dist_info: DistInfo) -> Device:
    """Return the device of a process: this machine's or, with `--gpus`, the planned one."""
    if config.gpus:
        auto = torch.float16 if config.gpu in BEFORE_AMPERE else torch.bfloat16
        return Device(config.gpu, GPUS[config.gpu].memory_gib, DTYPES.get(config.dtype, auto))
    device, memory = dist_info.device, memory_gib(dist_info.device)
    if memory is not None and device.type != "cuda":
        memory /= dist_info.local_world_size  # processes without GPUs share the machine's memory
    return Device(device_name(device), memory, select_dtype(config.dtype, device))


# --- memory -----------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Estimated device memory of a process, in bytes."""

    state: float  # parameters, gradients and moments
    per_token: float  # per token of a micro-batch: activations and logits

    def total(self, tokens: int) -> float:
        """Return the total bytes for a micro-batch of `tokens` tokens."""
        return self.state + self.per_token * tokens


def plan_memory(
    config: TrainConfig,
    model_config: GPTConfig,
    dtype: torch.dtype,
    dist_info: DistInfo,
    loss_chunks: int,
) -> Memory:
    """Estimate the bytes of model and optimizer state, and the bytes per token of a micro-batch.

    Parameters, gradients and moments are float32; `--parallel fsdp` and `hsdp` shard them.
    """
    n_params, width = model_config.n_params, model_config.n_embd
    vocab_size, itemsize = model_config.padded_vocab_size, dtype.itemsize
    shards = {"ddp": 1, "fsdp": dist_info.world_size, "hsdp": dist_info.local_world_size}
    sharded = 16 * n_params
    if config.optimizer == "muon":  # keeps one moment of the blocks' matrices, not two
        sharded -= 4 * 12 * model_config.n_layer * width**2
    # Every process also holds copies of the weights in the matmul dtype and, once these are freed,
    # the gradients of a micro-batch until they are added to the accumulated gradients.
    head_bytes = HEAD_BYTES + (HEAD_REDUCE_BYTES if config.is_sharded else 0)
    unsharded = 4 * n_params + head_bytes * vocab_size * width
    if dist_info.world_size > 1 and not config.is_sharded:  # DDP's buckets and pending gradients
        unsharded += 8 * n_params
    if dist_info.device.type == "cpu":
        unsharded += CHECKPOINT_BYTES_PER_PARAMETER * n_params  # copy that is written to disk

    if config.compile:  # two chunks' logits, or their gradients
        logits = itemsize * vocab_size * 2 / loss_chunks
    else:  # and float32 copies
        logits = (12 if loss_chunks == 1 else 18 / loss_chunks) * vocab_size
    mode = config.activation_checkpointing
    is_bfloat16 = dtype == torch.bfloat16 and (config.compile or mode != "none")
    residual = 2 if is_bfloat16 else 4  # bytes per value; an uncompiled LayerNorm saves float32
    saved = {mode: r * residual + m * itemsize for mode, (r, m) in SAVED_VALUES.items()}
    if mode != "none":  # a recomputed block holds all of its activations
        logits = max(logits, saved["none"] * width)
    return Memory(
        (0 if config.cpu_offload else sharded / shards[config.parallel]) + unsharded,
        (saved[mode] * model_config.n_layer + EMBED_AND_NORM_BYTES) * width + logits,
    )


def warn_about_gpu(needed_bytes: float, dist_info: DistInfo) -> None:
    """Warn if this process's GPU lacks `needed_bytes` of free memory or has a slow cuDNN."""
    device = dist_info.device
    if device.type != "cuda":
        return
    free, needed = torch.cuda.mem_get_info(device)[0] / 2**30, needed_bytes / 2**30
    if free < needed:
        print(
            f"warning: GPU {device.index} has {free:.1f} GiB free, but the run needs about "
            f"{needed:.1f} GiB: stop other programs on that GPU (nvidia-smi), or use a smaller "
            f"--micro-batch-size",
            file=sys.stderr,
        )
    is_hopper = torch.version.cuda and torch.cuda.get_device_capability(device) == (9, 0)
    if is_hopper and 0 < (found := cudnn_version()) < HOPPER_MIN_CUDNN:
        print0(
            f"warning: attention is slow with cuDNN {found}, older than {HOPPER_MIN_CUDNN}: "
            f"install torch for CUDA 13, and remove other cuDNN versions from LD_LIBRARY_PATH"
        )


# --- batch ------------------------------------------------------------------------------------


class BatchSplit(NamedTuple):
    """Split of the global batch over processes and micro-steps."""

    micro_batch_size: int  # sequences per forward pass on each process
    loss_chunks: int  # chunks of a micro-batch in which logits are computed


def split_batch(
    config: TrainConfig, model_config: GPTConfig, device: Device, dist_info: DistInfo
) -> BatchSplit:
    """Split the global batch over processes and micro-steps, identically on every process.

    `--micro-batch-size auto` is the largest size that divides the sequences of a process, fits in
    every process's memory and is faster than smaller sizes. On a GPU, `--loss-chunks` then defaults
    to the smallest number that fits.
    """
    block_size, kind = model_config.block_size, dist_info.device.type
    usable = MEMORY_FRACTION[kind] * (device.memory_gib or math.inf) * 2**30
    usable = -all_reduce_max(-int(min(usable, 2**62)))  # the minimum over all processes

    def fits(sequences: int, loss_chunks: int) -> bool:
        memory = plan_memory(config, model_config, device.dtype, dist_info, loss_chunks)
        return memory.total(sequences * block_size) <= usable

    fixed = None if config.micro_batch_size == "auto" else config.micro_batch_size
    total, unit = config.total_batch_size, block_size * dist_info.world_size * (fixed or 1)
    if total % unit:
        nearest = [count * unit for count in (total // unit, total // unit + 1) if count]
        raise ValueError(
            f"--total-batch-size {total} is not a multiple of {unit} tokens (one micro-batch per "
            f"process): use --total-batch-size {' or '.join(map(str, nearest))}"
        )
    step_sizes = {windows_at(config, step) for step in range(config.max_steps)}
    for size in sorted(step_sizes):
        if size < 1 or size * block_size % unit:
            raise ValueError(
                f"lr_schedule.windows_at returns {size}, which is not a multiple of "
                f"{unit // block_size} (one micro-batch per process): change its return value, or "
                f"--micro-batch-size"
            )
    sequences = math.gcd(*step_sizes) // dist_info.world_size  # in each step on each process
    chunks = config.loss_chunks or (4 if kind == "cpu" else MAX_CHUNKS)
    limit = max(1, MAX_MICRO_BATCH_TOKENS[kind] // block_size)
    sizes = (n for n in range(min(limit, sequences), 0, -1) if sequences % n == 0)
    micro_batch_size = fixed or next((n for n in sizes if fits(n, chunks)), 1)
    if kind == "cuda" and config.loss_chunks is None:
        chunks, tokens = 1, micro_batch_size * block_size
        while tokens > chunks * MAX_CHUNK_TOKENS:
            chunks *= 2
        while chunks < MAX_CHUNKS and not fits(micro_batch_size, chunks):
            chunks *= 2
    return BatchSplit(micro_batch_size, chunks)


# --- plan -------------------------------------------------------------------------------------


def print_plan(config: TrainConfig, model_config: GPTConfig) -> None:
    """Print a run's plan on rank 0, for this machine or for `--gpus`."""
    if config.gpus:
        dist_info = DistInfo(torch.device("cuda"), 0, 0, config.gpus, config.gpus // config.nodes)
    else:
        dist_info = read_dist_env(config.device)
    device, train_shards = find_device(config, dist_info), None
    split = split_batch(config, model_config, device, dist_info)
    with suppress(OSError, ValueError):  # a plan does not need data
        train_shards = open_shards(config.data_dir, "train")
    if is_main():
        print0(describe_plan(config, model_config, device, split, dist_info, train_shards))


def describe_plan(
    config: TrainConfig,
    model_config: GPTConfig,
    device: Device,
    split: BatchSplit,
    dist_info: DistInfo,
    train_shards: TokenShards | None,
) -> str:
    """Return a run's plan as a table."""
    n_params = model_config.n_params
    world_size, block_size = dist_info.world_size, model_config.block_size
    tokens = position_at(config, config.max_steps) * block_size
    flops = flops_per_token(model_config) * tokens
    micro_steps = config.total_batch_size // (split.micro_batch_size * block_size * world_size)
    memory = plan_memory(config, model_config, device.dtype, dist_info, split.loss_chunks)
    state = memory.state / 2**30
    activations = memory.per_token * split.micro_batch_size * block_size / 2**30
    n_saves = math.ceil(config.max_steps / (config.checkpoint_every or config.max_steps))
    # Also the best checkpoint, and one more: the oldest is deleted once the next one is complete.
    n_on_disk = min(n_saves, (config.keep_checkpoints or n_saves) + 2)
    checkpoint = CHECKPOINT_BYTES_PER_PARAMETER * n_params / 2**30
    rows = {
        "model": f"{n_params:,} parameters: {model_config.n_layer} layers, {model_config.n_head} "
        f"heads, width {model_config.n_embd}, context {block_size:,}",
        "device": f"{world_size} x {device.name}, {str(device.dtype).removeprefix('torch.')}",
        "batch": f"{config.total_batch_size:,} tokens = {split.micro_batch_size} sequences x "
        f"{block_size:,} tokens x {micro_steps} micro-steps x world size {world_size}",
        "tokens": f"{tokens:,} in {config.max_steps:,} steps, "
        f"{tokens / n_params:.3g} per parameter",
        "FLOPs": f"{flops:.3g}, {flops / tokens / 1e6:,.0f}M per token",
        "memory": f"about {state + activations:.1f} GiB per device: {state:.1f} weights, "
        f"gradients, moments + {activations:.1f} activations",
        "checkpoint": f"{checkpoint:.2f} GiB; {n_on_disk * checkpoint:,.2f} GiB on disk for "
        f"{n_on_disk}",
    }
    if train_shards is not None:
        total = train_shards.total_tokens
        rows["passes"] = f"{tokens / total:.3g} over the dataset's {total:,} tokens"
    if device.memory_gib is not None and state + activations > device.memory_gib:
        rows["memory"] += f"; the device has {device.memory_gib:.0f}"
    rows |= describe_time(config, model_config, device, dist_info)
    if config.config is not None and (about := read_json(config.config).get("about")):
        rows["recipe"] = about
    if config.max_minutes is not None:  # the number of steps is not known yet
        rows = {name: row for name, row in rows.items() if name not in STEP_DEPENDENT_ROWS}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def time_call(work: Callable[[], object], dist_info: DistInfo) -> float:
    """Return the seconds that a compiled call takes; every process must call this."""
    calls = 1
    for _ in range(3):  # compile, estimate the number of calls, measure
        begun = perf_counter()
        for _ in range(calls):
            work()
        synchronize(dist_info.device)
        seconds = (perf_counter() - begun) / calls
        calls = all_reduce_max(int(min(100, 1 + TIMED_SECONDS / seconds)))
    return seconds


def describe_time(
    config: TrainConfig, model_config: GPTConfig, device: Device, dist_info: DistInfo
) -> dict[str, str]:
    """Return the plan's time row: the duration of training without evaluations."""
    peak = None
    if dist_info.device.type == "cpu":
        peak = cpu_flops(device.dtype)
    elif dist_info.device.type == "cuda" and model_config.n_params > MIN_PARAMETERS:
        peak = peak_flops(device.name, float32=device.dtype == torch.float32)
    if peak is None:
        unknown = "unknown for this model on this device"
        return {"time": f"{unknown}; see the eta after the first steps"}
    tokens = position_at(config, config.max_steps) * model_config.block_size
    seconds = flops_per_token(model_config) * tokens / (config.mfu * peak)  # on one device
    time = f"about {format_duration(seconds / dist_info.world_size)}, at {config.mfu:.0%} MFU"
    if dist_info.device.type == "cpu":  # may be wrong by a factor of two
        time += "; the eta after the first steps is more accurate"
    if seconds / dist_info.world_size > 86400:
        time += "; to train for less time, use --max-minutes"
    return {"time": time}
