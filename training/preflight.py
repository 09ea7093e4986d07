"""The checks of `--preflight`: can this run start on these machines? Every run makes the second."""

import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from corpus.shards import Manifest, verify_shards
from dataloader import open_data
from runtime.cli import RunStopped, flag_of
from runtime.device import device_name, select_dtype
from runtime.distributed import (
    DistInfo,
    all_reduce_sum,
    check_same_on_all_ranks,
    gather_text,
    is_lost_process,
    is_main,
    print0,
    raise_on_all_ranks,
    read_dist_env,
    setup_distributed,
)
from runtime.files import sha256_of
from runtime.trackers import check_installed
from training.config import TrainConfig
from training.plan import CHECKPOINT_BYTES_PER_PARAMETER
from training.run_dir import check_usable, model_dimensions

CODE_FOLDERS = (".", "corpus", "runtime", "training")
ADVICE = {
    "network": "machines must reach each other on all ports (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)",
    "software": "install the same Python, torch and scripts everywhere, and give the same flags "
    "(--resume takes those of its checkpoint)",
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
        with explaining("software"):
            print0(f"software  {check_software(config)}")
        with explaining("data"):
            print0(f"data      {check_data(config, dist_info)}")
        with explaining("disk"):
            print0(f"disk      {check_disk(config, checkpoint, dist_info)}")


@contextmanager
def explaining(check: str) -> Iterator[None]:
    """Name the check that fails in the body and say what to do."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{check}: {error}: {ADVICE[check]}") from None
    except RuntimeError as error:
        if is_lost_process(error):
            raise RunStopped(f"{check}: another process is gone: {ADVICE[check]}") from None
        raise


def check_network(dist_info: DistInfo) -> str:
    """Sum the ranks over all processes."""
    n = dist_info.world_size
    total = int(all_reduce_sum(torch.tensor(dist_info.rank + 1, device=dist_info.device)))
    with raise_on_all_ranks():
        if total != n * (n + 1) // 2:
            raise ValueError("an all-reduce gave a wrong sum")
    return f"{n} x {device_name(dist_info.device)}, {dist_info.local_world_size} per machine"


def check_software(config: TrainConfig) -> str:
    """Check that all ranks have the same software, and rank 0 the trackers' packages."""
    lines = describe_software(config)
    check_same_on_all_ranks("processes", lines)
    with raise_on_all_ranks():
        check_installed(config.logger if is_main() else ())
    return f"{', '.join(lines[:3])}, {len(lines) - 3} files and flags"


def describe_software(config: TrainConfig) -> list[str]:
    """What all ranks must have in common: versions, the dtype, the scripts and the flags.

    Ranks that differ would train different weights without a word, or wait for each other in
    different collectives.
    """
    dtype = select_dtype(config.dtype, read_dist_env(config.device).device)
    root = Path(__file__).parent.parent
    scripts = sorted(path for folder in CODE_FOLDERS for path in (root / folder).glob("*.py"))
    settings = {"resume": config.resume} | config.saved()
    return [
        *(f"Python {platform.python_version()}", f"torch {torch.__version__}"),
        str(dtype).removeprefix("torch."),
        *(f"{path.relative_to(root)} of SHA-256 {sha256_of(path)[:12]}" for path in scripts),
        *(f"{flag_of(name)} {value}" for name, value in settings.items()),
    ]


def check_data(config: TrainConfig, dist_info: DistInfo) -> str:
    """Check that all ranks have the same data, and every shard's hash if there is a manifest."""
    train, val = open_data(config.data_dir, config.block_size, config.val_every > 0)
    manifest, checked = Manifest.load(config.data_dir), "no manifest"
    if manifest is not None:
        with raise_on_all_ranks():  # the ranks of a machine share the work
            own = manifest.shards[dist_info.local_rank :: dist_info.local_world_size]
            verify_shards(config.data_dir, own)
        checked = "all hashes right"
    tokens = f"{train.total_tokens:,} + {val.total_tokens:,} tokens"
    return f"{tokens}, fingerprint {train.fingerprint[:12]}, {checked}"


def check_disk(config: TrainConfig, checkpoint: Path | None, dist_info: DistInfo) -> str:
    """Check that `--out-dir` is one folder for all ranks, and has room for a checkpoint."""
    needed = CHECKPOINT_BYTES_PER_PARAMETER * model_dimensions(config, checkpoint).n_params / 2**30
    out_dir, name = config.out_dir, ""
    with ExitStack() as stack:
        with raise_on_all_ranks():
            if dist_info.is_main:
                if config.run_name is not None:
                    check_usable(out_dir / config.run_name, config, checkpoint)
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
    device, world_size, local = dist_info.device, dist_info.world_size, dist_info.local_world_size
    for name in ("cpu_offload", "activation_offload"):
        if getattr(config, name) and device.type != "cuda":
            raise ValueError(f"{flag_of(name)} needs GPUs, and this device is {device.type}")
    if not config.is_sharded:
        return
    if select_dtype(config.dtype, device) == torch.float16:
        raise ValueError(
            f"--parallel {config.parallel} is for bfloat16 or float32, and this GPU has no "
            f"bfloat16: use --dtype float32, or --parallel ddp"
        )
    if not torch.distributed.is_initialized():
        start = "--standalone --nproc_per_node=2 train_gpt2.py"
        if config.parallel == "hsdp":
            start = "--nnodes=2 --nproc_per_node=8 ... on each of two machines"
        raise ValueError(
            f"--parallel {config.parallel} is for processes that torchrun starts, as in "
            f"torchrun {start}; for one process, use --parallel ddp"
        )
    if config.parallel == "hsdp" and (world_size == local or world_size % local):
        raise ValueError(
            f"--parallel hsdp needs several machines with equally many processes, and {local} of "
            f"{world_size} are on this one: use --parallel fsdp, or several machines"
        )
