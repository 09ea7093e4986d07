"""Find a run's checkpoints, and load models by any name that a user may pass.

model = load_model("runs/mine")
"""

import os
from pathlib import Path

import torch

from formats import checkpoint, huggingface
from formats.metrics import BEST_SUFFIX, RUNS, find_run, is_run, validations
from formats.tensors import read_tensors
from model import GPT, GPTConfig
from runtime.cli import print_error, shell_line
from runtime.distributed import is_main, print0
from runtime.errors import UserError

RUN_CONFIG_NAME = "config.json"  # a run's settings
RUN_LOCK_NAME = ".lock"
VAL_LOSS_NOISE = 0.05  # nats per token: smaller differences may be chance

# --- finding ----------------------------------------------------------------------------------


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the run's complete checkpoint with the highest step; None if it has none."""
    return next(iter(checkpoint.complete_checkpoints(run_dir / "checkpoints")), None)


def latest_valid_checkpoint(run_dir: Path) -> Path | None:
    """Return the run's undamaged checkpoint with the highest step; None if it has none.

    Print a warning for each damaged checkpoint that is skipped.
    """
    for path in checkpoint.complete_checkpoints(run_dir / "checkpoints"):
        try:
            checkpoint.verify_checkpoint(path)
            return path
        except (OSError, UserError) as error:
            print0(f"warning: {error}; falling back to the previous checkpoint")
    return None


def find_checkpoint(source: str | Path, runs: Path = RUNS) -> Path:
    """Resolve a path to a checkpoint: the path itself, or the latest one of a run.

    A run is given by its folder or by its name in `runs`. With the suffix `@best`, this is the
    run's checkpoint with the lowest validation loss.
    """
    find = checkpoint.best_checkpoint if str(source).endswith(BEST_SUFFIX) else latest_checkpoint
    path = find_run(str(source).removesuffix(BEST_SUFFIX), runs)
    path = path.parent if path.is_file() else path  # a file of the model
    if path.name == "checkpoints" and is_run(path.parent):
        path = path.parent
    found = path if (path / checkpoint.STATE_NAME).is_file() else find(path)
    if found is not None:
        return found
    if latest := latest_checkpoint(path):
        raise UserError(f"{path} has no checkpoint with a validation loss: use {latest}")
    if is_run(path) or (path / RUN_LOCK_NAME).exists():
        fix = "start over with the command that started it and another --run-name"
        wait = f"wait for its first one or, if the run has ended, {fix}"
        raise UserError(f"the run {path} has no checkpoint yet: {wait}")
    kinds = ("config.json", "adapter_config.json", checkpoint.STATE_NAME)
    if models := [file.parent for kind in kinds for file in path.glob(f"*/{kind}")]:
        newest = max(models, key=os.path.getmtime)
        raise UserError(f"{path} holds models: use one of them, such as {newest}")
    problem = "is not a run, checkpoint or model folder" if path.exists() else "does not exist"
    places = [p for p in (path, *path.parents[:-1], runs, Path()) if p.is_dir()]
    raise UserError(f"{path} {problem}: {list_runs(next(filter(run_names, places), runs))}")


def describe_best(run_dir: Path) -> str:
    """Return a run's final lines: its best validation loss, and a warning if the last is higher.

    Each line ends with a newline. The text is empty if the run was never validated.
    """
    if not (by_step := validations(run_dir)):
        return ""
    best = min(by_step.values(), key=lambda record: record["val_loss"])
    loss, last_loss = best["val_loss"], by_step[max(by_step)]["val_loss"]
    text = f"best val_loss {loss:.4f} at step {best['step']}"
    if bits := best.get("val_bpb"):
        text += f", {bits:.4f} bits per byte"
    if last_loss - loss >= VAL_LOSS_NOISE:
        model = shell_line("--model", f"{run_dir}{BEST_SUFFIX}")
        fix = f"use the best saved checkpoint ({model}), a smaller --max-steps, or more data"
        text += f"\nwarning: the last val_loss, {last_loss:.4f}, is clearly higher: {fix}"
    return f"{text}\n"


def newest_run() -> Path:
    """Return the run in `RUNS` that saved a checkpoint last, and print its name to stderr."""
    saved = {p: run for run in RUNS.glob("[!.]*") if (p := latest_checkpoint(run))}
    if not saved:
        raise UserError(f"no run in {RUNS} has a checkpoint: train one, or use --model gpt2")
    run = saved[max(saved, key=os.path.getmtime)]
    if is_main():
        print_error(f"note: the model is {run}, the newest run; for another one, use --model")
    return run


def list_runs(out_dir: Path) -> str:
    """Return a clause that lists the runs in a folder, for messages."""
    names = ", ".join(run_names(out_dir))
    return f"the runs in {out_dir} are {names}" if names else f"the folder {out_dir} has no runs"


def run_names(out_dir: Path) -> list[str]:
    """Return the names of the runs in a folder."""
    return [run.name for run in sorted(out_dir.glob("[!.]*")) if is_run(run)]


# --- loading ----------------------------------------------------------------------------------


def load_model(source: str | Path, device: torch.device | str = "cpu") -> GPT:
    """Load a raw model, in float32 and eval mode.

    Args:
        source: a run folder (its latest checkpoint; with `@best`, its best), a checkpoint, a folder
            in Hugging Face format, or the name of a GPT-2 on the hub.
        device: the model's device.
    """
    return load_with_state(source, device)[0]


def load_with_state(
    source: str | Path, device: torch.device | str = "cpu"
) -> tuple[GPT, checkpoint.Checkpoint | None]:
    """Load a model as `load_model` does; also return its checkpoint, if it has one.

    If the run's trainer deletes the checkpoint meanwhile, the next one is loaded.
    """
    if is_hugging_face(source):
        return huggingface.load_pretrained(source, device), None
    path = find_checkpoint(source)
    try:
        checkpoint.verify_checkpoint(path, (checkpoint.MODEL_NAME, checkpoint.STATE_NAME))
        state = checkpoint.read_state(path)
        tensors = read_tensors(path / checkpoint.MODEL_NAME)
    except (FileNotFoundError, UserError):  # UserError: deleted while it was read
        if path.exists():
            raise
        return load_with_state(source, device)
    with torch.device(device):
        model = GPT(GPTConfig(**state.model_config))
    checkpoint.copy_state(tensors, model, path)
    checkpoint.warn_if_code_changed(path, state, "model.py")
    return model.eval(), checkpoint.Checkpoint(path, state)


def model_config_of(source: str | Path) -> GPTConfig:
    """Return the dimensions of the model that `load_model` loads, without reading its weights."""
    if is_hugging_face(source):
        return huggingface.read_pretrained_config(source)
    return GPTConfig(**checkpoint.read_state(find_checkpoint(source)).model_config)


def is_hugging_face(source: str | Path) -> bool:
    """Return whether a model is in Hugging Face format, unlike a run, which has a `config.json`."""
    path = find_run(source)
    # config.json, or a related file such as adapter_config.json; `[!.]` excludes hidden files.
    path = path.parent if path.is_file() else path
    is_folder = any(path.glob("[!.]*onfig.json")) and not is_run(path)
    return is_folder or not huggingface.is_local(source)
