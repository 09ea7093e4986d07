"""What this machine can do: device, dtype, compiler, memory."""

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
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # is there while the driver is loaded (Linux)
# torch's own words on a GPU and on a CPU, Triton's, NCCL's, cuBLAS's and cuDNN's.
OUT_OF_MEMORY = re.compile(
    r"out of memory|Failed to CUDA \w+|_ALLOC(ATION)?_FAILED|can't allocate memory"
)
MATMUL_SIZE, MATMUL_REPEATS = 1024, 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_device(name: DeviceName, local_rank: int = 0) -> torch.device:
    """The device to run on; `auto` is CUDA, else MPS, else the CPU.

    With CUDA, every process of a machine takes the GPU of its local rank. An NVIDIA GPU that torch
    cannot use is refused: `auto` does not fall back to a CPU that takes weeks.
    """
    if name == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(action="ignore"):  # `cuda_problem` says it
        found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name != "mps" and not found["cuda"] and (problem := cuda_problem()):
        raise ValueError(problem)
    available = [*(kind for kind in found if found[kind]), "cpu"]
    if name not in ("auto", *available):
        raise ValueError(
            f"--device {name} is not available here; available: {', '.join(available)}"
        )
    kind = available[0] if name == "auto" else name
    if kind != "cuda":
        return torch.device(kind)
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"process {local_rank} on this machine has no GPU of its own: "
            f"run torchrun with --nproc_per_node={torch.cuda.device_count()}"
        )
    major, minor = torch.cuda.get_device_capability(local_rank)
    built_for = re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))  # none with ROCm
    if built_for and 10 * major + minor < min(map(int, built_for)):
        raise ValueError(
            f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(local_rank)}"
            f" (sm_{major}{minor}): install it for CUDA 12 (docs/troubleshooting.md), or give "
            f"--device cpu"
        )
    return torch.device("cuda", local_rank)


def cuda_problem() -> str | None:
    """Why torch cannot use this machine's NVIDIA GPU; None if it has none, or the user hides it."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden or not (NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi")):
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it sees no GPU"
    except (AssertionError, RuntimeError) as error:  # the former if it is built without CUDA
        reason = str(error).partition(". ")[0]
    return (
        f"this machine has an NVIDIA driver, and torch {torch.__version__} cannot use it ({reason})"
        f": update the driver, install another torch (docs/troubleshooting.md), or give "
        f"--device cpu"
    )


def select_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; parameters stay float32.

    `auto` is bfloat16 where the hardware multiplies it faster than float32, float16 on older NVIDIA
    GPUs, and float32 elsewhere. Intel's AVX-512 takes twice as long for bfloat16 as for float32.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    if device.type == "cpu":
        has = torch.cpu.get_capabilities()
        is_intel = "Intel" in has.get("cpu_name", "")
        if has.get("amx_bf16") or (has.get("avx512_bf16") and not is_intel):
            return torch.bfloat16
    return torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Run matrix products in `dtype` from float32 parameters; float32 needs no autocast."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """In the body, a model's dropout is off; then its mode is as it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def inference(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Autocast and eval mode for sampling and scoring: float32 logits, other shapes at every turn.

    Products of float32 matrices are only as exact as `dtype` asks; on a CPU this also selects
    oneDNN's, as MKL's take 1.5 to 3 times as long on AMD. Attention goes without cuDNN, which is
    torch's first choice on Hopper GPUs and makes a plan for every new shape.
    """
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    before = torch.get_float32_matmul_precision()
    if dtype != torch.float32:
        torch.set_float32_matmul_precision("medium")
    try:
        with eval_mode(model), autocast(device, dtype), sdpa_kernel(backends):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_deterministic() -> None:
    """Make sums repeatable, which a resume bit for bit needs.

    Compiled CPU code would otherwise add up embedding gradients in the order in which its threads
    finish. So would kernels on a GPU, such as flash attention's backward pass. There this comes
    before the process group and the first matrix product: torch also takes from NCCL an algorithm
    that is not repeatable, and cuBLAS needs a workspace of a fixed size.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def tune_malloc() -> None:
    """Let the C library reuse the memory of freed tensors (Linux with glibc).

    By default it returns every large tensor to the kernel, which zeroes the memory again page by
    page: half a million page faults in a step of the 124M model.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not in musl
        m_trim_threshold, m_mmap_max = -1, -4  # from glibc's malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch, or a library that it uses, says that the device has not enough memory."""
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def compile_error(error: Exception) -> str | None:
    """What to do about an error of torch.compile's; None if it is another, as one in the model."""
    kind = type(error)  # a TorchRuntimeError is of what was traced: shapes that do not match
    is_compilers = kind.__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
    if not is_compilers or kind.__name__ == "TorchRuntimeError":
        return None
    return f"torch.compile failed: {_reason(error)}, or add --no-compile"


def _reason(error: Exception) -> str:
    """The first line of what Dynamo may have wrapped, and the remedy for a damaged cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # is imported by now

    inner = getattr(error, "inner_exception", error)
    first_line = str(inner).strip().partition("\n")[0]
    return f"{type(inner).__name__}: {first_line}; delete its cache {cache_dir()}"


@functools.cache  # it compiles
def prepare_compiler(device: torch.device) -> str | None:
    """Set torch.compile up for training; returns why it cannot work here, None if it can."""
    if device.type == "mps":
        return "torch.compile does not support MPS well yet"
    try:  # a compiler may be missing or broken, and torch's inner names may change
        from torch._dynamo import config as dynamo_config  # importing it takes a second

        # Compiled code is cached for the next run; our own autograd functions' only with this.
        functorch_config.autograd_cache_allow_custom_autograd_functions = True
        dynamo_config.optimize_ddp = False  # it cuts graphs where buckets end; blocks are short
        # Six lines for each loss of a vocabulary that is large beside the model.
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly")
        if device.type == "cpu":  # recompute GELU in the backward pass: 3.3 GiB at 124M, not 3.9
            functorch_config.ban_recompute_materialized_backward = False
        from torch._inductor.codecache import get_lock_dir

        locks = Path(get_lock_dir())
        for path in locks.parent.glob("[!.]*/[!.]*.so"):  # torn ones lack their first bytes
            with contextlib.suppress(Timeout), FileLock(locks / f"{Path(path.stem).stem}.lock", 0):
                if path.exists() and not np.fromfile(path, np.uint8, count=1).any():
                    path.unlink()
                    print(f"warning: removed {path}, torn in a killed run", file=sys.stderr)
        # With a number of NumPy's: Dynamo then lists NumPy's functions here, and not while another
        # thread, as the loader's, lets NumPy import a part of itself.
        torch.compile(lambda x: x.sin() + np.pi, dynamic=False)(torch.ones(64, device=device))
    except Exception as error:  # whatever Dynamo, Inductor, Triton or the compiler make of it
        if "Python.h" in str(error):
            return "Python.h is missing: install your system's python3-dev package"
        return f"{_reason(error)}, or install a C++ compiler"
    return None


def cpu_flops(dtype: torch.dtype) -> float:
    """The FLOP/s that this CPU reaches: the best of some products of two square matrices."""
    matrix, best = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype), math.inf
    for _ in range(MATMUL_REPEATS):
        start = time.perf_counter()
        _ = matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / best


def device_name(device: torch.device) -> str:
    """The name of the GPU's kind, else the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cudnn_version() -> int:
    """Such as 91500 for 9.15; 0 without cuDNN, or with one that torch refuses."""
    with contextlib.suppress(RuntimeError):
        return cudnn.version() or 0  # type: ignore[no-untyped-call]
    return 0


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work, so that times are true."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_gib(device: torch.device) -> float | None:
    """The device's total memory in GiB; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 2**30
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return None


def peak_memory_gib(device: torch.device) -> float | None:
    """The most memory used so far, in GiB: of the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**30
    if sys.platform == "win32":
        return None
    import resource  # POSIX only

    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the CPU to the device; a GPU is not waited for, as pageable memory would."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
