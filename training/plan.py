"""What a run will take, before it starts: memory, the micro-batch that fits, time and price.

The figures follow from shapes and data sheets, of a CPU from the speed of a matrix product.
"""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

import torch

from corpus.shards import TokenShards, open_shards
from model import GPTConfig
from ops import ActivationCheckpointing
from runtime.cli import format_duration
from runtime.device import (
    DTYPES,
    cpu_flops,
    cudnn_version,
    device_name,
    memory_gib,
    select_dtype,
    synchronize,
)
from runtime.distributed import DistInfo, all_reduce_max, is_main, print0, read_dist_env
from runtime.files import read_json
from runtime.gpus import BEFORE_AMPERE, GPUS, flops_per_token, peak_flops
from training.config import TrainConfig

CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32: parameter and two moments
MEMORY_SHARE = {"cuda": 0.9, "mps": 0.8, "cpu": 0.8}  # of a device, what a plan counts on
MAX_MICRO_BATCH_TOKENS = {"cuda": 131_072, "mps": 8192, "cpu": 4096}  # more are not faster
MAX_CHUNKS = 8  # more save little memory
# On GPUs, fewer chunks are faster while one has fewer than 2**31 logits: beyond, a compiled kernel
# needs 64-bit indices.
MAX_CHUNK_TOKENS = 32_768
LEAST_PARAMETERS = 1e8  # that keep a GPU busy; a smaller model reaches a share that is not known
# What a block saves of a token for its backward pass, per channel: values of the residual stream,
# and others, in the dtype of matrix products. none: two residual inputs; two normalised copies, q,
# k, v, attention's output, and the hidden layer before and after GELU. selective: the block's
# input; q, k, v, attention's output, two projections, and the hidden layer before GELU.
SAVED: dict[ActivationCheckpointing, tuple[int, int]] = {
    "none": (2, 2 + 4 + 8),
    "selective": (1, 4 + 2 + 4),
    "full": (1, 0),  # the block's input
}
# Fitted to peaks of torch's allocator (docs/memory.md), which lie up to 12 % below the plan.
HEAD_BYTES = 10  # per weight of the LM head: its gradient, from the head and from the embedding
REDUCED_BYTES = 10  # per weight of the LM head, while its gradient is reduced to shards
ENDS_BYTES = 12  # per channel and token: embedding, last LayerNorm
TIMED_SECONDS = 5.0
OF_ALL_STEPS = ("tokens", "FLOPs", "passes", "time")  # rows of a plan
HOPPERS_CUDNN = 91500  # 9.15; with an older one, torch takes FlashAttention-2 there


class Device(NamedTuple):
    """What a process computes on."""

    name: str
    memory_gib: float | None  # that a process may take; None where it is not known
    dtype: torch.dtype  # of matrix products


def find_device(config: TrainConfig, dist_info: DistInfo) -> Device:
    """The device of a process: this machine's or, with `--gpus`, the planned one."""
    if config.gpus:
        auto = torch.float16 if config.gpu in BEFORE_AMPERE else torch.bfloat16
        return Device(config.gpu, GPUS[config.gpu].memory_gib, DTYPES.get(config.dtype, auto))
    device, memory = dist_info.device, memory_gib(dist_info.device)
    if memory is not None and device.type != "cuda":
        memory /= dist_info.local_world_size  # processes without a GPU each share the machine's
    return Device(device_name(device), memory, select_dtype(config.dtype, device))


# --- memory -----------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes that a process takes of its device, about."""

    state: float  # parameters, gradients and moments
    per_token: float  # of a micro-batch: activations and logits

    def total(self, tokens: int) -> float:
        """With a micro-batch of so many tokens."""
        return self.state + self.per_token * tokens


def plan_memory(
    config: TrainConfig,
    model_config: GPTConfig,
    dtype: torch.dtype,
    dist_info: DistInfo,
    chunks: int,
) -> Memory:
    """Estimate bytes per parameter, and per token of a micro-batch whose loss has `chunks`.

    Parameters, gradients and moments are float32, and sharded with `--parallel fsdp` or `hsdp`.
    """
    n_params, width = model_config.n_params, model_config.n_embd
    values, size = model_config.padded_vocab_size, dtype.itemsize
    shards = {"ddp": 1, "fsdp": dist_info.world_size, "hsdp": dist_info.local_world_size}
    sharded = 16 * n_params
    if config.optimizer == "muon":  # of the blocks' matrices it keeps one moment, not two
        sharded -= 4 * 12 * model_config.n_layer * width**2
    # Every process has besides: copies of the weights in the dtype of matrix products and, when
    # these are done, the gradients of a micro-batch, until they are added to the ones before.
    head_bytes = HEAD_BYTES + (REDUCED_BYTES if config.is_sharded else 0)
    whole = 4 * n_params + head_bytes * values * width
    if dist_info.world_size > 1 and not config.is_sharded:  # DDP's buckets, and what waits for them
        whole += 8 * n_params
    if dist_info.device.type == "cpu":
        whole += CHECKPOINT_BYTES_PER_PARAMETER * n_params  # while it is written

    if config.compile:  # two chunks' logits, or their gradients
        logits = size * values * 2 / chunks
    else:  # copies in float32, too
        logits = (12 if chunks == 1 else 18 / chunks) * values
    mode = config.activation_checkpointing
    is_bfloat16 = dtype == torch.bfloat16 and (config.compile or mode != "none")
    residual = 2 if is_bfloat16 else 4  # bytes of a value; LayerNorm, not compiled, saves float32
    saved = {mode: n * residual + count * size for mode, (n, count) in SAVED.items()}
    if mode != "none":  # a block that is computed again has all of its activations
        logits = max(logits, saved["none"] * width)
    return Memory(
        (0 if config.cpu_offload else sharded / shards[config.parallel]) + whole,
        (saved[mode] * model_config.n_layer + ENDS_BYTES) * width + logits,
    )


def warn_of_gpu(needed_bytes: float, dist_info: DistInfo) -> None:
    """Say what is wrong with this process's GPU for a run that takes so much memory."""
    device = dist_info.device
    if device.type != "cuda":
        return
    free, needed = torch.cuda.mem_get_info(device)[0] / 2**30, needed_bytes / 2**30
    if free < needed:
        print(
            f"warning: GPU {device.index} has {free:.1f} GiB free, and the run takes about "
            f"{needed:.1f}: end what else runs there (nvidia-smi), or give --micro-batch-size",
            file=sys.stderr,
        )
    is_hopper = torch.version.cuda and torch.cuda.get_device_capability(device) == (9, 0)
    if is_hopper and 0 < (found := cudnn_version()) < HOPPERS_CUDNN:
        print0(
            f"warning: attention is slow with cuDNN {found}, below {HOPPERS_CUDNN}: install torch "
            f"for CUDA 13, and take another cuDNN off LD_LIBRARY_PATH"
        )


# --- batch ------------------------------------------------------------------------------------


class BatchSplit(NamedTuple):
    """How a global batch is split over processes and micro-steps."""

    micro_batch_size: int  # sequences of a process in a forward pass
    grad_accum_steps: int  # micro-batches of each process in an optimizer step
    loss_chunks: int  # parts of a micro-batch for which logits are computed


def split_batch(
    config: TrainConfig, model_config: GPTConfig, device: Device, dist_info: DistInfo
) -> BatchSplit:
    """Split the global batch over processes and micro-steps, in the same way on every process.

    `--micro-batch-size auto` is the largest one that divides a process's part, fits every process's
    memory and is faster than a smaller one. Then `--loss-chunks` is the smallest number that fits.
    """
    block_size, kind = model_config.block_size, dist_info.device.type
    usable = MEMORY_SHARE[kind] * (device.memory_gib or math.inf) * 2**30
    usable = -all_reduce_max(-int(min(usable, 2**62)))  # the least of all processes

    def fits(sequences: int, chunks: int) -> bool:
        memory = plan_memory(config, model_config, device.dtype, dist_info, chunks)
        return memory.total(sequences * block_size) <= usable

    fixed = None if config.micro_batch_size == "auto" else config.micro_batch_size
    total, unit = config.total_batch_size, block_size * dist_info.world_size * (fixed or 1)
    if total % unit:
        nearest = [count * unit for count in (total // unit, total // unit + 1) if count]
        raise ValueError(
            f"--total-batch-size {total} is not a multiple of {unit} tokens, one micro-batch of "
            f"each process: use {' or '.join(map(str, nearest))}"
        )
    sequences = total // (block_size * dist_info.world_size)  # of a process's step
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
    return BatchSplit(micro_batch_size, sequences // micro_batch_size, chunks)


# --- what it comes to -------------------------------------------------------------------------


def print_plan(config: TrainConfig, model_config: GPTConfig) -> None:
    """Print on rank 0 what a run would take: on this machine or, with `--gpus`, on those."""
    if config.gpus:
        dist_info = DistInfo(torch.device("cuda"), 0, 0, config.gpus, config.gpus // config.nodes)
    else:
        dist_info = read_dist_env(config.device)
    device, train_shards = find_device(config, dist_info), None
    split = split_batch(config, model_config, device, dist_info)
    with suppress(OSError, ValueError):  # a plan needs no data
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
    """What a run will take, as a table."""
    n_params = model_config.n_params
    world_size, block_size = dist_info.world_size, model_config.block_size
    tokens = config.total_batch_size * config.max_steps
    flops = flops_per_token(model_config) * tokens
    memory = plan_memory(config, model_config, device.dtype, dist_info, split.loss_chunks)
    state = memory.state / 2**30
    activations = memory.per_token * split.micro_batch_size * block_size / 2**30
    saves = math.ceil(config.max_steps / (config.checkpoint_every or config.max_steps))
    # The best is kept, and one goes when the next is there.
    on_disk = min(saves, (config.keep_checkpoints or saves) + 2)
    checkpoint = CHECKPOINT_BYTES_PER_PARAMETER * n_params / 2**30
    rows = {
        "model": f"{n_params:,} parameters: {model_config.n_layer} layers, {model_config.n_head} "
        f"heads, width {model_config.n_embd}, context {block_size:,}",
        "device": f"{world_size} x {device.name}, {str(device.dtype).removeprefix('torch.')}",
        "batch": f"{config.total_batch_size:,} tokens = {split.micro_batch_size} sequences x "
        f"{block_size:,} tokens x {split.grad_accum_steps} micro-steps x world size {world_size}",
        "tokens": f"{tokens:,} in {config.max_steps:,} steps, "
        f"{tokens / n_params:.3g} per parameter",
        "FLOPs": f"{flops:.3g}, {flops / tokens / 1e6:,.0f}M per token",
        "memory": f"about {state + activations:.1f} GiB per device: {state:.1f} weights, "
        f"gradients, moments + {activations:.1f} activations",
        "checkpoint": f"{checkpoint:.2f} GiB; {on_disk * checkpoint:,.2f} on disk for {on_disk}",
    }
    if train_shards is not None:
        total = train_shards.total_tokens
        rows["passes"] = f"{tokens / total:.3g} over the data's {total:,} tokens"
    if device.memory_gib is not None and state + activations > device.memory_gib:
        rows["memory"] += f"; it has {device.memory_gib:.0f}"
    rows |= describe_time(config, model_config, device, dist_info)
    if config.config is not None and (about := read_json(config.config).get("about")):
        rows["recipe"] = about
    if config.max_minutes is not None:  # the steps are not known yet
        rows = {name: row for name, row in rows.items() if name not in OF_ALL_STEPS}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def seconds_of(work: Callable[[], object], dist_info: DistInfo) -> float:
    """How long a call takes, once it is compiled; every process must call this."""
    calls = 1
    for _ in range(3):  # to compile; to see how long it takes; to measure
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
    """A row of the plan: how long training takes, without evaluations."""
    peak = None
    if dist_info.device.type == "cpu":
        peak = cpu_flops(device.dtype)
    elif dist_info.device.type == "cuda" and model_config.n_params > LEAST_PARAMETERS:
        peak = peak_flops(device.name, float32=device.dtype == torch.float32)
    if peak is None:
        unknown = "not known for this model on this device"
        return {"time": f"{unknown}: the eta of a run's first steps says it"}
    flops = flops_per_token(model_config) * config.total_batch_size * config.max_steps
    seconds = flops / (config.mfu * peak)  # of one device
    time = f"about {format_duration(seconds / dist_info.world_size)}, at {config.mfu:.0%} MFU"
    if dist_info.device.type == "cpu":  # it may be half, or twice
        time += ": the eta of a run's first steps says it better"
    if seconds / dist_info.world_size > 86400:
        time += "; --max-minutes ends it sooner"
    return {"time": time}
