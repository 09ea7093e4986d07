"""Multiple processes: process group, reductions, agreement.

`torchrun` sets each process's rank in its environment. Without it there is a single process, for
which the collectives here do nothing.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from runtime.threads import usable_cores

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from runtime.cli import RANK_0_SECONDS
from runtime.device import DeviceName, select_device
from runtime.errors import LOST_PROCESS, RunStopped, UserError, is_user_error

Item = TypeVar("Item")
# Variables in which srun and mpirun set the number of processes and the number of each process.
LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}


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
        check_launcher()
        return DistInfo(select_device(device_name))
    if "WORLD_SIZE" not in os.environ:
        raise UserError("RANK is set but WORLD_SIZE is not: start with torchrun, or unset RANK")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = select_device(device_name, local_rank)
    return DistInfo(device, rank, local_rank, world_size, local_world_size)


def check_launcher() -> None:
    """Raise if srun or mpirun started several processes, each of which would train alone.

    Only their first process prints the error.
    """
    for name, rank in LAUNCHERS.items():
        if (count := os.environ.get(name, "")) in ("", "0", "1"):
            continue
        if os.environ.get(rank, "0") != "0":
            time.sleep(RANK_0_SECONDS)
            raise SystemExit(2)
        fix = "start one process per machine, and in it torchrun (docs/many_machines.md)"
        other_fix = f"unset {name} to train {count} separate models"
        raise UserError(f"{name} is {count}: {fix}, or {other_fix}")


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
        UserError: the device is not available or does not support several processes, or the
            environment lacks an address, or its port is in use.
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
        fix = "start without torchrun, or use --device cpu"  # torch for Windows has no NCCL
        raise UserError(f"--device {device.type} runs one process: {fix}")
    if device.type == "cpu":  # torchrun sets OMP_NUM_THREADS to 1 if it is not set
        threads = int(os.environ.get("OMP_NUM_THREADS", 1))
        torch.set_num_threads(threads if threads > 1 else usable_cores())
    timeout = timedelta(minutes=timeout_minutes or 60 * 24 * 365)  # a year stands for no limit
    try:
        gpu_backend = "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"
        backend = gpu_backend if device.type == "cuda" else "gloo"
        device_id = device if backend == "nccl" else None
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        yield dist_info
        # Not after an error: other ranks may be waiting in a collective until torchrun ends them.
        gc.collect()  # frees DDP models, whose gloo threads can abort the process's exit
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        is_of_address = isinstance(error, ValueError) or "server socket" in str(error)
        if is_of_address and not dist.is_initialized():
            fix = "start with torchrun, or set MASTER_ADDR, and MASTER_PORT to a free port"
            raise UserError(f"the processes cannot connect ({error}): {fix}") from None
        if not is_lost_process(error):
            raise
        raise RunStopped(LOST_PROCESS) from None


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
    """If any process raises an error in the body, end all of them.

    Otherwise the other processes would wait for it in the next collective. The body must not
    contain a collective. Rank 0 raises the first user error, and the other ranks exit with code 2.
    An error that is not a user error is raised where it happened, with its traceback.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    code = "2" if is_user_error(error) else "1"
    rank = dist.get_rank() if dist.is_initialized() else 0
    text = "" if error is None else f"{code} on rank {rank}: {str(error) or repr(error)}"
    failures = sorted(filter(None, gather_text(text)))  # with code 1 first
    if error is not None and (code == "1" or is_main()):
        raise error
    if failures:
        code, _, message = failures[0].partition(" ")
        if code == "1":
            time.sleep(RANK_0_SECONDS)  # after the first exit, torchrun ends the other ranks
        elif is_main():
            raise UserError(message)
        raise SystemExit(int(code))


def check_same_on_all_ranks(what: str, lines: Sequence[str], fix: str = "") -> None:
    """End every process if `lines`, which describe `what`, differ between processes."""
    texts = gather_text("\n".join(lines))
    with raise_on_all_ranks():
        for rank, text in enumerate(texts):
            for line, main in zip(text.split("\n"), texts[0].split("\n"), strict=True):
                if line != main:
                    raise UserError(f"{what} differ: rank {rank} has {line}, rank 0 {main}{fix}")


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
    if is_main():
        with suppress(OSError):  # a full disk or a closed pipe must not end a run
            tqdm.write(f"{line}\n", end="")
            sys.stdout.flush()  # log files and pipes get the line immediately
