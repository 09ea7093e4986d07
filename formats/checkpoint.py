"""Save and load checkpoints: exact, atomic, verified by hashes, and without pickle.

    runs/NAME/checkpoints/step_00000500/
        model.safetensors        float32 parameters, and buffers
        optimizer.safetensors    the optimizers' tensors, such as exp_avg.transformer.wte.weight,
                                 and the tensors of `Trainer.state`, such as trainer.NAME
        trainer_state.json       step, position, configuration, generator states, data fingerprint
        manifest.json            size and SHA-256 of each file, written last

Tensors are saved unsharded, so that any number of processes can load them. A folder without a
manifest is not a checkpoint. Training waits while the state is copied, but not while the copy is
written.
"""

import base64
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from formats.code_hashes import code_hashes
from formats.metrics import validations
from formats.tensors import Tensors, check_tensors, find_nonfinite, read_tensors
from model import GPT, GPTConfig
from parallel import SINGLE_PROCESS, Ranks
from runtime.cli import print_error, shell_line
from runtime.distributed import all_reduce_max, gather_text, is_main, print0, raise_on_all_ranks
from runtime.errors import DivergedError, UserError
from runtime.files import read_json, sha256_of, write_folder, write_json

MODEL_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"
CHECKPOINT_MANIFEST = "manifest.json"
FILE_NAMES = (MODEL_NAME, OPTIMIZER_NAME, STATE_NAME)
CHECKPOINT_FORMAT = 1
OWN = "trainer."  # prefix of the tensors of `Trainer.state`


@dataclass(frozen=True)
class TrainerState:
    """Content of `trainer_state.json`: a run's state except its tensors."""

    step: int
    """Number of optimizer updates done."""
    tokens_seen: int
    model_config: dict[str, Any]
    """Fields of `GPTConfig`."""
    train_config: dict[str, Any]
    """Fields of `TrainConfig` that are saved."""
    data_fingerprint: str
    rng_states: list[dict[str, str]]
    """Generator states of each rank, by device type, in base64."""
    grad_scaler: dict[str, Any]
    """State of the loss scaler; empty unless float16 is in use."""
    val_fingerprint: str
    """Fingerprint of the validation split."""
    optimizers: list[str]
    """Class names of the optimizers."""
    optimizer_values: dict[str, Any]
    """Optimizer state other than tensors, as JSON values: see `Contents`."""
    position: int = 0
    """Windows of the data order that the updates have consumed."""
    optimizer_groups: list[dict[str, float]] = field(default_factory=list)
    """Numbers that the optimizers changed in their groups, for each group."""
    own: dict[str, float] = field(default_factory=dict)
    """The numbers of `Trainer.state`."""
    code: dict[str, str] = field(default_factory=dict)
    """Hashes of the code that trained: see `code_hashes`. Older checkpoints have none by file."""


class Contents(NamedTuple):
    """All that training changes and a checkpoint holds, by name: see `collect`."""

    model: dict[str, Tensor]
    """Parameters and persistent buffers; tied ones appear once."""
    optimizer: dict[str, Any]
    """The optimizers' state by key and parameter, as `exp_avg.transformer.wte.weight`."""
    own: dict[str, Any]
    """The values of `Trainer.state`, as `trainer.NAME`."""


class Checkpoint(NamedTuple):
    """A checkpoint's folder and the state read from it."""

    path: Path
    state: TrainerState


# --- saving -----------------------------------------------------------------------------------


@dataclass
class CheckpointWriter:
    """Save checkpoints while training continues; a context manager that waits for the last one.

    `save` copies the state, and a thread writes the copy: `save_file` and hashing release the
    interpreter's lock.
    """

    checkpoints_dir: Path | None
    """The run's `checkpoints` folder; the first save creates it. None on ranks that write nothing:
    their `save` only contributes their shards."""
    keep: int = 0
    """Number of newest checkpoints to keep, in addition to the one with the lowest validation loss;
    0 keeps all."""
    on_saved: Callable[[int, Path], object] = lambda *_: None
    """Called in the thread, with the step and the folder of each complete checkpoint."""
    ranks: Ranks = SINGLE_PROCESS
    """The processes that share the state."""
    on_failed: Callable[[], object] = lambda: None
    """Called in the thread if the code, and not the disk, failed while a checkpoint was saved."""
    expand: Callable[[Tensors], dict[str, Tensor]] = dict
    """Returns the tensors to save from the running model's and its optimizers'."""
    error: Exception | None = None
    """Error that prevented the last checkpoint from being saved; None if it was saved."""

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # starts with the first save
        self._last = Future[None]()
        self._last.set_result(None)
        self._built = dict[str, str]()
        self.saved_step: int | None = None
        """Updates done at the last call of `save`."""
        code_hashes()  # read the code that runs now, because files may be edited during the run

    def check(self, contents: Contents) -> None:
        """Raise UserError if a resume could not restore all that a checkpoint would hold now.

        The first call, before the first step, notes the values that a resume will build again.
        """
        first_names = dict[int, str]()
        for name, value in contents.optimizer.items():
            _kind_of(name, value)
            if isinstance(value, Tensor) and first_names.setdefault(id(value), name) != name:
                same = first_names[id(value)]
                raise UserError(f"{name} and {same} are one tensor: give each parameter its own")
            is_like = isinstance(value, Tensor) and value.dim() > 0
            like = contents.model[split_name(name)[1]] if is_like else None
            if getattr(value, "placements", None) != getattr(like, "placements", None):
                raise UserError(f"{name} is not sharded like its parameter: use torch.zeros_like")
        kinds = {n: _kind_of(n, value) for n, value in (contents.model | contents.own).items()}
        self._built = self._built or kinds
        for name in sorted(kinds.keys() | self._built.keys()):
            now, built = kinds.get(name, "missing"), self._built.get(name, "missing")
            if now != built:
                problem = f"a resume could not restore {name}, which was {built} before the first"
                fix = "give it this shape and dtype in train_gpt2.build"
                raise UserError(f"{problem} step and is {now} now: {fix}")

    @torch.no_grad()
    def save(self, state: TrainerState, contents: Contents) -> None:
        """Wait for the previous checkpoint, copy the current state, and start to write the copy.

        If the model is sharded, every rank must call this: tensors are gathered one at a time.
        """
        self.wait()
        self.check(contents)
        self.saved_step = state.step
        others = tensors_of(contents.optimizer | contents.own)
        is_kept = self.checkpoints_dir is not None
        copies = {
            MODEL_NAME: self.ranks.copy_to_host(contents.model, is_kept),
            OPTIMIZER_NAME: self.ranks.copy_to_host(others, is_kept),
        }
        if self.checkpoints_dir is not None:
            path = self.checkpoints_dir / f"step_{state.step:08d}"
            self._last = self._thread.submit(self._write, path, state, copies)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete or has failed: see `error`.

        Every rank must call this. The ranks synchronize every second: if they waited for a slow
        disk in a single collective, it could time out.
        """
        while all_reduce_max(not self._last.done()):
            wait_for([self._last], timeout=1)  # Ctrl-C can interrupt this wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # These happen on all ranks. After any other error, each rank waits alone, in `shutdown`.
        if kind in (None, DivergedError):
            self.wait()
        self._thread.shutdown()

    def _write(self, path: Path, state: TrainerState, copies: dict[str, dict[str, Tensor]]) -> None:
        """Write a checkpoint, which gets its name once it is complete; then delete old ones."""
        self.error = None
        try:
            with write_folder(path) as folder:
                for name, tensors in copies.items():
                    save_file(self.expand(tensors), folder / name)
                write_json(folder / STATE_NAME, asdict(state))
                files = {name: _manifest_entry(folder / name) for name in FILE_NAMES}
                manifest = {"format": CHECKPOINT_FORMAT, "files": files}
                write_json(folder / CHECKPOINT_MANIFEST, manifest)
            self.on_saved(state.step, path)
            if self.keep:
                self._delete_old(path)
        except (OSError, SafetensorError) as error:  # SafetensorError: the disk is full
            self.error = UserError(f"{path} was not saved: {error}")
            print0(f"warning: {self.error}")
        except Exception as error:  # the next checkpoint would also fail
            self.error = error
            self.on_failed()

    def _delete_old(self, newest: Path) -> None:
        try:
            best = best_checkpoint(newest.parent.parent)
            # Checkpoints of later steps are damaged, or the run would have resumed from them.
            older = [c for c in complete_checkpoints(newest.parent) if c.name < newest.name]
            for checkpoint in {*older[self.keep - 1 :]} - {best}:
                # Renamed first, so that a partially deleted folder is never taken for a checkpoint.
                # Files that cannot be deleted now, for example on NFS while another process reads
                # them, are left to `clean_up`.
                hidden = checkpoint.with_name(f".{checkpoint.name}.deleted")
                shutil.rmtree(checkpoint.rename(hidden), ignore_errors=True)
        except OSError as error:  # only costs disk space
            print0(f"warning: {error}")


def clean_up(checkpoints_dir: Path) -> None:
    """Delete the remains of checkpoints that a killed process was saving or deleting."""
    for leftover in checkpoints_dir.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _manifest_entry(path: Path) -> dict[str, Any]:
    """Return a file's entry in the manifest: its size and SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def collect(model: nn.Module, optimizers: Sequence[Optimizer], own: Mapping[str, Any]) -> Contents:
    """Collect what a checkpoint holds of a raw model, its optimizers and `Trainer.state`.

    Raise UserError for values that have no name: state of the optimizers that belongs to no
    parameter of the model, and keys that are not texts.
    """
    names: dict[object, str] = {p: name for name, p in model.named_parameters()}
    values = dict[str, Any]()
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            if owner not in names or not all(isinstance(key, str) for key in state):
                where = f"{type(optimizer).__name__}.state of {names.get(owner, repr(owner)):.60}"
                keys = "its keys must be a parameter of the model, then a text"
                problem = f"a checkpoint cannot hold {where}: {keys}"
                raise UserError(f"{problem}; keep other values in Trainer.state")
            values |= {join_name(key, names[owner]): value for key, value in state.items()}
    if other := [name for name in own if not isinstance(name, str)]:
        raise UserError(f"Trainer.state has the key {other[0]!r:.60}: use a text as each key")
    return Contents(model_state(model), values, {f"{OWN}{n}": value for n, value in own.items()})


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a raw model's parameters and persistent buffers by name; tied ones appear once."""
    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(state.items())}  # each one's first name
    return {name: tensor for name, tensor in state.items() if names[id(tensor)] == name}


def join_name(key: str, parameter: str) -> str:
    """Return the name of a parameter's state under a key; a dot in the key becomes `%2E`.

    The key `trainer` becomes `%74rainer`, because the names of `Trainer.state` begin with
    `trainer.`.
    """
    quoted = "%74rainer" if key == "trainer" else quote(key).replace(".", "%2E")
    return f"{quoted}.{parameter}"


def split_name(name: str) -> tuple[str, str]:
    """Return the key and the parameter's name from what `join_name` returned."""
    key, _, parameter = name.partition(".")
    return unquote(key), parameter


def tensors_of(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values that are tensors."""
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not tensors, which `trainer_state.json` has."""
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def _kind_of(name: str, value: object) -> str:
    """Return the kind of a value, dtype and shape of a tensor; raise if no file can hold it."""
    if isinstance(value, int | float | str | None):
        return "a number or text"
    kind = type(value).__name__
    is_plain = type(value) in (Tensor, nn.Parameter) or hasattr(value, "full_tensor")
    if isinstance(value, Tensor) and is_plain and not name.endswith("_extra_state"):
        kind = f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
        if _can_save(value.dtype, value.layout):
            return kind
    fix = "keep plain tensors, numbers and texts in the state, each under its own name"
    raise UserError(f"a checkpoint cannot hold {name}, a {kind}: {fix}")


@cache
def _can_save(dtype: torch.dtype, layout: torch.layout) -> bool:
    with suppress(Exception):  # safetensors raises several classes
        save({"x": torch.empty(0, dtype=dtype, layout=layout)})
        return True
    return False


def find_nonfinite_on_ranks(contents: Contents) -> str | None:
    """Return the name of a parameter, or of an optimizer's tensor, that is not finite.

    Return None if all are finite. Buffers, such as masks, may be infinite. Every process must call
    this; all get the same name.
    """
    parameters = {n: x for n, x in contents.model.items() if isinstance(x, nn.Parameter)}
    tensors = parameters | tensors_of(contents.optimizer)
    shards = {n: x.to_local() if hasattr(x, "to_local") else x for n, x in tensors.items()}
    bad = find_nonfinite(shards)
    return next(filter(None, gather_text(bad or "")), None)


def rng_states() -> list[dict[str, str]]:
    """Return the states of every rank's global random generators, by device type, in base64.

    Every process must call this; all get the same list.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    encoded = {name: base64.b64encode(bytes(s.tolist())).decode() for name, s in states.items()}
    return [json.loads(text) for text in gather_text(json.dumps(encoded))]


# --- reading ----------------------------------------------------------------------------------


def complete_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Return a run's checkpoints, highest step first, including those with damaged files.

    Their names are `step_` and eight digits; a user's copy with any other name is ignored.
    """
    folders = sorted(checkpoints_dir.glob("step_" + 8 * "[0-9]"), reverse=True)
    return [folder for folder in folders if (folder / CHECKPOINT_MANIFEST).is_file()]


def best_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint with the lowest validation loss; None if no saved step has one."""
    losses = {f"step_{step:08d}": r["val_loss"] for step, r in validations(run_dir).items()}
    saved = [c for c in complete_checkpoints(run_dir / "checkpoints") if c.name in losses]
    return min(saved, key=lambda checkpoint: losses[checkpoint.name], default=None)


def verify_checkpoint(checkpoint: Path, names: Sequence[str] = FILE_NAMES) -> None:
    """Check a checkpoint's files against its manifest."""
    manifest = read_json(checkpoint / CHECKPOINT_MANIFEST)
    for name in names:
        is_same = manifest.get("files", {}).get(name) == _manifest_entry(checkpoint / name)
        if not is_same or manifest.get("format") != CHECKPOINT_FORMAT:
            problem = "its size, SHA-256 or format differs from the manifest"
            raise UserError(f"{checkpoint / name} is damaged: {problem}")


def read_state(checkpoint: Path) -> TrainerState:
    """Read a checkpoint's `trainer_state.json`, without fields that this version does not have."""
    path = checkpoint / STATE_NAME
    try:
        values = read_json(path)
        if "position" not in values:  # an older checkpoint
            values["position"] = values["tokens_seen"] // values["model_config"]["block_size"]
        state = TrainerState(**_known_fields(TrainerState, values))
        return replace(state, model_config=_known_fields(GPTConfig, state.model_config))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not a trainer state: {error}") from None


def _known_fields(config_class: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass."""
    return {f.name: values[f.name] for f in fields(config_class) if f.name in values}


def warn_if_code_changed(path: Path, state: TrainerState, program: str = "train_gpt2.py") -> None:
    """Warn if files that `program` imports have changed since a checkpoint was saved.

    Checkpoints of earlier versions have the hashes of fewer files, or of none.
    """
    current = code_hashes(program).items()
    edits = [file for file, digest in current if state.code.get(file, digest) != digest]
    if edits and is_main():
        # On stderr, because `sample.py` prints texts on stdout.
        names = ", ".join(edits)
        print_error(f"warning: {path} was saved by different code ({names}): results may differ")


# --- resuming ---------------------------------------------------------------------------------


def load_checkpoint(
    checkpoint: Checkpoint,
    model: GPT,
    optimizers: Sequence[Optimizer],
    scaler: torch.amp.GradScaler,
    own: dict[str, Tensor | float],
    ranks: Ranks = SINGLE_PROCESS,
    select: Callable[[Tensors], dict[str, Tensor]] = dict,
) -> None:
    """Restore the model, optimizers, loss scaler, `Trainer.state` and this rank's generators.

    Every process must call this. The optimizers' hyperparameters (`param_groups`) are left
    unchanged. Hashes are not checked here: see `verify_checkpoint`. `select` reverses
    `CheckpointWriter.expand`.
    """
    path, state = checkpoint
    with raise_on_all_ranks():
        built = [type(optimizer).__name__ for optimizer in optimizers]
        if built != state.optimizers:
            trained, builds = (" and ".join(names) for names in (state.optimizers, built))
            problem = f"{path} was trained with {trained}, but this run builds {builds}"
            new_run = f"start a new run with {shell_line('--init-from', path)}"
            raise UserError(f"{problem}: use the same --optimizer, or {new_run}")
        copy_state(select(read_tensors(path / MODEL_NAME)), model, path, ranks)
        warn_if_code_changed(path, state)
        values = select(read_tensors(path / OPTIMIZER_NAME)) | state.optimizer_values
        saved = {n.removeprefix(OWN): values.pop(n) for n in list(values) if n.startswith(OWN)}
        _load_own(own, saved | state.own, path, ranks)
    _load_optimizers(values, model, optimizers, ranks)
    if state.grad_scaler:
        scaler.load_state_dict(state.grad_scaler)
    restore_rng_states(state.rng_states, ranks.rank)


@torch.no_grad()
def _load_own(
    own: dict[str, Tensor | float], saved: Mapping[str, Any], path: Path, ranks: Ranks
) -> None:
    """Set the values of `Trainer.state` that were saved; print a line about all others."""
    for name in own.keys() & saved.keys():
        built, value = own[name], saved[name]
        if isinstance(built, Tensor):
            if not isinstance(value, Tensor) or value.shape != built.shape:
                raise UserError(f"{path} has another {name!r} in Trainer.state: rename yours")
            built.copy_(ranks.shard(value.to(built.device), built))
        else:
            own[name] = value
    if other := ", ".join(sorted(own.keys() ^ saved.keys())):
        print0(f"note: {path} and Trainer.state do not both have {other}: not resumed")


def _load_optimizers(
    values: Mapping[str, Any], model: GPT, optimizers: Sequence[Optimizer], ranks: Ranks
) -> None:
    """Set the optimizers' state from `Contents.optimizer`.

    `Optimizer.load_state_dict` would cast it to the dtype of the parameters.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    # AdamW's step counts stay on the CPU, unless a GPU reads them.
    on_cpu = {p for g in groups if not (g.get("fused") or g.get("capturable")) for p in g["params"]}
    states = defaultdict[Tensor, dict[str, Any]](dict)
    for flat_name, value in values.items():
        key, name = split_name(flat_name)
        parameter = parameters[name]
        if isinstance(value, Tensor):
            if not (key == "step" and parameter in on_cpu):
                value = value.to(parameter.device)
            # Without the copy, the entire file would stay mapped into memory.
            value = (ranks.shard(value, parameter) if value.dim() else value).clone()
        states[parameter][key] = value
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            optimizer.state.update({p: states[p] for p in group["params"] if p in states})


def restore_rng_states(states: list[dict[str, str]], rank: int = 0) -> None:
    """Set this rank's generators to the states that `rng_states` returned.

    A rank that the saved run did not have keeps its current states: with another rank's states, it
    would draw the same random numbers.
    """
    for device_type, text in (states[rank] if rank < len(states) else {}).items():
        state = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
        if device_type == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


@torch.no_grad()
def copy_weights(source: GPT, target: GPT, ranks: Ranks) -> None:
    """Copy a model's state into a model that may be sharded or have a shorter context.

    Position embeddings beyond the target's `block_size` are dropped.
    """
    tensors, size = model_state(source), target.config.block_size
    tensors = {name: x[:size] if ".wpe." in name else x for name, x in tensors.items()}
    copy_state(tensors, target, "the --init-from model", ranks)


@torch.no_grad()
def copy_state(
    tensors: Mapping[str, Tensor], model: GPT, source: str | Path, ranks: Ranks = SINGLE_PROCESS
) -> None:
    """Copy tensors by name into a model, sharded or not; raise if they do not fit it."""
    targets = model_state(model)
    buffers = dict(model.named_buffers())
    check_tensors(tensors, targets, f"{source} does not fit the model in model.py", buffers)
    for name, target in targets.items():
        target.copy_(ranks.shard(tensors[name], target))
