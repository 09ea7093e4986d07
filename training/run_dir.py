"""A run's folder and configuration: where they come from, and what may be resumed."""

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from model import GPTConfig
from runtime.checkpoint import (
    find_checkpoint,
    latest_checkpoint,
    latest_valid_checkpoint,
    load_model,
    quarantine_newer,
    read_state,
    remove_leftovers,
    verify_checkpoint,
)
from runtime.cli import parse_flags
from runtime.distributed import DistInfo, broadcast_int
from runtime.files import find_escaping_link, read_json, write_json
from training.config import TrainConfig

CONFIG_NAME = "config.json"
LOCK_NAME = ".lock"
PREEMPTED_NAME = "PREEMPTED"
FIXED_SETTINGS = ("total_batch_size", "seed", "shuffle")  # of a run, from its first step on


def parse_config(args: Sequence[str]) -> tuple[TrainConfig, Path | None]:
    """The configuration, and the checkpoint to resume from, if any.

    Flags are laid over the settings of the resumed checkpoint or of `--config`.
    """
    locate = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("config", "resume", "out-dir", "run-name"):
        locate.add_argument(f"--{flag}", f"--{flag.replace('-', '_')}", nargs="?")
    given, _ = locate.parse_known_args(args)
    saved, checkpoint = read_settings(given.config), None
    if given.resume:
        out_dir = Path(given.out_dir or saved.get("out_dir") or TrainConfig.out_dir)
        if given.resume == "auto" and given.run_name is None:
            given.run_name = last_run(out_dir)
            args = [*args, f"--run-name={given.run_name}"] if given.run_name else args
        checkpoint = find_resumable(given.resume, out_dir, given.run_name)
        if checkpoint is None and given.run_name and given.config is None:
            config_path = out_dir / given.run_name / CONFIG_NAME
            if config_path.is_file():  # the run was stopped before its first checkpoint
                saved = read_settings(str(config_path))
    if checkpoint is not None:
        saved = read_state(checkpoint).train_config
    return parse_flags(TrainConfig, [*settings_as_args(saved), *args]), checkpoint


def last_run(out_dir: Path) -> str | None:
    """The name of the run that `--resume auto` means where no name is given; None without one.

    It is the run that was preempted last or, if none was, the one that saved last.
    """
    runs = list(out_dir.glob("*"))
    preempted = [mark for run in runs if (mark := run / PREEMPTED_NAME).is_file()]
    saved = [checkpoint for run in runs if (checkpoint := latest_checkpoint(run))]
    last = max(preempted or saved, key=lambda path: path.stat().st_mtime, default=None)
    return None if last is None else last.relative_to(out_dir).parts[0]


def find_resumable(resume: str, out_dir: Path, run_name: str | None) -> Path | None:
    """The checkpoint that `--resume` means.

    Args:
        resume: `auto`, a run folder or a checkpoint. `auto` is the run's last checkpoint that is
            not damaged.
        out_dir: where the run folders are.
        run_name: the run that `auto` is about, if there is one.

    Returns:
        The checkpoint's folder; None if `auto` finds none, so that the run is to start anew.

    Raises:
        FileNotFoundError: `resume` names something that is no checkpoint and has none.
        ValueError: the checkpoint, or with `auto` every checkpoint of the run, is damaged.
    """
    if resume != "auto":
        checkpoint = find_checkpoint(Path(resume))
        verify_checkpoint(checkpoint)
        return checkpoint
    return latest_valid_checkpoint(out_dir / run_name, _warn) if run_name else None


def _warn(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # there is no process group yet
        print(f"warning: {message}", flush=True)


@dataclass(frozen=True)
class Preemption:
    """Why and where a run was stopped from outside; the content of its `PREEMPTED` file."""

    step: int
    """Optimizer updates done."""
    reason: str
    """A signal's name, or `failure`."""
    evaluated: bool = True

    def save(self, run_dir: Path) -> None:
        """Write the run folder's `PREEMPTED`."""
        write_json(run_dir / PREEMPTED_NAME, asdict(self))


def read_preemption(run_dir: Path) -> Preemption | None:
    """The run folder's `PREEMPTED`; None if the run was not preempted, or went on since.

    Raises:
        ValueError: the file is something else.
    """
    path = run_dir / PREEMPTED_NAME
    if not path.is_file():
        return None
    try:
        return Preemption(**read_json(path))
    except TypeError:
        raise ValueError(f"{path} is not what this code writes: delete it") from None


def clear_preemption(run_dir: Path) -> None:
    """Take the mark away: the run goes on."""
    (run_dir / PREEMPTED_NAME).unlink(missing_ok=True)


def settings_as_args(settings: Mapping[str, Any]) -> list[str]:
    """Saved settings as command-line flags, so that they are parsed and checked as flags are."""
    args = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            args.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            args.append(f"--{flag}={value}")
    return args


def read_settings(config_path: str | None) -> dict[str, Any]:
    """The settings in a run's `config.json`; none without a path.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is not a configuration.
    """
    if config_path is None:
        return {}
    if not Path(config_path).is_file():
        raise FileNotFoundError(f"--config {config_path} is not a file: give a run's {CONFIG_NAME}")
    settings = read_json(Path(config_path))
    if not isinstance(settings, dict):
        raise ValueError(f"--config {config_path} is not a run's {CONFIG_NAME}")
    return settings


def choose_run_dir(config: TrainConfig, checkpoint: Path | None, dist_info: DistInfo) -> Path:
    """Where the run goes: the resumed checkpoint's run, the given name, or size and time.

    Raises:
        ValueError: the checkpoint is in no run's folder.
    """
    started = broadcast_int(int(time.time()), dist_info)  # one name, though clocks differ
    if checkpoint is not None and (config.run_name is None or config.resume == "auto"):
        if checkpoint.absolute().parent.name != "checkpoints":
            raise ValueError(
                f"{checkpoint} is not in a run's checkpoints folder: give a --run-name"
            )
        return checkpoint.absolute().parent.parent
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
    return config.out_dir / (config.run_name or f"{config.size}-{stamp}")


def is_resumed(run_dir: Path, config: TrainConfig, checkpoint: Path | None) -> bool:
    """Whether the folder's own run goes on, and not a new one or a fork of another."""
    own = checkpoint is None or checkpoint.parent.parent.resolve() == run_dir.resolve()
    return config.resume is not None and own


@contextmanager
def open_run(
    run_dir: Path, config: TrainConfig, checkpoint: Path | None, dist_info: DistInfo
) -> Iterator[None]:
    """Hold a run's folder for the length of the body; the main process makes and locks it.

    Args:
        run_dir: the folder. It may hold a run already if `--resume` found its checkpoint, or
            found none because the run died before its first.
        config: the run's settings, for `config.json`.
        checkpoint: where the run goes on from, if anywhere.
        dist_info: rank, world size and device of this process.

    Raises:
        ValueError: the folder holds another run, or another trainer has it.
    """
    lock = FileLock(run_dir / LOCK_NAME)
    resuming = is_resumed(run_dir, config, checkpoint)
    last = checkpoint if resuming else None
    problem = _take(run_dir, lock, config.saved(), resuming, last) if dist_info.is_main else None
    if not broadcast_int(problem is None, dist_info):
        if problem is None:
            raise SystemExit(2)  # the main process says why
        raise ValueError(problem)
    try:
        yield
    finally:
        lock.release()


def unusable(run_dir: Path, resuming: bool) -> str | None:
    """Why a run cannot go on, or a new one begin, in this folder; None if it can."""
    if not resuming and (run_dir / CONFIG_NAME).exists():
        return (
            f"{run_dir} already holds a run: give another --run-name, or go on with it by "
            f"--resume {run_dir}"
        )
    if link := find_escaping_link(run_dir):
        return f"{link} is a link out of the run folder, which is not followed: remove it"
    return None


def _take(
    run_dir: Path,
    lock: FileLock,
    settings: Mapping[str, Any],
    resuming: bool,
    checkpoint: Path | None,
) -> str | None:
    """Make, lock and label the folder; if that cannot be, say why."""
    if problem := unusable(run_dir, resuming):
        return problem
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        remove_leftovers(run_dir / "checkpoints")
        if checkpoint is not None:
            quarantine_newer(checkpoint)
        write_json(run_dir / CONFIG_NAME, dict(settings))
    except Timeout:
        return f"another trainer is at work in {run_dir}"
    except OSError as error:
        return f"the run folder cannot be written: {error}"
    return None


def check_resume_compatible(
    checkpoint: Path, model: GPTConfig, config: TrainConfig, data_fingerprint: str
) -> None:
    """Refuse to resume with a model, a batch, an order or data that are not the checkpoint's.

    Raises:
        ValueError: values differ; the message lists each.
    """
    state = read_state(checkpoint)
    saved = {**state.model_config, "data_fingerprint": state.data_fingerprint}
    wanted = {**asdict(model), "data_fingerprint": data_fingerprint}
    for name in FIXED_SETTINGS:
        saved[name], wanted[name] = state.train_config.get(name), getattr(config, name)
    changes = [
        f"{name} {saved.get(name)} -> {value}"
        for name, value in wanted.items()
        if saved.get(name) != value
    ]
    if changes:
        raise ValueError(
            f"{checkpoint} is of another run ({', '.join(changes)}): "
            f"leave these as they were, or start a new run without --resume"
        )


def model_dimensions(config: TrainConfig, checkpoint: Path | None) -> GPTConfig:
    """The dimensions that the flags give or, with `--init-from`, its model's or the run's."""
    if config.init_from is None:
        return config.model_config()
    if checkpoint is not None:  # the run has long left its source
        return GPTConfig(**read_state(checkpoint).model_config)
    return replace(load_model(config.init_from).config, block_size=config.block_size)
