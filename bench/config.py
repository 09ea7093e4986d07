"""The flags of `python -m bench`, and the training run that they describe."""

import hashlib
import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from model import GPTConfig
from runtime.device import DeviceName, select_device
from training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
DIMENSIONS = ("size", "n_layer", "n_head", "n_embd", "block_size")
WARMUP_STEPS = 10  # short, so that the few steps of a run already learn
PRODUCT = "product defaults"
NEEDED = {"transformers": "transformers", "tests": "pytest"}  # to measure one, the package
UNMEASURED = ("out_dir", "data_dir", "gpu", "minutes", "fresh")  # do not change what is measured


@dataclass(frozen=True)
class BenchConfig:
    """Measure this device: the speed ladder, or what --peer, --component or --gpu names."""

    gpu: bool = False
    """Measure everything that this machine's GPUs can tell, the most important first; a second
    call goes on where the first one was stopped."""
    minutes: float = 28.0
    """With --gpu: stop after this time."""
    fresh: bool = False
    """With --gpu: forget what was measured before."""
    peer: Literal["transformers", "eager", "switches", "gpus"] | None = None
    """Compare the product's defaults with this trainer, instead of the ladder. switches: with
    itself, changed (bench/switches.py); gpus: with itself on all GPUs (off GPUs, 2 processes)."""
    component: (
        Literal["busy", "checkpoint", "context", "data", "hellaswag", "optimizer", "sample"]
        | Literal["startup", "tests", "tokenize", "train"]
        | None
    ) = None
    """Measure this part of the product, instead of the ladder. busy: training while other
    programs use all cores; context: the longest that fits; tests: those that need CUDA; train: a
    short run on the shards of --data-dir."""

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
    """Runs of each configuration, alternating with the others; 1 of each with --gpu."""
    train_steps: int = 500
    """Optimizer steps of --component train."""

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
        package = NEEDED.get(self.peer or self.component or "")
        if package and not importlib.util.find_spec(package):
            raise ValueError(f"{package} is missing: pip install -r requirements-dev.txt")
        if self.component == "train" and self.data_dir is None:
            raise ValueError("--component train needs shards of text: --data-dir DIR")
        for name in ("micro_batch_size", "total_batch_size", "steps", "rounds", "train_steps"):
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

    @property
    def section(self) -> str:
        """The name of what is measured, in the results."""
        if self.component:
            return f"component_{self.component}"
        return f"peer_{self.peer}" if self.peer else "ladder"

    @property
    def processes(self) -> int:
        """Processes of `--peer gpus`."""
        return torch.cuda.device_count() if self.torch_device.type == "cuda" else 2

    def key(self) -> str:
        """A hash of the settings, the code and torch, which a result is valid for."""
        settings = {name: str(v) for name, v in asdict(self).items() if name not in UNMEASURED}
        if self.component == "train":
            settings["data_dir"] = str(self.data_dir)
        digest = hashlib.sha256(json.dumps([settings, torch.__version__]).encode())
        for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]):
            if path.parent.name != "tests" or self.component == "tests":
                digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

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
