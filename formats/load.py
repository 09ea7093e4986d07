"""Find a run's checkpoints, and load models by any name that a user may pass.

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
    warn_if_code_changed,
)
from formats.code_hashes import MODEL_FILES
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

RUN_CONFIG_NAME = "config.json"  # a run's settings
RUN_LOCK_NAME = ".lock"
RUNS = Path("runs")  # default of --out-dir
BEST_SUFFIX = "@best"  # after a run's name: its checkpoint with the lowest validation loss
VAL_LOSS_NOISE = 0.05  # nats per token: smaller differences may be chance

# --- finding ----------------------------------------------------------------------------------


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the run's complete checkpoint with the highest step; None if it has none."""
    return next(iter(complete_checkpoints(run_dir / "checkpoints")), None)


def latest_valid_checkpoint(run_dir: Path) -> Path | None:
    """Return the run's undamaged checkpoint with the highest step; None if it has no checkpoint.

    Print a warning for each damaged checkpoint that is skipped. Raise a ValueError if all
    checkpoints are damaged.
    """
    checkpoints = complete_checkpoints(run_dir / "checkpoints")
    for checkpoint in checkpoints:
        try:
            verify_checkpoint(checkpoint)
        except (OSError, ValueError) as error:
            print0(f"warning: {error}; falling back to the previous checkpoint")
        else:
            return checkpoint
    if checkpoints:
        raise ValueError(
            f"every checkpoint in {run_dir} is damaged: start a new run with another --run-name"
        )
    return None


def find_checkpoint(path: Path) -> Path:
    """Resolve a path to a checkpoint: the path itself, or the latest one of a run.

    A run is given by its folder or name. With the suffix `@best`, this is the run's checkpoint with
    the lowest validation loss.
    """
    name = str(path)
    find, path = latest_checkpoint, Path(name.removesuffix(BEST_SUFFIX))
    if name.endswith(BEST_SUFFIX):
        find = best_checkpoint
    if not path.exists() and (RUNS / path).is_dir():
        path = RUNS / path
    if (path / CHECKPOINT_MANIFEST).is_file() and (path / STATE_NAME).is_file():
        return path
    if found := find(path):
        return found
    if latest := latest_checkpoint(path):
        raise FileNotFoundError(f"{path} has no checkpoint with a validation loss: use {latest}")
    if is_run(path) or (path / RUN_LOCK_NAME).exists():
        hint = no_checkpoint_hint(path)
        if os.access(path / RUN_LOCK_NAME, os.W_OK):  # not another user's run
            try:
                with FileLock(path / RUN_LOCK_NAME, timeout=0):
                    pass
            except Timeout:
                hint = "no checkpoint yet and is still training: wait for its first one"
        raise FileNotFoundError(f"the run {path} has {hint}")
    problem = "is not a run, checkpoint or model folder" if path.exists() else "does not exist"
    places = (path, *path.parents[:-1], RUNS, Path())
    folder = next(folder for folder in places if folder.is_dir())
    raise FileNotFoundError(f"{path} {problem}: {list_runs(folder)}")


def describe_best(run_dir: Path) -> str:
    """Return a run's final lines: its best validation loss, and a warning if the last is higher.

    Each line ends with a newline. The text is empty if the run was never validated.
    """
    by_step = validations(run_dir)
    losses = {step: record["val_loss"] for step, record in by_step.items()}
    if not losses:
        return ""
    best, last = min(losses, key=losses.__getitem__), max(losses)
    line = f"best val_loss {losses[best]:.4f} at step {best}"
    if bits := by_step[best].get("val_bpb"):
        line += f", {bits:.4f} bits per byte"
    if losses[last] - losses[best] < VAL_LOSS_NOISE:
        return f"{line}\n"
    remedy = "use a smaller --max-steps, or more data"
    saved = best_checkpoint(run_dir)
    if saved is not None and saved != latest_checkpoint(run_dir):
        remedy = f"use {saved.name} with {shell_line('--model', f'{run_dir}{BEST_SUFFIX}')}"
    return f"{line}\nwarning: the last val_loss, {losses[last]:.4f}, is clearly higher: {remedy}\n"


def no_checkpoint_hint(run_dir: Path) -> str:
    """Describe how to start over a run that has no checkpoint."""
    flags = ("--resume", "auto", "--out-dir", run_dir.parent, "--run-name", run_dir.name)
    config, command = run_dir / RUN_CONFIG_NAME, "the command that started it"
    # config.json does not record that a run began from another run's checkpoint.
    if config.exists() and not last_saved_step(run_dir / METRICS_NAME):
        command = train_command("--config", config, *flags)
    return f"no checkpoint yet: start over with {command}"


def list_runs(out_dir: Path) -> str:
    """Return a clause that lists the runs in a folder, for messages."""
    return f"the runs in {out_dir} are {', '.join(run_names(out_dir)) or 'none'}"


def run_names(out_dir: Path) -> list[str]:
    """Return the names of the runs in a folder."""
    return [run.name for run in sorted(out_dir.glob("[!.]*")) if is_run(run)]


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's folder."""
    # Path.is_dir would raise an error in another user's folder.
    return os.path.isdir(path / "checkpoints") or os.path.isfile(path / METRICS_NAME)


# --- loading ----------------------------------------------------------------------------------


def load_model(source: str | Path, device: torch.device | str = "cpu") -> GPT:
    """Load a raw model, in float32 and eval mode.

    Args:
        source: a run folder (its latest checkpoint; with `@best`, its best), a checkpoint, a folder
            in Hugging Face format, or the name of a GPT-2 on the hub.
        device: the model's device.
    """
    if is_hugging_face(source):
        return load_pretrained(source, device)
    path = find_checkpoint(Path(source))
    verify_checkpoint(path, (MODEL_NAME, STATE_NAME))
    state = read_state(path)
    model = new_model(GPTConfig(**state.model_config), device)
    copy_state(read_tensors(path / MODEL_NAME), model, path)
    warn_if_code_changed(path, state, MODEL_FILES)
    return model.eval()


def model_config_of(source: str | Path) -> GPTConfig:
    """Return the dimensions of the model that `load_model` loads, without reading its weights."""
    if is_hugging_face(source):
        return read_pretrained_config(source)
    return GPTConfig(**read_state(find_checkpoint(Path(source))).model_config)


def is_hugging_face(source: str | Path) -> bool:
    """Return whether a model is in Hugging Face format, unlike a run, which has a `config.json`."""
    path = Path(source)
    return not is_local(source) or (any(path.glob("[!.]*onfig.json")) and not is_run(path))
