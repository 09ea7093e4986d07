"""Exact, atomic, verified save and resume; no pickle.

    runs/NAME/checkpoints/step_00000500/
        model.safetensors        parameters, float32, and buffers
        optimizer.safetensors    the optimizers' tensors, such as exp_avg.transformer.wte.weight
        trainer_state.json       step, configuration, generator states, data fingerprint
        manifest.json            size and SHA-256 of each, written last

Tensors are saved whole, not sharded, so that any number of processes can load them. A folder
without its manifest is not a checkpoint. Training waits while the state is copied, but not while
the copy is written.
"""

import base64
import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from formats.huggingface import check_tensors, is_finite, read_tensors, shapes_of
from formats.metrics import validations
from model import GPT, GPTConfig
from runtime.cli import print_error, shell_line
from runtime.distributed import (
    all_reduce_max,
    distribute_like,
    full_tensor,
    gather_text,
    is_main,
    print0,
    raise_on_all_ranks,
)
from runtime.files import read_json, sha256_of, sync_folder, write_json

MODEL_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"
CHECKPOINT_MANIFEST = "manifest.json"
FILE_NAMES = (MODEL_NAME, OPTIMIZER_NAME, STATE_NAME)
CHECKPOINT_FORMAT = 1
CHECKPOINT_NAME = re.compile(r"step_(\d{8})")
MAX_CODE_ERROR = 5e-6  # rounding gives 2e-7, the exact GELU instead of tanh's 3e-5


@dataclass(frozen=True)
class RunState:
    """What `trainer_state.json` holds: a run's state except its tensors."""

    step: int
    """Optimizer updates done."""
    tokens_seen: int
    model_config: dict[str, Any]
    """The fields of `GPTConfig`."""
    train_config: dict[str, Any]
    """The training configuration, as its flags."""
    data_fingerprint: str
    rng_states: list[dict[str, str]]
    """Of each rank, its generators' states by device type, base64."""
    grad_scaler: dict[str, Any]
    """The loss scaler's state; empty unless float16 is in use."""
    val_fingerprint: str
    """Of the validation split."""
    optimizers: list[str]
    """The optimizers' class names."""
    optimizer_values: dict[str, Any]
    """Optimizer state that is not a tensor, in values that JSON has: see `optimizer_state`."""
    code_logits: list[float] = field(default_factory=list)
    """What the code computed, see `code_logits`; older checkpoints do not say."""


class Checkpoint(NamedTuple):
    """A checkpoint's folder, and the state that was read from it."""

    path: Path
    state: RunState


# --- saving -----------------------------------------------------------------------------------


class CheckpointWriter:
    """Save checkpoints while training goes on; a context manager that waits for the last one.

    A thread writes the copy that `save` makes (`save_file` and hashing release the interpreter's
    lock). The next save reuses its memory: filling new pages takes longer than copying.

    Args:
        checkpoints_dir: the run's `checkpoints` folder; the first save creates it. None on ranks
            that write nothing: their `save` only contributes their shards.
        keep: once a checkpoint is complete, delete all but the newest `keep`, and the one of the
            lowest validation loss; 0 deletes none.
        on_saved: called, in the thread, with the step and the folder of a complete checkpoint.
    """

    def __init__(
        self,
        checkpoints_dir: Path | None,
        keep: int = 0,
        on_saved: Callable[[int, Path], object] = lambda *_: None,
    ) -> None:
        self.error: OSError | None = None
        """Why the last checkpoint was not saved; None if it was."""
        self._checkpoints_dir = checkpoints_dir
        self._keep = keep
        self._on_saved = on_saved
        self._copies: dict[str, dict[str, Tensor]] = {}  # by file, then by tensor
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # starts with the first save
        self._last: Future[None] | None = None

    @torch.no_grad()
    def save(self, state: RunState, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Wait for the last checkpoint, copy the present state, and start to write it.

        The model is the raw one, neither compiled nor wrapped. If it is sharded, every rank must
        call this: tensors are gathered one at a time.
        """
        self.wait()
        tensors = {
            MODEL_NAME: model_state(model),
            OPTIMIZER_NAME: optimizer_state(model, optimizers, tensors=True),
        }
        if self._checkpoints_dir is None:
            for tensor in (tensor for named in tensors.values() for tensor in named.values()):
                full_tensor(tensor)
            return
        self._copies = {
            file: {name: self._copy(file, name, tensor) for name, tensor in named.items()}
            for file, named in tensors.items()
        }
        self._last = self._thread.submit(self._write, self._checkpoints_dir, state)

    def _copy(self, file: str, name: str, tensor: Tensor) -> Tensor:
        """A full copy on the CPU, in the memory of the last one.

        It is not pinned: torch rounds each pinned tensor up to a power of two, 1.39 GiB to 2.31.
        """
        full = full_tensor(tensor)
        copy = self._copies.get(file, {}).get(name)
        return full.to("cpu", copy=True) if copy is None else copy.copy_(full)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete, or has failed: see `error`.

        Every rank must call this. They meet each second: a rank that waited in one collective for
        a slow disk would end at its timeout.
        """
        while all_reduce_max(self._last is not None and not self._last.done()):
            if self._last is not None:
                wait_for([self._last], timeout=1)  # Ctrl-C may interrupt this
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind in (None, FloatingPointError):  # on all ranks alike; of another, each waits alone
            self.wait()
        self._thread.shutdown()

    def _write(self, checkpoints_dir: Path, state: RunState) -> None:
        self.error, saved = None, None
        try:
            saved = _write_checkpoint(checkpoints_dir, state, self._copies)
            self._on_saved(state.step, saved)
            older = [c for c in complete_checkpoints(checkpoints_dir) if c.name < saved.name]
            for checkpoint in older[self._keep - 1 :] if self._keep else ():
                if checkpoint != best_checkpoint(checkpoints_dir.parent):
                    _delete(checkpoint)
        except OSError as error:
            self.error = None if saved else error  # an old one that stays costs only its space
            print0(f"warning: {error}")


def _write_checkpoint(
    checkpoints_dir: Path, state: RunState, tensors_by_file: dict[str, dict[str, Tensor]]
) -> Path:
    """Write a checkpoint that appears under its name once it is complete; return its folder."""
    final = checkpoints_dir / f"step_{state.step:08d}"
    temporary = checkpoints_dir / f".{final.name}.tmp"
    try:
        checkpoints_dir.mkdir(exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)  # of an attempt that failed
        temporary.mkdir()
        for name, tensors in tensors_by_file.items():
            save_file(tensors, temporary / name)
            with (temporary / name).open("r+b") as file:
                os.fsync(file.fileno())
        write_json(temporary / STATE_NAME, asdict(state))
        files = {name: _manifest_entry(temporary / name) for name in FILE_NAMES}
        manifest = {"format": CHECKPOINT_FORMAT, "files": files}
        write_json(temporary / CHECKPOINT_MANIFEST, manifest)
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
    """Delete a checkpoint, or the link to one; renamed first, so that no half is taken for one.

    Of what cannot be deleted now, as on NFS while another process reads it, `clean_up` takes care.
    """
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        deleted = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.deleted"))
        shutil.rmtree(deleted, ignore_errors=True)


def clean_up(checkpoints_dir: Path) -> None:
    """Delete what a process left behind that died while it saved or deleted a checkpoint."""
    for leftover in checkpoints_dir.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _manifest_entry(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """A raw model's parameters and persistent buffers by name; a tied one once."""
    tensors, names = dict[str, Tensor](), dict[Tensor, str]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if names.setdefault(tensor, name) == name:
            tensors[name] = tensor
    return tensors


def optimizer_state(
    model: nn.Module, optimizers: Sequence[Optimizer], *, tensors: bool
) -> dict[str, Any]:
    """The tensors of the optimizers' state, as `exp_avg.transformer.wte.weight`; or all else."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{key}.{names[parameter]}": value
        for optimizer in optimizers
        for parameter, own in optimizer.state.items()
        for key, value in own.items()
        if isinstance(value, Tensor) == tensors
    }


def find_nonfinite(model: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    """The name of a tensor to be saved that has a NaN or an infinity; None if all are finite.

    Every process must call this, and gets the same name.
    """
    state = model_state(model) | optimizer_state(model, optimizers, tensors=True)
    local = {
        name: tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for name, tensor in state.items()
        if tensor.is_floating_point()
    }
    own = "" if is_finite(*local.values()) else next(n for n in local if not is_finite(local[n]))
    return next(filter(None, gather_text(own)), None)


def rng_states() -> list[dict[str, str]]:
    """The states of every rank's global random generators, by device type, as base64 text.

    Every process must call this, and gets the same list.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    own = {name: base64.b64encode(bytes(s.tolist())).decode() for name, s in states.items()}
    return [json.loads(text) for text in gather_text(json.dumps(own))]


# --- reading ----------------------------------------------------------------------------------


def complete_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """The checkpoints of a run, the highest step first; one whose files are damaged counts, too.

    They are named `step_` and eight digits: a user's copy under another name is none of them.
    """
    return [
        folder
        for folder in sorted(checkpoints_dir.glob("step_*"), reverse=True)
        if CHECKPOINT_NAME.fullmatch(folder.name) and (folder / CHECKPOINT_MANIFEST).is_file()
    ]


def best_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint of the lowest validation loss; None if none was validated at its step."""
    losses = {f"step_{step:08d}": r["val_loss"] for step, r in validations(run_dir).items()}
    saved = [c for c in complete_checkpoints(run_dir / "checkpoints") if c.name in losses]
    return min(saved, key=lambda checkpoint: losses[checkpoint.name], default=None)


def verify_checkpoint(checkpoint: Path, names: Sequence[str] = FILE_NAMES) -> None:
    """Check files of a checkpoint against its manifest, and its name against its step."""
    path = checkpoint / CHECKPOINT_MANIFEST
    manifest = read_json(path)
    if manifest.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(f"{path} is damaged, or not of format {CHECKPOINT_FORMAT}")
    for name in names:
        if manifest.get("files", {}).get(name) != _manifest_entry(checkpoint / name):
            raise ValueError(
                f"{checkpoint / name} is damaged: its size or SHA-256 is not the manifest's"
            )
    step, named = read_state(checkpoint).step, CHECKPOINT_NAME.fullmatch(checkpoint.name)
    if named and step != int(named[1]):
        raise ValueError(f"{checkpoint} holds the state of step {step}: rename it")


def read_state(checkpoint: Path) -> RunState:
    """Read a checkpoint's `trainer_state.json`."""
    path = checkpoint / STATE_NAME
    try:
        return RunState(**read_json(path))
    except TypeError as error:
        raise ValueError(f"{path} is not a trainer state: {error}") from None


def code_logits(model_config: GPTConfig) -> list[float]:
    """What `model.py` and `ops.py` compute: logits of a tiny model, weights and input by formula.

    Empty if an edited model cannot be so small.
    """
    size = {"block_size": 8, "vocab_size": 50, "n_layer": 2, "n_embd": 8 * model_config.n_head}
    for dtype in (torch.float64, torch.float32):  # an edit may take float32 only
        with suppress(Exception), torch.random.fork_rng([]), torch.device("cpu"), torch.no_grad():
            model = GPT(replace(model_config, **size)).to(dtype).eval()
            for name, tensor in model_state(model).items():
                if tensor.is_floating_point():
                    numbers = torch.arange(tensor.numel()).view_as(tensor) ** 2
                    tensor.copy_((numbers + crc32(name.encode())) % 101 / 101 - 0.5)
            logits = model(7 * torch.arange(16).view(2, 8) % 50).logits[:, -1, :4].flatten()
            if is_finite(logits):
                return [float(logit) for logit in logits]
    return []


def warn_of_other_code(path: Path, state: RunState) -> None:
    """Say so if the code computes something else than the code that saved a checkpoint."""
    saved, found = state.code_logits, code_logits(GPTConfig(**state.model_config))
    error = math.dist(saved, found) / math.hypot(*saved) if saved and found else 0.0
    if is_main() and error > MAX_CODE_ERROR:
        print_error(  # not where `sample.py` prints texts
            f"warning: {path} was trained by other code, its logits differ by {error:.1e} of their "
            f"size: restore model.py and ops.py (git stash, git checkout), or results will differ"
        )


# --- resuming ---------------------------------------------------------------------------------


def load_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Restore a raw model, its optimizers and the random generators, on every process.

    The model may be sharded. The optimizers' settings (`param_groups`) stay as they are. The files'
    hashes are not checked here: see `verify_checkpoint`.
    """
    path, state = checkpoint
    with raise_on_all_ranks():
        built = [type(optimizer).__name__ for optimizer in optimizers]
        if built != state.optimizers:
            raise ValueError(
                f"{path} was trained by {' and '.join(state.optimizers)}, and this run builds "
                f"{' and '.join(built)}: use the same --optimizer, or start a new run by "
                f"{shell_line('--init-from', path)}"
            )
        copy_state(read_tensors(path / MODEL_NAME), model, path)
        warn_of_other_code(path, state)
        values = read_tensors(path / OPTIMIZER_NAME) | state.optimizer_values
    _load_optimizers(values, model, optimizers)
    if scaler is not None and state.grad_scaler:
        scaler.load_state_dict(state.grad_scaler)
    restore_rng_states(state.rng_states)


def _load_optimizers(
    values: Mapping[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Set the optimizers' state to what `optimizer_state` returned."""
    by_parameter: dict[str, dict[str, Any]] = defaultdict(dict)
    for flat_name, value in values.items():
        key, _, name = flat_name.partition(".")
        by_parameter[name][key] = value
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        own = optimizer.state_dict()
        own["state"] = {
            index: {key: _placed(value, p) for key, value in by_parameter[names[p]].items()}
            for index, p in enumerate(updated)
        }
        optimizer.load_state_dict(own)


def _placed(value: Any, parameter: Tensor) -> Any:  # noqa: ANN401 - a tensor or a plain value
    """A saved value as the parameter is sharded; a copy, or it would keep the whole file mapped."""
    if not isinstance(value, Tensor):
        return value
    return (distribute_like(value, parameter) if value.dim() else value).clone()


def restore_rng_states(states: list[dict[str, str]]) -> None:
    """Set this rank's generators to what `rng_states` returned.

    A rank that the saved run did not have keeps its own: another's would repeat that one's numbers.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for device_type, text in (states[rank] if rank < len(states) else {}).items():
        state = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
        if device_type == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


@torch.no_grad()
def copy_weights(source: GPT, target: GPT) -> None:
    """Copy a model's state into one that may be sharded, or have a shorter context.

    Position embeddings lose the rows after the target's `block_size`.
    """
    tensors = {
        name: tensor[: target.config.block_size] if ".wpe." in name else tensor
        for name, tensor in model_state(source).items()
    }
    copy_state(tensors, target, "the model to start from")


@torch.no_grad()
def copy_state(tensors: Mapping[str, Tensor], model: nn.Module, source: str | Path) -> None:
    """Copy tensors by name into a model, sharded or not; refuse others than it has."""
    targets = model_state(model)
    check_tensors(tensors, shapes_of(targets), f"{source} does not fit the model in model.py")
    for name, target in targets.items():
        target.copy_(distribute_like(tensors[name], target))
