"""Files of named tensors, and checks of their names, shapes and values."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from runtime.errors import UserError
from runtime.files import check_downloaded

Tensors = Mapping[str, Tensor]  # by name


def check_tensors(
    tensors: Tensors, targets: Tensors, problem: str, buffers: Collection[str] = ()
) -> None:
    """Raise unless names and shapes match the targets' and all values are finite floats.

    Buffers, such as masks, may have any values, but must have the targets' dtype.
    """
    for name in sorted(targets.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        expected = tuple(targets[name].shape) if name in targets else "none"
        if found != expected:
            raise UserError(f"{problem}: {name} is {found}, expected {expected}")
        if name in buffers:
            if tensors[name].dtype != targets[name].dtype:
                kinds = f"{tensors[name].dtype}, expected {targets[name].dtype}"
                raise UserError(f"{problem}: {name} is {kinds}")
        elif not (tensors[name].is_floating_point() and all_finite(tensors[name])):
            raise UserError(f"{problem}: {name} is not floating-point, or has NaN or infinity")


def all_finite(tensor: Tensor) -> bool:
    """Return whether no number is NaN or infinite."""
    # aminmax() returns NaN if any number is NaN. On a CPU, it is 16 times faster than isfinite().
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())


def find_nonfinite(tensors: Tensors) -> str | None:
    """Return the name of the first tensor that has NaN or an infinity; None if all are finite."""
    floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
    return next((name for name, tensor in floats.items() if not all_finite(tensor)), None)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Map a safetensors file's tensors into memory; each is read when it is used."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: just deleted
        if path.exists():
            check_downloaded(path)
        raise UserError(f"{path} is not a readable safetensors file: {error}") from None
