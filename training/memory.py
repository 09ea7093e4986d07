"""What a run will take, worked out before it starts: batches, memory, FLOPs."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from model import GPTConfig
from ops import ActivationCheckpointing as Checkpointing
from runtime.device import autocast, device_name, is_out_of_memory, memory_gib, select_dtype
from runtime.distributed import DistInfo, all_reduce_sum, set_gradient_sync
from runtime.metrics import flops_per_token, peak_flops
from training.config import TrainConfig

STATE_BYTES_PER_PARAMETER = 16  # float32: parameter, gradient and AdamW's two moments
CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32: parameter and two moments
MEMORY_SHARE = 0.8  # of a device, what a plan may count on
OVERCOMMIT = 4  # times the estimate: what a probe tries first
# Bytes a channel and token that a block keeps for its backward pass, with products in 16 bits or
# in 32. All is: two residual inputs (float32), two normalised copies, q, k, v and attention's
# output, the hidden layer before and after GELU. Products: block input, q, k, v, attention's
# output, its projection, the hidden layer before GELU, its projection.
SAVED_BYTES: dict[Checkpointing, tuple[int, int]] = {
    "none": (8 + 4 + 8 + 16, 8 + 8 + 16 + 32),
    "selective": (4 + 8 + 2 + 8 + 2, 4 + 16 + 4 + 16 + 4),
    "full": (4, 4),
}
GRADIENT_BYTES = (28, 44)  # likewise, of the block whose backward pass runs
CONTEXTS = [2**power for power in range(10, 18)]  # tokens
MAX_MICRO_BATCH_TOKENS = {"cuda": 65536, "mps": 8192, "cpu": 4096}  # more brings no more speed


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is shared out over processes and micro-steps."""

    micro_batch_size: int
    """Sequences that a process takes at once."""
    grad_accum_steps: int
    """Micro-batches of each process in an optimizer step."""


def plan_batch(
    config: TrainConfig,
    model: GPTConfig,
    dist_info: DistInfo,
    overcommit: float = 1.0,
) -> BatchPlan:
    """Share the global batch out over processes and micro-steps.

    With `--micro-batch-size auto`, a process takes at once the most sequences that divide its
    share, should fit its memory, and still bring speed.

    Args:
        config: the run's settings.
        model: the model's dimensions.
        dist_info: this process; the others have a device like its own.
        overcommit: how many times what should fit may be tried.

    Raises:
        ValueError: the batch does not divide; the message names the nearest sizes that do.
    """
    limit = _micro_batch_limit(config, model, dist_info, overcommit)
    return split_batch(config, model.block_size, dist_info.world_size, limit)


def split_batch(config: TrainConfig, block_size: int, world_size: int, limit: int) -> BatchPlan:
    """Divide the global batch, `limit` sequences at once at most if `auto` is to choose.

    Raises:
        ValueError: it does not divide; the message names the nearest sizes that do.
    """
    total = config.total_batch_size
    fixed = None if config.micro_batch_size == "auto" else config.micro_batch_size
    unit = block_size * world_size * (fixed or 1)
    if total % unit:
        factors = f"block size {block_size} x world size {world_size}"
        if fixed:
            factors = f"micro-batch size {fixed} x {factors}"
        nearest = [count * unit for count in (total // unit, total // unit + 1) if count]
        raise ValueError(
            f"--total-batch-size {total} is not a multiple of {factors} = {unit} tokens: "
            f"use {' or '.join(map(str, nearest))}"
        )
    sequences = total // (block_size * world_size)  # of each process in a step
    return _largest_plan(sequences, fixed or limit)


def _largest_plan(sequences: int, limit: int) -> BatchPlan:
    """The plan of the largest micro-batch up to `limit` that divides a process's sequences."""
    micro_batch_size = max(size for size in range(1, limit + 1) if sequences % size == 0)
    return BatchPlan(micro_batch_size, sequences // micro_batch_size)


def choose_batch(
    config: TrainConfig,
    model: GPTConfig,
    network: nn.Module,
    dtype: torch.dtype,
    dist_info: DistInfo,
) -> BatchPlan:
    """The planned batch; on a GPU, if it is to be chosen, the largest that a probe step bears.

    Elsewhere no probe is made: there, the system ends a process that runs out of memory.

    Args:
        config: the run's settings.
        model: the model's dimensions.
        network: the model, compiled and wrapped.
        dtype: of matrix products.
        dist_info: rank, world size and device of this process.
    """
    probed = dist_info.device.type == "cuda" and config.micro_batch_size == "auto"
    # Nor of a sharded model: where one process runs out of memory the others would wait for it.
    if not probed or config.is_sharded:
        return plan_batch(config, model, dist_info)

    def attempt(micro_batch_size: int) -> None:
        probe_step(network, micro_batch_size, model.block_size, dtype, dist_info)

    return fit_batch(plan_batch(config, model, dist_info, OVERCOMMIT), attempt, dist_info)


def probe_step(
    network: nn.Module,
    micro_batch_size: int,
    block_size: int,
    dtype: torch.dtype,
    dist_info: DistInfo,
) -> None:
    """Take the memory of a training step: gradients of one micro-batch, beside AdamW's moments.

    Raises:
        RuntimeError: there is not enough.
    """
    moments = [torch.empty_like(p) for p in network.parameters() for _ in range(2)]
    idx = torch.zeros(micro_batch_size, block_size, dtype=torch.int64, device=dist_info.device)
    set_gradient_sync(network, False)
    try:
        with autocast(dist_info.device, dtype):
            _, loss = network(idx, idx)
        loss.backward()
    finally:
        network.zero_grad(set_to_none=True)
        set_gradient_sync(network, True)
    del moments


def fit_batch(batch: BatchPlan, attempt: Callable[[int], None], dist_info: DistInfo) -> BatchPlan:
    """Halve the micro-batch until every process has the memory for it.

    The global batch stays the same; what a micro-batch loses, the accumulation gains. Every
    process must call this.

    Args:
        batch: what to try first.
        attempt: computes the gradients of that many sequences, without talking to others.
        dist_info: rank, world size and device of this process.

    Raises:
        ValueError: there is not enough memory for one sequence.
    """
    while True:
        fits = True
        try:
            attempt(batch.micro_batch_size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        gc.collect()  # what the failed attempt held goes only now, with its traceback
        if dist_info.device.type == "cuda":
            torch.cuda.empty_cache()
        ready = all_reduce_sum(torch.tensor(float(fits), device=dist_info.device), dist_info)
        if int(ready) == dist_info.world_size:
            return batch
        if batch.micro_batch_size == 1:
            raise ValueError(
                "the device has not enough memory for a single sequence: "
                "use a smaller --block-size, a smaller --size, or more --loss-chunks"
            )
        sequences = batch.micro_batch_size * batch.grad_accum_steps
        batch = _largest_plan(sequences, batch.micro_batch_size // 2)


def _micro_batch_limit(
    config: TrainConfig, model: GPTConfig, dist_info: DistInfo, overcommit: float
) -> int:
    """Sequences that should fit a process's memory, at least 1."""
    device = dist_info.device
    limit = MAX_MICRO_BATCH_TOKENS[device.type] // model.block_size
    memory = memory_gib(device)
    if memory is not None:
        if device.type != "cuda":
            memory /= dist_info.local_world_size  # without a GPU each, they share what there is
        dtype, chunks = select_dtype(config.dtype, device), loss_chunks(config, device.type)
        state = state_bytes(config, model, dtype, chunks, dist_info, accumulates=True)
        free = MEMORY_SHARE * memory * 2**30 - state
        per_sequence = activation_bytes_per_token(config, model, dtype, chunks) * model.block_size
        limit = min(limit, int(overcommit * free // per_sequence))
    return max(1, limit)


def loss_chunks(config: TrainConfig, device_type: str) -> int:
    """Parts of the vocabulary's logits: as asked, else 4 on a CPU, where it costs no time."""
    return config.loss_chunks or (4 if device_type == "cpu" else 1)


def activation_bytes_per_token(
    config: TrainConfig, model: GPTConfig, dtype: torch.dtype, chunks: int
) -> int:
    """Device memory that a token takes at the worst moment of a pass: an estimate, a cautious one.

    That is what all blocks keep and, whichever is more, the vocabulary's logits or one block's
    backward pass, before which it computes again what it has not kept. The logits take 8 bytes an
    id compiled, 16 eagerly; in chunks 12 or 21, of one chunk's tokens only.

    Args:
        config: says what is kept, and whether it is compiled.
        model: the model's dimensions.
        dtype: of matrix products.
        chunks: parts in which the logits are computed.
    """
    wide = dtype == torch.float32
    everything, kept = SAVED_BYTES["none"][wide], SAVED_BYTES[config.activation_checkpointing][wide]
    working = (everything - kept + GRADIENT_BYTES[wide]) * model.n_embd
    compiled = config.compile and not config.is_sharded  # of a sharded model, blocks only
    per_id = (8 if compiled else 16) if chunks == 1 else (12 if compiled else 21)
    vocabulary = per_id * model.padded_vocab_size // chunks
    if config.activation_offload:
        # Eagerly, `selective` holds its products itself: only the blocks' inputs go.
        held = config.activation_checkpointing == "selective" and not config.compile
        kept = kept - 4 if held else 0
    hidden = 6 * model.n_embd  # after the last block, and normalised
    return kept * model.n_layer * model.n_embd + hidden + max(working, vocabulary)


def state_bytes(
    config: TrainConfig,
    model: GPTConfig,
    dtype: torch.dtype,
    chunks: int,
    dist_info: DistInfo,
    accumulates: bool,
) -> float:
    """Device memory of what does not grow with the batch: parameters, gradients, moments, buffers.

    Args:
        config: says what is shared out.
        model: the model's dimensions.
        dtype: of matrix products.
        chunks: parts in which the logits are computed.
        dist_info: rank, world size and device of one process.
        accumulates: whether a step has several micro-batches.
    """
    n_params, cast = model.n_params, 0 if dtype == torch.float32 else 2
    head = model.padded_vocab_size * model.n_embd
    chunked = 10 * head if chunks > 1 else 0  # the head's gradient, scaled, and in 16 bits
    # What waits for the last micro-batch is whole on every process: as gradients beside DDP's
    # buckets, or as those that FSDP has yet to share out.
    waiting = 4 * n_params if accumulates and dist_info.world_size > 1 else 0
    if not config.is_sharded:
        return (STATE_BYTES_PER_PARAMETER + cast) * n_params + waiting + chunked
    block = model.block_params
    rest = n_params - model.n_layer * block  # in float32 with its gradient, and cast for the head
    at_once = min(2, model.n_layer) if config.reshard_after_forward else model.n_layer
    gathered = at_once * (cast or 4) * block + (8 + cast) * rest
    reducing = 8 * block  # one block's gradient, and the buffer that it is reduced in
    shards = dist_info.world_size if config.parallel == "fsdp" else dist_info.local_world_size
    own = 0 if config.cpu_offload else STATE_BYTES_PER_PARAMETER * n_params / shards
    return own + gathered + reducing + waiting + chunked


def describe_contexts(
    config: TrainConfig, model: GPTConfig, dtype: torch.dtype, dist_info: DistInfo
) -> str:
    """Peak memory by context length and by what is kept, one sequence at a time, as a table.

    Args:
        config: says what is shared out, and whether it is compiled.
        model: the model's dimensions, but for the context length.
        dtype: of matrix products.
        dist_info: rank, world size and device of one process.
    """
    on_gpu = dist_info.device.type == "cuda"
    modes: dict[str, dict[str, Any]] = {
        name: {"activation_checkpointing": name, "activation_offload": False}
        for name in SAVED_BYTES
    }
    if on_gpu:
        modes["offload"] = {"activation_checkpointing": "none", "activation_offload": True}
    lines = [
        f"peak GiB of each device by context length, one {str(dtype).removeprefix('torch.')} "
        f"sequence at a time, {config.parallel} over {dist_info.world_size}",
        "with --activation-checkpointing none, selective, full"
        + (", or with --activation-offload" if on_gpu else "")
        + "; /8: with --loss-chunks 8",
        "context" + "".join(f"{name:>12}{'/8':>8}" for name in modes),
    ]
    for length in CONTEXTS:
        longer, row = replace(model, block_size=length), f"{length:>7,}"
        least = length * dist_info.world_size  # tokens of a step of one micro-batch
        accumulates = config.total_batch_size > least
        for settings in modes.values():
            kept = replace(config, **settings)
            for width, chunks in ((12, 1), (8, 8)):
                total = length * activation_bytes_per_token(kept, longer, dtype, chunks)
                total += state_bytes(kept, longer, dtype, chunks, dist_info, accumulates)
                row += f"{total / 2**30:>{width}.1f}"
        if not accumulates:
            row += f"  in one micro-step of --total-batch-size {least}"
        lines.append(row)
    return "\n".join(lines)


def describe_plan(
    config: TrainConfig, model: GPTConfig, batch: BatchPlan, dist_info: DistInfo
) -> str:
    """What a run will take, as a table.

    Args:
        config: the run's settings.
        model: the model's dimensions.
        batch: how the global batch is shared out.
        dist_info: rank, world size and device of one process.
    """
    device, world_size = dist_info.device, dist_info.world_size
    tokens = config.total_batch_size * config.max_steps
    per_token = flops_per_token(model.n_params, model.n_layer, model.n_embd, model.block_size)
    micro_batch_tokens = batch.micro_batch_size * model.block_size
    dtype, chunks = select_dtype(config.dtype, device), loss_chunks(config, device.type)
    state = state_bytes(config, model, dtype, chunks, dist_info, batch.grad_accum_steps > 1)
    per_token_bytes = activation_bytes_per_token(config, model, dtype, chunks)
    state_gib, activations_gib = state / 2**30, per_token_bytes * micro_batch_tokens / 2**30
    peak = peak_flops(device_name(device))
    rows = {
        "model": f"{model.n_layer} layers, {model.n_head} heads, width {model.n_embd}, "
        f"context {model.block_size:,}, {model.padded_vocab_size:,} embedding rows",
        "parameters": f"{model.n_params:,}",
        "device": f"{world_size} x {device_name(device)}, {str(dtype).removeprefix('torch.')}",
        "batch": f"{config.total_batch_size:,} tokens = {batch.micro_batch_size} sequences x "
        f"{model.block_size:,} tokens x {batch.grad_accum_steps} micro-steps x "
        f"world size {world_size}",
        "steps": f"{config.max_steps:,}",
        "tokens": f"{tokens:,} ({tokens / model.n_params:,.1f} a parameter)",
        "FLOPs": f"{per_token * tokens:.3g} ({per_token / 1e6:,.0f}M a token)",
        "memory per device": f"at most about {state_gib + activations_gib:.1f} GiB: "
        f"{state_gib:.1f} parameters, gradients, moments + {activations_gib:.1f} activations",
        "checkpoint": f"{CHECKPOINT_BYTES_PER_PARAMETER * model.n_params / 2**30:.2f} GiB",
    }
    if peak is not None:
        hours = per_token * tokens / (config.mfu * peak * world_size) / 3600
        rows["time"] = f"about {hours:,.1f} hours, at {config.mfu:.0%} MFU"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
