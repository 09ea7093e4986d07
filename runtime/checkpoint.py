"""Exact, atomic, verified save and resume; no pickle.

    runs/NAME/checkpoints/step_00000500/
        model.safetensors        parameters, float32
        optimizer.safetensors    the optimizers' tensors, such as exp_avg.transformer.wte.weight
        trainer_state.json       step, configuration, generator states, data fingerprint
        manifest.json            size and SHA-256 of each, written last

Tensors are saved whole, not sharded, so that any number of processes can load them. A folder
without its manifest is not a checkpoint. Training waits while the state is copied, but not while
the copy is written.
"""

import base64
import os
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from model import GPT, GPTConfig, build_on_meta
from runtime.device import synchronize
from runtime.distributed import (
    all_reduce_max,
    distribute_like,
    full_tensor,
    gather_text,
    raise_on_all_ranks,
)
from runtime.files import check_types, read_json, sha256_of, sync_folder, write_json
from runtime.huggingface import (
    HF_CONFIG_NAME,
    build_model,
    check_finite_weights,
    check_shapes,
    is_finite,
    is_local,
    load_pretrained,
    read_pretrained_config,
    read_tensors,
    shapes_of,
)

MODEL_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"
CHECKPOINT_MANIFEST = "manifest.json"
FILE_NAMES = (MODEL_NAME, OPTIMIZER_NAME, STATE_NAME)
CHECKPOINT_FORMAT = 1
CHECKPOINT_NAME = re.compile(r"step_(\d{8})")
UNFINISHED, DELETED = ".tmp", ".deleted"  # endings of folders that are no checkpoints


@dataclass(frozen=True)
class TrainerState:
    """A run's state except its large tensors. Fields with a default may be missing in the file."""

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
    val_fingerprint: str = ""
    """Of the validation split; checkpoints of earlier versions have none."""
    optimizers: list[str] = field(default_factory=lambda: ["AdamW"])
    """The optimizers' class names. This field and the next are set by `save`."""
    optimizer_values: dict[str, Any] = field(default_factory=dict)
    """Optimizer state that is not a tensor, named as the tensors are."""
    format: int = CHECKPOINT_FORMAT

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self)).items()
        check_types(vars(self), {name: get_origin(hint) or hint for name, hint in hints})
        GPTConfig(**self.model_config)


class Checkpoint(NamedTuple):
    """A checkpoint's folder, and the state that was read from it."""

    path: Path
    state: TrainerState


class CheckpointWriter:
    """Save checkpoints while training goes on; a context manager that waits for the last one.

    A thread writes the copy that `save` makes (`save_file` and hashing release the interpreter's
    lock). The next save reuses its memory: filling new pages takes longer than copying.

    Args:
        checkpoints_dir: the run's `checkpoints` folder; the first save creates it. None on ranks
            that write nothing: their `save` only contributes their shards.
        keep: once a checkpoint is complete, delete the oldest but `keep`; 0 deletes none.
        on_error: called, in the thread, with what could not be written or deleted.
        on_saved: called, in the thread, with the step and the folder of a complete checkpoint.
    """

    def __init__(
        self,
        checkpoints_dir: Path | None,
        keep: int = 0,
        on_error: Callable[[OSError], object] = lambda _: None,
        on_saved: Callable[[int, Path], object] = lambda *_: None,
    ) -> None:
        self.error: OSError | None = None
        """Why the last checkpoint was not saved; None if it was."""
        self._checkpoints_dir = checkpoints_dir
        self._keep = keep
        self._on_error = on_error
        self._on_saved = on_saved
        self._copies: dict[str, dict[str, Tensor]] = {}  # by file, then by tensor
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # starts with the first save
        self._last: Future[None] | None = None

    def save(self, state: TrainerState, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Wait for the last checkpoint, copy the present state, and start to write it.

        If the model is sharded, every rank must call this: tensors are gathered one at a time.

        Args:
            state: what to save next to the tensors; its `step` names the folder.
            model: the raw model, neither compiled nor wrapped; the same each time.
            optimizers: of any class, over the model's parameters.

        Raises:
            ValueError: an optimizer has state that is neither a tensor nor a plain value.
        """
        self.wait()
        tensors_by_file, state = _collect(state, model, optimizers)
        if self._checkpoints_dir is None:
            for tensors in tensors_by_file.values():
                for tensor in tensors.values():
                    full_tensor(tensor)
            return
        self._copies = {
            file: {name: self._copy(file, name, tensor) for name, tensor in tensors.items()}
            for file, tensors in tensors_by_file.items()
        }
        synchronize(next(model.parameters()).device)  # once: a GPU copies without being waited for
        self._last = self._thread.submit(self._write, self._checkpoints_dir, state)

    def _copy(self, file: str, name: str, tensor: Tensor) -> Tensor:
        """A full copy on the CPU, in the memory of the last one, which a GPU may still fill."""
        full = full_tensor(tensor)
        copy = self._copies.get(file, {}).get(name)
        if copy is None:
            copy = torch.empty_like(full, device="cpu", pin_memory=full.is_cuda)
        return copy.copy_(full, non_blocking=full.is_cuda)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete, or has failed: see `error`.

        Every rank must call this. They meet each second: a rank that waited in one collective for
        a slow disk would end at its timeout.
        """
        while all_reduce_max(self._last is not None and not self._last.done()):
            if self._last is not None:
                wait_for([self._last], timeout=1)  # Ctrl-C may interrupt this
        if self._last is not None:
            last, self._last = self._last, None
            last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind in (None, FloatingPointError):  # on all ranks alike; of another, each waits alone
            self.wait()
        self._thread.shutdown()

    def _write(self, checkpoints_dir: Path, state: TrainerState) -> None:
        self.error = None
        try:
            saved = _write_checkpoint(checkpoints_dir, state, self._copies)
        except OSError as error:
            self.error = error
            self._on_error(error)
            return
        self._on_saved(state.step, saved)
        older = [c for c in complete_checkpoints(checkpoints_dir) if c.name < saved.name]
        for checkpoint in older[self._keep - 1 :] if self._keep else ():
            try:
                _delete(checkpoint)
            except OSError as error:
                self._on_error(OSError(f"{checkpoint} could not be deleted: {error}"))


def _write_checkpoint(
    checkpoints_dir: Path, state: TrainerState, tensors_by_file: dict[str, dict[str, Tensor]]
) -> Path:
    """Write a checkpoint that appears under its name once it is complete; return its folder."""
    final = checkpoints_dir / f"step_{state.step:08d}"
    temporary = checkpoints_dir / f".{final.name}{UNFINISHED}"
    try:
        checkpoints_dir.mkdir(exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)  # of an attempt that failed
        temporary.mkdir()
        for name, tensors in tensors_by_file.items():
            save_file(tensors, temporary / name)
            with (temporary / name).open("r+b") as file:
                os.fsync(file.fileno())
        write_json(temporary / STATE_NAME, asdict(state))
        write_json(temporary / CHECKPOINT_MANIFEST, _manifest(temporary))
        if os.path.lexists(final):  # a damaged one, or it would have been resumed from
            _delete(final)
        temporary.rename(final)
        sync_folder(checkpoints_dir)
    except (OSError, SafetensorError) as error:  # safetensors raises its own on a full disk
        raise OSError(f"{final} was not saved: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # is there only if saving failed
    return final


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint, or the link to one; renamed first, so that no half is taken for one."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}{DELETED}")))


def clean_up(checkpoints_dir: Path) -> None:
    """Delete what a process left behind that died while it saved or deleted a checkpoint."""
    for ending in (UNFINISHED, DELETED):
        for leftover in checkpoints_dir.glob(f".step_*{ending}"):
            shutil.rmtree(leftover, ignore_errors=True)


def complete_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """The checkpoints of a run, the highest step first; one whose files are damaged counts, too.

    They are named `step_` and eight digits: a user's copy under another name is none of them.
    """
    return [
        folder
        for folder in sorted(checkpoints_dir.glob("step_*"), reverse=True)
        if CHECKPOINT_NAME.fullmatch(folder.name) and (folder / CHECKPOINT_MANIFEST).is_file()
    ]


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The run's complete checkpoint of the highest step; None if it has none."""
    return next(iter(complete_checkpoints(run_dir / "checkpoints")), None)


def latest_valid_checkpoint(run_dir: Path, warn: Callable[[str], None]) -> Path | None:
    """The run's undamaged checkpoint of the highest step; None if the run has no checkpoint.

    `warn` is called with a line about each of a higher step that is damaged.

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


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or a run folder's latest.

    Raises:
        FileNotFoundError: it is neither; the message lists the runs that are there.
    """
    if (path / CHECKPOINT_MANIFEST).is_file() and (path / STATE_NAME).is_file():
        return path
    if latest := latest_checkpoint(path):
        return latest
    if is_run(path):
        raise FileNotFoundError(f"the run {path} has {no_checkpoint_hint(path)}")
    problem = "is no run, checkpoint or Hugging Face model" if path.exists() else "does not exist"
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    raise FileNotFoundError(f"{path} {problem}: {list_runs(folder)}")


def no_checkpoint_hint(run_dir: Path) -> str:
    """How to begin a run again that had its settings and no checkpoint."""
    flags = ("--resume", "auto", "--out-dir", run_dir.parent, "--run-name", run_dir.name)
    command = ("train_gpt2.py", "--config", run_dir / "config.json", *flags)
    return f"no checkpoint yet: begin again with {shlex.join(map(str, command))}"


def list_runs(out_dir: Path) -> str:
    """The runs that are in a folder, for a message."""
    runs = run_names(out_dir)
    return (
        f"the runs in {out_dir} are {', '.join(runs)}" if runs else f"there is no run in {out_dir}"
    )


def run_names(out_dir: Path) -> list[str]:
    """The names of the runs in a folder."""
    return [run.name for run in sorted(out_dir.glob("*")) if is_run(run)]


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    # Not Path.is_dir, which raises an error in another user's folder.
    return os.path.isdir(path / "checkpoints") or os.path.isfile(path / "metrics.jsonl")


def verify_checkpoint(checkpoint: Path, names: Sequence[str] = FILE_NAMES) -> None:
    """Check files of a checkpoint against its manifest, and its name against its step.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file's size or hash is not the manifest's, or the folder was renamed.
    """
    path = checkpoint / CHECKPOINT_MANIFEST
    manifest = read_json(path)
    listed = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(listed, dict) or manifest.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(f"{path} is damaged: it is not what was written")
    for name in names:
        if listed.get(name) != _manifest_entry(checkpoint / name):
            raise ValueError(
                f"{checkpoint / name} is damaged: its size or SHA-256 is not the manifest's"
            )
    step, named = read_state(checkpoint).step, CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if named and step != int(named[1]):
        raise ValueError(f"{checkpoint} holds the state of step {step}: rename it")


def describe_checkpoint(checkpoint: Checkpoint | None) -> str:
    """A checkpoint's folder and the first digits of its manifest's hash, to compare over ranks."""
    if checkpoint is None:
        return "no checkpoint"
    return f"{checkpoint.path} ({sha256_of(checkpoint.path / CHECKPOINT_MANIFEST)[:8]})"


def read_state(checkpoint: Path) -> TrainerState:
    """Read a checkpoint's `trainer_state.json`; fields of earlier versions are passed over.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one of this format.
    """
    path, known = checkpoint / STATE_NAME, {each.name for each in fields(TrainerState)}
    content = read_json(path)
    try:
        state = TrainerState(**{name: content[name] for name in content if name in known})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a trainer state: {error}") from None
    if state.format != CHECKPOINT_FORMAT:
        raise ValueError(f"{path} has format {state.format}, this code reads {CHECKPOINT_FORMAT}")
    return state


def load_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Restore a model, its optimizers and the random generators, on every process.

    The files' hashes are not checked here: see `verify_checkpoint`.

    Args:
        checkpoint: what `read_state` has read, and where.
        model: the raw model, with the same parameters as the saved one; it may be sharded.
        optimizers: of the same classes, over the same parameters as the saved ones. Their
            settings (`param_groups`) stay as they are.
        scaler: the loss scaler, with float16.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file does not fit the model or the optimizers.
    """
    path, state = checkpoint
    with raise_on_all_ranks():
        parameters = read_tensors(path / MODEL_NAME)
        _check_fit(path / MODEL_NAME, parameters, dict(model.named_parameters()))
        _check_classes(path, state, optimizers)
        optimizer_state = read_tensors(path / OPTIMIZER_NAME) | state.optimizer_values
        _check_state_fits(path / OPTIMIZER_NAME, optimizer_state, model)
        try:
            if scaler is not None and state.grad_scaler:
                scaler.load_state_dict(state.grad_scaler)
            restore_rng_states(state.rng_states)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path / STATE_NAME} has no valid generator states: {error}"
            ) from None
    _copy_parameters(parameters, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_parameter: dict[str, dict[str, Any]] = defaultdict(dict)
    for flat_name, value in optimizer_state.items():
        key, _, name = flat_name.partition(".")
        by_parameter[name][key] = value
    for optimizer in optimizers:
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        own = optimizer.state_dict()
        own["state"] = {
            index: {key: _placed(value, p) for key, value in by_parameter[names[p]].items()}
            for index, p in enumerate(updated)
            if names[p] in by_parameter  # not one that never had a gradient
        }
        optimizer.load_state_dict(own)


def _check_state_fits(path: Path, flat: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse optimizer state that is of no parameter, or has neither its shape nor none."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, value in flat.items():
        expected = shapes.get(name.partition(".")[2])
        shape = value.shape if isinstance(value, Tensor) else ()
        if expected is None or shape not in ((), expected):
            raise ValueError(f"{path} does not fit this model: {name} is {tuple(shape)}")


def _placed(value: Any, parameter: Tensor) -> Any:  # noqa: ANN401 - a tensor or a plain value
    """A saved value as the parameter is sharded; a copy, or it would keep the whole file mapped."""
    if not isinstance(value, Tensor):
        return value
    return (distribute_like(value, parameter) if value.dim() else value).clone()


def load_model(source: str | Path, device: torch.device | str = "cpu") -> GPT:
    """Load a model, raw and in float32, by a name on this machine or on the hub.

    Args:
        source: a run folder (its latest checkpoint), a checkpoint, a folder in Hugging Face's
            format, or the name of a GPT-2 on the hub.
        device: where to put it.

    Raises:
        FileNotFoundError: there is no such run, checkpoint, folder or model.
        ValueError: it is damaged, has weights that are not finite, or does not fit the model that
            `model.py` builds.
    """
    if is_hugging_face(source):
        return load_pretrained(source, device)
    path = find_checkpoint(Path(source))
    verify_checkpoint(path, (MODEL_NAME, STATE_NAME))
    tensors, config = _open_model(path)
    check_finite_weights(tensors, path)
    model = build_model(config, device)
    _copy_parameters(tensors, model)
    return model


def read_model_config(source: str | Path) -> GPTConfig:
    """The dimensions of a model that `load_model` loads, without reading its weights.

    Raises:
        FileNotFoundError: there is no such run, checkpoint, folder or model.
        ValueError: the dimensions are not those of its tensors.
    """
    if is_hugging_face(source):
        return read_pretrained_config(source)
    return _open_model(find_checkpoint(Path(source)))[1]


def is_hugging_face(source: str | Path) -> bool:
    """Whether a model is in Hugging Face's format; a run's own `config.json` is something else."""
    path = Path(source)
    return not is_local(source) or ((path / HF_CONFIG_NAME).is_file() and not is_run(path))


def _open_model(checkpoint: Path) -> tuple[dict[str, Tensor], GPTConfig]:
    """A checkpoint's parameters, not read from the disk yet, and the dimensions that they fit.

    A forged file may claim any dimensions: shapes are compared before memory is taken for them.
    """
    path, config = checkpoint / MODEL_NAME, GPTConfig(**read_state(checkpoint).model_config)
    tensors = read_tensors(path)
    if config.n_layer > len(tensors):
        raise ValueError(f"{path} has {len(tensors)} tensors, too few for {config.n_layer} layers")
    try:
        expected = dict(build_on_meta(config).named_parameters())
    except RuntimeError as error:  # more elements than 64 bits can count
        raise ValueError(f"{path} is of no possible model: {error}") from None
    _check_fit(path, tensors, expected)
    return tensors, config


def copy_weights(source: GPT, target: GPT) -> None:
    """Copy parameters by name into a model that may be sharded, or have a shorter context.

    Position embeddings, the parameters with a row for each position, lose the rows after the
    target's `block_size`.

    Raises:
        ValueError: the target has more positions, or is another model.
    """
    source_size, target_size = source.config.block_size, target.config.block_size
    tensors = {name: parameter.detach() for name, parameter in source.named_parameters()}
    for name, parameter in target.named_parameters():
        value = tensors.get(name, parameter)
        if value.shape != parameter.shape and value.shape[:1] == (source_size,):
            tensors[name] = value[:target_size]
    _check_fit("the model to start from", tensors, dict(target.named_parameters()))
    _copy_parameters(tensors, target)


def rng_states() -> dict[str, str]:
    """The states of torch's global random generators, by device type, as base64 text."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(bytes(s.tolist())).decode() for name, s in states.items()}


def restore_rng_states(states: dict[str, str]) -> None:
    """Set torch's global random generators to what `rng_states` returned."""
    tensors = {
        name: torch.tensor(list(base64.b64decode(s)), dtype=torch.uint8)
        for name, s in states.items()
    }
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


@torch.no_grad()
def _copy_parameters(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy tensors whose names and shapes were checked into a model, sharded or not."""
    for name, parameter in model.named_parameters():
        parameter.copy_(distribute_like(tensors[name], parameter))


def find_nonfinite(model: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    """The name of a tensor to be saved that has a NaN or an infinity; None if all are finite.

    Every process must call this, and gets the same name.
    """
    state = dict(model.named_parameters()) | _optimizer_state(model, optimizers)
    own = ""
    for name, value in state.items():
        local = getattr(value, "to_local", lambda value=value: value)()  # of a sharded one
        if isinstance(local, Tensor) and not is_finite(local):
            own = name
            break
    return next(filter(None, gather_text(own)), None)


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of the files in this folder."""
    files = {name: _manifest_entry(checkpoint / name) for name in FILE_NAMES}
    return {"format": CHECKPOINT_FORMAT, "files": files}


def _manifest_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _collect(
    state: TrainerState, model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[dict[str, dict[str, Tensor]], TrainerState]:
    """The tensors of each file, not copied yet, and the state with the optimizers' values.

    Each parameter is there once (the tied one as `transformer.wte.weight`); the optimizers' state
    of it is named `exp_avg.transformer.wte.weight`.
    """
    flat = _optimizer_state(model, optimizers)
    values = {name: value for name, value in flat.items() if not isinstance(value, Tensor)}
    for name, value in values.items():
        if not isinstance(value, bool | int | float | str | None):
            raise ValueError(
                f"the optimizer's {name} is a {type(value).__name__}: a checkpoint can hold "
                f"tensors, numbers, strings and None"
            )
    state = replace(
        state,
        optimizers=[type(optimizer).__name__ for optimizer in optimizers],
        optimizer_values=values,
    )
    return {
        MODEL_NAME: {name: parameter.detach() for name, parameter in model.named_parameters()},
        OPTIMIZER_NAME: {n: value.detach() for n, value in flat.items() if n not in values},
    }, state


def _optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The optimizers' state, named as in the file: `exp_avg.transformer.wte.weight`."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{key}.{names[parameter]}": value
        for optimizer in optimizers
        for parameter, own in optimizer.state.items()
        for key, value in own.items()
    }


def _check_classes(checkpoint: Path, state: TrainerState, optimizers: Sequence[Optimizer]) -> None:
    """Refuse the state of optimizers of other classes."""
    if (built := [type(optimizer).__name__ for optimizer in optimizers]) != state.optimizers:
        trained_by = " and ".join(map(str, state.optimizers))
        raise ValueError(
            f"{checkpoint} was trained by {trained_by}, and this run builds {' and '.join(built)}: "
            f"use the same --optimizer, or start a new run from the weights by "
            f"--init-from {checkpoint}"
        )


def _check_fit(source: str | Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse values whose names or shapes are not the expected ones."""
    check_shapes(shapes_of(found), shapes_of(expected), f"{source} does not fit this model")
