"""A run's folder: its configuration and lock, what may be resumed, and how it ended."""

import argparse
import itertools
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from filelock import Timeout

from corpus.shards import SHARD_MANIFEST
from model import GPTConfig
from runtime.checkpoint import (
    clean_up,
    find_checkpoint,
    latest_checkpoint,
    latest_valid_checkpoint,
    read_latest,
    read_model_config,
    read_state,
    set_newer_aside,
)
from runtime.cli import RunStopped, parse_flags
from runtime.device import compile_error, is_out_of_memory
from runtime.distributed import (
    DistInfo,
    barrier,
    broadcast_int,
    gather_text,
    is_lost_process,
    print0,
    raise_on_all_ranks,
)
from runtime.files import LockedFolder, lock_folder, write_json
from runtime.metrics import METRICS_NAME, last_saved_step
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

    Flags that are not given have the values of the resumed checkpoint or of `--config`, and
    `--block-size` is the context of the model of a given `--init-from`. A resumed run keeps its
    warm-up, whatever `--max-steps` becomes: the schedule so far must not change.

    Raises:
        FileNotFoundError: `--config`, `--resume` or `--init-from` names nothing that is there.
        ValueError: a flag or a saved setting is refused.
    """
    locate = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("config", "resume", "out-dir", "run-name", "init-from"):
        locate.add_argument(f"--{flag}", f"--{flag.replace('-', '_')}", nargs="?")
    given, _ = locate.parse_known_args(args)
    defaults = read_config(Path(given.config)) if given.config else TrainConfig()
    checkpoint = None
    if given.resume:
        out_dir, run_name = Path(given.out_dir or defaults.out_dir), given.run_name
        if given.resume == "auto" and run_name is None and (last := last_run(out_dir)):
            run_name, event = last
            print0(
                f"--resume auto takes {out_dir / run_name}, the last run that was at work: it "
                f"{event}; --run-name chooses another run"
            )
        run_dir = out_dir / run_name if run_name else None
        find = partial(_find_to_resume, given.resume, run_dir)
        checkpoint, settings = read_latest(find, _with_settings)
        config_path = out_dir / (run_name or "") / RUN_CONFIG_NAME
        if settings is not None:
            defaults = settings
        elif run_name and given.config is None and config_path.is_file():
            defaults = read_config(config_path)  # of a run that ended before its first checkpoint
        defaults = replace(defaults, run_name=run_name)
    if given.init_from and checkpoint is None and defaults.init_from is None:
        own = read_model_config(given.init_from).block_size
        defaults = replace(defaults, block_size=own)
    config = parse_flags(TrainConfig, args, defaults, FLAG_HINTS)
    if checkpoint is None or config.warmup_steps != defaults.warmup_steps:
        check_warmup(config)
    return config, checkpoint


def _find_to_resume(resume: str, run_dir: Path | None) -> Path | None:
    """What `--resume` means; None if it is auto and the run, if there is one, has to begin."""
    if resume != "auto":
        return find_checkpoint(Path(resume))
    if run_dir is None:
        return None
    return latest_valid_checkpoint(run_dir, lambda line: print0(f"warning: {line}"))


def _with_settings(checkpoint: Path | None) -> tuple[Path | None, TrainConfig | None]:
    """A checkpoint and the settings of its run."""
    if checkpoint is None:
        return None, None
    return checkpoint, config_from_settings(read_state(checkpoint).train_config, checkpoint)


def last_run(out_dir: Path) -> tuple[str, str] | None:
    """The run that `--resume auto` means without `--run-name`: the one that was at work last.

    Returns:
        Its name, and what it did last and when; None if there is no run.
    """
    events = []
    for run in out_dir.glob("*"):
        with suppress(OSError):  # another user's
            saved = latest_checkpoint(run)
            marks = {"was stopped": run / PREEMPTED_NAME, "logged a step": run / METRICS_NAME}
            for what, path in (marks | ({f"saved {saved.name}": saved} if saved else {})).items():
                if path.exists():
                    events.append((path.stat().st_mtime, run.name, what))
    if not events:
        return None
    seconds, name, what = max(events)
    return name, f"{what} on {time.strftime('%Y-%m-%d at %H:%M:%S', time.localtime(seconds))}"


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
    barrier()  # all is written
    if reason is None:
        print0(f"done: {run_dir}")
        return
    stop.raise_failure()
    line = f"after step {step}; {resume_hint(run_dir)}"
    if reason == "SIGINT":
        raise KeyboardInterrupt(line) if dist_info.is_main else SystemExit(130)
    print0(f"{reason}: stopped {line}")


def describe_run(run_dir: Path) -> str:
    """Where a run is, and how to follow, stop and resume it."""
    path = as_typed(run_dir)
    return (
        f"run folder  {path}\n"
        f"figures     python plot.py {path}, at any time\n"
        f"to stop     Ctrl-C or SIGTERM, which save first\n"
        f"to resume   python train_gpt2.py --resume {path}"
    )


def as_typed(path: Path) -> str:
    """A path for a shell: relative if it is below the working folder, and quoted."""
    with suppress(ValueError, OSError):
        path = path.relative_to(Path.cwd())
    return shlex.quote(path.as_posix())


def resume_hint(run_dir: Path) -> str:
    """The last checkpoint, and the flags that resume from it."""
    checkpoint = latest_checkpoint(run_dir)
    if checkpoint is None:
        return f"no checkpoint yet, begin again with --resume auto --run-name {run_dir.name}"
    return f"last checkpoint {checkpoint.name}, go on with --resume {as_typed(run_dir)}"


@contextmanager
def explain_failures(run_dir: Path) -> Iterator[None]:
    """Add to a failure of the body which checkpoint is left, and what to do.

    Raises:
        FloatingPointError: the body raised it, on all ranks.
        RunStopped: another process is gone.
        ValueError: the device ran out of memory, or torch.compile failed.
    """
    try:
        yield
    except FloatingPointError as error:
        barrier()  # all ranks come here, rank 0 when its last save is complete
        raise FloatingPointError(f"{error}; {resume_hint(run_dir)}") from None
    except Exception as error:  # Triton's are no RuntimeErrors
        if is_out_of_memory(error):  # asked first: NCCL's is a DistError, too
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


def choose_run_dir(config: TrainConfig, checkpoint: Path | None) -> Path:
    """The run's folder: that of the resumed checkpoint, of the given name, or of size and time.

    Raises:
        ValueError: the checkpoint is in no run's folder.
    """
    if checkpoint is not None and (config.run_name is None or config.resume == "auto"):
        if checkpoint.absolute().parent.name != "checkpoints":
            raise ValueError(
                f"{checkpoint} is not in a run's checkpoints folder: give a --run-name"
            )
        return checkpoint.absolute().parent.parent
    if config.run_name is not None:
        return config.out_dir / config.run_name
    for seconds in itertools.count(int(time.time())):  # another run may have begun in this one
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))
        if not (run_dir := config.out_dir / f"{config.size}-{stamp}").exists():
            break
    return run_dir


def is_own(checkpoint: Path, run_dir: Path) -> bool:
    """Whether a checkpoint is of this run, under whatever path they are given."""
    parents = (checkpoint.parent.resolve(), checkpoint.resolve().parent)
    return (run_dir / "checkpoints").resolve() in parents


def check_usable(run_dir: Path, config: TrainConfig, checkpoint: Path | None) -> None:
    """Refuse a folder in which the run can be neither resumed nor started.

    Raises:
        ValueError: the folder holds another run, or its checkpoints are not there.
    """
    checkpoints = run_dir / "checkpoints"
    if checkpoints.is_symlink() and not checkpoints.exists():
        raise ValueError(
            f"{checkpoints} is a link to {checkpoints.readlink()}, which is not there: mount its "
            f"disk, make that folder, or remove the link"
        )
    is_run = any((run_dir / name).exists() for name in (RUN_CONFIG_NAME, METRICS_NAME))
    is_resumed = config.resume is not None and (checkpoint is None or is_own(checkpoint, run_dir))
    if (is_run or any(checkpoints.glob("step_*"))) and not is_resumed:
        raise ValueError(
            f"{run_dir} already holds a run: give another --run-name, or go on with it by "
            f"--resume {run_dir}"
        )


@contextmanager
def open_run(
    args: Sequence[str], config: TrainConfig, checkpoint: Path | None, dist_info: DistInfo
) -> Iterator[tuple[LockedFolder, TrainConfig, Path | None]]:
    """Lock the run's folder for the length of the body; rank 0 does it for all.

    The folder may hold a run already if `--resume` found its checkpoint, or found none because the
    run ended before its first.

    Yields:
        The folder; the configuration, and the checkpoint to resume from. These were chosen by
        `parse_config` when another trainer may still have been saving, and are chosen again if so.

    Raises:
        ValueError: the folder holds another run, cannot be written, or another trainer is using it.
    """
    with ExitStack() as stack:
        folder = LockedFolder(Path())  # of rank 0, as soon as that has it
        with raise_on_all_ranks():
            if dist_info.is_main:
                folder = _lock(stack, config, checkpoint)
        folder.path = Path(gather_text(str(folder.path))[0])
        latest = latest_checkpoint(folder.path)
        has_changed = (latest and latest.name) != (checkpoint and checkpoint.name)
        if config.resume is not None and broadcast_int(has_changed):
            name = ("--run-name", folder.path.name) if config.resume == "auto" else ()
            with raise_on_all_ranks():
                config, checkpoint = parse_config([*args, *name])
        with raise_on_all_ranks():
            if dist_info.is_main and checkpoint is None:
                check_nothing_lost(folder.path)
        yield folder, config, checkpoint


def check_nothing_lost(run_dir: Path) -> None:
    """Refuse to begin again a run that had saved checkpoints.

    Raises:
        ValueError: `metrics.jsonl` says that it had.
    """
    if step := last_saved_step(run_dir / METRICS_NAME):
        raise ValueError(
            f"{run_dir} had saved step {step} and has no checkpoint any more: mount or restore "
            f"{run_dir / 'checkpoints'}, or begin again with another --run-name"
        )


def _lock(stack: ExitStack, config: TrainConfig, checkpoint: Path | None) -> LockedFolder:
    """Make and lock the run's folder, and clean up what a killed process has left there."""
    run_dir = choose_run_dir(config, checkpoint)
    try:
        folder = stack.enter_context(lock_folder(run_dir, LOCK_NAME))
        check_usable(run_dir, config, checkpoint)
        clean_up(run_dir / "checkpoints")
    except Timeout:
        if config.run_name is None and checkpoint is None:  # one that began in the same second
            return _lock(stack, config, checkpoint)
        raise ValueError(f"another trainer is at work in {run_dir}") from None
    except OSError as error:
        raise ValueError(f"the run folder cannot be written: {error}") from None
    return folder


def label_run(
    run_dir: Path, config: TrainConfig, checkpoint: Path | None, dist_info: DistInfo
) -> None:
    """Write `config.json`; set checkpoints of later steps aside, which the run will save again.

    Raises:
        ValueError: the folder cannot be written.
    """
    with raise_on_all_ranks():
        if not dist_info.is_main:
            return
        try:
            if checkpoint is not None and is_own(checkpoint, run_dir):
                step = read_state(checkpoint).step
                if moved := set_newer_aside(run_dir / "checkpoints", step):
                    names = ", ".join(path.name for path in moved)
                    print0(f"set aside in {moved[0].parent}: {names}")
            write_json(run_dir / RUN_CONFIG_NAME, config.saved())
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
    """The dimensions that the flags give or, with `--init-from`, its model's or the run's.

    Raises:
        ValueError: `--block-size` is longer than the context of the model to start from.
    """
    if config.init_from is None:
        return config.model_config()
    if checkpoint is not None:  # --init-from may be gone by now
        return GPTConfig(**read_state(checkpoint).model_config)
    model_config = read_model_config(config.init_from)
    given, own = config.block_size, model_config.block_size
    if given > own:
        raise ValueError(
            f"--block-size {given} is beyond this model's {own}: give --block-size {own} or less"
        )
    if given < own:
        print0(
            f"--block-size {given}: of {config.init_from}, positions {given} to {own - 1} are cut"
        )
    return replace(model_config, block_size=given)
