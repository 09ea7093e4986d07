"""The flags of `train_gpt2.py`: every setting of a run, its default and its limits."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from lr_schedule import ScheduleName
from model import GPT2_SIZES, GPTConfig
from ops import ActivationCheckpointing as Checkpointing
from runtime.device import DeviceName, DtypeName
from runtime.files import is_plain_name

ABOVE_ZERO = (
    *("block_size", "total_batch_size", "micro_batch_size", "max_steps", "val_tokens"),
    *("log_every", "max_lr", "grad_clip", "loss_chunks", "gpus", "nodes", "mfu"),
)
NOT_SAVED = (  # flags that name a run, or plan one: not its settings
    *("config", "resume", "plan", "preflight", "run_name"),
    *("gpus", "nodes", "gpu", "mfu", "gpu_hour_price"),
)


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT-2. With no flags: the 124M model on 10B tokens of FineWeb-Edu."""

    data_dir: Path = Path("data/fineweb-edu-10BT")
    """Folder of token shards, as fineweb.py makes it."""
    shuffle: bool = True
    """Take the training windows in a new random order each epoch, or in sequence."""
    seed: int = 1337
    """Chooses the initial weights, the data order and the samples."""

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
    init_from: str | None = None
    """Start from these weights: gpt2, gpt2-medium, …, a Hugging Face folder, or a run."""

    total_batch_size: int = 524_288
    """Tokens in an optimizer step, over all processes and micro-steps."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Sequences that a process takes at once; auto is the most that fit and still bring speed."""
    loss_chunks: int | None = None
    """Parts in which the vocabulary's logits are computed: more take less memory, not other
    results. By default 4 on a CPU, where it costs no time, and 1 elsewhere."""

    max_steps: int = 19_073
    """Optimizer steps in all."""
    max_lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = 6e-5
    """Learning rate at the end."""
    warmup_steps: int = 715
    """Steps of linear warm-up."""
    lr_schedule: ScheduleName = "cosine"
    """Shape of the decay: half a cosine, or constant and then linear (warm-up, stable, decay)."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices; biases and LayerNorms have none."""
    grad_clip: float = 1.0
    """Largest global norm of the gradient; larger ones are scaled down to it."""
    skip_grad_norm_zscore: float = 0.0
    """Skip the update if the gradient's norm is this many standard deviations above the mean of
    the last 128; 0 = never."""

    val_every: int = 250
    """Steps between validations; 0 = never."""
    val_tokens: int = 10_485_760
    """Tokens in a validation, or what there is."""
    hellaswag_every: int = 250
    """Steps between HellaSwag evaluations; 0 = never."""
    hellaswag_data: Path | None = None
    """A HellaSwag JSONL file; by default the validation set, downloaded once."""
    sample_every: int = 250
    """Steps between samples; 0 = never."""

    out_dir: Path = Path("runs")
    """Where run folders go."""
    run_name: str | None = None
    """Name of the run's folder; by default size and time."""
    resume: str | None = None
    """Go on from a checkpoint: auto (the run's latest, if any), a run folder or a checkpoint."""
    config: Path | None = None
    """Take the flags that are not given from this run's config.json."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; one is saved at the end too, and 0 saves only that."""
    keep_checkpoints: int = 0
    """Keep this many checkpoints, the newest; 0 = all."""
    stop_on_write_error: bool = False
    """Stop all processes when a checkpoint, metrics or samples cannot be written (a full disk),
    instead of going on with a warning each time."""
    log_every: int = 1
    """Steps between lines on the console; metrics.jsonl has every step."""

    activation_checkpointing: Checkpointing = "none"
    """What the backward pass computes again instead of keeping it: nothing, all but products and
    attention (selective), or every block (full). Less memory, more time, the same results."""
    activation_offload: bool = False
    """On GPUs: keep in the CPU's memory what the backward pass needs."""

    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """How several processes share the work: ddp, each has the whole model; fsdp, parameters,
    gradients and optimizer state are shared out; hsdp, within each machine only."""
    reshard_after_forward: bool = True
    """With fsdp: gather every block again for the backward pass (ZeRO-3), which takes the least
    memory; without, blocks stay gathered (ZeRO-2), which takes the least time."""
    cpu_offload: bool = False
    """With fsdp on GPUs: keep parameters and optimizer state in the CPU's memory."""

    device: DeviceName = "auto"
    """Device to train on."""
    dtype: DtypeName = "auto"
    """Type of matrix products; auto is bfloat16 where the hardware has it."""
    compile: bool = True
    """Compile the model with torch.compile, where there is a compiler."""
    plan: bool = False
    """Print what the run would take, and exit."""
    preflight: bool = False
    """Check on every process that the run can start: network, software, settings, clocks, data
    and disk, a line each; then exit."""
    gpus: int | None = None
    """With --plan: plan for this many GPUs in all, rather than for this machine."""
    nodes: int = 1
    """With --gpus: machines that they are in."""
    gpu: Literal["A100", "H100", "H200"] = "H100"
    """With --gpus: their kind."""
    mfu: float = 0.4
    """With --plan: the share of its peak that a single GPU reaches; measure it in a short run."""
    gpu_hour_price: float = 0.0
    """With --gpus: the price of one for an hour; 0 = show no price."""

    def __post_init__(self) -> None:
        problems = []
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            flag = f"--{name.replace('_', '-')}"
            if name in ABOVE_ZERO and not 0 < value < math.inf:
                problems.append(f"{flag} must be above 0, not {value}")
            elif not 0 <= value < math.inf:
                problems.append(f"{flag} must be at least 0, not {value}")
            elif isinstance(value, int) and value >= 2**63:
                problems.append(f"{flag} must be below 2**63, not {value}")
        if self.min_lr > self.max_lr:
            problems.append(f"--min-lr {self.min_lr} is above --max-lr {self.max_lr}")
        if self.val_every and 0 < self.val_tokens < self.block_size:
            problems.append(
                f"--val-tokens {self.val_tokens} is below --block-size {self.block_size}"
            )
        if self.run_name is not None and not (
            is_plain_name(self.run_name) and self.run_name.isprintable()
        ):
            problems.append(f"--run-name {self.run_name!r} must be a plain folder name")
        if self.init_from is not None and (
            self.size != "gpt2" or self.n_layer or self.n_head or self.n_embd
        ):
            problems.append("--init-from brings its own --size, --n-layer, --n-head and --n-embd")
        if self.cpu_offload and not self.is_sharded:
            problems.append("--cpu-offload goes with --parallel fsdp or hsdp")
        if self.dtype == "float16" and self.is_sharded:
            problems.append(
                f"--dtype float16 does not go with --parallel {self.parallel}: use bfloat16"
            )
        if self.mfu > 1:
            problems.append(f"--mfu {self.mfu} is above 1, the GPU's peak: use 0.4, say")
        problems += self._planning_problems()
        try:
            self.model_config()
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))

    def _planning_problems(self) -> list[str]:
        """What is wrong with the flags that a plan for other machines takes."""
        if self.gpus is None:
            given = {
                "--nodes": self.nodes != 1,
                "--gpu": self.gpu != "H100",
                "--gpu-hour-price": self.gpu_hour_price,
            }
            return [f"{flag} goes with --plan --gpus" for flag in given if given[flag]]
        if self.gpus < 1 or self.nodes < 1:
            return []  # said already
        problems = []
        if not self.plan:
            problems.append("--gpus goes with --plan")
        if self.gpus % self.nodes:
            nearest = self.gpus // self.nodes * self.nodes
            sizes = [size for size in (nearest, nearest + self.nodes) if size]
            problems.append(
                f"--gpus {self.gpus} is not a multiple of --nodes {self.nodes}: "
                f"use --gpus {' or '.join(map(str, sizes))}"
            )
        if self.parallel == "hsdp" and self.nodes == 1:
            problems.append("--parallel hsdp needs --nodes 2 or more: use fsdp on one")
        return problems

    @property
    def is_sharded(self) -> bool:
        """Whether no process has the whole model."""
        return self.parallel != "ddp"

    def model_config(self) -> GPTConfig:
        """The dimensions that the size and its overrides give."""
        dimensions = dict(GPT2_SIZES[self.size])
        for name in dimensions:
            if getattr(self, name) is not None:
                dimensions[name] = getattr(self, name)
        return GPTConfig(block_size=self.block_size, **dimensions)

    def saved(self) -> dict[str, Any]:
        """The settings as JSON values, for `config.json` and checkpoints."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
            if name not in NOT_SAVED
        }
