"""What is checked before a run starts: that all ranks agree, and with `--preflight` the machines."""

import platform
from pathlib import Path

import torch

from corpus.shards import TokenShards
from dataloader import open_data
from runtime.checkpoint import Checkpoint, describe_checkpoint
from runtime.device import select_dtype
from runtime.distributed import (
    DistInfo,
    check_same_on_all_ranks,
    raise_on_all_ranks,
)
from runtime.files import sha256_of
from runtime.trackers import check_installed
from training.config import TrainConfig
from training.run_dir import check_resume_compatible

CODE_FOLDERS = (".", "corpus", "runtime", "training")


def open_same_data(
    config: TrainConfig, resumed: Checkpoint | None, dist_info: DistInfo
) -> tuple[TokenShards, TokenShards]:
    """The training and the validation split, once all ranks agree on what they are to do.

    Ranks that differ would train different weights, without a word, or wait for each other in
    different collectives.

    Raises:
        ValueError: a rank cannot read the data or resume from the checkpoint, or it has other
            software, flags or data, or another checkpoint, than rank 0.
    """
    with raise_on_all_ranks():
        check_parallel_mode(config, dist_info)
        check_installed(config.logger if dist_info.is_main else ())
        train, val = open_data(config.data_dir, config.block_size, validates=config.val_every > 0)
        if resumed is not None:
            check_resume_compatible(resumed, config, train.fingerprint)
    lines = [*describe_software(config, dist_info), describe_checkpoint(resumed)]
    check_same_on_all_ranks("the ranks", lines + train.describe() + val.describe())
    return train, val


def describe_software(config: TrainConfig, dist_info: DistInfo) -> list[str]:
    """Versions, dtype, code and flags of this rank, one to a line."""
    root, dtype = Path(__file__).parent.parent, select_dtype(config.dtype, dist_info.device)
    scripts = sorted(path for part in CODE_FOLDERS for path in (root / part).glob("*.py"))
    settings = {"resume": config.resume} | config.saved()
    return [
        f"Python {platform.python_version()}, torch {torch.__version__}, {dtype}",
        *(f"{path.relative_to(root)} of SHA-256 {sha256_of(path)[:12]}" for path in scripts),
        *(f"--{name.replace('_', '-')} {value}" for name, value in settings.items()),
    ]


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


def run_preflight(config: TrainConfig, resumed: Checkpoint | None) -> None:
    """Shim."""
