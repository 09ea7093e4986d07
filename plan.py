"""What a run will take, worked out before it starts: batches, memory, FLOPs."""

from dataclasses import dataclass

import torch

from metrics import flops_per_token
from model import GPTConfig

BYTES_PER_STATE_PARAMETER = 16  # float32: parameter, gradient and AdamW's two moments
CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32: parameter and two moments
MEMORY_SHARE = 0.8  # of a device, what a plan may count on
MAX_MICRO_BATCH_TOKENS = {"cuda": 65536, "mps": 8192, "cpu": 4096}  # more brings no more speed


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is shared out over processes and micro-steps."""

    micro_batch_size: int
    """Sequences that a process takes at once."""
    grad_accum_steps: int
    """Micro-batches of each process in an optimizer step."""


def plan_batch(
    model: GPTConfig,
    *,
    total_batch_size: int,
    micro_batch_size: int | None,
    world_size: int,
    device: torch.device,
    memory_gib: float | None,
) -> BatchPlan:
    """Share a global batch out.

    Args:
        model: the dimensions; `block_size` is the length of a sequence.
        total_batch_size: tokens in an optimizer step, over all processes.
        micro_batch_size: sequences that a process takes at once; None chooses the most that
            divides the batch, should fit the device's memory, and still brings speed.
        world_size: processes.
        device: what they run on.
        memory_gib: what each may use; None where it is not known.

    Raises:
        ValueError: the batch does not divide; the message names the nearest sizes that do.
    """
    sequences_apiece, rest = divmod(total_batch_size, model.block_size * world_size)
    unit = model.block_size * world_size * (micro_batch_size or 1)
    if rest or sequences_apiece % (micro_batch_size or 1):
        micro = f" x micro_batch_size {micro_batch_size}" if micro_batch_size else ""
        nearest = [n * unit for n in (total_batch_size // unit, total_batch_size // unit + 1) if n]
        raise ValueError(
            f"--total-batch-size {total_batch_size} is not a multiple of block_size "
            f"{model.block_size} x world_size {world_size}{micro} = {unit}: "
            f"use {' or '.join(map(str, nearest))}"
        )
    if micro_batch_size is None:
        limit = max(1, MAX_MICRO_BATCH_TOKENS[device.type] // model.block_size)
        if memory_gib is not None:
            state = BYTES_PER_STATE_PARAMETER * model.n_params
            free = memory_gib * 2**30 * MEMORY_SHARE - state
            limit = min(limit, int(free / (activation_bytes_per_token(model) * model.block_size)))
        micro_batch_size = max(
            size for size in range(1, max(1, limit) + 1) if sequences_apiece % size == 0
        )
    return BatchPlan(micro_batch_size, sequences_apiece // micro_batch_size)


def activation_bytes_per_token(model: GPTConfig) -> int:
    """Memory that the backward pass needs of the forward's, compiled, in bfloat16: an estimate.

    A block keeps its two float32 residual inputs (8C bytes), two normalised copies (4C), q, k, v
    and attention's output (8C), and the MLP's hidden layer before and after GELU (16C). The
    vocabulary adds its bfloat16 logits, their float32 softmax on the way, and the gradient.
    """
    return model.n_layer * 36 * model.n_embd + 8 * model.padded_vocab_size


def describe_plan(
    model: GPTConfig,
    batch: BatchPlan,
    *,
    total_batch_size: int,
    max_steps: int,
    world_size: int,
    peak_flops: float | None,
) -> str:
    """The plan as a table, for `--plan`.

    Args:
        model: the dimensions.
        batch: how the global batch is shared out.
        total_batch_size: tokens in an optimizer step.
        max_steps: optimizer steps.
        world_size: processes.
        peak_flops: one device's peak in FLOP/s, or None.
    """
    tokens = total_batch_size * max_steps
    per_token = flops_per_token(model.n_params, model.n_layer, model.n_embd, model.block_size)
    state_gib = BYTES_PER_STATE_PARAMETER * model.n_params / 2**30
    micro_batch_tokens = batch.micro_batch_size * model.block_size
    activation_gib = activation_bytes_per_token(model) * micro_batch_tokens / 2**30
    rows = {
        "model": f"{model.n_layer} layers, {model.n_head} heads, width {model.n_embd}, "
        f"context {model.block_size:,}, {model.padded_vocab_size:,} embedding rows",
        "parameters": f"{model.n_params:,}",
        "batch": f"{total_batch_size:,} tokens = {batch.micro_batch_size} sequences x "
        f"{model.block_size:,} tokens x {batch.grad_accum_steps} micro-steps x "
        f"{world_size} processes",
        "steps": f"{max_steps:,}",
        "tokens": f"{tokens:,} ({tokens / model.n_params:.1f} a parameter)",
        "FLOPs": f"{per_token * tokens:.3g} ({per_token / 1e6:,.0f}M a token)",
        "memory per device": f"about {state_gib + activation_gib:.1f} GiB: {state_gib:.1f} "
        f"parameters, gradients, moments + {activation_gib:.1f} activations (estimate)",
        "checkpoint": f"{CHECKPOINT_BYTES_PER_PARAMETER * model.n_params / 2**30:.2f} GiB",
        "time": "not known for this device",
    }
    if peak_flops is not None:
        hours = per_token * tokens / (0.4 * peak_flops * world_size) / 3600
        rows["time"] = f"about {hours:,.1f} hours at 40 % MFU"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
