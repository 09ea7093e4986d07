"""FLOPs and MFU: FLOPs per token, peak speed and memory of GPU models."""

import re
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """A GPU model."""

    pattern: str  # regular expression for the driver's name
    memory_gib: int  # available to a program
    peak_flops: float


# Keyed by the `--gpu` name; the first matching pattern wins. Peaks are in FLOP/s, for dense
# bfloat16 (float16 on the T4 and V100, which have no bfloat16) with float32 accumulation. They are
# from NVIDIA's data sheets; where these quote the sparse peak, it is halved.
GPUS = {
    "B200": Gpu(r"\bB200$", 178, 2250e12),
    "GH200": Gpu(r"\bGH200\b", 94, 989e12),
    "H200-NVL": Gpu(r"\bH200 NVL$", 139, 835e12),
    "H200": Gpu(r"\bH200\b", 139, 989e12),
    "H100-PCIe": Gpu(r"\bH100 PCIe$", 79, 756e12),
    "H100-NVL": Gpu(r"\bH100 NVL$", 93, 835e12),
    "H100": Gpu(r"\bH100 .*HBM3$", 79, 989e12),
    "A100-40GB": Gpu(r"\bA100.*-40GB$", 39, 312e12),
    "A100": Gpu(r"\bA100\b", 79, 312e12),
    "A10": Gpu(r"\bA10$", 22, 125e12),
    "A10G": Gpu(r"\bA10G$", 22, 70e12),
    "A40": Gpu(r"\bA40$", 44, 150e12),
    "L4": Gpu(r"\bL4$", 22, 121e12),
    "L40": Gpu(r"\bL40$", 44, 181e12),
    "L40S": Gpu(r"\bL40S$", 44, 362e12),
    "T4": Gpu(r"\bT4$", 14, 65e12),
    "A6000": Gpu(r"\bRTX A6000$", 47, 155e12),
    "PRO6000": Gpu(r"\bRTX PRO 6000 Blackwell Workstation Edition$", 94, 504e12),
    "5090": Gpu(r"\bRTX 5090$", 31, 210e12),
    "5080": Gpu(r"\bRTX 5080$", 15, 113e12),
    "5070": Gpu(r"\bRTX 5070$", 11, 62e12),
    "4090": Gpu(r"\bRTX 4090$", 23, 165e12),
    "4080": Gpu(r"\bRTX 4080$", 15, 97e12),
    "4070": Gpu(r"\bRTX 4070$", 11, 58e12),
    "4060Ti": Gpu(r"\bRTX 4060 Ti$", 7, 44e12),  # a 16 GB version has the same name
    "3090": Gpu(r"\bRTX 3090$", 23, 71e12),
    "3080": Gpu(r"\bRTX 3080$", 9, 60e12),
    "3060": Gpu(r"\bRTX 3060$", 11, 25e12),
    "V100": Gpu(r"\bV100-SXM2-", 15, 125e12),
}
BEFORE_AMPERE = ("T4", "V100")  # without bfloat16 and TF32


def flops_per_token(model_config: Any) -> int:  # noqa: ANN401 - a GPTConfig
    """Return the floating-point operations to train on one token, forward and backward.

    They are six per parameter and, for attention scores and values, twelve per layer, channel and
    position of the context, masked positions included. Source: PaLM (Chowdhery et al. 2022),
    appendix B.
    """
    attention = 12 * model_config.n_layer * model_config.n_embd * model_config.block_size
    return 6 * model_config.n_params + attention


def peak_flops(device_name: str, *, float32: bool = False) -> float | None:
    """Return the dense peak of a GPU in FLOP/s; None if unknown.

    Args:
        device_name: the driver's name of the GPU, or its `--gpu` name.
        float32: whether matmuls are in float32 (TF32) instead of a 16-bit dtype.
    """
    if "MIG" in device_name:  # a slice of a GPU, with a fraction of its peak
        return None
    for name, gpu in GPUS.items():
        if device_name == name or re.search(gpu.pattern, device_name):
            tf32 = None if name in BEFORE_AMPERE else gpu.peak_flops / 2
            return tf32 if float32 else gpu.peak_flops
    return None


def mfu(
    tokens_per_second: float, flops_per_token: int, device_peak_flops: float | None, world_size: int
) -> float | None:
    """Return the model FLOPs utilization: the fraction of the devices' peak spent on the model.

    `tokens_per_second` is the speed of all `world_size` devices together, `device_peak_flops` the
    peak of one device in FLOP/s. The result is None if the peak is None. Source: PaLM (Chowdhery et
    al. 2022), section 4.1.
    """
    if device_peak_flops is None:
        return None
    return tokens_per_second * flops_per_token / (device_peak_flops * world_size)
