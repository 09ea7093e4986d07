"""FLOPs and MFU: FLOPs per token, peak speed and memory of GPU models."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from runtime.files import read_json

GPUS_PATH = Path(__file__).parents[1] / "assets/gpus.json"


class Gpu(NamedTuple):
    """A GPU model."""

    pattern: str  # regular expression for the driver's name
    memory_gib: int  # available to a program
    peak_flops: float


# Keyed by the `--gpu` name; the first matching pattern wins. Peaks are in FLOP/s, for dense
# bfloat16 (float16 on the T4 and V100, which have no bfloat16) with float32 accumulation. They are
# from NVIDIA's data sheets; where these quote the sparse peak, it is halved. A 4060 Ti with 16 GB
# has the same name as the one with 8 GB.
GPUS = {name: Gpu(**gpu) for name, gpu in read_json(GPUS_PATH).items()}
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
