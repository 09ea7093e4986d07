"""Several processes as one trainer: the group, the wrapping, the reductions.

Run by `torchrun`, each process finds its place in the environment; run plainly, there is one
process and every function here is free.
"""

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from runtime.device import DeviceName, select_device

Item = TypeVar("Item")


@dataclass(frozen=True)
class DistInfo:
    """This process's place among all of them."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Processes on this machine."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes."""
        return self.rank == 0


def read_dist_env(device_name: DeviceName) -> DistInfo:
    """This process's place by `torchrun`'s word for it, without joining the others.

    Raises:
        ValueError: the device is missing.
    """
    rank, local_rank, world_size, local_world_size = (
        int(os.environ.get(name, default))
        for name, default in (
            ("RANK", 0),
            ("LOCAL_RANK", 0),
            ("WORLD_SIZE", 1),
            ("LOCAL_WORLD_SIZE", 1),
        )
    )
    device = select_device(device_name, local_rank)
    return DistInfo(device, rank, local_rank, world_size, local_world_size)


@contextmanager
def setup_distributed(
    device_name: DeviceName = "auto", cpu_offload: bool = False
) -> Iterator[DistInfo]:
    """Join the process group that `torchrun` describes, if any, for the length of the body.

    NCCL joins GPUs, gloo joins CPUs. A wrapped model must not outlive the body: make it in a
    function that the body calls.

    Args:
        device_name: see `select_device`; with CUDA each process takes the GPU of its local rank.
        cpu_offload: GPUs have tensors on the CPU to reduce and gather, too.

    Yields:
        This process's context.

    Raises:
        ValueError: the device is missing, or cannot be shared by several processes.
    """
    dist_info = read_dist_env(device_name)
    device = dist_info.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:  # not started by torchrun
        yield dist_info
        return
    if device.type == "mps":
        raise ValueError("--device mps runs one process: leave torchrun out, or use --device cpu")
    if device.type == "cpu":  # torchrun allows each process one thread, however many cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist_info.local_world_size))
    if device.type == "cuda" and cpu_offload:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    elif device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield dist_info
    # Not after an error, when others may wait in a collective: torchrun ends them.
    gc.collect()  # a wrapped model keeps gloo's threads, which can abort the interpreter's exit
    dist.barrier()
    dist.destroy_process_group()


def wrap_model(model: nn.Module, dist_info: DistInfo) -> nn.Module:
    """Average gradients over all processes (DDP); a lone process keeps the model as it is."""
    if dist_info.world_size == 1:
        return model
    device_ids = [dist_info.device.index] if dist_info.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def shard_model(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    dist_info: DistInfo,
    *,
    methods: Sequence[str],
    replicate: bool,
    reshard_after_forward: bool,
    cpu_offload: bool,
    dtype: torch.dtype,
) -> None:
    """Share parameters, gradients and optimizer state out over all processes (FSDP2), in place.

    A block is gathered before it computes and, with `reshard_after_forward`, again before its
    backward pass (ZeRO-3; Rajbhandari et al. 2020, section 5); without, it stays (ZeRO-2). What
    is not in a block, the embeddings and the last LayerNorm, is gathered once a pass.

    Args:
        model: on the meta device, so that no process ever holds it whole.
        blocks: the parts that are gathered one after the other.
        dist_info: rank, world size and device of this process.
        methods: of the model that compute, besides `forward`.
        replicate: share out within a machine only, and replicate over machines (HSDP).
        reshard_after_forward: free gathered blocks between forward and backward pass.
        cpu_offload: keep the shards and the optimizer's state in the CPU's memory.
        dtype: blocks are gathered and computed in it; gradients are reduced in float32.
    """
    # Here, because they take more than a second to import.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    shape: tuple[int, ...] = (dist_info.world_size,)
    if replicate:
        shape = (dist_info.world_size // dist_info.local_world_size, dist_info.local_world_size)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(dist_info.device.type, shape, mesh_dim_names=names)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    # The residual stream enters a block as it is, float32: the block's own products are cast.
    in_dtype = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=in_dtype,
            offload_policy=offload,
        )
    # Float32 as without sharding: scores are read from the vocabulary matrix in full precision.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, offload_policy=offload)
    for method in methods:
        register_fsdp_forward_method(model, method)
    model.to_empty(device="cpu" if cpu_offload else dist_info.device)


def distribute_like(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that all have, laid out as `like` is."""
    if not hasattr(like, "device_mesh"):  # no DTensor
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    whole = whole.to(like.device)
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)


def reshard(model: nn.Module) -> None:
    """Free what a pass without a backward pass has left gathered of a sharded model."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor whole; every process must ask for it. Others as they are."""
    return cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients down to a global norm of at most `max_norm`; returns what it was."""
    return full_tensor(nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Choose whether the next backward pass averages gradients or only accumulates them."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        cast(Any, model).set_requires_gradient_sync(enabled)


def all_reduce_sum(tensor: Tensor, dist_info: DistInfo) -> Tensor:
    """Sum `tensor` over all processes, in place; every process gets the result."""
    if dist_info.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_mean(tensor: Tensor, dist_info: DistInfo) -> Tensor:
    """Average a float `tensor` over all processes, in place; every process gets the result."""
    return all_reduce_sum(tensor, dist_info).div_(dist_info.world_size)


def all_reduce_max(value: int, dist_info: DistInfo) -> int:
    """The largest `value` of all processes, on every process."""
    if dist_info.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.int64, device=dist_info.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def gather_text(text: str, dist_info: DistInfo) -> list[str]:
    """Every process's `text`, in the order of their ranks, on every process."""
    if dist_info.world_size == 1:
        return [text]
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=dist_info.device)
    longest = max(1, all_reduce_max(len(data), dist_info))
    padded = nn.functional.pad(data, (0, longest - len(data)))  # by NULs, which text has none of
    full_tensor = [torch.empty_like(padded) for _ in range(dist_info.world_size)]
    dist.all_gather(full_tensor, padded)
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in full_tensor]


@contextmanager
def raise_on_all_ranks(dist_info: DistInfo) -> Iterator[None]:
    """Where the body raises what a user can cause on one process, end every process.

    Without this the others would wait for it, in the next collective. The body must have none.

    Raises:
        ValueError: on the main process, with the message of the first that met an error.
        SystemExit: on the others, exit code 2.
    """
    error = None
    try:
        yield
    except (OSError, ValueError) as caught:
        error = caught
    messages = gather_text("" if error is None else str(error) or repr(error), dist_info)
    if not any(messages):
        return
    if not dist_info.is_main:
        raise SystemExit(2)
    if error is not None:
        raise error
    rank = next(rank for rank, message in enumerate(messages) if message)
    raise ValueError(f"on rank {rank}: {messages[rank]}")


def check_same_on_all_ranks(what: str, lines: Sequence[str], dist_info: DistInfo) -> None:
    """End every process if `lines`, which describe `what`, are not the same on all of them.

    Raises:
        ValueError: on the main process, naming the first difference.
        SystemExit: on the others, exit code 2.
    """
    texts = gather_text("\n".join(lines), dist_info)
    with raise_on_all_ranks(dist_info):
        for rank, text in enumerate(texts):
            pairs = itertools.zip_longest(text.split("\n"), texts[0].split("\n"))
            for there, here in pairs:
                if there != here:
                    raise ValueError(
                        f"{what} differ: rank {rank} has {there or 'nothing'}, "
                        f"rank 0 has {here or 'nothing'}"
                    )


def rank_batches(
    batches: Sequence[Item], dist_info: DistInfo, between: Callable[[], object] = lambda: None
) -> Iterator[tuple[Item, bool]]:
    """Split an evaluation's batches over the ranks, equally many to each.

    A model whose parameters are sharded needs every rank in every forward pass. In the last round
    some ranks have no batch left: they get one again, to compute and not to count.

    Args:
        batches: the same ones on every rank.
        dist_info: this process.
        between: called before every round, on all ranks; it may raise, on all of them alike.

    Yields:
        A batch, and whether to count its result.
    """
    for start in range(0, len(batches), dist_info.world_size):
        between()
        place = start + dist_info.rank
        yield batches[min(place, len(batches) - 1)], place < len(batches)


def is_lost_process(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is gone or unreachable."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def broadcast_int(value: int, dist_info: DistInfo) -> int:
    """The main process's `value`, on every process."""
    if dist_info.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.int64, device=dist_info.device)
    dist.broadcast(tensor, src=0)
    return int(tensor)


def barrier(dist_info: DistInfo) -> None:
    """Wait until every process has come here."""
    if dist_info.world_size > 1:
        dist.barrier()


def print0(dist_info: DistInfo, line: str) -> None:
    """Print a line once, above the progress bar if there is one."""
    if not dist_info.is_main:
        return
    with suppress(OSError):  # a run is worth more than its log on a full disk or a closed pipe
        tqdm.write(line)
        sys.stdout.flush()  # a log file or a pipe is to have it at once
