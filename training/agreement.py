"""What all ranks must agree on before a run starts: flags, code, data, checkpoint."""

import platform
from pathlib import Path

import torch
import torch.distributed as dist

from corpus.shards import TokenShards, open_shards
from dataloader import count_windows
from formats.checkpoint import CHECKPOINT_MANIFEST, Checkpoint
from model import GPTConfig
from runtime.cli import flag_of
from runtime.distributed import DistInfo, check_same_on_all_ranks, is_main, raise_on_all_ranks
from runtime.files import sha256_of
from training.config import TrainConfig
from training.resume import check_resume_compatible
from training.trackers import check_installed

CODE_FOLDERS = (".", "corpus", "formats", "runtime", "training")


def check_ranks_agree(
    config: TrainConfig,
    resumed: Checkpoint | None,
    model_config: GPTConfig,
    dtype: torch.dtype,
    dist_info: DistInfo,
) -> tuple[TokenShards, TokenShards]:
    """Open the training and the validation split, once all ranks agree on what they are to do.

    Ranks that differ would train different weights, without a word, or wait for each other in
    different collectives.
    """
    with raise_on_all_ranks():
        check_parallel_mode(config, dtype, dist_info)
        check_installed(config.logger if is_main() else ())
        train, val = (open_shards(config.data_dir, split) for split in ("train", "val"))
        if config.val_every and not count_windows(val.total_tokens, model_config.block_size):
            raise ValueError(
                f"the validation split has {val.total_tokens} tokens, fewer than "
                f"--block-size {config.block_size} + 1: give more data, or --val-every 0"
            )
        if resumed is not None:
            check_resume_compatible(
                resumed, config, model_config, train.fingerprint, val.fingerprint
            )
    checkpoint = "no checkpoint"
    if resumed is not None:
        checkpoint = f"{resumed.path} ({sha256_of(resumed.path / CHECKPOINT_MANIFEST)[:8]})"
    lines = [*describe_software(config, dtype), checkpoint]
    lines += [f"train tokens {train.fingerprint}", f"val tokens {val.fingerprint}"]
    check_same_on_all_ranks("the ranks", lines)
    return train, val


def describe_software(config: TrainConfig, dtype: torch.dtype) -> list[str]:
    """Versions, dtype, scripts and flags of this rank, one to a line."""
    root = Path(__file__).parent.parent
    scripts = sorted(path for folder in CODE_FOLDERS for path in (root / folder).glob("*.py"))
    settings = {"resume": config.resume} | config.saved()
    return [
        f"Python {platform.python_version()}, torch {torch.__version__}, {dtype}",
        *(f"{path.relative_to(root)} of SHA-256 {sha256_of(path)[:12]}" for path in scripts),
        *(f"{flag_of(name)} {value}" for name, value in settings.items()),
    ]


def check_parallel_mode(config: TrainConfig, dtype: torch.dtype, dist_info: DistInfo) -> None:
    """Refuse a `--parallel` or an offload that this device or these processes cannot do."""
    device = dist_info.device
    if config.cpu_offload and device.type != "cuda":
        raise ValueError(f"--cpu-offload needs GPUs, and this device is {device.type}")
    if not config.is_sharded:
        return
    if dtype == torch.float16:
        raise ValueError(
            f"float16 does not go with --parallel {config.parallel}: use --dtype bfloat16 or, on a "
            f"GPU that has none, float32"
        )
    if not dist.is_initialized():
        raise ValueError(
            f"--parallel {config.parallel} is for processes that torchrun starts, as in torchrun "
            f"--standalone --nproc_per_node=2 train_gpt2.py; for one process, use --parallel ddp"
        )
