"""Time, memory and cost of a run on GPUs that this machine does not have: `--plan --gpus`."""

from dataclasses import replace
from typing import NamedTuple

import torch

from model import GPTConfig
from runtime.device import DTYPES, select_dtype
from runtime.distributed import read_dist_env
from runtime.metrics import flops_per_token, peak_flops
from training.config import TrainConfig
from training.memory import (
    BatchPlan,
    MemoryModel,
    describe_contexts,
    describe_plan,
    gpus,
    plan_batch,
    split_batch,
)


class Gpu(NamedTuple):
    """A kind of GPU, from NVIDIA's data sheets; rates are in bytes per second and direction."""

    name: str  # as the driver gives it; see `metrics.peak_flops`
    memory_gib: float  # what a program can have
    nvlink: float  # to the other GPUs of its machine
    pcie: float  # to the CPU's memory


GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 79, 300e9, 32e9),
    "H100": Gpu("NVIDIA H100 80GB HBM3", 79, 450e9, 64e9),
    "H200": Gpu("NVIDIA H200", 139, 450e9, 64e9),
}
INFINIBAND, ETHERNET = 400e9 / 8, 100e9 / 8  # of a machine, per direction: NDR; 100GbE
LINK_SHARE = 0.7  # of a link's rate, what a collective or a copy reaches


class Cluster(NamedTuple):
    """Processes and their links, in bytes per second and direction."""

    processes: int
    nodes: int  # machines with equally many processes each
    within: float  # between a process and the others on its machine
    between: float  # between a machine, all its processes together, and the others


def ring_seconds(size: float, members: int, rate: float) -> float:
    """Time to gather `size` bytes from all members on each, or to reduce and scatter them.

    Every member passes on all but its own part. An all-reduce is both, and takes twice as long.
    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms.
    """
    return (members - 1) / members * size / rate


def step_seconds(
    config: TrainConfig,
    model_config: GPTConfig,
    cluster: Cluster,
    micro_steps: int,
    forward: float,
    backward: float,
) -> float:
    """The seconds of an optimizer step, from those of a micro-batch's passes on one process alone.

    Communication that runs while a pass computes costs only the time by which it is longer. DDP's
    all-reduce runs during the last backward pass, except for the tied embedding's gradient, which
    is complete only at its end. FSDP gathers and reduces blocks while others compute; the
    embeddings are gathered before a pass and reduced after it.
    """
    members, nodes, rate, between = cluster
    per_node, hybrid = members // nodes, config.parallel == "hsdp"
    if hybrid:
        members = per_node
    elif nodes > 1:  # a ring of all processes crosses each machine's link once per direction
        rate = min(rate, between)

    def reduce(size: float) -> float:
        seconds = ring_seconds(4 * size, members, rate)
        if hybrid:  # then each shard over the machines, all at once
            seconds += 2 * ring_seconds(4 * size / members, nodes, between / per_node)
        return seconds

    blocks = model_config.n_layer * model_config.block_params
    rest = model_config.n_params - blocks
    if not config.is_sharded:
        exposed = max(2 * reduce(model_config.n_params) - backward, 2 * reduce(rest))
        return micro_steps * (forward + backward) + exposed
    gather = ring_seconds(planned_dtype(config).itemsize * blocks, members, rate)
    gather_again = gather if config.reshard_after_forward else 0.0
    first = ring_seconds(4 * rest, members, rate) + max(forward, gather)
    last = max(backward, gather_again + reduce(blocks)) + reduce(rest)
    return micro_steps * first + (micro_steps - 1) * max(backward, gather_again) + last


class Estimate(NamedTuple):
    """What a run takes on a cluster."""

    batch: BatchPlan
    step_seconds: float
    memory_gib: float  # of each GPU, at most about


def estimate(config: TrainConfig, model_config: GPTConfig, between: float) -> Estimate:
    """Time and memory on the GPUs that the flags name, by a link of `between` bytes per second.

    Raises:
        ValueError: the batch does not divide.
    """
    assert config.gpus is not None
    gpu, run = GPUS[config.gpu], planned_memory(config, model_config)
    limit = run.largest_micro_batch(gpu.memory_gib)
    batch = split_batch(config, model_config.block_size, config.gpus, limit)
    passes = pass_seconds(config, model_config, batch.micro_batch_size)
    links = LINK_SHARE * gpu.nvlink, LINK_SHARE * between
    cluster = Cluster(config.gpus, config.nodes, *links)
    seconds = step_seconds(config, model_config, cluster, batch.grad_accum_steps, *passes)
    memory = run.estimate(batch.micro_batch_size, batch.grad_accum_steps > 1)
    return Estimate(batch, seconds, sum(memory))


def pass_seconds(
    config: TrainConfig, model_config: GPTConfig, micro_batch_size: int
) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward pass on one GPU, at the planned MFU.

    The backward pass takes twice as long as the forward pass, or three times where it computes all
    blocks again. Offloaded tensors cross to the CPU and back while nothing computes: saved
    activations, and the weights in the dtype of the products, which the backward pass needs too.
    """
    tokens = micro_batch_size * model_config.block_size
    per_token = flops_per_token(model_config)
    forward = tokens * per_token / (config.mfu * planned_peak(config)) / 3
    backward = forward * (3 if config.activation_checkpointing == "full" else 2)
    if config.activation_offload:
        on_gpu, offloaded = (
            planned_memory(replace(config, activation_offload=offload), model_config)
            for offload in (False, True)
        )
        saved = on_gpu.activation_bytes_per_token() - offloaded.activation_bytes_per_token()
        copied = tokens * saved + on_gpu.dtype.itemsize * model_config.n_params
        copying = copied / (LINK_SHARE * GPUS[config.gpu].pcie)
        forward, backward = forward + copying, backward + copying
    return forward, backward


def planned_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of matrix products on the planned GPUs, which all have bfloat16."""
    return torch.bfloat16 if config.dtype == "auto" else DTYPES[config.dtype]


def planned_memory(config: TrainConfig, model_config: GPTConfig) -> MemoryModel:
    """The memory of a process on one of the planned GPUs."""
    dist_info = gpus(config.gpus or 1, config.nodes)
    return MemoryModel(config, model_config, planned_dtype(config), dist_info)


def planned_peak(config: TrainConfig) -> float:
    """The planned GPU's FLOP/s; float32 runs in TF32, at half the rate of 16 bits."""
    peak = peak_flops(GPUS[config.gpu].name)
    assert peak is not None
    return peak / 2 if planned_dtype(config) == torch.float32 else peak


def modes(config: TrainConfig) -> dict[str, TrainConfig]:
    """By its flags, every `--parallel` that the configuration can have."""
    ddp = replace(config, parallel="ddp", cpu_offload=False)
    if config.dtype == "float16":
        return {"ddp": ddp}
    fsdp = replace(config, parallel="fsdp", reshard_after_forward=True)
    zero_2 = replace(fsdp, reshard_after_forward=False)
    modes = {"ddp": ddp, "fsdp": fsdp, "fsdp --no-reshard-after-forward": zero_2}
    return modes | ({"hsdp": replace(config, parallel="hsdp")} if config.nodes > 1 else {})


def print_plan(config: TrainConfig, model_config: GPTConfig) -> None:
    """Print on rank 0 what a run would take: on this machine or, with `--gpus`, on those.

    Raises:
        ValueError: the batch does not divide, or the device is missing.
    """
    dist_info = read_dist_env("cpu" if config.gpus else config.device)
    if not dist_info.is_main:
        return
    if config.gpus:
        print(describe_cluster(config, model_config))
        return
    batch = plan_batch(config, model_config, dist_info)
    dtype = select_dtype(config.dtype, dist_info.device)
    print(describe_plan(config, model_config, batch, dist_info), end="\n\n")
    print(describe_contexts(config, model_config, dtype, dist_info))


def describe_cluster(config: TrainConfig, model_config: GPTConfig) -> str:
    """What a run takes on other GPUs with every `--parallel`, and what that assumes."""
    assert config.gpus is not None
    gpu, several = GPUS[config.gpu], config.nodes > 1
    dtype, dist_info = planned_dtype(config), gpus(config.gpus, config.nodes)
    tokens = config.total_batch_size * config.max_steps
    lines = [
        f"{model_config.n_params:,} parameters, context {model_config.block_size:,}, {tokens:,} "
        f"tokens in {config.max_steps:,} steps of {config.total_batch_size:,}",
        f"on {config.gpus} x {gpu.name}, {config.gpus // config.nodes} in each of "
        f"{config.nodes} node{'s' if several else ''}",
        "",
        f"{'--parallel':<31} {'batch':>7} {'step ms':>8} {'tokens/s':>11} {'hours':>8} "
        f"{'GPU-hours':>9} {'GiB':>6}"
        + (f" {'price':>10}" if config.gpu_hour_price else "")
        + (f" {'by Ethernet, tokens/s':>22}" if several else ""),
    ]
    for name, mode in modes(config).items():
        batch, seconds, gib = estimate(mode, model_config, INFINIBAND)
        hours = config.max_steps * seconds / 3600
        line = (
            f"{name:<31} {f'{batch.micro_batch_size} x {batch.grad_accum_steps}':>7} "
            f"{1000 * seconds:>8,.1f} {config.total_batch_size / seconds:>11,.0f} {hours:>8,.1f} "
            f"{hours * config.gpus:>9,.1f} {gib:>6.1f}"
        )
        if config.gpu_hour_price:
            line += f" {hours * config.gpus * config.gpu_hour_price:>10,.2f}"
        if several:
            slower = estimate(mode, model_config, ETHERNET).step_seconds
            line += f" {config.total_batch_size / slower:>22,.0f}"
        lines.append(line + ("  does not fit" if gib > gpu.memory_gib else ""))
    rates = f"{gpu.nvlink / 1e9:.0f} GB/s NVLink per GPU, {gpu.pcie / 1e9:.0f} GB/s PCIe"
    if several:
        rates += f", {INFINIBAND * 8 / 1e9:.0f} Gb/s InfiniBand per node"
        rates += f" (Ethernet: {ETHERNET * 8 / 1e9:.0f} Gb/s)"
    lines += [
        "",
        "batch: sequences at once x micro-steps. Assumed, not measured here:",
        f"- one GPU reaches {config.mfu:.0%} (--mfu) of its "
        f"{planned_peak(config) / 1e12:.0f} {str(dtype).removeprefix('torch.')} TFLOP/s",
        f"- {LINK_SHARE:.0%} of the links' rates: {rates}",
        "- ddp hides its all-reduce behind the last backward pass, fsdp and hsdp hide their "
        "communication of blocks behind computation; that of the embeddings is not hidden",
        "- no latencies, stragglers, evaluation, saving, or optimizer on the CPU (--cpu-offload)",
        "",
        describe_contexts(config, model_config, dtype, dist_info),
    ]
    return "\n".join(lines)
