"""The device of this process: which one, its name and its memory."""

import contextlib
import ctypes
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from runtime.errors import UserError

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # Linux
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists while the driver is loaded (Linux)


def select_device(name: DeviceName, local_rank: int = 0) -> torch.device:
    """Return the device to run on; `auto` is CUDA if available, else MPS, else the CPU.

    With CUDA, every process on a machine uses the GPU of its local rank.

    Raises:
        UserError: the device is not available, or torch cannot use this machine's NVIDIA GPU. Then
            `auto` does not fall back to the CPU, where training would take weeks.
    """
    if name == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(action="ignore"):  # `cuda_problem` has the reason
        found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name != "mps" and not found["cuda"] and (problem := cuda_problem()):
        raise UserError(problem)
    available = [*(kind for kind in found if found[kind]), "cpu"]
    if name not in ("auto", *available):
        fix = f"use --device {' or '.join(available)}"
        raise UserError(f"--device {name} is not available here: {fix}")
    kind = available[0] if name == "auto" else name
    if kind != "cuda":
        return torch.device(kind)
    if local_rank >= (n_gpus := torch.cuda.device_count()):
        fix = f"run torchrun with --nproc_per_node={n_gpus}"
        raise UserError(f"process {local_rank} on this machine has no GPU: {fix}")
    major, minor = torch.cuda.get_device_capability(local_rank)
    built_for = re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))  # empty with ROCm
    if built_for and 10 * major + minor < min(map(int, built_for)):
        gpu = f"{torch.cuda.get_device_name(local_rank)} (sm_{major}{minor})"
        fix = "install torch for CUDA 12 (docs/troubleshooting.md), or use --device cpu"
        raise UserError(f"torch {torch.__version__} has no kernels for {gpu}: {fix}")
    return torch.device("cuda", local_rank)


def cuda_problem() -> str | None:
    """Describe why torch cannot use the NVIDIA GPU; None if there is none or the user hides it."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or not (NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi")):
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "no GPU found"
    except (AssertionError, RuntimeError) as error:  # AssertionError: built without CUDA
        reason = str(error).partition(". ")[0]
    problem = f"torch {torch.__version__} cannot use it ({reason})"
    fix = "update the driver, install another torch (docs/troubleshooting.md), or use --device cpu"
    return f"this machine has an NVIDIA driver, but {problem}: {fix}"


def tune_malloc() -> None:
    """Let the C library reuse the memory of freed tensors (Linux with glibc).

    By default, it returns the memory of every large tensor to the kernel, which zeroes each page
    before it is used again: half a million page faults per step of the 124M model.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4  # from glibc's malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)


def device_name(device: torch.device) -> str:
    """Return the model name of a CUDA GPU, or the type of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work, so that measured times are correct."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_gib(device: torch.device) -> float | None:
    """Return the device's total memory in GiB, or a container's limit; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min([total, *_cgroup_limits()]) / 2**30
    return None


def _cgroup_limits() -> Iterator[int]:
    """Yield the limits in bytes that a container or a cluster sets for this process (Linux)."""
    groups = OWN_CGROUPS.read_text() if OWN_CGROUPS.exists() else ""
    for group in map(Path, re.findall(":(/.*)", groups)):
        for folder in (group, *group.parents):
            # Files of versions 2 and 1 of control groups.
            for limit in (f"{folder}/memory.max", f"/memory{folder}/memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # "max": no limit
                    yield int(Path(f"{CGROUPS}{limit}").read_text())


def peak_memory_gib(device: torch.device) -> float | None:
    """Return the peak memory so far in GiB: allocated on a CUDA GPU, or resident in this process.

    With MPS, it is the memory that the driver holds now. On Windows it is None.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**30
    if sys.platform == "win32":
        return None
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 2**10  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device; pinned memory avoids waiting for a CUDA GPU."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
