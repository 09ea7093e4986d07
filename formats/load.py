"""Find a run's checkpoints, and load models by any name that a user gives.

model = load_model("runs/mine")
"""

import os
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from formats.checkpoint import (
    CHECKPOINT_MANIFEST,
    MODEL_NAME,
    STATE_NAME,
    best_checkpoint,
    complete_checkpoints,
    copy_state,
    read_state,
    verify_checkpoint,
    warn_of_other_code,
)
from formats.huggingface import (
    is_local,
    load_pretrained,
    new_model,
    read_pretrained_config,
    read_tensors,
)
from formats.metrics import METRICS_NAME, last_saved_step, validations
from model import GPT, GPTConfig
from runtime.cli import shell_line
from runtime.distributed import print0, train_command

RUN_CONFIG_NAME = "config.json"  # of a run: its settings
RUN_LOCK_NAME = ".lock"
RUNS = Path("runs")  # --out-dir's default
BEST = "@best"  # after a run's name: its checkpoint of the lowest validation loss
CLEARLY_ABOVE = 0.05  # nats per token: more than a validation loss goes up and down by chance

# --- finding ----------------------------------------------------------------------------------


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The run's complete checkpoint of the highest step; None if it has none."""
    return next(iter(complete_checkpoints(run_dir / "checkpoints")), None)


def latest_valid_checkpoint(run_dir: Path) -> Path | None:
    """The run's undamaged checkpoint of the highest step; None if the run has no checkpoint.

    A line warns of each of a higher step that is damaged; a ValueError says that all are.
    """
    checkpoints = complete_checkpoints(run_dir / "checkpoints")
    for checkpoint in checkpoints:
        try:
            verify_checkpoint(checkpoint)
        except (OSError, ValueError) as error:
            print0(f"warning: {error}; going back to the checkpoint before it")
        else:
            return checkpoint
    if checkpoints:
        raise ValueError(
            f"every checkpoint in {run_dir} is damaged: start a new run with another --run-name"
        )
    return None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the latest of a run, by its folder or name.

    With `@best` after it, the run's one of the lowest validation loss.
    """
    name = str(path)
    find, path = latest_checkpoint, Path(name.removesuffix(BEST))
    if name.endswith(BEST):
        find = best_checkpoint
    if not path.exists() and (RUNS / path).is_dir():
        path = RUNS / path
    if (path / CHECKPOINT_MANIFEST).is_file() and (path / STATE_NAME).is_file():
        return path
    if found := find(path):
        return found
    if latest := latest_checkpoint(path):
        raise FileNotFoundError(f"{path} has no checkpoint with a validation: use {latest}")
    if is_run(path) or (path / RUN_LOCK_NAME).exists():
        hint = no_checkpoint_hint(path)
        if os.access(path / RUN_LOCK_NAME, os.W_OK):  # it is not another user's
            try:
                with FileLock(path / RUN_LOCK_NAME, timeout=0):
                    pass
            except Timeout:
                hint = "no checkpoint yet, and is still training: wait for its first"
        raise FileNotFoundError(f"the run {path} has {hint}")
    problem = "is no run, checkpoint or Hugging Face model" if path.exists() else "does not exist"
    places = (path, *path.parents[:-1], RUNS, Path())
    folder = next(folder for folder in places if folder.is_dir())
    raise FileNotFoundError(f"{path} {problem}: {list_runs(folder)}")


def describe_best(run_dir: Path) -> str:
    """The last lines of a run: its best validation loss, and a warning if the last is above it.

    Each ends its line. Empty if the run was never validated.
    """
    by_step = validations(run_dir)
    losses = {step: record["val_loss"] for step, record in by_step.items()}
    if not losses:
        return ""
    best, last = min(losses, key=losses.__getitem__), max(losses)
    line = f"best val_loss {losses[best]:.4f} at step {best}"
    if bits := by_step[best].get("val_bpb"):
        line += f", {bits:.4f} bits per byte"
    if losses[last] - losses[best] < CLEARLY_ABOVE:
        return f"{line}\n"
    remedy = "use fewer --max-steps, or more data"
    kept = best_checkpoint(run_dir)
    if kept is not None and kept != latest_checkpoint(run_dir):
        remedy = f"use {kept.name}, {shell_line('--model', f'{run_dir}{BEST}')}"
    return f"{line}\nwarning: the last, {losses[last]:.4f}, is clearly above it: {remedy}\n"


def no_checkpoint_hint(run_dir: Path) -> str:
    """How to begin a run again that has no checkpoint."""
    flags = ("--resume", "auto", "--out-dir", run_dir.parent, "--run-name", run_dir.name)
    config, command = run_dir / RUN_CONFIG_NAME, "the command that began it"
    if config.exists() and not last_saved_step(run_dir / METRICS_NAME):  # not from another run
        command = train_command("--config", config, *flags)
    return f"no checkpoint yet: begin again with {command}"


def list_runs(out_dir: Path) -> str:
    """The runs that are in a folder, for a message."""
    return f"the runs in {out_dir} are {', '.join(run_names(out_dir)) or 'none'}"


def run_names(out_dir: Path) -> list[str]:
    """The names of the runs in a folder."""
    return [run.name for run in sorted(out_dir.glob("[!.]*")) if is_run(run)]


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    # Not Path.is_dir, which raises an error in another user's folder.
    return os.path.isdir(path / "checkpoints") or os.path.isfile(path / METRICS_NAME)


# --- loading ----------------------------------------------------------------------------------


def load_model(source: str | Path, device: torch.device | str = "cpu") -> GPT:
    """Load a model, raw, in float32 and in eval mode.

    Args:
        source: a run folder (its latest checkpoint; with `@best`, its best), a checkpoint, a folder
            in Hugging Face's format, or the name of a GPT-2 on the hub.
        device: where to put it.
    """
    if is_hugging_face(source):
        return load_pretrained(source, device)
    path = find_checkpoint(Path(source))
    verify_checkpoint(path, (MODEL_NAME, STATE_NAME))
    state = read_state(path)
    model = new_model(GPTConfig(**state.model_config), device)
    copy_state(read_tensors(path / MODEL_NAME), model, path)
    warn_of_other_code(path, state)
    return model.eval()


def model_config_of(source: str | Path) -> GPTConfig:
    """The dimensions of a model that `load_model` loads, without reading its weights."""
    if is_hugging_face(source):
        return read_pretrained_config(source)
    return GPTConfig(**read_state(find_checkpoint(Path(source))).model_config)


def is_hugging_face(source: str | Path) -> bool:
    """Whether a model is in Hugging Face's format; a run's own `config.json` is something else."""
    path = Path(source)
    return not is_local(source) or (any(path.glob("[!.]*onfig.json")) and not is_run(path))
