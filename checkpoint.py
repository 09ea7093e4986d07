"""Exact, atomic, verified save and resume; no pickle.

    runs/NAME/checkpoints/step_00000500/
        model.safetensors        parameters, float32
        optimizer.safetensors    AdamW's moments and step counts, by parameter name
        trainer_state.json       step, configuration, generator states, data fingerprint
        manifest.json            size and SHA-256 of each, written last

The state is whole, not sharded, so that any number of processes can load it. A folder without
its manifest is not a checkpoint.
"""

import base64
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from files import read_json, sha256_of, sync_folder, write_json
from model import GPT, GPTConfig
from pretrained import load_pretrained

MODEL_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"
MANIFEST_NAME = "manifest.json"
CHECKPOINT_FORMAT = 1


@dataclass(frozen=True)
class TrainerState:
    """All of a run's state that is not a large tensor."""

    step: int
    """Optimizer updates done."""
    tokens_seen: int
    model_config: dict[str, int]
    """The fields of `GPTConfig`."""
    train_config: dict[str, Any]
    """The training configuration, as its flags."""
    data_fingerprint: str
    rng_states: dict[str, str]
    """Generator states by device type, base64."""
    grad_scaler: dict[str, Any]
    """The loss scaler's state; empty unless float16 is in use."""
    format: int = CHECKPOINT_FORMAT


def save_checkpoint(
    checkpoints_dir: Path, state: TrainerState, model: GPT, optimizer: torch.optim.Optimizer
) -> Path:
    """Write a checkpoint that is either complete or not there.

    Args:
        checkpoints_dir: the run's `checkpoints` folder.
        state: what to save beside the tensors; its `step` names the folder.
        model: the raw model, neither compiled nor wrapped.
        optimizer: AdamW over the model's parameters.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the disk is full or cannot be written; older checkpoints are as they were.
    """
    final = checkpoints_dir / f"step_{state.step:08d}"
    temporary = checkpoints_dir / f".{final.name}.tmp"
    remove_leftovers(checkpoints_dir)
    temporary.mkdir(parents=True)
    try:
        _write_tensors(temporary / MODEL_NAME, _parameters(model))
        _write_tensors(temporary / OPTIMIZER_NAME, _optimizer_tensors(model, optimizer))
        write_json(temporary / STATE_NAME, asdict(state))
        names = (MODEL_NAME, OPTIMIZER_NAME, STATE_NAME)
        for name in names:
            _flush(temporary / name)
        files = {
            name: {
                "bytes": (temporary / name).stat().st_size,
                "sha256": sha256_of(temporary / name),
            }
            for name in names
        }
        write_json(temporary / MANIFEST_NAME, {"format": CHECKPOINT_FORMAT, "files": files})
        if final.exists():  # an older attempt at the same step
            shutil.rmtree(final)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(checkpoints_dir)
    return final


def remove_leftovers(checkpoints_dir: Path) -> None:
    """Delete what a process that died in the middle of a save has left."""
    for leftover in checkpoints_dir.glob(".*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def load_checkpoint(
    checkpoint: Path,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
) -> TrainerState:
    """Put a model, an optimizer and the random generators back to where they were saved.

    Args:
        checkpoint: a checkpoint's folder; its hashes are checked first.
        model: the raw model, of the same dimensions.
        optimizer: AdamW over its parameters, grouped as it was.
        scaler: the loss scaler, with float16.

    Returns:
        The rest of the state.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or does not fit the model.
    """
    verify_checkpoint(checkpoint)
    state = read_state(checkpoint)
    load_parameters(checkpoint, model)
    _load_optimizer(checkpoint, model, optimizer)
    if scaler is not None and state.grad_scaler:
        scaler.load_state_dict(state.grad_scaler)
    restore_rng_states(state.rng_states)
    return state


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The run's complete checkpoint of the highest step; None if it has none."""
    complete = (run_dir / "checkpoints").glob(f"step_*/{MANIFEST_NAME}")
    return max((manifest.parent for manifest in complete), default=None)


def set_aside_later(checkpoint: Path) -> list[Path]:
    """Move a run's checkpoints of later steps to `checkpoints/set_aside`: they will be redone.

    Returns:
        Where they are now.
    """
    folder = checkpoint.parent / "set_aside"
    moved = []
    for later in sorted(checkpoint.parent.glob("step_*")):
        if later.name > checkpoint.name:
            folder.mkdir(exist_ok=True)
            target = folder / later.name
            if target.exists():
                shutil.rmtree(target)
            moved.append(later.rename(target))
    return moved


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or a run folder's latest.

    Raises:
        FileNotFoundError: it is neither.
    """
    if (path / MANIFEST_NAME).is_file() and (path / STATE_NAME).is_file():
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        raise FileNotFoundError(f"{path} is neither a checkpoint nor a run folder that has one")
    return latest


def verify_checkpoint(checkpoint: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file's size or hash is not the manifest's.
    """
    manifest_path = checkpoint / MANIFEST_NAME
    manifest = read_json(manifest_path)
    for name in (MODEL_NAME, OPTIMIZER_NAME, STATE_NAME):
        path = checkpoint / name
        try:
            expected = manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]
        except (KeyError, TypeError):
            raise ValueError(f"{manifest_path} does not list {name}") from None
        if (path.stat().st_size, sha256_of(path)) != expected:
            raise ValueError(f"{path} is damaged: its size or SHA-256 is not the manifest's")


def read_state(checkpoint: Path) -> TrainerState:
    """Read a checkpoint's `trainer_state.json`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one of this format.
    """
    path = checkpoint / STATE_NAME
    try:
        state = TrainerState(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} is not a trainer state: {error}") from None
    if state.format != CHECKPOINT_FORMAT:
        raise ValueError(f"{path} has format {state.format}, this code reads {CHECKPOINT_FORMAT}")
    return state


def load_model(source: str | Path, device: torch.device | str = "cpu") -> GPT:
    """Load a model from wherever it may be.

    Args:
        source: a run folder (its latest checkpoint), a checkpoint, a folder in Hugging Face's
            format, or the name of a GPT-2 on the hub.
        device: where to put it.

    Returns:
        The raw model, in float32.

    Raises:
        FileNotFoundError: there is no such thing.
        ValueError: it is damaged, or not a GPT-2.
    """
    path = Path(source)
    if not (path / STATE_NAME).is_file() and not (path / "checkpoints").is_dir():
        return load_pretrained(str(source), torch.device(device))
    checkpoint = find_checkpoint(path)
    verify_checkpoint(checkpoint)
    with torch.device(device):
        model = GPT(GPTConfig(**read_state(checkpoint).model_config))
    load_parameters(checkpoint, model)
    return model


def rng_states() -> dict[str, str]:
    """The states of torch's global generators, by device type, as base64 text."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(bytes(s.tolist())).decode() for name, s in states.items()}


def restore_rng_states(states: dict[str, str]) -> None:
    """Set torch's global generators to what `rng_states` returned."""
    tensors = {
        name: torch.tensor(list(base64.b64decode(s)), dtype=torch.uint8)
        for name, s in states.items()
    }
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def load_parameters(checkpoint: Path, model: GPT) -> None:
    """Copy a checkpoint's parameters into a model of the same dimensions.

    Raises:
        ValueError: names or shapes differ, or the file is damaged.
    """
    tensors = _read_tensors(checkpoint / MODEL_NAME)
    parameters = dict(model.named_parameters())
    _check_shapes(checkpoint / MODEL_NAME, tensors, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter once (the tied one as `transformer.wte.weight`), on the CPU."""
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<…>`."""
    return {
        f"{key}.{name}": value.detach().cpu()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    path = checkpoint / OPTIMIZER_NAME
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _read_tensors(path).items():
        kind, _, name = key.partition(".")
        by_parameter.setdefault(name, {})[kind] = tensor
    parameters = dict(model.named_parameters())
    moments = {name: state["exp_avg"] for name, state in by_parameter.items()}
    _check_shapes(path, moments, parameters)
    names = {parameter: name for name, parameter in parameters.items()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    # The optimizer's own loader puts each tensor on its parameter's device; it counts parameters
    # by their place in the groups.
    optimizer.load_state_dict(
        {
            "state": {place: by_parameter[name] for place, name in enumerate(order)},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # what a full disk becomes there
        raise OSError(f"{path} cannot be written: {error}") from None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None


def _check_shapes(
    path: Path, tensors: dict[str, Tensor], parameters: dict[str, nn.Parameter]
) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if found == wanted:
        return
    name = next(name for name in {**wanted, **found} if found.get(name) != wanted.get(name))
    raise ValueError(
        f"{path} does not fit the model: {name} is {found.get(name, 'missing')} there and "
        f"{wanted.get(name, 'missing')} in the model"
    )


def _flush(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
