"""The flags of `python -m bench`, and the training run that they describe."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from model import GPTConfig
from runtime.device import DeviceName, select_device
from training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
DIMENSIONS = ("size", "n_layer", "n_head", "n_embd", "block_size")
WARMUP_STEPS = 10  # short, so that the few steps of a run already learn


@dataclass(frozen=True)
class BenchConfig:
    """Measure this device: the speed ladder, or the trainer named by --peer, or one component."""

    peer: Literal["transformers", "eager"] | None = None
    """Compare the product's defaults with this trainer, instead of the ladder."""
    component: (
        Literal["busy", "checkpoint", "data", "hellaswag", "sample", "startup", "tokenize"] | None
    ) = None
    """Measure this part of the product, instead of the ladder. busy: training while other
    programs use all cores."""

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
    """Sequences per micro-batch; by default 16 on a GPU (as in published figures) and 4 elsewhere.
    The ladder's last configuration takes what train_gpt2.py would choose."""
    total_batch_size: int | None = None
    """Tokens per step with gradient accumulation; by default 524,288 on a GPU. Elsewhere the
    ladder accumulates 4 micro-batches, and peers are compared on 1."""
    steps: int | None = None
    """Timed optimizer steps per run, after one untimed step; by default 20 on a GPU, else 4."""
    rounds: int = 3
    """Runs of each configuration, alternating with the others."""

    device: DeviceName = "auto"
    """Device to measure."""
    data_dir: Path | None = None
    """Folder of token shards to train on; by default Python's standard library, tokenized."""
    text: Path | None = None
    """A .parquet or .jsonl file for --component tokenize; by default the standard library."""
    hellaswag_data: Path | None = None
    """A HellaSwag JSONL for --component hellaswag; by default the sample in assets/."""
    out_dir: Path = Path("bench/results")
    """Where the results go: DEVICE.json for the default model and batch, a file named after the
    dimensions for others."""

    def __post_init__(self) -> None:
        if self.peer and self.component:
            raise ValueError("--peer and --component are two measurements: give one of them")
        if self.peer == "transformers" and not importlib.util.find_spec("transformers"):
            raise ValueError("transformers is missing: pip install -r requirements-dev.txt")
        for name in ("micro_batch_size", "total_batch_size", "steps", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        self.model_config()

    def model_config(self) -> GPTConfig:
        """The dimensions that the flags give."""
        return TrainConfig(**{name: getattr(self, name) for name in DIMENSIONS}).model_config()

    @property
    def torch_device(self) -> torch.device:
        """The device to measure."""
        return select_device(self.device)

    @property
    def sequences(self) -> int:
        """Sequences per micro-batch."""
        return self.micro_batch_size or (16 if self.torch_device.type == "cuda" else 4)

    @property
    def timed_steps(self) -> int:
        """Timed steps per run: seconds on a GPU, a minute elsewhere."""
        return self.steps or (20 if self.torch_device.type == "cuda" else 4)

    def results_name(self, label: str) -> str:
        """The results file's name without its suffix, from the device's.

        Another model or batch than the default gets its own file, so that no file and no chart
        compares different sizes.
        """
        model_config = self.model_config()
        if model_config != GPTConfig():
            label += (
                f"_{model_config.n_layer}-layers-{model_config.n_head}-heads"
                f"-width-{model_config.n_embd}-context-{model_config.block_size}"
            )
        if self.micro_batch_size is not None:
            label += f"_micro-batch-{self.micro_batch_size}"
        if self.total_batch_size is not None:
            label += f"_total-batch-{self.total_batch_size}"
        return label


def train_config(config: BenchConfig, **changes: Any) -> TrainConfig:  # noqa: ANN401 - any setting
    """The flags of a run that only trains, one micro-batch per step; `changes` override them."""
    assert config.data_dir is not None
    settings = {name: getattr(config, name) for name in (*DIMENSIONS, "device")} | {
        "data_dir": config.data_dir.absolute(),
        "micro_batch_size": config.sequences,
        "total_batch_size": config.sequences * config.block_size,
        "warmup_steps": WARMUP_STEPS,
        "val_every": 0,
        "hellaswag_every": 0,
        "sample_every": 0,
    }
    return TrainConfig(**settings | changes)
