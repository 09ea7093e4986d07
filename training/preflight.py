"""The checks of `--preflight`: can this run start on these machines? Every run makes the second."""

import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from corpus.shards import Manifest, verify_shards
from dataloader import open_data
from runtime.cli import RunStopped, print_error
from runtime.device import device_name, select_dtype, synchronize
from runtime.distributed import (
    DistInfo,
    all_reduce_sum,
    barrier,
    check_same_on_all_ranks,
    gather_text,
    is_lost_process,
    print0,
    raise_on_all_ranks,
    setup_distributed,
)
from runtime.files import sha256_of
from runtime.trackers import check_installed
from training.config import TrainConfig
from training.memory import CHECKPOINT_BYTES_PER_PARAMETER
from training.run_dir import check_usable, choose_run_dir, model_dimensions

PATIENCE_SECONDS = 120  # a check that takes longer is waiting for a process that hangs
REDUCED_BYTES, ROUNDS = 64 << 20, 5
CLOCK_WARNING_SECONDS, CLOCK_LIMIT_SECONDS = 1.0, 60.0
CODE_FOLDERS = ("corpus", "runtime", "training")  # besides the scripts of the root
ADVICE = {
    "network": "machines must reach each other on all ports (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)",
    "software": "install the same Python, torch and scripts everywhere, and give the same flags "
    "(--resume takes those of its checkpoint)",
    "clocks": "have them set by NTP",
    "data": "give every machine the same files in --data-dir",
    "disk": "give an --out-dir that all machines share, with room for checkpoints",
}


def run_preflight(config: TrainConfig, checkpoint: Path | None) -> None:
    """Join the other processes and make every check; each that passes prints a line.

    Raises:
        ValueError: a check failed; the message names it, and what to do.
        RunStopped: another process is gone or cannot be reached.
    """
    with ExitStack() as stack:
        with explaining("network"):
            dist_info = stack.enter_context(setup_distributed(config.device, config.cpu_offload))
            print0(f"network   {check_network(dist_info)}")
        print0(f"software  {check_software(config, dist_info)}")
        with explaining("clocks"):
            print0(f"clocks    {check_clocks()}")
        with explaining("data", patient=True):  # reading or hashing it all may take long
            print0(f"data      {check_data(config, dist_info)}")
        run_dir = choose_run_dir(config, checkpoint)
        with raise_on_all_ranks():
            check_usable(run_dir, config, checkpoint)
        with explaining("disk"):
            found = check_disk(run_dir.parent, config, checkpoint, dist_info)
            print0(f"disk      {found}")


@contextmanager
def explaining(check: str, patient: bool = False) -> Iterator[None]:
    """Name the check that fails in the body and say what to do; end one that waits too long.

    A `patient` check ends only at the process group's own timeout.
    """

    def give_up() -> None:
        waited = f"waited {PATIENCE_SECONDS} s for another process"
        print_error(f"stopped: {check}: {waited}: {ADVICE[check]}")
        os._exit(1)  # the main thread is in a collective, which no exception reaches

    timer = threading.Timer(PATIENCE_SECONDS, give_up)
    if not patient:
        timer.start()
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{check}: {error}: {ADVICE[check]}") from None
    except RuntimeError as error:
        if is_lost_process(error):
            raise RunStopped(f"{check}: another process is gone: {ADVICE[check]}") from None
        raise
    finally:
        timer.cancel()


def check_network(dist_info: DistInfo) -> str:
    """Sum a tensor over all processes; the bandwidth is that of each link of a ring."""
    n, device = dist_info.world_size, dist_info.device
    tensor, seconds = torch.empty(REDUCED_BYTES // 4, device=device), []
    for _ in range(1 + ROUNDS):  # the first round makes the connections
        tensor.fill_(dist_info.rank + 1)
        barrier()
        synchronize(device)
        start = time.perf_counter()
        all_reduce_sum(tensor)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    with raise_on_all_ranks():
        if not torch.all(tensor == n * (n + 1) / 2):
            raise ValueError("an all-reduce gave a wrong sum")
    place = f"{n} x {device_name(device)}, {dist_info.local_world_size} per machine"
    median, size = statistics.median(seconds[1:]), f"{REDUCED_BYTES >> 20} MiB"
    bandwidth = 2 * (n - 1) / n * REDUCED_BYTES / median / 1e9
    timed = f"all-reduce of {size} in {median * 1e3:.1f} ms, {bandwidth:.2f} GB/s"
    return f"{place}: {timed}" if n > 1 else place


def check_software(config: TrainConfig, dist_info: DistInfo) -> str:
    """Check that Python, torch, the scripts and the flags are the same on all ranks.

    Every run begins with it: ranks that differ would train different weights, without a word, or
    wait for each other in different collectives. Rank 0 must also have the trackers' packages.

    Raises:
        ValueError: they differ; the message names the first difference. Or a package is missing.
        SystemExit: the same, on the other ranks.
        RunStopped: another process is gone.
    """
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions.append(str(select_dtype(config.dtype, dist_info.device)).removeprefix("torch."))
    root = Path(__file__).parent.parent
    scripts = sorted(path for part in (".", *CODE_FOLDERS) for path in (root / part).glob("*.py"))
    hashes = [f"{path.relative_to(root)} of SHA-256 {sha256_of(path)[:12]}" for path in scripts]
    settings = {"resume": config.resume} | config.saved()
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()]
    with explaining("software"):
        check_same_on_all_ranks("processes", [*versions, *hashes, *flags])
    with raise_on_all_ranks():
        check_installed(config.logger if dist_info.is_main else ())
    return f"{', '.join(versions)}, {len(scripts)} scripts, {len(flags)} flags"


def check_clocks() -> str:
    """Check that clocks agree: `--resume auto` compares the times of files."""
    barrier()  # all ranks leave it within milliseconds
    times = [int(each) / 1e9 for each in gather_text(str(time.time_ns()))]
    skew, rank = max((abs(each - times[0]), rank) for rank, each in enumerate(times))
    found = f"rank {rank}'s is {skew:.3f} s from rank 0's" if len(times) > 1 else "one"
    with raise_on_all_ranks():
        if skew > CLOCK_LIMIT_SECONDS:
            raise ValueError(f"{found}, more than {CLOCK_LIMIT_SECONDS:.0f} s")
    return f"warning: {found}" if skew > CLOCK_WARNING_SECONDS else found


def check_data(config: TrainConfig, dist_info: DistInfo) -> str:
    """Check that all ranks have the same data, and every shard's hash or, without any, ids."""
    validates = config.val_every > 0
    train, val = open_data(config.data_dir, config.block_size, validates)
    manifest, checked = Manifest.load(config.data_dir), "no manifest, all ids right"
    if manifest is not None:
        with raise_on_all_ranks():  # the ranks of a machine share the work
            own = manifest.shards[dist_info.local_rank :: dist_info.local_world_size]
            verify_shards(config.data_dir, own)
        checked = "all hashes right"
    tokens = f"{train.total_tokens:,} + {val.total_tokens:,} tokens"
    return f"{tokens}, fingerprint {train.fingerprint[:12]}, {checked}"


def check_disk(
    out_dir: Path, config: TrainConfig, checkpoint: Path | None, dist_info: DistInfo
) -> str:
    """Check that `out_dir` has room for a checkpoint and is the same folder on all ranks."""
    needed = CHECKPOINT_BYTES_PER_PARAMETER * model_dimensions(config, checkpoint).n_params / 2**30
    name = ""
    with ExitStack() as stack:
        with raise_on_all_ranks():
            if dist_info.is_main:
                out_dir.mkdir(parents=True, exist_ok=True)
                name = stack.enter_context(tempfile.NamedTemporaryFile(dir=out_dir)).name
        name = Path(gather_text(name)[0]).name
        with raise_on_all_ranks():
            if not (out_dir / name).is_file():
                raise ValueError(f"rank 0 wrote to {out_dir}, and this rank does not see it")
            free = shutil.disk_usage(out_dir).free / 2**30
            found = f"{out_dir} has {free:.2f} GiB free, a checkpoint takes {needed:.2f} GiB"
            if free < needed:
                raise ValueError(found)
    return found


def check_parallel_mode(config: TrainConfig, dist_info: DistInfo) -> None:
    """Refuse a `--parallel` or an offload that this device or these processes cannot do.

    Raises:
        ValueError: the message names what they can do.
    """
    for name in ("cpu_offload", "activation_offload"):
        if getattr(config, name) and dist_info.device.type != "cuda":
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} needs GPUs, and this device is {dist_info.device.type}")
    if config.is_sharded and select_dtype(config.dtype, dist_info.device) == torch.float16:
        raise ValueError(
            f"--parallel {config.parallel} is for bfloat16 or float32, and this GPU has no "
            f"bfloat16: use --dtype float32, or --parallel ddp"
        )
    if config.is_sharded and not torch.distributed.is_initialized():
        start = "--standalone --nproc_per_node=2 train_gpt2.py"
        if config.parallel == "hsdp":
            start = "--nnodes=2 --nproc_per_node=8 ... on each of two machines"
        raise ValueError(
            f"--parallel {config.parallel} is for processes that torchrun starts, as in "
            f"torchrun {start}; for one process, use --parallel ddp"
        )
    world_size, local = dist_info.world_size, dist_info.local_world_size
    if config.parallel == "hsdp" and (world_size == local or world_size % local):
        raise ValueError(
            f"--parallel hsdp needs several machines with equally many processes, and {local} of "
            f"{world_size} are on this one: use --parallel fsdp, or several machines"
        )
