"""The flags of `python -m bench`, and what follows from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from model import GPTConfig
from runtime.cli import bad_numbers
from runtime.device import DeviceName, device_name, memory_gib, select_device
from runtime.gpus import flops_per_token, peak_flops
from training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
STEP_SECONDS = 2  # of a step, where the default's batch would take longer
LEAST_MFU = 0.3  # that a GPU reaches
UNKNOWN_PEAK = 65e12  # FLOP/s, where the GPU's is not known: a T4's
Part = Literal["environment", "tests", "ladder", "defaults", "muon", "xl", "context"]  # of --gpu
DIMENSIONS = ("size", "n_layer", "n_head", "n_embd", "block_size")


@dataclass(frozen=True)
class BenchConfig:
    """Measure training speed on this device: the ladder, or what --peer or --gpu names."""

    gpu: bool = False
    """Check this machine's GPU in 12 minutes: tests, ladder, defaults, Muon, XL, long context."""
    only: Part | None = None
    """Run only this part of --gpu."""
    peer: Literal["transformers", "eager"] | Path | None = None
    """Compare train_gpt2.py's defaults with transformers, eager or the training script at PATH. A
    script prints its tokens per second, and finds the shards in the folder edu_fineweb10B. With
    --gpu, it is compared in the part `defaults`."""

    size: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Model size: 124M, 350M, 774M or 1558M parameters."""
    n_layer: int | None = None
    """Number of blocks, instead of the size's."""
    n_head: int | None = None
    """Number of attention heads, instead of the size's."""
    n_embd: int | None = None
    """Width, instead of the size's."""
    block_size: int = 1024
    """Context length in tokens."""

    micro_batch_size: int | None = None
    """Sequences per micro-batch; by default 16 on a GPU (as in published figures), fewer below 64
    GiB, and 4 elsewhere. In the ladder, with --gpu and next to a script, train_gpt2.py chooses."""
    steps: int | None = None
    """Timed steps per run, after one untimed step; by default 20 on a GPU, else 4."""
    rounds: int = 3
    """Runs of each, in turn with the others."""

    device: DeviceName = "auto"
    """Device to measure."""
    data_dir: Path | None = None
    """Folder of token shards to train on; by default Python's standard library, tokenized."""
    out_dir: Path = Path("bench/results")
    """Where the results go. Another model or batch than the default has a file of its own."""

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
        """The dimensions that the flags give."""
        return TrainConfig(**{name: getattr(self, name) for name in DIMENSIONS}).model_config()

    def shared_settings(self) -> dict[str, Any]:
        """What the commands that are measured take over: by their fields, too."""
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
        # The ladder's first runs, of 124M, save all attention scores: 2 to 3 GiB per sequence.
        fitting = (memory_gib(self.torch_device) or 0) / 4
        return self.micro_batch_size or power_of_two(min(16, fitting))

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.sequences * self.block_size

    @property
    def step_tokens(self) -> int:
        """Tokens per step: a micro-batch; on a GPU the default's, or what takes two seconds."""
        if self.torch_device.type != "cuda":
            return self.micro_batch_tokens
        flops = LEAST_MFU * (peak_flops(device_name(self.torch_device)) or UNKNOWN_PEAK)
        within = STEP_SECONDS * flops / flops_per_token(self.model_config())
        wanted = min(TrainConfig.total_batch_size, within)
        return power_of_two(wanted / self.micro_batch_tokens) * self.micro_batch_tokens


def power_of_two(most: float) -> int:
    """The largest power of two up to `most`; 1 below that."""
    return 1 << max(0, int(most).bit_length() - 1)
