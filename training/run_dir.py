"""A run's folder: its configuration and lock, what may be resumed, and how it ended."""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock, Timeout

from corpus.shards import SHARD_MANIFEST
from model import GPTConfig
from runtime.checkpoint import (
    find_checkpoint,
    latest_checkpoint,
    latest_valid_checkpoint,
    quarantine_newer,
    read_model_config,
    read_state,
    remove_leftovers,
)
from runtime.cli import RunStopped, parse_flags
from runtime.device import compile_error, is_out_of_memory
from runtime.distributed import (
    DistInfo,
    barrier,
    broadcast_int,
    is_lost_process,
    print0,
    raise_on_all_ranks,
)
from runtime.files import find_escaping_link, write_json
from runtime.stopping import StopRequest
from training.config import (
    FLAG_HINTS,
    TrainConfig,
    check_warmup,
    config_from_settings,
    read_config,
)

RUN_CONFIG_NAME = "config.json"
LOCK_NAME = ".lock"
PREEMPTED_NAME = "PREEMPTED"
DATA_ORDER_SETTINGS = ("total_batch_size", "seed", "shuffle")  # a run keeps them to its end


def parse_config(args: Sequence[str]) -> tuple[TrainConfig, Path | None]:
    """The configuration, and the checkpoint to resume from, if any.

    Flags that are not given have the values of the resumed checkpoint or of `--config`. A resumed
    run keeps its warm-up, whatever `--max-steps` becomes: the schedule so far must not change.

    Raises:
        FileNotFoundError: `--config` or `--resume` names nothing that is there.
        ValueError: a flag or a saved setting is refused.
    """
    locate = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("config", "resume", "out-dir", "run-name"):
        locate.add_argument(f"--{flag}", f"--{flag.replace('-', '_')}", nargs="?")
    given, _ = locate.parse_known_args(args)
    defaults = read_config(Path(given.config)) if given.config else TrainConfig()
    checkpoint = None
    if given.resume:
        out_dir, run_name = Path(given.out_dir or defaults.out_dir), given.run_name
        if given.resume == "auto" and run_name is None and (run_name := last_run(out_dir)):
            _print0(f"--resume auto takes {out_dir / run_name}; --run-name chooses another run")
        if given.resume != "auto":
            checkpoint = find_checkpoint(Path(given.resume))
        elif run_name is not None:
            checkpoint = latest_valid_checkpoint(
                out_dir / run_name, lambda line: _print0(f"warning: {line}")
            )
        config_path = out_dir / (run_name or "") / RUN_CONFIG_NAME
        if checkpoint is not None:
            defaults = config_from_settings(read_state(checkpoint).train_config, checkpoint)
        elif run_name and given.config is None and config_path.is_file():
            defaults = read_config(config_path)  # of a run that ended before its first checkpoint
        defaults = replace(defaults, run_name=run_name)
    config = parse_flags(TrainConfig, args, defaults, FLAG_HINTS)
    if checkpoint is None or config.warmup_steps != defaults.warmup_steps:
        check_warmup(config)
    return config, checkpoint


def last_run(out_dir: Path) -> str | None:
    """The name of the run that `--resume auto` means without `--run-name`; None if none is there.

    It is the run that was preempted last or, if none was, the one that saved last.
    """
    runs = list(out_dir.glob("*"))
    preempted = [mark for run in runs if (mark := run / PREEMPTED_NAME).is_file()]
    saved = [checkpoint for run in runs if (checkpoint := latest_checkpoint(run))]
    last = max(preempted or saved, key=lambda path: path.stat().st_mtime, default=None)
    return None if last is None else last.relative_to(out_dir).parts[0]


def _print0(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # there is no process group yet
        print(line, flush=True)


def is_finished(checkpoint: Path | None, config: TrainConfig) -> bool:
    """Whether nothing is left to do: the last step is saved, and the run was not preempted there.

    Reads a small file, so it can be asked before anything is built. Processes may see a shared
    disk at different times: rank 0 has to decide for all.

    Raises:
        ValueError: the state of the checkpoint cannot be read.
    """
    if checkpoint is None:
        return False
    step, mark = read_state(checkpoint).step, checkpoint.parent.parent / PREEMPTED_NAME
    return step > config.max_steps or (step == config.max_steps and not mark.is_file())


def clear_preemption(run_dir: Path) -> None:
    """Delete `PREEMPTED`: the run was resumed and has saved, or has ended."""
    (run_dir / PREEMPTED_NAME).unlink(missing_ok=True)


def finish_run(
    run_dir: Path, step: int, is_complete: bool, stop: StopRequest, dist_info: DistInfo
) -> None:
    """Say how the run has ended; mark one that is to be resumed by `PREEMPTED`.

    Every process must call this, after `step` updates that are saved. If the run `is_complete`, a
    signal came too late to matter.

    Raises:
        KeyboardInterrupt: the run was stopped by Ctrl-C.
        OSError: a file could not be written, and the run was to stop for that.
    """
    reason = None if is_complete and stop.reason != "failure" else stop.reason
    if dist_info.is_main:
        with stop.on_write_error():
            if reason is None:
                clear_preemption(run_dir)
            else:
                write_json(run_dir / PREEMPTED_NAME, {"step": step, "reason": reason})
    barrier(dist_info)  # all is written
    if reason is None:
        print0(dist_info, f"done: {run_dir}")
        return
    stop.raise_failure()
    line = f"after step {step}; {resume_hint(run_dir)}"
    if reason == "SIGINT":
        raise KeyboardInterrupt(line) if dist_info.is_main else SystemExit(130)
    print0(dist_info, f"{reason}: stopped {line}")


def resume_hint(run_dir: Path) -> str:
    """The last checkpoint, and the flags that resume from it."""
    checkpoint = latest_checkpoint(run_dir)
    if checkpoint is None:
        return f"no checkpoint yet, begin again with --resume auto --run-name {run_dir.name}"
    return f"last checkpoint {checkpoint.name}, go on with --resume {run_dir}"


@contextmanager
def explain_failures(run_dir: Path, dist_info: DistInfo) -> Iterator[None]:
    """Add to a failure of the body which checkpoint is left, and what to do.

    Raises:
        FloatingPointError: the body raised it, on all ranks.
        RunStopped: another process is gone.
        ValueError: the device ran out of memory, or torch.compile failed.
    """
    try:
        yield
    except FloatingPointError as error:
        barrier(dist_info)  # all ranks come here, rank 0 when its last save is complete
        raise FloatingPointError(f"{error}; {resume_hint(run_dir)}") from None
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise ValueError(
                "the device ran out of memory: give a smaller --micro-batch-size"
            ) from None
        if is_lost_process(error):
            raise RunStopped(
                f"another process of this run is gone; {resume_hint(run_dir)}"
            ) from None
        if problem := compile_error(error):
            raise ValueError(problem) from None
        raise


def choose_run_dir(config: TrainConfig, checkpoint: Path | None, dist_info: DistInfo) -> Path:
    """The run's folder: that of the resumed checkpoint, of the given name, or of size and time.

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


def _is_resumed(run_dir: Path, config: TrainConfig, checkpoint: Path | None) -> bool:
    """Whether the folder's own run is resumed; False for a new run and for a fork of another."""
    own = checkpoint is None or checkpoint.parent.parent.resolve() == run_dir.resolve()
    return config.resume is not None and own


def check_usable(run_dir: Path, config: TrainConfig, checkpoint: Path | None) -> None:
    """Refuse a folder in which the run can be neither resumed nor started.

    Raises:
        ValueError: the folder holds another run, or links to outside.
    """
    if (run_dir / RUN_CONFIG_NAME).exists() and not _is_resumed(run_dir, config, checkpoint):
        raise ValueError(
            f"{run_dir} already holds a run: give another --run-name, or go on with it by "
            f"--resume {run_dir}"
        )
    if link := find_escaping_link(run_dir):
        raise ValueError(
            f"{link} is a link out of the run folder, which is not followed: remove it"
        )


@contextmanager
def open_run(
    run_dir: Path, config: TrainConfig, checkpoint: Path | None, dist_info: DistInfo
) -> Iterator[None]:
    """Make and lock a run's folder for the length of the body; rank 0 does it for all.

    The folder may hold a run already if `--resume` found its checkpoint, or found none because the
    run ended before its first.

    Raises:
        ValueError: the folder holds another run, cannot be written, or another trainer is using it.
    """
    lock = FileLock(run_dir / LOCK_NAME)
    try:
        with raise_on_all_ranks(dist_info):
            if dist_info.is_main:
                check_usable(run_dir, config, checkpoint)
                _prepare(run_dir, lock, config, checkpoint)
        yield
    finally:
        lock.release()


def _prepare(run_dir: Path, lock: FileLock, config: TrainConfig, checkpoint: Path | None) -> None:
    """Make, lock, clean and label the folder."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        remove_leftovers(run_dir / "checkpoints")
        if checkpoint is not None and _is_resumed(run_dir, config, checkpoint):
            quarantine_newer(checkpoint)
        write_json(run_dir / RUN_CONFIG_NAME, config.saved())
    except Timeout:
        raise ValueError(f"another trainer is at work in {run_dir}") from None
    except OSError as error:
        raise ValueError(f"the run folder cannot be written: {error}") from None


def check_resume_compatible(
    checkpoint: Path, model_config: GPTConfig, config: TrainConfig, data_fingerprint: str
) -> None:
    """Refuse to resume with another model, batch, order or data set than the checkpoint's.

    Raises:
        ValueError: values differ; the message lists each.
    """
    state = read_state(checkpoint)
    found = {**asdict(model_config), "data_fingerprint": data_fingerprint}
    expected = {**state.model_config, "data_fingerprint": state.data_fingerprint}
    for name in DATA_ORDER_SETTINGS:
        found[name], expected[name] = getattr(config, name), state.train_config.get(name)
    changes = {
        name: f"{name} {expected.get(name)} -> {value}"
        for name, value in found.items()
        if expected.get(name) != value
    }
    if changes:
        choice = ", choose another run by --run-name," if config.resume == "auto" else ""
        hint, manifest = "", config.data_dir / SHARD_MANIFEST
        if changes.keys() == {"data_fingerprint"}:  # which a manifest gives, if there is one
            hint = f"; if {manifest} was added since, move it away"
            if not manifest.is_file():
                hint = (
                    f"; if {manifest} was lost since, put it back, or make the data again by the "
                    f"same python fineweb.py with another --data-dir"
                )
        raise ValueError(
            f"{checkpoint} is of another run ({', '.join(changes.values())}): "
            f"leave these as they were{choice} or start a new run without --resume{hint}"
        )


def model_dimensions(config: TrainConfig, checkpoint: Path | None) -> GPTConfig:
    """The dimensions that the flags give or, with `--init-from`, its model's or the run's."""
    if config.init_from is None:
        return config.model_config()
    if checkpoint is not None:  # --init-from may be gone by now
        return GPTConfig(**read_state(checkpoint).model_config)
    return replace(read_model_config(config.init_from), block_size=config.block_size)
