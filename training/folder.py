"""A run's folder: choosing, locking and checking it, and how to resume the run in it."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from formats.checkpoint import Checkpoint, clean_up, complete_checkpoints, verify_checkpoint
from formats.load import RUN_CONFIG_NAME, RUN_LOCK_NAME, describe_best, latest_checkpoint
from formats.metrics import METRICS_NAME, logged_values
from runtime import distributed
from runtime.cli import as_flags, shell_line
from runtime.compiler import compile_error
from runtime.distributed import is_main, print0
from runtime.errors import LOST_PROCESS, DivergedError, RunStopped, UserError, is_out_of_memory
from runtime.files import lock_folder
from training.config import TrainConfig
from training.stopping import StopRequest, StopRequested


@contextmanager
def lock_run_folder(config: TrainConfig, resumed: Checkpoint | None) -> Iterator[Path]:
    """Lock the run's folder while the body runs; rank 0 does it for all ranks.

    The folder may already hold a run if `--resume` found a checkpoint in it, or if it found none
    because the run ended before its first checkpoint.
    """
    with ExitStack() as stack:
        run_dir = Path()
        with distributed.raise_on_all_ranks():
            if is_main():
                run_dir = choose_run_dir(config, resumed)
                remedy = "use another --run-name or --out-dir"
                if resumed is not None:  # the checkpoint can be continued as a new run
                    resume = shell_line("--resume", resumed.path)
                    remedy = f"use {resume} with another --run-name and --out-dir"
                stack.enter_context(lock_folder(run_dir, RUN_LOCK_NAME, remedy))
                check_usable(run_dir, config, resumed)
                clean_up(run_dir / "checkpoints")
        yield Path(distributed.gather_text(str(run_dir))[0])


def choose_run_dir(config: TrainConfig, resumed: Checkpoint | None) -> Path:
    """Return the run's folder: from `--run-name`, the resumed run, or size and time."""
    if config.run_name is not None:
        return config.out_dir / config.run_name
    if resumed is not None and (folder := resumed.path.absolute().parent).name == "checkpoints":
        return folder.parent if resumed.path.is_absolute() else Path(os.path.relpath(folder.parent))
    return config.out_dir / f"{config.size}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_usable(run_dir: Path, config: TrainConfig, resumed: Checkpoint | None) -> None:
    """Raise if the run can be neither started nor resumed in this folder."""
    checkpoints, metrics = run_dir / "checkpoints", run_dir / METRICS_NAME
    saved, started = (logged_values(metrics, name) for name in ("saved_step", "resumed_from"))
    # It continued another run and was killed before its first save, so the same command works.
    is_repeated = any(started) and not saved and not any(checkpoints.glob("step_*"))
    # Links may lead to the run's folder.
    is_own = resumed is None or resumed.path.parent.resolve() == checkpoints.resolve()
    files = (run_dir / RUN_CONFIG_NAME, metrics, *checkpoints.glob("step_*"))
    is_resumed = config.resume is not None and (is_own or is_repeated)
    if any(file.exists() for file in files) and not is_resumed:
        if latest_checkpoint(run_dir) is None:
            raise UserError(f"{run_dir} exists but has no checkpoint: use another --run-name")
        hint = resume_hint(run_dir)
        raise UserError(f"{run_dir} already holds a run: use another --run-name; {hint}")
    # Compare by step, because a copy of a checkpoint may have any name.
    resumed_name = f"step_{resumed.state.step:08d}" if resumed else ""
    for other in complete_checkpoints(checkpoints):
        if other.name > resumed_name and is_valid(other):
            problem = f"{run_dir} has a newer checkpoint, {other.name}"
            other_fix = "continue from the older one as a new run with another --run-name"
            raise UserError(f"{problem}: resume from it, or {other_fix}")
    if resumed is None and (step := max(saved or started, default=0)):
        what = "saved" if saved else "continued another run's"
        fix = f"restore {checkpoints}" if saved else "use --resume with the other run"
        problem = f"{run_dir} {what} step {step}, but its checkpoints are missing or damaged"
        raise UserError(f"{problem}: {fix}, or start over with another --run-name")


def is_valid(checkpoint: Path) -> bool:
    """Return whether a checkpoint is undamaged."""
    with suppress(OSError, UserError):
        verify_checkpoint(checkpoint)
        return True
    return False


def resume_hint(run_dir: Path) -> str:
    """Describe the last checkpoint, and how to resume from it or to start over without one."""
    if (checkpoint := latest_checkpoint(run_dir)) is None:
        return "no checkpoint yet: start over with the same command and another --run-name"
    return f"last checkpoint {checkpoint.name}, resume with {shell_line('--resume', run_dir)}"


def print_next_commands(run_dir: Path) -> None:
    """Print what to do with a run that is complete, and its best validation loss."""
    if is_main():
        path, exported = shell_line(run_dir), shell_line(Path("exported") / run_dir.name)
        print0(f"sample      python sample.py --model {path}")
        print0(f"figures     python plot.py {path}")
        print0(f"export      python export.py --model {path} --out {exported}")
        print0(f"{describe_best(run_dir)}done: {run_dir}")


def lower_rate_command(run_dir: Path, config: TrainConfig) -> str:
    """Return the command that resumes a diverged run, or repeats it, at a lower learning rate."""
    is_saved = latest_checkpoint(run_dir) is not None
    source = {"resume": run_dir} if is_saved else {"config": run_dir / RUN_CONFIG_NAME}
    rates = {"max_lr": f"{config.max_lr / 2:g}", "min_lr": f"{config.min_lr / 2:g}"}
    steps = {"max_steps": None if config.max_minutes else config.max_steps}
    launcher = "torchrun ..." if "RANK" in os.environ else "python"
    command = shell_line("train_gpt2.py", *as_flags(source | rates | steps))
    return f"use a lower learning rate, such as {launcher} {command}"


@contextmanager
def explain_failures(run_dir: Path, config: TrainConfig, stop: StopRequest) -> Iterator[None]:
    """If the body fails, add the last checkpoint and the fix to the error message."""
    try:
        yield
    except StopRequested:  # no evaluation was running: a signal came before training began
        stop.report("before training began: run the same command again")
    except DivergedError as error:
        distributed.barrier()  # every rank gets here, rank 0 once its last save is complete
        raise DivergedError(f"{error}: {lower_rate_command(run_dir, config)}") from None
    except Exception as error:  # Triton's errors are not RuntimeErrors
        hint = resume_hint(run_dir)
        if is_out_of_memory(error):  # first, because NCCL's is also a DistError
            fix = "stop other programs on the device, or use a smaller --micro-batch-size"
            raise UserError(f"the device ran out of memory: {fix}; {hint}") from None
        if distributed.is_lost_process(error):
            raise RunStopped(f"{LOST_PROCESS}; {hint}") from None
        if reason := compile_error(error):
            if stop.signal:  # the signal also stopped the compiler's processes
                raise KeyboardInterrupt(hint) from None
            raise UserError(f"{reason}; {hint}") from None
        raise
