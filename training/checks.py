"""Checks before a run starts: whether its ranks agree, and with `--preflight`, data and disk."""

import platform
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from corpus.shards import Manifest, TokenShards, open_shards, verify_shards
from dataloader import count_windows, validation_fingerprint
from formats.checkpoint import CHECKPOINT_MANIFEST, Checkpoint
from formats.code_hashes import code_hashes
from lr_schedule import windows_at
from runtime import distributed
from runtime.cli import flag_of
from runtime.distributed import DistInfo, gather_text, is_main, print0, raise_on_all_ranks
from runtime.errors import UserError
from runtime.files import sha256_of
from training.config import TrainConfig
from training.folder import lock_run_folder
from training.memory import CHECKPOINT_BYTES_PER_PARAMETER, Device, find_device
from training.resume import check_resume_compatible
from training.trackers import check_installed


def check_ranks_agree(
    config: TrainConfig, resumed: Checkpoint | None, device: Device
) -> tuple[TokenShards, TokenShards]:
    """Check that all ranks agree; return the training split and the validation split.

    Ranks that differ would silently train different weights, or wait for each other in different
    collectives.
    """
    with raise_on_all_ranks():
        check_parallel_mode(config, device)
        check_installed(config.logger if is_main() else ())
        rows = config.hellaswag_data if config.hellaswag_every else None
        if rows and not rows.exists():
            raise UserError(f"{rows} does not exist: use --hellaswag-data FILE")
        train = open_shards(config.data_dir, "train")
        val = open_shards(config.data_dir, "val", is_optional=True)
        check_lengths(config, train.total_tokens, val.total_tokens)
        if resumed is not None:
            validated = validation_fingerprint(val, config.block_size, config.val_tokens)
            check_resume_compatible(resumed, config, train.fingerprint, validated)
    checkpoint = "no checkpoint"
    if resumed is not None:
        checkpoint = f"{resumed.path} ({sha256_of(resumed.path / CHECKPOINT_MANIFEST)[:8]})"
    lines = [*describe_software(config, device.dtype), checkpoint]
    lines += [f"train tokens {train.fingerprint}", f"val tokens {val.fingerprint}"]
    fix = "; install the same code, versions and data on every machine, and use the same flags"
    distributed.check_same_on_all_ranks("the ranks", lines, fix)
    return train, val


def check_lengths(config: TrainConfig, train_tokens: int, val_tokens: int) -> None:
    """Raise if a split is too short for one validation or one step."""
    block_size, fix = config.block_size, "use the command that fineweb.py printed"
    if config.val_every and not count_windows(val_tokens, block_size):
        found = f"the validation split in {config.data_dir} has {val_tokens} tokens"
        needed = f"fewer than --block-size {block_size} + 1"
        raise UserError(f"{found}, {needed}: {fix}, or --val-every 0")
    windows = max(windows_at(config, step) for step in range(config.max_steps))
    if (usable := count_windows(train_tokens, block_size)) < windows:
        sizes = f"{train_tokens:,} tokens, but one step needs {windows * block_size + 1:,}"
        problem = f"the text in {config.data_dir} is too small for this batch ({sizes})"
        fixed = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
        limit = block_size * (usable - usable % (fixed * distributed.world_size()))
        fix = f"{fix}, or --total-batch-size {limit} or less" if limit else "add text"
        raise UserError(f"{problem}: {fix}")


def describe_software(config: TrainConfig, dtype: torch.dtype) -> list[str]:
    """Return this rank's versions, dtype, hashes of the code and flags, one per line."""
    settings = {"resume": config.resume} | config.saved()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {dtype}"
    code = [f"{file} with code {digest}" for file, digest in code_hashes().items()]
    return [versions, *code, *(f"{flag_of(name)} {value}" for name, value in settings.items())]


def check_parallel_mode(config: TrainConfig, device: Device) -> None:
    """Raise if this device or these processes do not support `--parallel` or `--cpu-offload`."""
    kind = device.dist_info.device.type
    if config.cpu_offload and kind != "cuda":
        raise UserError(f"--cpu-offload requires a GPU, but this device is {kind}")
    if config.parallel != "fsdp":
        return
    if device.dtype == torch.float16:
        fix = "use --dtype bfloat16 or, if the GPU does not have it, --dtype float32"
        raise UserError(f"--parallel fsdp does not support float16: {fix}")
    if not dist.is_initialized():
        command = "torchrun --standalone --nproc_per_node=2 train_gpt2.py"
        fix = f"use {command} or, for one process, --parallel ddp"
        raise UserError(f"--parallel fsdp requires torchrun: {fix}")


# --- --preflight ------------------------------------------------------------------------------


def run_preflight(config: TrainConfig, resumed: Checkpoint | None, dist_info: DistInfo) -> None:
    """Run all checks; print a line for each one that passes."""
    distributed.barrier()
    count, per_machine = dist_info.world_size, dist_info.local_world_size
    device = find_device(config, dist_info)
    print0(f"network   {count} x {device.name}, {per_machine} per machine")
    check_ranks_agree(config, resumed, device)
    print0("ranks     have the same software, flags, data and checkpoint")
    print0(f"data      {check_hashes(config, dist_info)}")
    print0(f"disk      {check_disk(config, resumed)}")


def check_hashes(config: TrainConfig, dist_info: DistInfo) -> str:
    """Check every shard's hash, if there is a manifest; return a line for the report."""
    if (manifest := Manifest.load(config.data_dir)) is None:
        return "no manifest, so hashes were not checked"
    with raise_on_all_ranks():  # the ranks of a machine share the work
        rank_shards = manifest.shards[dist_info.local_rank :: dist_info.local_world_size]
        verify_shards(config.data_dir, rank_shards)
    return f"the hashes of all {len(manifest.shards)} shards match"


def check_disk(config: TrainConfig, resumed: Checkpoint | None) -> str:
    """Check that all ranks share `--out-dir` and that a checkpoint fits; return a report line."""
    needed = CHECKPOINT_BYTES_PER_PARAMETER * config.model_config().n_params / 2**30
    out_dir, name = config.out_dir, ""
    with lock_run_folder(config, resumed), ExitStack() as stack:
        with raise_on_all_ranks():
            if is_main():
                name = stack.enter_context(tempfile.NamedTemporaryFile(dir=out_dir)).name
        name = Path(gather_text(name)[0]).name
        with raise_on_all_ranks():
            if not (out_dir / name).is_file():
                problem = f"rank 0 wrote a file to {out_dir} that this rank does not see"
                raise UserError(f"{problem}: use an --out-dir that all machines share")
            free = shutil.disk_usage(out_dir).free / 2**30
            found = f"{out_dir} has {free:.2f} GiB free, a checkpoint needs {needed:.2f} GiB"
            if free < needed:
                raise UserError(f"{found}: use an --out-dir with more space")
    return found
