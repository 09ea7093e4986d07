"""Flags of `python -m bench`, and values derived from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from model import GPTConfig
from runtime.cli import bad_numbers
from runtime.device import DeviceName, device_name, memory_gib, select_device
from runtime.flops import flops_per_token, peak_flops
from training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
STEP_SECONDS = 2  # per step, on GPUs that need longer for the default batch
MIN_MFU = 0.3  # every GPU should reach this
UNKNOWN_PEAK = 65e12  # FLOP/s of a T4, assumed for unknown GPUs
Part = Literal["environment", "tests", "ladder", "defaults", "muon", "xl", "context"]  # for --gpu
DIMENSIONS = ("size", "n_layer", "n_head", "n_embd", "block_size")


@dataclass(frozen=True)
class BenchConfig:
    """Measure training speed: the ladder, a comparison (--peer) or a check of a GPU (--gpu)."""

    gpu: bool = False
    """Check this machine's GPU in at most 12 minutes: tests, ladder, defaults, Muon, GPT-2 XL, long
    context."""
    only: Part | None = None
    """Run only this part of --gpu; default: all parts."""
    peer: Literal["transformers", "eager"] | Path | None = None
    """Instead of the ladder, compare the defaults of train_gpt2.py with transformers (compiled),
    eager (a plain, uncompiled trainer) or the training script at PATH. The script must print its
    tokens per second, and finds the shards in the folder edu_fineweb10B. With --gpu, only
    a script can be a peer; it runs in the part `defaults`."""

    size: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Model size: 124M, 350M, 774M or 1558M parameters."""
    n_layer: int | None = None
    """Number of blocks; default: from --size."""
    n_head: int | None = None
    """Number of attention heads; default: from --size."""
    n_embd: int | None = None
    """Embedding width; default: from --size."""
    block_size: int = 1024
    """Context length in tokens."""

    micro_batch_size: int | None = None
    """Sequences per micro-batch; default: 16 on GPUs (as in published figures) or fewer below 64
    GiB of memory, 4 on other devices. By default, train_gpt2.py chooses its own micro-batch in the
    ladder, with --gpu and next to a script."""
    steps: int | None = None
    """Timed steps per run, after one untimed step; default: 20 on GPUs, else 4."""
    rounds: int = 3
    """Number of runs of each configuration; the configurations alternate."""

    device: DeviceName = "auto"
    """Device to measure."""
    data_dir: Path | None = None
    """Folder of token shards to train on; default: Python's standard library, tokenized."""
    out_dir: Path = Path("bench/results")
    """Folder for the results. A model or batch other than the default has a separate file."""

    def __post_init__(self) -> None:
        if isinstance(self.peer, Path):
            if not (self.peer.suffix == ".py" and self.peer.is_file()):
                raise ValueError(f"--peer {self.peer} is not transformers, eager or a .py file")
        elif self.gpu and self.peer:
            raise ValueError(f"--gpu requires a .py file as --peer, not {self.peer}")
        if self.only and not self.gpu:
            raise ValueError("--only requires --gpu")
        above_zero = ("micro_batch_size", "steps", "rounds")
        if problems := bad_numbers(self, above_zero):
            raise ValueError("; ".join(problems))
        self.model_config()

    def model_config(self) -> GPTConfig:
        """Return the model configuration that the flags select."""
        return TrainConfig(**{name: getattr(self, name) for name in DIMENSIONS}).model_config()

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings that the measured commands share, by field name."""
        return {name: getattr(self, name) for name in (*DIMENSIONS, "device", "data_dir")}

    @property
    def torch_device(self) -> torch.device:
        """The device to measure."""
        return select_device(self.device)

    @property
    def sequences(self) -> int:
        """Sequences per micro-batch."""
        if self.torch_device.type != "cuda":
            return self.micro_batch_size or 4
        # The first rows of the ladder save all attention scores: 2 to 3 GiB per sequence with 124M.
        max_sequences = (memory_gib(self.torch_device) or 0) / 4
        return self.micro_batch_size or power_of_two(min(16, max_sequences))

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.sequences * self.block_size

    @property
    def step_tokens(self) -> int:
        """Tokens per step: one micro-batch; on GPUs the default batch, or two seconds of work."""
        if self.torch_device.type != "cuda":
            return self.micro_batch_tokens
        flops = MIN_MFU * (peak_flops(device_name(self.torch_device)) or UNKNOWN_PEAK)
        max_tokens = STEP_SECONDS * flops / flops_per_token(self.model_config())
        tokens = min(TrainConfig.total_batch_size, max_tokens)
        return power_of_two(tokens / self.micro_batch_tokens) * self.micro_batch_tokens


def power_of_two(limit: float) -> int:
    """Return the largest power of two up to `limit`, at least 1."""
    return 1 << max(0, int(limit).bit_length() - 1)
