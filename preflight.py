"""What must be right before a run on several machines is worth starting: `--preflight`."""

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

from build import model_dimensions, open_data
from cli import RunStopped, print_error
from device import device_name, select_dtype, synchronize
from distributed import (
    DistributedContext,
    all_reduce_sum,
    barrier,
    failing_together,
    gather_text,
    is_lost_process,
    require_same,
    say,
    setup_distributed,
)
from files import sha256_of
from plan import CHECKPOINT_BYTES_PER_PARAMETER
from runs import choose_run_dir, is_resumed, unusable
from train_config import TrainConfig

PATIENCE_SECONDS = 120  # a check that takes longer waits for a process that will not answer
REDUCED_BYTES, ROUNDS = 64 << 20, 5
CLOCK_WARNING_SECONDS, CLOCK_LIMIT_SECONDS = 1.0, 60.0
ADVICE = {
    "network": "machines must reach each other on all ports (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)",
    "software": "install the same Python, torch and scripts everywhere, and give the same flags",
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
            context = stack.enter_context(setup_distributed(config.device, config.cpu_offload))
            say(context, f"network   {check_network(context)}")
        with explaining("software"):
            say(context, f"software  {check_software(config, context)}")
        with explaining("clocks"):
            say(context, f"clocks    {check_clocks(context)}")
        with explaining("data", patient=True):  # to read or hash it all may take long
            train, val = open_data(config, context)
            tokens = f"{train.total_tokens:,} + {val.total_tokens:,} tokens"
            say(context, f"data      {tokens}, fingerprint {train.fingerprint[:12]}")
        run_dir = choose_run_dir(config, checkpoint, context)
        with failing_together(context):
            if problem := unusable(run_dir, is_resumed(run_dir, config, checkpoint)):
                raise ValueError(problem)
        with explaining("disk"):
            say(context, f"disk      {check_disk(run_dir.parent, config, checkpoint, context)}")


@contextmanager
def explaining(check: str, patient: bool = False) -> Iterator[None]:
    """Say of a check that fails which it was and what to do; end one that gets no answer.

    Of a `patient` one only the process group's own timeout is the end.
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


def check_network(context: DistributedContext) -> str:
    """Sum a tensor over all processes; bandwidth is what each link of a ring then carries."""
    n, device = context.world_size, context.device
    tensor, seconds = torch.empty(REDUCED_BYTES // 4, device=device), []
    for _ in range(1 + ROUNDS):  # the first makes the connections
        tensor.fill_(context.rank + 1)
        barrier(context)
        synchronize(device)
        start = time.perf_counter()
        all_reduce_sum(tensor, context)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    with failing_together(context):
        if not torch.all(tensor == n * (n + 1) / 2):
            raise ValueError("an all-reduce gave a wrong sum")
    place = f"{n} x {device_name(device)}, {context.local_world_size} a machine"
    median, size = statistics.median(seconds[1:]), f"{REDUCED_BYTES >> 20} MiB"
    bandwidth = 2 * (n - 1) / n * REDUCED_BYTES / median / 1e9
    timed = f"all-reduce of {size} in {median * 1e3:.1f} ms, {bandwidth:.2f} GB/s"
    return f"{place}: {timed}" if n > 1 else place


def check_software(config: TrainConfig, context: DistributedContext) -> str:
    """Python, torch, the scripts and the flags are the same everywhere."""
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions.append(str(select_dtype(config.dtype, context.device)).removeprefix("torch."))
    scripts = sorted(Path(__file__).parent.glob("*.py"))
    hashes = [f"{path.name} of SHA-256 {sha256_of(path)[:12]}" for path in scripts]
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in config.saved().items()]
    require_same("processes", [*versions, *hashes, *flags], context)
    return f"{', '.join(versions)}, {len(scripts)} scripts, {len(flags)} flags"


def check_clocks(context: DistributedContext) -> str:
    """Clocks agree: `--resume auto` goes by the times of files."""
    barrier(context)  # all leave it within milliseconds
    times = [int(each) / 1e9 for each in gather_text(str(time.time_ns()), context)]
    skew, rank = max((abs(each - times[0]), rank) for rank, each in enumerate(times))
    found = f"rank {rank}'s is {skew:.3f} s from rank 0's" if len(times) > 1 else "one"
    with failing_together(context):
        if skew > CLOCK_LIMIT_SECONDS:
            raise ValueError(f"{found}, more than {CLOCK_LIMIT_SECONDS:.0f} s")
    return f"warning: {found}" if skew > CLOCK_WARNING_SECONDS else found


def check_disk(
    out_dir: Path, config: TrainConfig, checkpoint: Path | None, context: DistributedContext
) -> str:
    """Where runs go is room for a checkpoint, and all see what the main process writes there."""
    needed = CHECKPOINT_BYTES_PER_PARAMETER * model_dimensions(config, checkpoint).n_params / 2**30
    name = ""
    with ExitStack() as stack:
        with failing_together(context):
            if context.is_main:
                out_dir.mkdir(parents=True, exist_ok=True)
                name = stack.enter_context(tempfile.NamedTemporaryFile(dir=out_dir)).name
        name = Path(gather_text(name, context)[0]).name
        with failing_together(context):
            if not (out_dir / name).is_file():
                raise ValueError(f"rank 0 wrote to {out_dir}, and it is not seen here")
            free = shutil.disk_usage(out_dir).free / 2**30
            found = f"{out_dir} has {free:.2f} GiB free, a checkpoint takes {needed:.2f} GiB"
            if free < needed:
                raise ValueError(found)
    return found
