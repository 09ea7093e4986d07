"""Device, dtype, compiler and memory of this machine."""

import contextlib
import ctypes
import functools
import math
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch._functorch.config as functorch_config
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # exists while the driver is loaded (Linux)
# Matches the messages of torch (GPU and CPU), Triton, NCCL, cuBLAS and cuDNN.
OUT_OF_MEMORY = re.compile(
    r"out of memory|Failed to CUDA \w+|_ALLOC(ATION)?_FAILED|can't allocate memory"
)
MATMUL_SIZE, MATMUL_REPEATS = 1024, 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_device(name: DeviceName, local_rank: int = 0) -> torch.device:
    """Return the device to run on; `auto` is CUDA if available, else MPS, else the CPU.

    With CUDA, every process on a machine uses the GPU of its local rank.

    Raises:
        ValueError: the device is not available, or torch cannot use this machine's NVIDIA GPU. Then
            `auto` does not fall back to the CPU, where training would take weeks.
    """
    if name == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(action="ignore"):  # `cuda_problem` has the reason
        found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name != "mps" and not found["cuda"] and (problem := cuda_problem()):
        raise ValueError(problem)
    available = [*(kind for kind in found if found[kind]), "cpu"]
    if name not in ("auto", *available):
        raise ValueError(
            f"--device {name} is not available here: use --device {' or '.join(available)}"
        )
    kind = available[0] if name == "auto" else name
    if kind != "cuda":
        return torch.device(kind)
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"process {local_rank} on this machine has no GPU: "
            f"run torchrun with --nproc_per_node={torch.cuda.device_count()}"
        )
    major, minor = torch.cuda.get_device_capability(local_rank)
    built_for = re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))  # empty with ROCm
    if built_for and 10 * major + minor < min(map(int, built_for)):
        raise ValueError(
            f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(local_rank)}"
            f" (sm_{major}{minor}): install torch for CUDA 12 (docs/troubleshooting.md), or use "
            f"--device cpu"
        )
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
    return (
        f"this machine has an NVIDIA driver, but torch {torch.__version__} cannot use it ({reason})"
        f": update the driver, install another torch (docs/troubleshooting.md), or use "
        f"--device cpu"
    )


def select_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """Return the dtype for matmuls; parameters stay float32.

    `auto` is bfloat16 where the hardware multiplies it faster than float32, float16 on older NVIDIA
    GPUs, and float32 elsewhere. With Intel's AVX-512, bfloat16 takes twice as long as float32.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    if device.type == "cpu":
        cpu = torch.cpu.get_capabilities()
        is_intel = "Intel" in cpu.get("cpu_name", "")
        if cpu.get("amx_bf16") or (cpu.get("avx512_bf16") and not is_intel):
            return torch.bfloat16
    return torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Run matmuls of float32 parameters in `dtype`; for float32, do nothing."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for the body, then restore its previous mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def inference(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Use autocast and eval mode for sampling and scoring, where shapes change with every call.

    Unless `dtype` is float32, float32 matmuls also run at reduced precision. On a CPU, this selects
    oneDNN instead of MKL, which takes 1.5 to 3 times as long on AMD. Attention does not use cuDNN,
    torch's first choice on Hopper GPUs, because cuDNN builds a plan for every new shape.
    """
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    previous = torch.get_float32_matmul_precision()
    if dtype != torch.float32:
        torch.set_float32_matmul_precision("medium")
    try:
        with eval_mode(model), autocast(device, dtype), sdpa_kernel(backends):
            yield
    finally:
        torch.set_float32_matmul_precision(previous)


def make_deterministic() -> None:
    """Make sums deterministic, so that a resumed run can repeat its losses bit for bit.

    Otherwise compiled CPU code adds up embedding gradients in the order in which its threads
    finish, and so do GPU kernels such as flash attention's backward pass. For a GPU, call this
    before the process group is created and before the first matmul: torch also disables an NCCL
    algorithm that is not deterministic, and cuBLAS needs a workspace of a fixed size.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def tune_malloc() -> None:
    """Let the C library reuse the memory of freed tensors (Linux with glibc).

    By default, it returns the memory of every large tensor to the kernel, which zeroes each page
    before it is used again: half a million page faults per step of the 124M model.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl does not have it
        m_trim_threshold, m_mmap_max = -1, -4  # from glibc's malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch, or a library that it uses, reports that the device is out of memory."""
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def compile_error(error: Exception) -> str | None:
    """Describe an error of torch.compile and its fix; None for any other error."""
    kind = type(error)  # TorchRuntimeError: an error in the traced code, such as a wrong shape
    is_of_compiler = kind.__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
    if not is_of_compiler or kind.__name__ == "TorchRuntimeError":
        return None
    return f"torch.compile failed with {_reason(error)}, or add --no-compile"


def _reason(error: Exception) -> str:
    """Return an error, which Dynamo may have wrapped, on one line, and the fix for a bad cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # torch.compile has imported it

    inner = getattr(error, "inner_exception", error)
    first_line = str(inner).strip().partition("\n")[0]
    return f"{type(inner).__name__} ({first_line}): delete the compile cache {cache_dir()}"


@functools.cache  # because it compiles a function
def prepare_compiler(device: torch.device) -> str | None:
    """Set up torch.compile for training; return why it cannot work here, or None if it can."""
    if device.type == "mps":
        return "torch.compile does not support MPS well yet"
    try:  # a compiler may be missing or broken, and torch internals may change
        from torch._dynamo import config as dynamo_config  # takes a second to import

        # Also cache compiled code that contains custom autograd functions, as `ops` has them.
        functorch_config.autograd_cache_allow_custom_autograd_functions = True
        dynamo_config.optimize_ddp = False  # it splits graphs at DDP buckets; blocks are short
        # If blocks differ in a number, each needs a program for training and one for validation.
        dynamo_config.recompile_limit = 128
        # A warning of six lines for each loss, if the vocabulary is large relative to the model.
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly")
        if device.type == "cpu":  # recompute GELU in the backward pass: 3.3, not 3.9 GiB for 124M
            functorch_config.ban_recompute_materialized_backward = False
        from torch._inductor.codecache import get_lock_dir

        locks = Path(get_lock_dir())
        for path in locks.parent.glob("[!.]*/[!.]*.so"):  # incomplete ones lack their first bytes
            with contextlib.suppress(Timeout), FileLock(locks / f"{Path(path.stem).stem}.lock", 0):
                if path.exists() and not np.fromfile(path, np.uint8, count=1).any():
                    path.unlink()
                    print(f"warning: removed {path}, broken by a killed run", file=sys.stderr)
        # np.pi makes Dynamo list NumPy's functions now. Later, another thread, such as the data
        # loader's, might be importing a NumPy module at that moment.
        torch.compile(lambda x: x.sin() + np.pi, dynamic=False)(torch.ones(64, device=device))
    except Exception as error:  # Dynamo, Inductor and Triton raise many classes
        if "Python.h" in str(error):
            return "Python.h is missing: install your system's python3-dev package"
        return f"{_reason(error)}, or install a C++ compiler"
    return None


def cpu_flops(dtype: torch.dtype) -> float:
    """Measure the FLOP/s that this CPU reaches: the fastest of several square matmuls."""
    matrix, best = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype), math.inf
    for _ in range(MATMUL_REPEATS):
        start = time.perf_counter()
        _ = matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / best


def device_name(device: torch.device) -> str:
    """Return the model name of a CUDA GPU, or the type of any other device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cudnn_version() -> int:
    """Return the version of cuDNN, such as 91500 for 9.15; 0 if torch has none or rejects it."""
    with contextlib.suppress(RuntimeError):
        return cudnn.version() or 0  # type: ignore[no-untyped-call]
    return 0


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work, so that measured times are correct."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_gib(device: torch.device) -> float | None:
    """Return the device's total memory in GiB; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return None


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
