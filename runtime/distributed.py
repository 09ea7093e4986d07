"""Multiple processes as one trainer: process group, sharding (FSDP2), reductions, agreement.

`torchrun` sets each process's rank in its environment. Without it there is a single process, for
which the collectives here do nothing.
"""

import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

from runtime.threads import usable_cores

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from model import GPT, Block
from runtime.cli import RunStopped, shell_line
from runtime.device import DeviceName, select_device

Item = TypeVar("Item")
MAX_TIMEOUT_MINUTES = 60 * 24 * 365  # stands for no limit


@dataclass(frozen=True)
class DistInfo:
    """Device and rank of this process, and the number of processes; by default the only one."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Number of processes on this machine."""


def read_dist_env(device_name: DeviceName) -> DistInfo:
    """Read this process's rank and device from `torchrun`'s environment without joining a group."""
    if "RANK" not in os.environ:  # a cluster may set WORLD_SIZE on its own
        return DistInfo(select_device(device_name))
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("RANK is set but WORLD_SIZE is not: start with torchrun, or unset RANK")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    return DistInfo(
        select_device(device_name, local_rank),
        rank=int(os.environ["RANK"]),
        local_rank=local_rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )


def train_command(*flags: object) -> str:
    """Return a command that trains with these flags on the current number of processes."""
    given, local = shell_line(*flags), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if "RANK" not in os.environ:
        return f"python train_gpt2.py {given}"
    if local != os.environ.get("WORLD_SIZE", local):  # the flags of torchrun are unknown
        return f"the same command with {given}"
    return f"torchrun --standalone --nproc_per_node={local} train_gpt2.py {given}"


@contextmanager
def setup_distributed(
    device_name: DeviceName = "auto", cpu_offload: bool = False, timeout_minutes: float = 30.0
) -> Iterator[DistInfo]:
    """Join the process group that `torchrun` describes, if any, while the body runs.

    GPUs use NCCL and CPUs use gloo; with `cpu_offload`, GPU runs use gloo for their CPU tensors.
    Neither backend authenticates connections. Therefore the processes of a single machine
    communicate over its loopback interface, unless the environment names another one.

    A process that waits longer than `timeout_minutes` for the others in a collective exits; 0 = no
    limit. A DDP model must not outlive the body: build it in a function that the body calls.

    Raises:
        RunStopped: another process has exited or cannot be reached.
        ValueError: the device is not available, or does not support several processes.
    """
    dist_info = read_dist_env(device_name)
    device = dist_info.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:  # not started by torchrun
        yield dist_info
        return
    # Accept connections only from this machine. (Not on Windows, where interface names vary.)
    if dist_info.local_world_size == dist_info.world_size and os.name == "posix":
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if device.type == "mps" or (device.type == "cuda" and not dist.is_nccl_available()):
        raise ValueError(  # torch for Windows has no NCCL
            f"--device {device.type} runs one process: start without torchrun, or use --device cpu"
        )
    if device.type == "cpu":  # torchrun sets OMP_NUM_THREADS to 1 if it is not set
        threads = int(os.environ.get("OMP_NUM_THREADS", 1))
        torch.set_num_threads(threads if threads > 1 else usable_cores())
    timeout = timedelta(minutes=timeout_minutes or MAX_TIMEOUT_MINUTES)
    try:
        if device.type == "cuda" and not cpu_offload:
            dist.init_process_group("nccl", timeout=timeout, device_id=device)
        else:
            backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, timeout=timeout)
        yield dist_info
        # Not after an error: other ranks may be waiting in a collective until torchrun ends them.
        gc.collect()  # frees DDP models, whose gloo threads can abort the process's exit
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        if not is_lost_process(error):
            raise
        raise RunStopped(
            "another process has exited or cannot be reached: all ports must be open between the "
            "machines (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)"
        ) from None


def build_sharded(
    build: Callable[[], GPT],
    dist_info: DistInfo,
    *,
    replicate: bool,
    reshard_after_forward: bool,
    cpu_offload: bool,
    dtype: torch.dtype,
) -> GPT:
    """Build a GPT whose parameters, gradients and optimizer moments are sharded (FSDP2).

    Each block is sharded as soon as it is created, so that no process ever holds all blocks. The
    parameters keep the values from the constructors, which must be the same on every rank.

    A block's parameters are gathered before its forward pass. With `reshard_after_forward`, they
    are freed after it and gathered again for the backward pass (ZeRO-3; Rajbhandari et al. 2020,
    section 5); otherwise they stay gathered (ZeRO-2). Embeddings and the last LayerNorm are
    gathered once per forward pass. With `replicate`, the model is sharded within each machine and
    replicated across machines (HSDP). On GPUs, blocks are gathered in `dtype`.
    """
    # Imported here because the import takes more than a second.
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
    # A block's inputs are not cast: `ops.residual_stream` chooses their dtype. On a CPU, blocks
    # are gathered in float32, because LayerNorm does not accept other gains under CPU autocast.
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=dtype if dist_info.device.type == "cuda" else torch.float32,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )

    def shard_block(_parent: nn.Module, _name: str, module: nn.Module) -> None:
        if isinstance(module, Block):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=mixed_precision,
                offload_policy=offload,
            )

    hook = register_module_module_registration_hook(shard_block)
    try:
        model = build()
    finally:
        hook.remove()
    # The root holds the tied embedding and LM head. Like an unsharded model, it is gathered in
    # float32, because HellaSwag and sampling need its logits in full precision.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, offload_policy=offload)
    register_fsdp_forward_method(model, "hidden_states")
    return model


def distribute_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of `full`, which every process has, placed like `like`."""
    if not hasattr(like, "device_mesh"):  # not a DTensor
        return full
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    shard = distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return shard.to(like.device)  # with `cpu_offload`, `distribute_tensor` moved it to the GPU


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, which every process must do; return other tensors unchanged."""
    return cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass leaves gathered."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


def set_gradient_sync(models: Iterable[nn.Module], enabled: bool) -> None:
    """Set whether the next backward pass averages gradients over ranks or only accumulates them."""
    for model in models:  # DDP wraps the trained model, FSDP2 the raw model
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = enabled
        elif hasattr(model, "set_requires_gradient_sync"):
            cast(Any, model).set_requires_gradient_sync(enabled)


def sync_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0, which are the ones that are saved, to every process."""
    if world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this is rank 0, which prints and writes; works without a process group."""
    return os.environ.get("RANK", "0") == "0"


def _device() -> str:
    """Return the device of the process group's tensors; `cuda` is the current GPU."""
    return "cuda" if "nccl" in dist.get_backend_config() else "cpu"


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum `tensor` over all processes, in place; every process gets the result."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def average_over_ranks(*values: Tensor | float) -> list[float]:
    """Return the mean of each scalar over all processes, on every process; wait for the device."""
    device = next(value.device for value in values if isinstance(value, Tensor))
    scalars = [
        value if isinstance(value, Tensor) else torch.full((), float(value), device=device)
        for value in values
    ]
    return (all_reduce_sum(torch.stack(scalars)) / world_size()).tolist()


def all_reduce_max(value: int) -> int:
    """Return the largest `value` of all processes, on every process."""
    if world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.int64, device=_device())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def gather_text(text: str) -> list[str]:
    """Return every process's `text`, in rank order, on every process.

    `all_gather_object` is not used because it would unpickle data from other machines.
    """
    if world_size() == 1:
        return [text]
    encoded = text.encode(errors="surrogateescape")
    data = torch.tensor(list(encoded), dtype=torch.uint8, device=_device())
    longest = max(1, all_reduce_max(len(data)))
    padded = nn.functional.pad(data, (0, longest - len(data)))  # with NULs, which no text contains
    texts = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(texts, padded)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="surrogateescape") for each in texts]


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """If any process raises a user error (OSError, ValueError) in the body, end all of them.

    Otherwise the other processes would wait for it in the next collective. The body must not
    contain a collective. Rank 0 raises its error or, if another rank failed, a ValueError with that
    rank's message. The other ranks exit with code 2.
    """
    error = None
    try:
        yield
    except (OSError, ValueError) as caught:
        error = caught
    messages = gather_text("" if error is None else str(error) or repr(error))
    if not any(messages):
        return
    if not is_main():
        raise SystemExit(2)
    if error is not None:
        raise error
    rank = next(rank for rank, message in enumerate(messages) if message)
    raise ValueError(f"on rank {rank}: {messages[rank]}")


def check_same_on_all_ranks(what: str, lines: Sequence[str]) -> None:
    """End every process if `lines`, which describe `what`, differ between processes."""
    texts = gather_text("\n".join(lines))
    with raise_on_all_ranks():
        for rank, text in enumerate(texts):
            for line, main in itertools.zip_longest(text.split("\n"), texts[0].split("\n")):
                if line != main:
                    raise ValueError(
                        f"{what} differ: rank {rank} has {line or 'nothing'}, "
                        f"rank 0 has {main or 'nothing'}"
                    )


def rank_batches(
    batches: Sequence[Item],
    dist_info: DistInfo,
    before_batch: Callable[[], object] = lambda: None,
    title: str | None = None,
) -> Iterator[tuple[Item, bool]]:
    """Split an evaluation's batches over the ranks; every rank gets the same number.

    A sharded model needs every rank in every forward pass. Ranks that have no batch left in the
    last round compute the last batch again and do not count it.

    `before_batch` is called before every round; if it raises, it must raise on all ranks. With a
    `title`, rank 0 shows a progress bar on a terminal.

    Yields:
        A batch, and whether to count its result.
    """
    starts = range(0, len(batches), dist_info.world_size)
    disable = None if title and is_main() else True  # None: unless stderr is a terminal
    for start in tqdm(starts, title, leave=False, unit="batch", disable=disable):
        before_batch()
        index = start + dist_info.rank
        yield batches[min(index, len(batches) - 1)], index < len(batches)


def is_lost_process(error: Exception) -> bool:
    """Return whether a collective failed because another process exited or is unreachable."""
    is_of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return is_of_gloo or isinstance(error, dist.DistError)


def barrier() -> None:
    """Wait until every process has reached this point."""
    if world_size() > 1:
        dist.barrier()


def print0(line: str) -> None:
    """Print a line on rank 0, above an evaluation's progress bar if there is one."""
    if not is_main():
        return
    with suppress(OSError):  # a full disk or a closed pipe must not end a run
        tqdm.write(f"{line}\n", end="")
        sys.stdout.flush()  # log files and pipes get the line immediately
