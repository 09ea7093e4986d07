"""The memory that a run takes, and the micro-batch that fits it.

python -m training.memory      the table of docs/memory.md: H100s, in Markdown
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model import GPT2_SIZES, GPTConfig
from ops import ActivationCheckpointing
from runtime.cli import run_command
from runtime.device import (
    autocast,
    device_name,
    is_out_of_memory,
    limited_memory,
    memory_gib,
    select_dtype,
)
from runtime.distributed import DistInfo, all_reduce_max, print0, set_gradient_sync
from runtime.metrics import flops_per_token, peak_flops
from training.config import TrainConfig

STATE_BYTES_PER_PARAMETER = 16  # float32: parameter, gradient and AdamW's two moments
CHECKPOINT_BYTES_PER_PARAMETER = 12  # float32: parameter and two moments
MEMORY_SHARE = 0.8  # of a device, what a plan may count on
PROBED_SHARE = 0.92  # what a probe may take: NCCL's buffers and evaluations need the rest
OVERCOMMIT = 4  # times the estimate: what a probe tries first
# Saved activations: bytes per channel and token that a block saves for its backward pass, with
# matrix products in 16 bits or in 32. none: two residual inputs (float32), two normalised copies,
# q, k, v and attention's output, the hidden layer before and after GELU. selective: the block's
# input, q, k, v, attention's output and its projection, the hidden layer before GELU and its
# projection. full: the block's input.
SAVED_BYTES: dict[ActivationCheckpointing, tuple[int, int]] = {
    "none": (8 + 4 + 8 + 16, 8 + 8 + 16 + 32),
    "selective": (4 + 8 + 2 + 8 + 2, 4 + 16 + 4 + 16 + 4),
    "full": (4, 4),
}
GRADIENT_BYTES = (28, 44)  # likewise, of the block whose backward pass runs
# Resident in a CPU process besides its tensors, measured with torch 2.13: after the imports; more
# after torch.compile; more with a process group and FSDP.
PROCESS_GIB, COMPILER_GIB, GROUP_GIB = 0.25, 0.25, 0.2
# Freed tensors stay with the process (`tune_malloc`). Those of eager passes, of many sizes, leave
# holes that the next ones do not fit: 1.3 to 3.5 times their size was resident in small runs, of
# which identical ones differed by half.
EAGER_CPU_OVERHEAD = 3.5
CONTEXTS = [2**power for power in range(10, 18)]  # tokens
MAX_MICRO_BATCH_TOKENS = {"cuda": 65536, "mps": 8192, "cpu": 4096}  # more brings no more speed


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is split over processes and micro-steps."""

    micro_batch_size: int  # sequences that a process takes at once
    grad_accum_steps: int  # micro-batches of each process in an optimizer step


def plan_batch(
    config: TrainConfig, model_config: GPTConfig, dist_info: DistInfo, overcommit: float = 1.0
) -> BatchPlan:
    """Split the global batch over processes and micro-steps.

    With `--micro-batch-size auto`, a process takes at once the most sequences that divide its
    part, should fit its memory (`overcommit` times: may be tried), and still bring speed.

    Raises:
        ValueError: the batch does not divide; the message names the nearest sizes that do.
    """
    device, memory = dist_info.device, memory_gib(dist_info.device)
    if memory is not None and device.type != "cuda":
        memory /= dist_info.local_world_size  # processes without a GPU each share the machine's
    run = MemoryModel(config, model_config, select_dtype(config.dtype, device), dist_info)
    limit = run.largest_micro_batch(memory, overcommit)
    return split_batch(config, model_config.block_size, dist_info.world_size, limit)


def split_batch(config: TrainConfig, block_size: int, world_size: int, limit: int) -> BatchPlan:
    """Split the global batch; `auto` takes at most `limit` sequences at once.

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
    model_config: GPTConfig,
    model: nn.Module,
    dtype: torch.dtype,
    dist_info: DistInfo,
) -> BatchPlan:
    """The planned batch; `auto` on a GPU is the largest whose probe step fits.

    Elsewhere there is no probe: the system would end a process that runs out of memory. Nor is
    there one of a sharded model: other ranks would wait for the one that runs out.
    """
    probed = dist_info.device.type == "cuda" and config.micro_batch_size == "auto"
    if not probed or config.is_sharded:
        return plan_batch(config, model_config, dist_info)
    idx = torch.zeros(1, model_config.block_size, dtype=torch.int64, device=dist_info.device)
    with limited_memory(dist_info.device, PROBED_SHARE):
        return fit_batch(
            plan_batch(config, model_config, dist_info, OVERCOMMIT),
            lambda micro_batch_size: probe_step(model, idx.repeat(micro_batch_size, 1), dtype),
        )


def probe_step(model: nn.Module, idx: Tensor, dtype: torch.dtype) -> None:
    """Take the memory of a training step: AdamW's moments, and the gradients of two micro-batches.

    In a step's second micro-batch there are the first one's gradients and, compiled, those of all
    parameters beside them.

    Raises:
        RuntimeError: there is not enough.
    """
    moments = [torch.empty_like(p) for p in model.parameters() for _ in range(2)]
    set_gradient_sync(model, False)
    try:
        for _ in range(2):
            with autocast(idx.device, dtype):
                model(idx, idx).loss.backward()
    finally:
        model.zero_grad(set_to_none=True)
        set_gradient_sync(model, True)
    del moments


def fit_batch(batch: BatchPlan, attempt: Callable[[int], None]) -> BatchPlan:
    """Halve the micro-batch until every process has the memory for it.

    The global batch stays the same: half the micro-batch takes twice the micro-steps. Every
    process must call this. `attempt` computes the gradients of so many sequences, without
    communication.

    Raises:
        ValueError: there is not enough memory for one sequence.
    """
    while True:
        failed = False
        try:
            attempt(batch.micro_batch_size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        gc.collect()  # the failed attempt's tensors go only now, with its traceback
        torch.cuda.empty_cache()
        failed = bool(all_reduce_max(failed))
        outcome = "does not fit" if failed else "fits"
        print0(f"a micro-batch of {batch.micro_batch_size} {outcome}")
        if not failed:
            return batch
        if batch.micro_batch_size == 1:
            raise ValueError(
                "the device has not enough memory for a single sequence: "
                "use a smaller --block-size, a smaller --size, or more --loss-chunks"
            )
        sequences = batch.micro_batch_size * batch.grad_accum_steps
        batch = _largest_plan(sequences, batch.micro_batch_size // 2)


class MemoryEstimate(NamedTuple):
    """GiB that a process takes of its device at the worst moment of a run, at most about."""

    process: float  # Python, torch and the compiler; on a GPU 0, see `MemoryModel`
    state: float  # parameters, gradients, moments, buffers; on a CPU a checkpoint's copy, too
    activations: float  # what grows with the micro-batch


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of a run from its settings.

    On a GPU it is the memory of torch's allocator, which is what a run logs: `MEMORY_SHARE` leaves
    room for the CUDA context. On a CPU it is the resident memory of the process.
    """

    config: TrainConfig  # says what is sharded, saved and compiled
    model_config: GPTConfig
    dtype: torch.dtype  # of matrix products
    dist_info: DistInfo

    @property
    def compiled(self) -> bool:
        """Whether the whole model is compiled; of a sharded one only the blocks are."""
        return self.config.compile and not self.config.is_sharded

    @property
    def chunks(self) -> int:
        """Parts of the LM head's logits."""
        return loss_chunks(self.config, self.dist_info.device.type)

    def largest_micro_batch(self, memory: float | None, overcommit: float = 1.0) -> int:
        """The most sequences, at least 1, that should fit `memory` GiB and still bring speed."""
        block_size = self.model_config.block_size
        limit = MAX_MICRO_BATCH_TOKENS[self.dist_info.device.type] // block_size
        if memory is not None:
            process, state, per_sequence = self.estimate(1, accumulates=True)
            free = MEMORY_SHARE * memory - process - state
            limit = min(limit, int(overcommit * free // per_sequence))
        return max(1, limit)

    def estimate(self, micro_batch_size: int, accumulates: bool) -> MemoryEstimate:
        """The peak of so many sequences at once, if a step has one or several micro-batches."""
        tokens = micro_batch_size * self.model_config.block_size
        process, state = 0.0, self.state_bytes(accumulates)
        activations: float = tokens * self.activation_bytes_per_token()
        if self.dist_info.device.type == "cpu":
            process = PROCESS_GIB + COMPILER_GIB * self.config.compile
            process += GROUP_GIB * (self.dist_info.world_size > 1)
            state += CHECKPOINT_BYTES_PER_PARAMETER * self.model_config.n_params
            activations *= 1.0 if self.compiled else EAGER_CPU_OVERHEAD
        return MemoryEstimate(process, state / 2**30, activations / 2**30)

    def activation_bytes_per_token(self) -> int:
        """Bytes of tensors per token at the worst moment of a forward and backward pass, at most.

        It is the sum of the saved activations of all blocks and the larger of two: the LM head's
        logits, or the backward pass of a block, which first computes again what it has not saved.
        The logits take 8 bytes per id compiled, 16 eagerly; in chunks 12 or 21, of one chunk only.
        """
        wide, config, width = self.dtype == torch.float32, self.config, self.model_config.n_embd
        saved = SAVED_BYTES[config.activation_checkpointing][wide]
        block_backward = (SAVED_BYTES["none"][wide] - saved + GRADIENT_BYTES[wide]) * width
        per_id = (8, 12)[self.chunks > 1] if self.compiled else (16, 21)[self.chunks > 1]
        logits = per_id * self.model_config.padded_vocab_size // self.chunks
        if config.activation_offload:
            # Eagerly, `selective` holds its products itself: only the blocks' inputs go.
            held = config.activation_checkpointing == "selective" and not config.compile
            saved = saved - 4 if held else 0
        hidden = 6 * width  # after the last block, and normalised
        return saved * self.model_config.n_layer * width + hidden + max(block_backward, logits)

    def state_bytes(self, accumulates: bool) -> float:
        """Bytes of tensors that do not grow with the micro-batch."""
        config, model_config, dist_info = self.config, self.model_config, self.dist_info
        n_params, n_layer = model_config.n_params, model_config.n_layer
        cast = 0 if self.dtype == torch.float32 else 2
        # In chunks, the LM head's gradient is there three times: summed, scaled, and in 16 bits.
        head = model_config.padded_vocab_size * model_config.n_embd
        chunked = 10 * head if self.chunks > 1 else 0
        # Gradients that wait for the last micro-batch are whole on every process: a copy next to
        # DDP's buckets, or those that FSDP has yet to reduce and shard.
        waiting = 4 * n_params if accumulates and dist_info.world_size > 1 else 0
        if not config.is_sharded:
            return (STATE_BYTES_PER_PARAMETER + cast) * n_params + waiting + chunked
        block = model_config.block_params
        rest = n_params - n_layer * block  # in float32 with its gradient, and cast for the LM head
        at_once = min(2, n_layer) if config.reshard_after_forward else n_layer
        gathered = at_once * (cast or 4) * block + (8 + cast) * rest
        reducing = 8 * block  # one block's gradient, and the buffer that it is reduced in
        shards = dist_info.world_size if config.parallel == "fsdp" else dist_info.local_world_size
        own = 0 if config.cpu_offload else STATE_BYTES_PER_PARAMETER * n_params / shards
        return own + gathered + reducing + waiting + chunked


def loss_chunks(config: TrainConfig, device_type: str) -> int:
    """Parts of the LM head's logits: as asked, else 4 on a CPU, where it costs no time."""
    return config.loss_chunks or (4 if device_type == "cpu" else 1)


def peak_gib(
    config: TrainConfig, model_config: GPTConfig, dtype: torch.dtype, dist_info: DistInfo
) -> float:
    """Peak memory in GiB of one sequence at a time, at most about."""
    accumulates = config.total_batch_size > model_config.block_size * dist_info.world_size
    return sum(MemoryModel(config, model_config, dtype, dist_info).estimate(1, accumulates))


def describe_contexts(
    config: TrainConfig, model_config: GPTConfig, dtype: torch.dtype, dist_info: DistInfo
) -> str:
    """Peak memory by context length and activation checkpointing, one sequence at a time."""
    modes: dict[str, dict[str, Any]] = {
        name: {"activation_checkpointing": name, "activation_offload": False}
        for name in SAVED_BYTES
    }
    hint = "with --activation-checkpointing none, selective, full"
    if dist_info.device.type == "cuda":
        modes["offload"] = {"activation_checkpointing": "none", "activation_offload": True}
        hint += ", or with --activation-offload"
    lines = [
        f"peak GiB per device by context length, one {str(dtype).removeprefix('torch.')} "
        f"sequence at a time, {config.parallel} over {dist_info.world_size}",
        f"{hint}; /8: with --loss-chunks 8",
        "context" + "".join(f"{name:>12}{'/8':>8}" for name in modes),
    ]
    for length in CONTEXTS:
        longer, row = replace(model_config, block_size=length), f"{length:>7,}"
        for settings, (width, chunks) in product(modes.values(), ((12, 1), (8, 8))):
            changed = replace(config, loss_chunks=chunks, **settings)
            row += f"{peak_gib(changed, longer, dtype, dist_info):>{width}.1f}"
        one_micro_step = length * dist_info.world_size  # tokens
        if config.total_batch_size <= one_micro_step:
            row += f"  in one micro-step of --total-batch-size {one_micro_step}"
        lines.append(row)
    return "\n".join(lines)


def describe_plan(
    config: TrainConfig, model_config: GPTConfig, batch: BatchPlan, dist_info: DistInfo
) -> str:
    """What a run will take, as a table."""
    device, world_size, n_params = dist_info.device, dist_info.world_size, model_config.n_params
    tokens = config.total_batch_size * config.max_steps
    per_token = flops_per_token(model_config)
    dtype = select_dtype(config.dtype, device)
    run = MemoryModel(config, model_config, dtype, dist_info)
    memory = run.estimate(batch.micro_batch_size, batch.grad_accum_steps > 1)
    base = f"{memory.process:.1f} torch + " if memory.process else ""
    peak = peak_flops(device_name(device))
    rows = {
        "model": f"{model_config.n_layer} layers, {model_config.n_head} heads, width "
        f"{model_config.n_embd}, context {model_config.block_size:,}, "
        f"{model_config.padded_vocab_size:,} embedding rows",
        "parameters": f"{n_params:,}",
        "device": f"{world_size} x {device_name(device)}, {str(dtype).removeprefix('torch.')}",
        "batch": f"{config.total_batch_size:,} tokens = {batch.micro_batch_size} sequences x "
        f"{model_config.block_size:,} tokens x {batch.grad_accum_steps} micro-steps x "
        f"world size {world_size}",
        "steps": f"{config.max_steps:,}",
        "tokens": f"{tokens:,} ({tokens / n_params:,.1f} per parameter)",
        "FLOPs": f"{per_token * tokens:.3g} ({per_token / 1e6:,.0f}M per token)",
        "memory per device": f"at most about {sum(memory):.1f} GiB: {base}"
        f"{memory.state:.1f} weights, grads, moments + {memory.activations:.1f} activations",
        "checkpoint": f"{CHECKPOINT_BYTES_PER_PARAMETER * n_params / 2**30:.2f} GiB",
    }
    if peak is not None:
        hours = per_token * tokens / (config.mfu * peak * world_size) / 3600
        rows["time"] = f"about {hours:,.1f} hours, at {config.mfu:.0%} MFU"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def gpus(count: int, nodes: int = 1) -> DistInfo:
    """One process of `count` with a GPU each, equally many on each machine."""
    return DistInfo(torch.device("cuda"), world_size=count, local_world_size=count // nodes)


def markdown_table() -> str:
    """Peak memory per GPU by model and context length, compiled in bfloat16, as Markdown."""
    columns: dict[str, tuple[DistInfo, dict[str, Any]]] = {
        "none": (gpus(1), {}),
        "none /8": (gpus(1), {"loss_chunks": 8}),
        "full /8": (gpus(1), {"loss_chunks": 8, "activation_checkpointing": "full"}),
        "offload /8": (gpus(1), {"loss_chunks": 8, "activation_offload": True}),
        "8 GPUs, fsdp: none /8": (gpus(8), {"loss_chunks": 8, "parallel": "fsdp"}),
    }
    lines = [f"| model | context | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for size, length in product(("gpt2", "gpt2-xl"), (1024, 65_536)):
        model_config = GPTConfig(block_size=length, **GPT2_SIZES[size])
        row = f"| {size} | {length:,} |"
        for dist_info, flags in columns.values():
            gib = peak_gib(TrainConfig(**flags), model_config, torch.bfloat16, dist_info)
            row += f" {gib:.1f} |"
        lines.append(row)
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(lambda: print(markdown_table()))
