"""Exact, atomic, verified save and resume; no pickle.

    runs/NAME/checkpoints/step_00000500/
        model.safetensors        parameters, float32
        optimizer.safetensors    AdamW's moments and step counts, by parameter name
        trainer_state.json       step, configuration, generator states, data fingerprint
        manifest.json            size and SHA-256 of each, written last

The state is whole, not sharded, so that any number of processes can load it. A folder without
its manifest is not a checkpoint. Training waits for a copy of the state, not for its writing.
"""

import base64
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model import GPT, GPTConfig
from runtime.distributed import distribute_like, full_tensor
from runtime.files import check_types, read_json, sha256_of, sync_folder, write_json
from runtime.huggingface import check_dimensions, load_pretrained

MODEL_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"
MANIFEST_NAME = "manifest.json"
FILE_NAMES = (MODEL_NAME, OPTIMIZER_NAME, STATE_NAME)
CHECKPOINT_FORMAT = 1
STATE_TYPES = {
    "step": int,
    "tokens_seen": int,
    "model_config": dict,
    "train_config": dict,
    "data_fingerprint": str,
    "rng_states": dict,
    "grad_scaler": dict,
    "grad_norms": list,
    "format": int,
}


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
    grad_norms: list[float] = field(default_factory=list)
    """The last gradient norms, which outliers are told by."""
    format: int = CHECKPOINT_FORMAT

    def __post_init__(self) -> None:
        check_types(vars(self), STATE_TYPES)
        if not all(type(norm) is float for norm in self.grad_norms):
            raise ValueError("grad_norms are not all numbers")
        GPTConfig(**self.model_config)


class CheckpointWriter:
    """Save checkpoints while training goes on; a context manager that sees the last one written.

    `save` keeps training waiting while the state is copied to the CPU, no longer; a thread then
    writes the copy (`save_file` and hashing release the interpreter's lock). The copy's memory is
    kept for the next one: to fill pages that are new takes several times longer than to copy.

    Args:
        checkpoints_dir: the run's `checkpoints` folder; made by the first save. None on processes
            that write nothing: their `save` gives their parts of a sharded state.
        keep: once a checkpoint is complete, delete all but this many, the oldest first; 0 keeps
            all.
    """

    def __init__(self, checkpoints_dir: Path | None, keep: int = 0) -> None:
        self._checkpoints_dir = checkpoints_dir
        self._keep = keep
        self._copies: dict[str, dict[str, Tensor]] = {}  # by file, then by tensor
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # starts with the first save
        self._last: Future[None] | None = None

    def save(
        self,
        state: TrainerState,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        on_saved: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Wait for the last checkpoint, copy the state as it is now, begin to write it.

        Every process must call this if the model is sharded: tensors are gathered one at a time.

        Args:
            state: what to save beside the tensors; its `step` names the folder.
            model: the raw model, neither compiled nor wrapped; the same each time.
            optimizer: AdamW over its parameters.
            on_saved: called with the checkpoint's folder once it is complete, by the thread.

        Raises:
            OSError: the last checkpoint was not saved.
        """
        self.wait()
        if self._checkpoints_dir is None:
            for tensors in _tensors_by_file(model, optimizer).values():
                for tensor in tensors.values():
                    full_tensor(tensor)
            return
        kept = self._copies
        self._copies = {
            file: {name: _copy(t, kept.get(file, {}).get(name)) for name, t in tensors.items()}
            for file, tensors in _tensors_by_file(model, optimizer).items()
        }
        self._last = self._thread.submit(self._write, self._checkpoints_dir, state, on_saved)

    def check(self) -> None:
        """Raise the last checkpoint's error, if it has met one by now."""
        if self._last is not None and self._last.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            OSError: the disk is full or cannot be written; older checkpoints are as they were.
        """
        if self._last is None:
            return
        wait_for([self._last])  # if Ctrl-C breaks this off, it is still to be waited for
        last, self._last = self._last, None
        last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except OSError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), stacklevel=2)  # what ended the body is to be heard
        finally:
            self._thread.shutdown()

    def _write(
        self, checkpoints_dir: Path, state: TrainerState, on_saved: Callable[[Path], None]
    ) -> None:
        on_saved(_write_checkpoint(checkpoints_dir, state, self._copies))
        if self._keep:
            _remove_oldest(checkpoints_dir, self._keep)


def save_checkpoint(
    checkpoints_dir: Path, state: TrainerState, model: GPT, optimizer: torch.optim.Optimizer
) -> Path:
    """Write a checkpoint and wait for it; see `CheckpointWriter.save`.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the disk is full or cannot be written; older checkpoints are as they were.
    """
    with CheckpointWriter(checkpoints_dir) as writer:
        writer.save(state, model, optimizer)
    return _folder(checkpoints_dir, state.step)


def remove_leftovers(checkpoints_dir: Path) -> None:
    """Delete what a process that died in the middle of a save, or of a deletion, has left."""
    for leftover in checkpoints_dir.glob(".step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)  # never through a link


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
    path = checkpoint / MODEL_NAME
    _copy_parameters(path, _read_tensors(path), model)
    _load_optimizer(checkpoint, model, optimizer)
    try:
        if scaler is not None and state.grad_scaler:
            scaler.load_state_dict(state.grad_scaler)
        restore_rng_states(state.rng_states)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{checkpoint / STATE_NAME} has no valid generator states: {error}"
        ) from None
    return state


def complete_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """The checkpoints that were saved to the end, the highest step first."""
    manifests = checkpoints_dir.glob(f"step_*/{MANIFEST_NAME}")
    return sorted((manifest.parent for manifest in manifests), reverse=True)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The run's complete checkpoint of the highest step; None if it has none."""
    return next(iter(complete_checkpoints(run_dir / "checkpoints")), None)


def latest_valid_checkpoint(run_dir: Path, warn: Callable[[str], None]) -> Path | None:
    """The run's checkpoint of the highest step whose hashes are right; None if it has none.

    Args:
        run_dir: the run's folder.
        warn: told of each damaged checkpoint on the way.

    Raises:
        ValueError: every checkpoint is damaged.
    """
    checkpoints = complete_checkpoints(run_dir / "checkpoints")
    for checkpoint in checkpoints:
        try:
            verify_checkpoint(checkpoint)
        except (OSError, ValueError) as error:
            warn(f"{error}; going back to the checkpoint before it")
        else:
            return checkpoint
    if checkpoints:
        raise ValueError(
            f"every checkpoint in {run_dir} is damaged: start a new run with another --run-name"
        )
    return None


def quarantine_newer(checkpoint: Path) -> list[Path]:
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
    path = checkpoint / MANIFEST_NAME
    manifest, found = read_json(path), _manifest(checkpoint)
    listed = manifest.get("files") if isinstance(manifest, dict) else None
    for name, entry in found["files"].items():
        if not isinstance(listed, dict) or name not in listed:
            raise ValueError(f"{path} is damaged: it does not list {name}")
        if listed[name] != entry:
            raise ValueError(
                f"{checkpoint / name} is damaged: its size or SHA-256 is not the manifest's"
            )
    if manifest != found:
        raise ValueError(f"{path} is damaged: it is not what was written")


def describe_checkpoint(checkpoint: Path | None) -> str:
    """A checkpoint's place and content in a line, to tell it from others."""
    if checkpoint is None:
        return "none"
    return f"{checkpoint} ({sha256_of(checkpoint / MANIFEST_NAME)[:8]})"


def read_state(checkpoint: Path) -> TrainerState:
    """Read a checkpoint's `trainer_state.json`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one of this format.
    """
    path = checkpoint / STATE_NAME
    try:
        state = TrainerState(**read_json(path))
    except (TypeError, ValueError) as error:
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
    config = GPTConfig(**read_state(checkpoint).model_config)
    tensors = _read_tensors(checkpoint / MODEL_NAME)
    check_dimensions(tensors, config, config.padded_vocab_size)
    with torch.device(device):
        model = GPT(config)
    _copy_parameters(checkpoint / MODEL_NAME, tensors, model)
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


def _copy_parameters(path: Path, tensors: dict[str, Tensor], model: GPT) -> None:
    """Copy a file's tensors into a model of the same dimensions."""
    parameters = dict(model.named_parameters())
    _check_shapes(path, tensors, {name: p.shape for name, p in parameters.items()})
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(distribute_like(tensors[name], parameter))


def _folder(checkpoints_dir: Path, step: int) -> Path:
    return checkpoints_dir / f"step_{step:08d}"


def _write_checkpoint(
    checkpoints_dir: Path, state: TrainerState, tensors_by_file: dict[str, dict[str, Tensor]]
) -> Path:
    """Write a checkpoint that is either complete or not there; return its folder."""
    final = _folder(checkpoints_dir, state.step)
    temporary = checkpoints_dir / f".{final.name}.tmp"
    try:
        remove_leftovers(checkpoints_dir)
        temporary.mkdir(parents=True)
        for name, tensors in tensors_by_file.items():
            save_file(tensors, temporary / name)
            _flush(temporary / name)
        write_json(temporary / STATE_NAME, asdict(state))
        write_json(temporary / MANIFEST_NAME, _manifest(temporary))
        if final.exists():  # an older attempt at the same step
            shutil.rmtree(final)
        temporary.rename(final)
        sync_folder(checkpoints_dir)
    except (OSError, SafetensorError) as error:  # the latter is what a full disk becomes there
        raise OSError(f"{final} was not saved: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # by now under its final name, or in vain
    return final


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """What the manifest of a folder with these files is to say."""
    paths = [checkpoint / name for name in FILE_NAMES]
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in paths}
    return {"format": CHECKPOINT_FORMAT, "files": files}


def _remove_oldest(checkpoints_dir: Path, keep: int) -> None:
    """Delete all checkpoints but the `keep` of the highest steps."""
    for checkpoint in complete_checkpoints(checkpoints_dir)[keep:]:
        # Under another name first, so that a half-deleted one is never taken for a checkpoint.
        shutil.rmtree(checkpoint.rename(checkpoints_dir / f".{checkpoint.name}.tmp"))


def _tensors_by_file(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """What each file is to hold, where it lies now.

    Each parameter is there once (the tied one as `transformer.wte.weight`), the optimizer's state
    as `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`.
    """
    parameters = dict(model.named_parameters())
    return {
        MODEL_NAME: {name: parameter.detach() for name, parameter in parameters.items()},
        OPTIMIZER_NAME: {
            f"{key}.{name}": value.detach()
            for name, parameter in parameters.items()
            for key, value in optimizer.state[parameter].items()
        },
    }


def _copy(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """A whole copy of `tensor` on the CPU, in the memory of an earlier one where there is one."""
    whole = full_tensor(tensor)
    return (torch.empty_like(whole, device="cpu") if kept is None else kept).copy_(whole)


def _load_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    path = checkpoint / OPTIMIZER_NAME
    tensors = _read_tensors(path)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    kinds = {"exp_avg": shapes, "exp_avg_sq": shapes, "step": dict.fromkeys(shapes, torch.Size())}
    _check_shapes(path, tensors, {f"{k}.{n}": s for k, of in kinds.items() for n, s in of.items()})
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # The optimizer's own loader puts each tensor on its parameter's device; it counts parameters
    # by their place in the groups.
    optimizer.load_state_dict(
        {
            "state": {
                place: {
                    "exp_avg": distribute_like(tensors[f"exp_avg.{names[parameter]}"], parameter),
                    "exp_avg_sq": distribute_like(
                        tensors[f"exp_avg_sq.{names[parameter]}"], parameter
                    ),
                    "step": tensors[f"step.{names[parameter]}"],
                }
                for place, parameter in enumerate(order)
            },
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None


def _check_shapes(path: Path, tensors: dict[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    found = {name: tensor.shape for name, tensor in tensors.items()}
    for name in {**wanted, **found}:
        there, here = (
            tuple(shapes[name]) if name in shapes else "missing" for shapes in (found, wanted)
        )
        if there != here:
            raise ValueError(
                f"{path} does not fit the model: {name} is {there} there and {here} in the model"
            )


def _flush(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
