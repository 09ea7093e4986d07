"""Checks on a run's ranks before it starts: whether they agree, and can train together."""

import platform
from pathlib import Path

import torch
import torch.distributed as dist

from corpus.shards import TokenShards, open_shards
from dataloader import count_windows
from formats.checkpoint import CHECKPOINT_MANIFEST, Checkpoint
from lr_schedule import windows_at
from runtime import distributed
from runtime.cli import flag_of
from runtime.distributed import DistInfo, is_main, raise_on_all_ranks
from runtime.files import sha256_of
from training.config import TrainConfig
from training.resume import check_resume_compatible
from training.trackers import check_installed

CODE_FOLDERS = (".", "corpus", "formats", "runtime", "training")


def check_ranks_agree(
    config: TrainConfig,
    resumed: Checkpoint | None,
    dtype: torch.dtype,
    dist_info: DistInfo,
) -> tuple[TokenShards, TokenShards]:
    """Check that all ranks agree; return the training split and the validation split.

    Ranks that differ would silently train different weights, or wait for each other in different
    collectives.
    """
    with raise_on_all_ranks():
        check_parallel_mode(config, dtype, dist_info)
        check_installed(config.logger if is_main() else ())
        train, val = (open_shards(config.data_dir, split) for split in ("train", "val"))
        if config.val_every and not count_windows(val.total_tokens, config.block_size):
            raise ValueError(
                f"the validation split has {val.total_tokens} tokens, fewer than "
                f"--block-size {config.block_size} + 1: add more data, or use --val-every 0"
            )
        windows = max(windows_at(config, step) for step in range(config.max_steps))
        if (found := count_windows(train.total_tokens, config.block_size)) < windows:
            raise ValueError(
                f"the training split in {config.data_dir} has {train.total_tokens:,} tokens, but "
                f"one step needs {windows * config.block_size + 1:,}: use a --total-batch-size of "
                f"at most {found * config.block_size}, or add data"
            )
        if resumed is not None:
            check_resume_compatible(
                resumed, config, config.model_config(), train.fingerprint, val.fingerprint
            )
    checkpoint = "no checkpoint"
    if resumed is not None:
        checkpoint = f"{resumed.path} ({sha256_of(resumed.path / CHECKPOINT_MANIFEST)[:8]})"
    lines = [*describe_software(config, dtype), checkpoint]
    lines += [f"train tokens {train.fingerprint}", f"val tokens {val.fingerprint}"]
    distributed.check_same_on_all_ranks("the ranks", lines)
    return train, val


def describe_software(config: TrainConfig, dtype: torch.dtype) -> list[str]:
    """Return this rank's versions, dtype, script hashes and flags, one per line."""
    root = Path(__file__).parent.parent
    scripts = sorted(path for folder in CODE_FOLDERS for path in (root / folder).glob("[!.]*.py"))
    settings = {"resume": config.resume} | config.saved()
    return [
        f"Python {platform.python_version()}, torch {torch.__version__}, {dtype}",
        *(f"{path.relative_to(root)} with SHA-256 {sha256_of(path)[:12]}" for path in scripts),
        *(f"{flag_of(name)} {value}" for name, value in settings.items()),
    ]


def check_parallel_mode(config: TrainConfig, dtype: torch.dtype, dist_info: DistInfo) -> None:
    """Raise if this device or these processes do not support `--parallel` or `--cpu-offload`."""
    device = dist_info.device
    if config.cpu_offload and device.type != "cuda":
        raise ValueError(f"--cpu-offload requires a GPU, but this device is {device.type}")
    if config.parallel != "fsdp":
        return
    if dtype == torch.float16:
        raise ValueError(
            "--parallel fsdp does not support float16: use --dtype bfloat16 or, if the GPU does "
            "not have it, --dtype float32"
        )
    if not dist.is_initialized():
        raise ValueError(
            "--parallel fsdp requires torchrun: use torchrun --standalone --nproc_per_node=2 "
            "train_gpt2.py or, for one process, --parallel ddp"
        )
