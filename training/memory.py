"""Estimate the memory of a run from shapes, and choose the micro-batch that fits in it."""

import math
from typing import NamedTuple

import torch

from lr_schedule import windows_at
from runtime.device import device_name, memory_gib
from runtime.distributed import DistInfo, all_reduce_max
from runtime.errors import UserError
from runtime.flops import BEFORE_AMPERE, GPUS
from runtime.precision import DTYPES, select_dtype
from training.config import TrainConfig

CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32: a parameter and two moments
MEMORY_FRACTION = {"cuda": 0.9, "mps": 0.8, "cpu": 0.8}  # usable part of device memory
MAX_MICRO_BATCH_TOKENS = {"cuda": 131_072, "mps": 8192, "cpu": 4096}  # larger ones are not faster
MAX_CHUNKS = 8  # more chunks save little memory
# On GPUs, fewer chunks are faster as long as a chunk has fewer than 2**31 logits; with more logits,
# compiled kernels need 64-bit indices.
MAX_CHUNK_TOKENS = 32_768
# Fitted to peaks of torch's allocator (docs/memory.md), which are up to 12 % below the estimates.
HEAD_BYTES = 10  # per LM head weight: its gradients as LM head and as embedding
HEAD_REDUCE_BYTES = 10  # per LM head weight, while its gradient is reduced to shards
EMBED_AND_NORM_BYTES = 12  # per token and channel: embedding, final LayerNorm


class Device(NamedTuple):
    """Device that a process computes on, and the process's place among all."""

    name: str
    memory_gib: float | None  # available to the process; None if unknown
    dtype: torch.dtype  # for matrix multiplications
    dist_info: DistInfo


def find_device(config: TrainConfig, dist_info: DistInfo) -> Device:
    """Return the device of a process: this machine's or, with `--gpus`, the planned one."""
    if config.gpus:
        auto = torch.float16 if config.gpu in BEFORE_AMPERE else torch.bfloat16
        dtype = DTYPES.get(config.dtype, auto)
        return Device(config.gpu, GPUS[config.gpu].memory_gib, dtype, dist_info)
    device, memory = dist_info.device, memory_gib(dist_info.device)
    if memory is not None and device.type != "cuda":
        memory /= dist_info.local_world_size  # processes without GPUs share the machine's memory
    return Device(device_name(device), memory, select_dtype(config.dtype, device), dist_info)


# --- memory -----------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Estimated device memory of a process, in bytes."""

    state: float  # parameters, gradients and moments
    per_token: float  # per token of a micro-batch: activations and logits

    def total(self, tokens: int) -> float:
        """Return the total bytes for a micro-batch of `tokens` tokens."""
        return self.state + self.per_token * tokens


def plan_memory(config: TrainConfig, device: Device, loss_chunks: int) -> Memory:
    """Estimate the bytes of model and optimizer state, and the bytes per token of a micro-batch.

    Parameters, gradients and moments are float32; `--parallel fsdp` shards them.
    """
    model_config, dist_info = config.model_config(), device.dist_info
    n_params, width = model_config.n_params, model_config.n_embd
    vocab_size, itemsize = model_config.padded_vocab_size, device.dtype.itemsize
    sharded = 16.0 * n_params
    if config.optimizer == "muon":  # keeps one moment of the blocks' matrices, not two
        sharded -= 4 * 12 * model_config.n_layer * width**2
    # Every process also holds copies of the weights in the matmul dtype and, once these are freed,
    # the gradients of a micro-batch until they are added to the accumulated gradients.
    unsharded = 4 * n_params + HEAD_BYTES * vocab_size * width
    if config.parallel == "fsdp":
        sharded = 0 if config.cpu_offload else sharded / dist_info.world_size
        unsharded += HEAD_REDUCE_BYTES * vocab_size * width
    elif dist_info.world_size > 1:  # DDP's buckets and pending gradients
        unsharded += 8 * n_params
    if dist_info.device.type == "cpu":
        unsharded += CHECKPOINT_BYTES_PER_PARAMETER * n_params  # copy that is written to disk

    if config.compile:  # two chunks' logits, or their gradients
        logits = itemsize * vocab_size * 2 / loss_chunks
    else:  # and float32 copies
        logits = (12 if loss_chunks == 1 else 18 / loss_chunks) * vocab_size
    recomputes = config.activation_checkpointing == "full"
    is_bfloat16 = device.dtype == torch.bfloat16 and (config.compile or recomputes)
    residual = 2 if is_bfloat16 else 4  # bytes per value; an uncompiled LayerNorm saves float32
    # What a block saves for its backward pass, per token and channel: two residual inputs; two
    # normalized copies, q, k, v, attention's output, and the hidden layer before and after GELU.
    block = 2 * residual + (2 + 4 + 8) * itemsize
    saved = block
    if recomputes:  # only the block's input; a recomputed block holds all of its activations
        saved = residual
        logits = max(logits, block * width)
    activations = (saved * model_config.n_layer + EMBED_AND_NORM_BYTES) * width
    return Memory(sharded + unsharded, activations + logits)


# --- batch ------------------------------------------------------------------------------------


class BatchSplit(NamedTuple):
    """Split of the global batch over processes and micro-steps."""

    micro_batch_size: int  # sequences per forward pass on each process
    loss_chunks: int  # chunks of a micro-batch in which logits are computed


def split_batch(config: TrainConfig, device: Device) -> BatchSplit:
    """Split the global batch over processes and micro-steps, identically on every process.

    `--micro-batch-size auto` is the largest size that divides the sequences of a process, fits in
    every process's memory and is faster than smaller sizes. On a GPU, `--loss-chunks` then defaults
    to the smallest number that fits.
    """
    block_size, dist_info = config.block_size, device.dist_info
    kind = dist_info.device.type
    usable = MEMORY_FRACTION[kind] * (device.memory_gib or math.inf) * 2**30
    usable = -all_reduce_max(-int(min(usable, 2**62)))  # the minimum over all processes

    fixed = None if config.micro_batch_size == "auto" else config.micro_batch_size
    divisor = dist_info.world_size * (fixed or 1)  # must divide the sequences of each step
    total, unit = config.total_batch_size, block_size * divisor
    if total % unit:
        nearest = [count * unit for count in (total // unit, total // unit + 1) if count]
        fix = f"--total-batch-size {' or '.join(map(str, nearest))}"
        counts = [n for n in range(1, 2 * dist_info.world_size) if total % (n * block_size) == 0]
        if config.resume is not None and counts:  # a resumed run keeps its batch
            fix = f"{' or '.join(map(str, counts))} processes with --micro-batch-size auto"
        problem = f"--total-batch-size {total} is not a multiple of {unit} tokens"
        raise UserError(f"{problem} (one micro-batch per process): use {fix}")
    step_sizes = {windows_at(config, step) for step in range(config.max_steps)}
    for size in sorted(step_sizes):
        if size % divisor:
            problem = f"{size}, which is not a multiple of {divisor} (one micro-batch per process)"
            fix = "change its return value, or --micro-batch-size"
            raise UserError(f"lr_schedule.windows_at returns {problem}: {fix}")
    sequences = math.gcd(*step_sizes) // dist_info.world_size  # in each step on each process
    chunks = config.loss_chunks or (4 if kind == "cpu" else MAX_CHUNKS)
    limit = max(1, MAX_MICRO_BATCH_TOKENS[kind] // block_size)
    sizes = (n for n in range(min(limit, sequences), 0, -1) if sequences % n == 0)
    memory = plan_memory(config, device, chunks)
    fitting = (n for n in sizes if memory.total(n * block_size) <= usable)
    micro_batch_size = fixed or next(fitting, 1)
    if kind == "cuda" and config.loss_chunks is None:
        chunks, tokens = 1, micro_batch_size * block_size
        while tokens > chunks * MAX_CHUNK_TOKENS:
            chunks *= 2
        while chunks < MAX_CHUNKS and plan_memory(config, device, chunks).total(tokens) > usable:
            chunks *= 2
    return BatchSplit(micro_batch_size, chunks)
