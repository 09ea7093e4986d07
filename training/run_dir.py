"""A run's folder: its configuration and lock, what may be resumed, and how it ended."""

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from filelock import Timeout

from model import GPTConfig
from runtime.checkpoint import (
    Checkpoint,
    clean_up,
    complete_checkpoints,
    find_checkpoint,
    latest_checkpoint,
    latest_valid_checkpoint,
    list_runs,
    no_checkpoint_hint,
    read_model_config,
    read_state,
    run_names,
    verify_checkpoint,
)
from runtime.cli import RunStopped, parse_flags, shell_line
from runtime.device import compile_error, is_out_of_memory
from runtime.distributed import (
    barrier,
    gather_text,
    is_lost_process,
    is_main,
    print0,
    raise_on_all_ranks,
    train_command,
)
from runtime.files import lock_folder, write_json
from runtime.metrics import METRICS_NAME, describe_best, last_saved_step
from runtime.stopping import StopRequest
from training.config import (
    TrainConfig,
    config_from_settings,
    learning_rate,
    read_config,
)

RUN_CONFIG_NAME = "config.json"
LOCK_NAME = ".lock"
PREEMPTED_NAME = "PREEMPTED"
RATE_JUMP = 1.1  # a rate that is higher by this factor than the step before has jumped
KEPT_SETTINGS = ("total_batch_size", "seed", "shuffle", "init_from")  # to the end of a run


def parse_config(args: Sequence[str]) -> tuple[TrainConfig, Checkpoint | None]:
    """The configuration, and the checkpoint to resume from, if any; its hashes are checked.

    Flags that are not given have the values of the resumed checkpoint or of `--config`, and
    `--block-size` is the context of the model of a given `--init-from`. A resumed run keeps its
    warm-up, whatever `--max-steps` becomes: the schedule so far must not change.
    """
    locate = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("config", "resume", "out-dir", "run-name", "init-from"):
        locate.add_argument(f"--{flag}", f"--{flag.replace('-', '_')}", nargs="?")
    given, _ = locate.parse_known_args(args)
    defaults, checkpoint = TrainConfig(), None
    if given.config:
        defaults = read_config(Path(given.config))
    if given.resume:
        out_dir = Path(given.out_dir or defaults.out_dir)
        path = _find_to_resume(given.resume, out_dir, given.run_name)
        if path is not None:
            checkpoint = Checkpoint(path, read_state(path))
            defaults = config_from_settings(checkpoint.state.train_config, path)
    if given.init_from and checkpoint is None and defaults.init_from is None:
        own = read_model_config(given.init_from).block_size
        defaults = replace(defaults, block_size=own)
    config = parse_flags(TrainConfig, args, defaults)
    if checkpoint is not None:
        _warn_of_jump(checkpoint, defaults, config)
        if given.config:
            meant = parse_flags(TrainConfig, args, read_config(Path(given.config)))
            if unused := differences(meant.saved(), config.saved()):
                print0(
                    f"warning: --config {given.config} is not used: {checkpoint.path} has the "
                    f"run's settings ({', '.join(unused)})"
                )
    return config, checkpoint


def _warn_of_jump(checkpoint: Checkpoint, saved: TrainConfig, config: TrainConfig) -> None:
    """Say so if the resumed run lifts the learning rate in one step."""

    def before(step: int) -> float:
        return max(learning_rate(saved, max(step - 1, 0)), learning_rate(saved, step))

    def jumps(step: int) -> bool:
        return learning_rate(config, step) > RATE_JUMP * before(step)

    step = checkpoint.state.step
    if jumps(step):
        others = complete_checkpoints(checkpoint.path.parent)
        smooth = (shell_line("--resume", p) for p in others if not jumps(int(p.name[5:])))
        remedy = next((f"{resume} with another --run-name" for resume in smooth), "a new run")
        print0(
            f"warning: the learning rate jumps at step {step} from {before(step):.2g} to "
            f"{learning_rate(config, step):.2g}; the way to a smooth curve is {remedy}"
        )


def _find_to_resume(resume: str, out_dir: Path, run_name: str | None) -> Path | None:
    """The checkpoint that `--resume` means; None if it is auto and the run has to begin."""
    if resume != "auto":
        path = find_checkpoint(Path(resume))
        try:
            verify_checkpoint(path)
        except ValueError as error:
            run_dir = path.absolute().parent.parent
            flags = ("--resume", "auto", "--out-dir", run_dir.parent, "--run-name", run_dir.name)
            raise ValueError(
                f"{error}: give an earlier checkpoint, or go back to the one before it by "
                f"{shell_line(*flags)}"
            ) from None
        return path
    if run_name is None:
        raise ValueError(f"--resume auto needs the --run-name: {list_runs(out_dir)}")
    names = run_names(out_dir)
    if run_name not in names:
        near = ", ".join(get_close_matches(run_name, names)) or "nothing like it"
        print0(f"no run {run_name} in {out_dir}, so it begins (there is {near})")
    return latest_valid_checkpoint(out_dir / run_name)


def is_finished(checkpoint: Checkpoint | None, config: TrainConfig) -> bool:
    """Whether nothing is left to do: the last step is saved, and the run was not preempted there.

    It is the same on all ranks, once `open_same_data` has found that they see one checkpoint.
    """
    if checkpoint is None:
        return False
    step, mark = checkpoint.state.step, checkpoint.path.parent.parent / PREEMPTED_NAME
    return step > config.max_steps or (step == config.max_steps and not mark.is_file())


def finish_run(run_dir: Path, step: int, is_complete: bool, stop: StopRequest) -> None:
    """Say how the run has ended; mark one that is to be resumed by `PREEMPTED`.

    Every process must call this, after `step` updates that are saved. If the run `is_complete`, a
    signal came too late to matter.
    """
    reason = None if is_complete and stop.reason != "failure" else stop.reason
    if is_main():
        with stop.on_write_error():
            if reason is None:
                (run_dir / PREEMPTED_NAME).unlink(missing_ok=True)
            else:
                write_json(run_dir / PREEMPTED_NAME, {"step": step, "reason": reason})
    barrier()  # all is written
    if reason is None:
        if is_main():
            print0(f"{describe_best(run_dir)}done: {run_dir}")
        return
    if reason == "failure":  # the process that met it says what it was
        raise stop.error or SystemExit(2)
    line = f"after step {step}; {resume_hint(run_dir)}"
    if reason == "SIGINT":
        raise KeyboardInterrupt(line) if is_main() else SystemExit(130)
    print0(f"{reason}: stopped {line}")


def describe_run(run_dir: Path) -> str:
    """Where a run is, and how to follow, stop and resume it."""
    path = shell_line(run_dir)
    return (
        f"run folder  {path}\n"
        f"figures     python plot.py {path}, at any time\n"
        f"to stop     Ctrl-C or SIGTERM, which save first\n"
        f"to resume   {train_command('--resume', run_dir)}"
    )


def resume_hint(run_dir: Path) -> str:
    """The last checkpoint, and the flags that resume from it."""
    checkpoint = latest_checkpoint(run_dir)
    if checkpoint is None:
        return no_checkpoint_hint(run_dir)
    return f"last checkpoint {checkpoint.name}, go on with {shell_line('--resume', run_dir)}"


@contextmanager
def explain_failures(run_dir: Path) -> Iterator[None]:
    """Add to a failure of the body which checkpoint is left, and what to do."""
    try:
        yield
    except FloatingPointError as error:
        barrier()  # all ranks come here, rank 0 when its last save is complete
        remedy = f"{resume_hint(run_dir)} and a lower --max-lr"
        for earlier in complete_checkpoints(run_dir / "checkpoints")[1:2]:
            remedy += f"; if this fails, another --run-name with {shell_line('--resume', earlier)}"
        raise FloatingPointError(f"{error}; {remedy}") from None
    except Exception as error:  # Triton's are no RuntimeErrors
        if is_out_of_memory(error):  # asked first: NCCL's is a DistError, too
            remedy = f"give a smaller --micro-batch-size; {resume_hint(run_dir)}"
            raise ValueError(f"the device ran out of memory: {remedy}") from None
        if is_lost_process(error):
            raise RunStopped(
                f"another process of this run is gone; {resume_hint(run_dir)}"
            ) from None
        if problem := compile_error(error):
            raise ValueError(f"{problem}; {resume_hint(run_dir)}") from None
        raise


@contextmanager
def open_run(config: TrainConfig, checkpoint: Checkpoint | None) -> Iterator[Path]:
    """Lock the run's folder for the length of the body; rank 0 does it for all.

    The folder may hold a run already if `--resume` found its checkpoint, or found none because the
    run ended before its first.
    """
    with ExitStack() as stack:
        run_dir = Path()
        with raise_on_all_ranks():
            if is_main():
                run_dir = choose_run_dir(config, checkpoint)
                try:
                    stack.enter_context(lock_folder(run_dir, LOCK_NAME))
                except Timeout:
                    raise ValueError(f"another trainer is at work in {run_dir}") from None
                check_usable(run_dir, config, checkpoint)
                clean_up(run_dir / "checkpoints")
        yield Path(gather_text(str(run_dir))[0])


def choose_run_dir(config: TrainConfig, checkpoint: Checkpoint | None) -> Path:
    """The run's folder: that of the resumed checkpoint, of the given name, or of size and time."""
    if checkpoint is not None and config.run_name is None:
        folder = checkpoint.path.absolute().parent
        if folder.name != "checkpoints":
            raise ValueError(
                f"{checkpoint.path} is not in a run's checkpoints folder: give a --run-name"
            )
        return folder.parent
    if config.run_name is not None:
        return config.out_dir / config.run_name
    for seconds in itertools.count(int(time.time())):
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))
        run_dir = config.out_dir / f"{config.size}-{stamp}"
        with suppress(FileExistsError):  # of a run that has begun in the same second
            run_dir.mkdir(parents=True)
            break
    return run_dir


def is_own(checkpoint: Checkpoint, run_dir: Path) -> bool:
    """Whether a checkpoint is of this run, under whatever path they are given."""
    parents = (checkpoint.path.parent.resolve(), checkpoint.path.resolve().parent)
    return (run_dir / "checkpoints").resolve() in parents


def check_usable(run_dir: Path, config: TrainConfig, checkpoint: Checkpoint | None) -> None:
    """Refuse a folder in which the run can be neither resumed nor started."""
    checkpoints = run_dir / "checkpoints"
    holds_run = any((run_dir / name).exists() for name in (RUN_CONFIG_NAME, METRICS_NAME))
    is_resumed = config.resume is not None and (checkpoint is None or is_own(checkpoint, run_dir))
    if (holds_run or any(checkpoints.glob("step_*"))) and not is_resumed:
        raise ValueError(
            f"{run_dir} already holds a run: give another --run-name, or go on with it by "
            f"{shell_line('--resume', run_dir)}"
        )
    # By the step: a copy that is resumed from may have any name.
    resumed = f"step_{checkpoint.state.step:08d}" if checkpoint else ""
    for other in complete_checkpoints(checkpoints):
        if other.name > resumed and is_valid(other):
            raise ValueError(
                f"{run_dir} has a newer checkpoint, {other.name}: resume from that, or train on "
                f"from the older one as another run, by another --run-name"
            )
    if checkpoint is None and (step := last_saved_step(run_dir / METRICS_NAME)):
        raise ValueError(
            f"{run_dir} had saved step {step} and has no checkpoint any more: mount or restore "
            f"{checkpoints}, or begin again with another --run-name"
        )


def is_valid(checkpoint: Path) -> bool:
    """Whether a checkpoint is undamaged."""
    with suppress(OSError, ValueError):
        verify_checkpoint(checkpoint)
        return True
    return False


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Write `config.json`."""
    with raise_on_all_ranks():
        if is_main():
            write_json(run_dir / RUN_CONFIG_NAME, config.saved())


def check_resume_compatible(
    checkpoint: Checkpoint, config: TrainConfig, data_fingerprint: str, val_fingerprint: str
) -> None:
    """Refuse to resume with another model, batch, order or data set than the checkpoint's."""
    path, state = checkpoint
    found = asdict(model_dimensions(config, checkpoint))
    found |= {"data_fingerprint": data_fingerprint, "val_fingerprint": val_fingerprint}
    expected: dict[str, Any] = {
        **state.model_config,
        "data_fingerprint": state.data_fingerprint,
        "val_fingerprint": state.val_fingerprint or val_fingerprint,  # earlier versions have none
    }
    for name in KEPT_SETTINGS:
        found[name], expected[name] = getattr(config, name), state.train_config.get(name)
    if changes := differences(expected, found):
        raise ValueError(
            f"{path} is of another run ({', '.join(changes)}): leave these as they were, or start "
            f"a new run, with another --run-name and without --resume"
        )


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What is found and not as expected, as `name expected -> found`."""
    return [
        f"{name} {expected.get(name)} -> {value}"
        for name, value in found.items()
        if expected.get(name) != value
    ]


def model_dimensions(config: TrainConfig, checkpoint: Checkpoint | None) -> GPTConfig:
    """The dimensions that the flags give or, with `--init-from`, its model's or the run's."""
    if config.init_from is None:
        return config.model_config()
    if checkpoint is not None:  # --init-from may be gone by now
        return GPTConfig(**checkpoint.state.model_config)
    model_config = read_model_config(config.init_from)
    given, own = config.block_size, model_config.block_size
    if given > own:
        raise ValueError(
            f"--block-size {given} is beyond this model's {own}: give --block-size {own} or less"
        )
    return replace(model_config, block_size=given)
