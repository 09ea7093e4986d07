"""How a run would go on other GPUs than this machine's: time, memory and cost, on paper."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from model import GPTConfig
from runtime.device import DTYPES
from runtime.distributed import DistInfo
from runtime.metrics import flops_per_token, peak_flops
from training.config import TrainConfig
from training.memory import (
    MAX_MICRO_BATCH_TOKENS,
    MEMORY_SHARE,
    BatchPlan,
    activation_bytes_per_token,
    describe_contexts,
    loss_chunks,
    split_batch,
    state_bytes,
)


@dataclass(frozen=True)
class Gpu:
    """What a plan knows of a kind of GPU, from NVIDIA's data sheets."""

    name: str
    """As the driver gives it; see `metrics.peak_flops`."""
    memory_gib: float
    """What a program can have."""
    nvlink: float
    """Bytes a second to the other GPUs of its machine, in each direction."""
    pcie: float
    """Bytes a second to the CPU's memory, in each direction."""


GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 79, 300e9, 32e9),
    "H100": Gpu("NVIDIA H100 80GB HBM3", 79, 450e9, 64e9),
    "H200": Gpu("NVIDIA H200", 139, 450e9, 64e9),
}
INFINIBAND, ETHERNET = 400e9 / 8, 100e9 / 8  # bytes/s of a machine in each direction: NDR; 100GbE
LINK_SHARE = 0.7  # of its rate, what a collective or a copy gets out of a link


@dataclass(frozen=True)
class Cluster:
    """Processes, and what joins them."""

    processes: int
    nodes: int
    """Machines with equally many processes each."""
    within: float
    """Bytes a second that a process exchanges with the others on its machine, each way."""
    between: float
    """Bytes a second that a machine, all its processes together, exchanges with others."""

    @property
    def per_node(self) -> int:
        """Processes on each machine."""
        return self.processes // self.nodes

    @property
    def ring(self) -> float:
        """Bytes a second around a ring of all: a machine's link carries it once in each way."""
        return self.within if self.nodes == 1 else min(self.within, self.between)


def ring_seconds(size: float, members: int, rate: float) -> float:
    """Time to gather `size` bytes from all members on each, or to reduce and scatter them.

    Every member passes on all but its own part; an all-reduce is both, twice that. Source:
    Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms.
    """
    return (members - 1) / members * size / rate


def step_seconds(
    config: TrainConfig,
    model: GPTConfig,
    cluster: Cluster,
    micro_steps: int,
    forward: float,
    backward: float,
    product_bytes: int = 2,
) -> float:
    """The time of an optimizer step, communication included.

    What is sent while a pass computes costs only what is longer than the pass. DDP's all-reduce
    runs behind the last backward pass, but for the tied embedding's gradient, which is complete
    at its end. FSDP's gathers and reductions of blocks run behind their computation, but the
    embeddings' begin and end a pass.

    Args:
        config: says how the work is shared.
        model: the model's dimensions.
        cluster: the processes.
        micro_steps: micro-batches of each process.
        forward: seconds of a micro-batch's forward pass on one process alone.
        backward: of its backward pass.
        product_bytes: of a gathered parameter, 2 for bfloat16.
    """
    alone = micro_steps * (forward + backward)
    blocks = model.n_layer * model.block_params
    rest = model.n_params - blocks
    if not config.is_sharded:
        whole, late = (
            2 * ring_seconds(4 * size, cluster.processes, cluster.ring)
            for size in (model.n_params, rest)
        )
        return alone + max(whole - backward, late)
    members, rate = cluster.processes, cluster.ring
    if config.parallel == "hsdp":
        members, rate = cluster.per_node, cluster.within
    gather = ring_seconds(product_bytes * blocks, members, rate)
    again = gather if config.reshard_after_forward else 0.0

    def reduce(size: float) -> float:
        seconds = ring_seconds(4 * size, members, rate)
        if config.parallel == "hsdp":  # then every shard over the machines, all at once
            shard, link = 4 * size / members, cluster.between / cluster.per_node
            seconds += 2 * ring_seconds(shard, cluster.nodes, link)
        return seconds

    first = ring_seconds(4 * rest, members, rate) + max(forward, gather)
    last = max(backward, again + reduce(blocks)) + reduce(rest)
    return micro_steps * first + (micro_steps - 1) * max(backward, again) + last


@dataclass(frozen=True)
class Estimate:
    """What a run takes on a cluster."""

    batch: BatchPlan
    step_seconds: float
    tokens_per_second: float
    hours: float
    memory_gib: float
    """Of each GPU, at most about."""


def estimate(config: TrainConfig, model: GPTConfig, between: float) -> Estimate:
    """Time and memory of a run on the GPUs that the flags name.

    Args:
        config: the run's settings; `gpus` is set.
        model: the model's dimensions.
        between: bytes a second of a machine's link to others, on paper.

    Raises:
        ValueError: the batch does not divide.
    """
    assert config.gpus is not None
    gpu, dtype, dist_info = GPUS[config.gpu], planned_dtype(config), planned_place(config)
    chunks = loss_chunks(config, "cuda")

    def state(accumulates: bool) -> float:
        return state_bytes(config, model, dtype, chunks, dist_info, accumulates)

    per_token = activation_bytes_per_token(config, model, dtype, chunks)
    free = MEMORY_SHARE * gpu.memory_gib * 2**30 - state(accumulates=True)
    tokens = min(MAX_MICRO_BATCH_TOKENS["cuda"], int(free // per_token))
    limit = max(1, tokens // model.block_size)
    batch = split_batch(config, model.block_size, config.gpus, limit)
    tokens = batch.micro_batch_size * model.block_size
    forward, backward = pass_seconds(config, model, tokens)
    seconds = step_seconds(
        config,
        model,
        Cluster(config.gpus, config.nodes, LINK_SHARE * gpu.nvlink, LINK_SHARE * between),
        batch.grad_accum_steps,
        forward,
        backward,
        product_bytes=dtype.itemsize,
    )
    return Estimate(
        batch=batch,
        step_seconds=seconds,
        tokens_per_second=config.total_batch_size / seconds,
        hours=config.max_steps * seconds / 3600,
        memory_gib=(state(batch.grad_accum_steps > 1) + per_token * tokens) / 2**30,
    )


def pass_seconds(config: TrainConfig, model: GPTConfig, tokens: int) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward pass on one GPU, at the planned MFU.

    The backward pass takes twice as long as the forward one and, where it computes all blocks
    again, three times. What is offloaded crosses to the CPU and back while nothing computes:
    activations, and the weights as they are multiplied, which the backward pass needs as well.
    """
    gpu = GPUS[config.gpu]
    per_token = flops_per_token(model.n_params, model.n_layer, model.n_embd, model.block_size)
    forward = tokens * per_token / (config.mfu * planned_peak(config)) / 3
    backward = forward * (3 if config.activation_checkpointing == "full" else 2)
    if config.activation_offload:
        dtype, chunks = planned_dtype(config), loss_chunks(config, "cuda")
        there, here = (
            activation_bytes_per_token(
                replace(config, activation_offload=offload), model, dtype, chunks
            )
            for offload in (False, True)
        )
        copied = tokens * (there - here) + dtype.itemsize * model.n_params
        copying = copied / (LINK_SHARE * gpu.pcie)
        forward, backward = forward + copying, backward + copying
    return forward, backward


def planned_dtype(config: TrainConfig) -> torch.dtype:
    """The type of matrix products on the planned GPUs, which all have bfloat16."""
    return torch.bfloat16 if config.dtype == "auto" else DTYPES[config.dtype]


def planned_place(config: TrainConfig) -> DistInfo:
    """The place of one of the planned processes."""
    gpus = config.gpus or 1
    per_node = gpus // config.nodes
    return DistInfo(torch.device("cuda"), world_size=gpus, local_world_size=per_node)


def planned_peak(config: TrainConfig) -> float:
    """The planned GPU's FLOP/s; float32 is multiplied in TF32, at half the rate of 16 bits."""
    peak = peak_flops(GPUS[config.gpu].name)
    assert peak is not None
    return peak / 2 if planned_dtype(config) == torch.float32 else peak


def modes(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """The configuration with every `--parallel` that it can have, and the flags that say so."""
    yield "ddp", replace(config, parallel="ddp", cpu_offload=False)
    if config.dtype == "float16":
        return
    yield "fsdp", replace(config, parallel="fsdp", reshard_after_forward=True)
    zero_2 = replace(config, parallel="fsdp", reshard_after_forward=False)
    yield "fsdp --no-reshard-after-forward", zero_2
    if config.nodes > 1:
        yield "hsdp", replace(config, parallel="hsdp")


def describe_scaling(config: TrainConfig, model: GPTConfig) -> str:
    """What a run on other GPUs will take, for every `--parallel`, with what that assumes.

    Args:
        config: the run's settings; `gpus` is set.
        model: the model's dimensions.

    Raises:
        ValueError: the batch does not divide.
    """
    assert config.gpus is not None
    gpu, several = GPUS[config.gpu], config.nodes > 1
    dtype = str(planned_dtype(config)).removeprefix("torch.")
    tokens = config.total_batch_size * config.max_steps
    lines = [
        f"{model.n_params:,} parameters, context {model.block_size:,}, {tokens:,} tokens in "
        f"{config.max_steps:,} steps of {config.total_batch_size:,}",
        f"on {config.gpus} x {gpu.name}, {config.gpus // config.nodes} in each of "
        f"{config.nodes} node{'s' if several else ''}",
        "",
        f"{'--parallel':<31} {'batch':>7} {'step ms':>8} {'tokens/s':>11} {'hours':>8} "
        f"{'GPU-hours':>9} {'GiB':>6}"
        + (f" {'price':>10}" if config.gpu_hour_price else "")
        + (f" {'by Ethernet, tokens/s':>22}" if several else ""),
    ]
    for name, mode in modes(config):
        run = estimate(mode, model, INFINIBAND)
        gpu_hours = run.hours * config.gpus
        shape = f"{run.batch.micro_batch_size} x {run.batch.grad_accum_steps}"
        line = (
            f"{name:<31} {shape:>7} {1000 * run.step_seconds:>8,.1f} "
            f"{run.tokens_per_second:>11,.0f} {run.hours:>8,.1f} {gpu_hours:>9,.1f} "
            f"{run.memory_gib:>6.1f}"
        )
        if config.gpu_hour_price:
            line += f" {gpu_hours * config.gpu_hour_price:>10,.2f}"
        if several:
            line += f" {estimate(mode, model, ETHERNET).tokens_per_second:>22,.0f}"
        if run.memory_gib > gpu.memory_gib:
            line += "  does not fit"
        lines.append(line)
    between = f", {INFINIBAND * 8 / 1e9:.0f} Gb/s InfiniBand a node (Ethernet: " if several else ""
    between += f"{ETHERNET * 8 / 1e9:.0f} Gb/s)" if several else ""
    lines += [
        "",
        "batch: sequences at once x micro-steps. Assumed, not measured here:",
        f"- one GPU reaches {config.mfu:.0%} (--mfu) of its "
        f"{planned_peak(config) / 1e12:.0f} {dtype} TFLOP/s",
        f"- {LINK_SHARE:.0%} of the links' rates: {gpu.nvlink / 1e9:.0f} GB/s NVLink a GPU, "
        f"{gpu.pcie / 1e9:.0f} GB/s PCIe{between}",
        "- ddp hides its all-reduce behind the last backward pass, fsdp and hsdp all they send of "
        "blocks behind their computation; what they send of the embeddings is not hidden",
        "- no latencies, stragglers, evaluation, saving, or optimizer on the CPU (--cpu-offload)",
        "",
        describe_contexts(config, model, planned_dtype(config), planned_place(config)),
    ]
    return "\n".join(lines)
