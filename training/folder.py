"""A run's folder: which one it is, whether a run may go into it, its lock, how to resume it."""

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from formats.checkpoint import Checkpoint, clean_up, complete_checkpoints, verify_checkpoint
from formats.load import RUN_CONFIG_NAME, RUN_LOCK_NAME, latest_checkpoint, no_checkpoint_hint
from formats.metrics import METRICS_NAME, last_saved_step, logged_values
from runtime import distributed
from runtime.cli import RunStopped, shell_line
from runtime.device import compile_error, is_out_of_memory
from runtime.distributed import is_main
from runtime.files import lock_folder
from training.config import TrainConfig
from training.stopping import StopRequest


@contextmanager
def lock_run_folder(config: TrainConfig, resumed: Checkpoint | None) -> Iterator[Path]:
    """Lock the run's folder for the length of the body; rank 0 does it for all.

    The folder may hold a run already if `--resume` found its checkpoint, or found none because the
    run ended before its first.
    """
    with ExitStack() as stack:
        run_dir = Path()
        with distributed.raise_on_all_ranks():
            if is_main():
                run_dir = choose_run_dir(config, resumed)
                try:
                    stack.enter_context(lock_folder(run_dir, RUN_LOCK_NAME))
                except Timeout:
                    raise ValueError(f"another trainer is at work in {run_dir}") from None
                check_usable(run_dir, config, resumed)
                clean_up(run_dir / "checkpoints")
        yield Path(distributed.gather_text(str(run_dir))[0])


def choose_run_dir(config: TrainConfig, resumed: Checkpoint | None) -> Path:
    """The run's folder: that of the resumed checkpoint, of the given name, or of size and time."""
    if resumed is not None and config.run_name is None:
        folder = resumed.path.absolute().parent
        if folder.name != "checkpoints":
            raise ValueError(
                f"{resumed.path} is not in a run's checkpoints folder: give a --run-name"
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


def is_own(resumed: Checkpoint, run_dir: Path) -> bool:
    """Whether a checkpoint is of this run, under whatever path they are given."""
    parents = (resumed.path.parent.resolve(), resumed.path.resolve().parent)  # it may be a link
    return (run_dir / "checkpoints").resolve() in parents


def check_usable(run_dir: Path, config: TrainConfig, resumed: Checkpoint | None) -> None:
    """Refuse a folder in which the run can be neither resumed nor started."""
    checkpoints = run_dir / "checkpoints"
    holds_run = any((run_dir / name).exists() for name in (RUN_CONFIG_NAME, METRICS_NAME))
    step, complete = last_saved_step(run_dir / METRICS_NAME), complete_checkpoints(checkpoints)
    is_resumed = config.resume is not None and (resumed is None or is_own(resumed, run_dir))
    if resumed and step and not (complete or logged_values(run_dir / METRICS_NAME, "saved_step")):
        is_resumed = True  # the same command, which was killed in its first save
    if (holds_run or any(checkpoints.glob("step_*"))) and not is_resumed:
        raise ValueError(
            f"{run_dir} already holds a run: give another --run-name, or go on with it by "
            f"{shell_line('--resume', run_dir)}"
        )
    # By the step: a copy that is resumed from may have any name.
    resumed_name = f"step_{resumed.state.step:08d}" if resumed else ""
    for other in complete:
        if other.name > resumed_name and is_valid(other):
            raise ValueError(
                f"{run_dir} has a newer checkpoint, {other.name}: resume from that, or train on "
                f"from the older one as another run, by another --run-name"
            )
    if resumed is None and step:
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


def describe_run(run_dir: Path) -> str:
    """Where a run is, and how to follow, stop and resume it."""
    path = shell_line(run_dir)
    return (
        f"run folder  {path}\n"
        f"figures     python plot.py {path}, at any time\n"
        f"to stop     Ctrl-C or SIGTERM, which save first\n"
        f"to resume   {distributed.train_command('--resume', run_dir)}"
    )


def resume_hint(run_dir: Path) -> str:
    """The last checkpoint, and the flags that resume from it."""
    checkpoint = latest_checkpoint(run_dir)
    if checkpoint is None:
        return no_checkpoint_hint(run_dir)
    return f"last checkpoint {checkpoint.name}, go on with {shell_line('--resume', run_dir)}"


@contextmanager
def explain_failures(run_dir: Path, stop: StopRequest) -> Iterator[None]:
    """Add to a failure of the body which checkpoint is left, and what to do."""
    try:
        yield
    except FloatingPointError as error:
        distributed.barrier()  # all ranks come here, rank 0 when its last save is complete
        remedy = f"{resume_hint(run_dir)} and a lower --max-lr"
        for earlier in complete_checkpoints(run_dir / "checkpoints")[1:2]:
            remedy += f"; if this fails, another --run-name with {shell_line('--resume', earlier)}"
        raise FloatingPointError(f"{error}; {remedy}") from None
    except Exception as error:  # Triton's are no RuntimeErrors
        if is_out_of_memory(error):  # asked first: NCCL's is a DistError, too
            remedy = f"give a smaller --micro-batch-size; {resume_hint(run_dir)}"
            raise ValueError(f"the device ran out of memory: {remedy}") from None
        if distributed.is_lost_process(error):
            raise RunStopped(
                f"another process of this run is gone; {resume_hint(run_dir)}"
            ) from None
        if problem := compile_error(error):
            if stop.is_asked:  # the signal also ended the compiler's processes
                raise KeyboardInterrupt(resume_hint(run_dir)) from None
            raise ValueError(f"{problem}; {resume_hint(run_dir)}") from None
        raise
