"""Precision: dtype, autocast, eval mode, inference, deterministic sums."""

import contextlib
import os
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for the body, then restore the mode of each of its modules."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


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
