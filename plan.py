"""What a run will take, worked out before it starts: batches, memory, FLOPs."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from device import autocast, device_name, is_out_of_memory, memory_gib, select_dtype
from distributed import DistributedContext, all_reduce_sum, set_gradient_sync
from metrics import flops_per_token, peak_flops
from model import GPTConfig
from train_config import TrainConfig

STATE_BYTES_PER_PARAMETER = 16  # float32: parameter, gradient and AdamW's two moments
CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32: parameter and two moments
MEMORY_SHARE = 0.8  # of a device, what a plan may count on
DARING = 4  # times the estimate: what a probe tries first
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
    device: torch.device,
    world_size: int,
    daring: float = 1.0,
) -> BatchPlan:
    """Share the global batch out over processes and micro-steps.

    With `--micro-batch-size auto`, a process takes at once the most sequences that divide its
    share, should fit its memory, and still bring speed.

    Args:
        config: the run's settings.
        model: the model's dimensions.
        device: what each process runs on.
        world_size: processes.
        daring: how many times what should fit may be tried.

    Raises:
        ValueError: the batch does not divide; the message names the nearest sizes that do.
    """
    total, block_size = config.total_batch_size, model.block_size
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
    limit = fixed or _micro_batch_limit(config, model, device, world_size, daring)
    return _largest_plan(sequences, limit)


def _largest_plan(sequences: int, limit: int) -> BatchPlan:
    """The plan of the largest micro-batch up to `limit` that divides a process's sequences."""
    micro_batch_size = max(size for size in range(1, limit + 1) if sequences % size == 0)
    return BatchPlan(micro_batch_size, sequences // micro_batch_size)


def choose_batch(
    config: TrainConfig,
    model: GPTConfig,
    network: nn.Module,
    dtype: torch.dtype,
    context: DistributedContext,
) -> BatchPlan:
    """The planned batch; on a GPU, if it is to be chosen, the largest that a probe step bears.

    Elsewhere no probe is made: there, the system ends a process that runs out of memory.

    Args:
        config: the run's settings.
        model: the model's dimensions.
        network: the model, compiled and wrapped.
        dtype: of matrix products.
        context: this process's place.
    """
    device, world_size = context.device, context.world_size
    # Nor of a sharded model: where one process runs out of memory the others would wait for it.
    if device.type != "cuda" or config.micro_batch_size != "auto" or config.is_sharded:
        return plan_batch(config, model, device, world_size)

    def attempt(micro_batch_size: int) -> None:
        probe_step(network, micro_batch_size, model.block_size, dtype, context)

    return fit_batch(plan_batch(config, model, device, world_size, DARING), attempt, context)


def probe_step(
    network: nn.Module,
    micro_batch_size: int,
    block_size: int,
    dtype: torch.dtype,
    context: DistributedContext,
) -> None:
    """Take the memory of a training step: gradients of one micro-batch, beside AdamW's moments.

    Raises:
        RuntimeError: there is not enough.
    """
    moments = [torch.empty_like(p) for p in network.parameters() for _ in range(2)]
    idx = torch.zeros(micro_batch_size, block_size, dtype=torch.int64, device=context.device)
    set_gradient_sync(network, False)
    try:
        with autocast(context.device, dtype):
            _, loss = network(idx, idx)
        loss.backward()
    finally:
        network.zero_grad(set_to_none=True)
        set_gradient_sync(network, True)
    del moments


def fit_batch(
    batch: BatchPlan, attempt: Callable[[int], None], context: DistributedContext
) -> BatchPlan:
    """Halve the micro-batch until every process has the memory for it.

    The global batch stays the same; what a micro-batch loses, the accumulation gains. Every
    process must call this.

    Args:
        batch: what to try first.
        attempt: computes the gradients of that many sequences, without talking to others.
        context: this process's place.

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
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
        ready = all_reduce_sum(torch.tensor(float(fits), device=context.device), context)
        if int(ready) == context.world_size:
            return batch
        if batch.micro_batch_size == 1:
            raise ValueError(
                "the device has not enough memory for a single sequence: "
                "use a smaller --block-size, a smaller --size, or more --loss-chunks"
            )
        sequences = batch.micro_batch_size * batch.grad_accum_steps
        batch = _largest_plan(sequences, batch.micro_batch_size // 2)


def _micro_batch_limit(
    config: TrainConfig, model: GPTConfig, device: torch.device, world_size: int, daring: float
) -> int:
    """Sequences that should fit a process's memory, at least 1."""
    limit = MAX_MICRO_BATCH_TOKENS[device.type] // model.block_size
    memory = memory_gib(device)
    if memory is not None:
        if device.type != "cuda":
            memory /= world_size  # processes without a GPU of their own share what there is
        free = MEMORY_SHARE * memory * 2**30 - STATE_BYTES_PER_PARAMETER * model.n_params
        per_sequence = activation_bytes_per_token(config, model, device) * model.block_size
        limit = min(limit, int(daring * free // per_sequence))
    return max(1, limit)


def activation_bytes_per_token(config: TrainConfig, model: GPTConfig, device: torch.device) -> int:
    """Memory that the backward pass needs of the forward's: an estimate, and a cautious one.

    A block keeps its two float32 residual inputs (8C bytes), two normalised copies (4C), q, k, v
    and attention's output (8C), and the MLP's hidden layer before and after GELU (16C). The
    vocabulary adds its bfloat16 logits and their gradient, and a float32 softmax on the way. That
    is compiled, in 16 bits; without either it is up to twice as much.
    """
    plain = not config.compile or select_dtype(config.dtype, device) == torch.float32
    return (36 * model.n_layer * model.n_embd + 8 * model.padded_vocab_size) * (1 + plain)


def describe_plan(
    config: TrainConfig,
    model: GPTConfig,
    batch: BatchPlan,
    device: torch.device,
    world_size: int,
) -> str:
    """What a run will take, as a table.

    Args:
        config: the run's settings.
        model: the model's dimensions.
        batch: how the global batch is shared out.
        device: what each process runs on.
        world_size: processes.
    """
    tokens = config.total_batch_size * config.max_steps
    per_token = flops_per_token(model.n_params, model.n_layer, model.n_embd, model.block_size)
    micro_batch_tokens = batch.micro_batch_size * model.block_size
    state_gib = STATE_BYTES_PER_PARAMETER * model.n_params / 2**30
    per_token_bytes = activation_bytes_per_token(config, model, device)
    activations_gib = per_token_bytes * micro_batch_tokens / 2**30
    peak = peak_flops(device_name(device))
    dtype = str(select_dtype(config.dtype, device)).removeprefix("torch.")
    rows = {
        "model": f"{model.n_layer} layers, {model.n_head} heads, width {model.n_embd}, "
        f"context {model.block_size:,}, {model.padded_vocab_size:,} embedding rows",
        "parameters": f"{model.n_params:,}",
        "device": f"{world_size} x {device_name(device)}, {dtype}",
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
        hours = per_token * tokens / (0.4 * peak * world_size) / 3600
        rows["time"] = f"about {hours:,.1f} hours, at 40% MFU"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
