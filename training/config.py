"""The flags of `train_gpt2.py`: every setting of a run, its default and its limits."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from lr_schedule import SCHEDULES
from model import GPT2_SIZES, GPTConfig
from ops import ActivationCheckpointing
from runtime.cli import as_flags, bad_numbers, parse_flags
from runtime.device import DeviceName, DtypeName
from runtime.files import read_json
from runtime.gpus import GPUS
from training.trackers import TrackerName

ABOVE_ZERO = (
    *("block_size", "total_batch_size", "micro_batch_size", "max_steps", "val_tokens"),
    *("log_every", "max_lr", "grad_clip", "loss_chunks", "gpus", "nodes", "mfu", "max_minutes"),
)
NOT_SAVED = (  # flags that name a run, or plan one: not its settings
    *("config", "resume", "plan", "preflight", "run_name", "max_minutes"),
    *("gpus", "nodes", "gpu", "mfu"),
)
MAX_DEFAULT_WARMUP_STEPS = 715  # GPT-3's 375M tokens, in steps of 524,288


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT-2. With no flags: the 124M model on 10B tokens of FineWeb-Edu.

    `--help` shows the first sentence of each docstring.
    """

    HELP_GROUPS: ClassVar = {  # by the first field of each
        "data_dir": "data",
        "size": "model",
        "total_batch_size": "batch",
        "max_steps": "optimizer and schedule",
        "val_every": "evaluation",
        "out_dir": "run",
        "activation_checkpointing": "memory",
        "parallel": "several processes",
        "device": "machine",
        "plan": "look ahead: train nothing",
    }
    OTHER_NAMES: ClassVar = {
        **dict.fromkeys(("--lr", "--learning-rate"), "--max-lr"),
        "--epochs": "--max-steps, of which an epoch has training tokens / --total-batch-size",
        "--batch-size": "--micro-batch-size (sequences) or --total-batch-size (tokens)",
    }

    data_dir: Path = Path("data/fineweb-edu-10BT")
    """Folder of token shards, as fineweb.py makes it."""
    shuffle: bool = True
    """A new random order of the windows each epoch. Otherwise in sequence."""
    seed: int = 1337
    """Of the initial weights, the data order and samples."""

    size: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Model size: 124M, 350M, 774M or 1558M parameters."""
    n_layer: int | None = None
    """Number of blocks, instead of the size's."""
    n_head: int | None = None
    """Number of attention heads, instead of the size's."""
    n_embd: int | None = None
    """Width, instead of the size's."""
    block_size: int = 1024
    """Context in tokens; with --init-from, its model's."""
    init_from: str | None = None
    """Start from gpt2, …, a Hugging Face folder, or a run."""

    total_batch_size: int = 524_288
    """Tokens in an optimizer step, over all processes. Micro-steps make up what does not fit."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Sequences that a process takes at once; auto is the most that fit and still bring speed."""
    loss_chunks: int | None = None
    """Number of chunks in which logits are computed, to save memory; by default as few as fit on an
    NVIDIA GPU, 4 on a CPU. The results are the same."""

    max_steps: int = 19_073
    """Optimizer steps in all."""
    max_minutes: float | None = None
    """Instead of --max-steps: as many as fit. The first steps are timed; a resume keeps the
    number."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon, which learns more per token. Muon has the blocks' matrices, AdamW the
    rest."""
    max_lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = 6e-5
    """Learning rate at the end."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; by default 715 or a tenth of the run, whichever is less."""
    lr_schedule: str = "cosine"
    """cosine (half of one), wsd (constant, then linear over the last 20 %) or wsd-long (60 %). All
    begin with the warm-up."""
    weight_decay: float = 0.1
    """Decay of matrices; biases and LayerNorms have none."""
    embedding_decay: float | None = None
    """Decay of the embeddings; by default --weight-decay."""
    spelling_share: float = 0.0
    """Add to a token's embedding's gradient, times this, those of tokens spelled alike."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float | None = None
    """AdamW's decay of the second moment; by default 0.95 at 524,288 tokens a step or more, and as
    slow, in tokens, at fewer."""
    momentum: float = 0.95
    """Muon's momentum."""
    grad_clip: float = 1.0
    """Largest global norm of the gradient. Larger ones are scaled down to it."""

    val_every: int = 250
    """Steps between validations; 0 = never."""
    val_tokens: int = 10_485_760
    """Tokens in a validation, or what there is."""
    hellaswag_every: int = 250
    """Steps between HellaSwag evaluations; 0 = never."""
    hellaswag_data: Path | None = None
    """A JSONL file; by default it is downloaded once."""
    sample_every: int = 250
    """Steps between samples; 0 = never."""
    sample_prompt: str | None = None
    """Text that samples continue; by default the first validation text. "" begins a document."""

    out_dir: Path = Path("runs")
    """Where run folders go."""
    run_name: str | None = None
    """Name of the run's folder; by default size and time."""
    resume: str | None = None
    """From a run's folder, a checkpoint, or auto: --run-name's latest, or a new run if there is
    none."""
    config: Path | None = None
    """Take defaults from a recipe or a run's config.json."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; 0 = at the end only. One is saved at the end in any case."""
    keep_checkpoints: int = 0
    """Keep the newest ones, this many, and the best validated; 0 = all."""
    step_timeout: float = 20.0
    """Minutes that a process waits for the others in a collective before it ends; 0 = as long as it
    takes."""
    log_every: int = 1
    """Steps between lines on the console. metrics.jsonl has every step."""
    logger: tuple[TrackerName, ...] = ()
    """Trackers: tensorboard, wandb, trackio. They get metrics and samples."""

    activation_checkpointing: ActivationCheckpointing = "none"
    """Compute again instead of saving: none, selective or full. For the backward pass: nothing, all
    but matrix products and attention, or every block. Less memory, more time, the same results."""

    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """ddp: each has the whole model; fsdp: it is sharded; hsdp: sharded within each machine. So are
    gradients and optimizer state."""
    reshard_after_forward: bool = True
    """With fsdp: ZeRO-3; off: ZeRO-2, faster. Every block is gathered again for the backward pass,
    or stays gathered."""
    cpu_offload: bool = False
    """With fsdp on GPUs: parameters in CPU memory. The optimizer's state, too."""

    device: DeviceName = "auto"
    """Device to train on."""
    dtype: DtypeName = "auto"
    """Of matrix products; auto is bfloat16 where it is faster."""
    deterministic: bool = False
    """On GPUs: resume bit for bit; slower. Every sum is repeated in the same order. CPUs always do
    so."""
    compile: bool = True
    """torch.compile the model, where there is a compiler."""
    plan: bool = False
    """Print what the run would take, and exit."""
    preflight: bool = False
    """Check that the run can start, and exit. One line each: network, software, data and disk."""
    gpus: int | None = None
    """With --plan: number of GPUs, not this machine's."""
    nodes: int = 1
    """With --gpus: number of machines that have them."""
    gpu: str = "H100"
    """With --gpus: their kind, such as A100, H200, B200, L4, T4, 4090."""
    mfu: float = 0.4
    """With --plan: share of its peak that a device reaches. Measure it in a short run."""

    def __post_init__(self) -> None:
        problems = [*bad_numbers(self, ABOVE_ZERO), *self._conflicts()]
        try:
            self.model_config()
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))

    def _conflicts(self) -> Iterator[str]:
        """What is wrong with flags that do not go together."""
        if self.min_lr > self.max_lr:
            yield f"--min-lr {self.min_lr} is above --max-lr {self.max_lr}"
        if self.lr_schedule not in SCHEDULES:
            yield f"--lr-schedule {self.lr_schedule} is not {' or '.join(SCHEDULES)}"
        for flag in ("beta1", "beta2", "momentum"):
            if (value := getattr(self, flag)) is not None and value >= 1:
                yield f"--{flag} {value} is not below 1"
        if self.warmup >= self.max_steps > 0 and self.max_minutes is None:
            yield (
                f"--warmup-steps {self.warmup} is not shorter than --max-steps {self.max_steps}: "
                f"use --warmup-steps {self.default_warmup}"
            )
        if self.val_every and 0 < self.val_tokens < self.block_size:
            yield f"--val-tokens {self.val_tokens} is below --block-size {self.block_size}"
        if (name := self.run_name) is not None:
            is_plain = Path(name).name == name and name not in ("", "..")
            if not (is_plain and name.isprintable()):
                yield f"--run-name {name!r} must be a plain folder name"
        if self.max_minutes is not None and self.resume not in (None, "auto"):
            yield "leave out --max-minutes: a run that is resumed has its --max-steps"
        if self.cpu_offload and not self.is_sharded:
            yield "--cpu-offload goes with --parallel fsdp or hsdp"
        if self.mfu > 1:
            yield f"--mfu {self.mfu} is above 1, the device's peak: use 0.4, say"
        if self.gpu not in GPUS:
            yield f"--gpu {self.gpu} is not {', '.join(GPUS)}"
        if self.gpus and not self.plan:
            yield (
                f"--gpus goes with --plan; to train on {self.gpus}: "
                f"torchrun --standalone --nproc_per_node={self.gpus} train_gpt2.py"
            )
        if self.gpus and self.nodes and self.gpus % self.nodes:
            yield f"--gpus {self.gpus} is not a multiple of --nodes {self.nodes}"

    @property
    def is_sharded(self) -> bool:
        """Whether no process has the whole model."""
        return self.parallel != "ddp"

    @property
    def default_warmup(self) -> int:
        """Steps of warm-up of a run as long as this one."""
        return min(MAX_DEFAULT_WARMUP_STEPS, self.max_steps // 10)

    @property
    def warmup(self) -> int:
        """Steps of warm-up: as given, else the default."""
        return self.default_warmup if self.warmup_steps is None else self.warmup_steps

    @property
    def embedding_weight_decay(self) -> float:
        """Decay of the matrices outside the blocks: as given, else that of the others."""
        return self.weight_decay if self.embedding_decay is None else self.embedding_decay

    @property
    def adam_beta2(self) -> float:
        """AdamW's beta2: as given, else averaging over the tokens of 0.95 at 524,288 per step.

        A row of the embedding has a gradient only where its token occurs (Marek et al. 2025).
        """
        if self.beta2 is not None:
            return self.beta2
        return 0.95 ** min(1.0, self.total_batch_size / 524_288)

    def model_config(self) -> GPTConfig:
        """The size with its overrides, and every other field that both classes have."""
        names = {field.name for field in fields(GPTConfig)} & {field.name for field in fields(self)}
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return GPTConfig(**(GPT2_SIZES[self.size] | given))

    def saved(self) -> dict[str, Any]:
        """The settings as JSON values, for `config.json` and checkpoints."""
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
            if name not in NOT_SAVED
        }
        return settings | {"warmup_steps": self.warmup, "logger": list(self.logger)}


def config_from_settings(settings: Mapping[str, Any], source: Path) -> TrainConfig:
    """The configuration whose `saved()` was `settings`; missing fields have their defaults."""
    for name in settings.keys() - {field.name for field in fields(TrainConfig)}:
        raise ValueError(
            f"{source} has the setting {name!r:.60}, which this version does not know: use the "
            f"version that wrote it, or take the setting out"
        )
    try:
        return parse_flags(TrainConfig, as_flags(settings))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def read_recipe(path: Path) -> TrainConfig:
    """The configuration in a recipe or in a run's `config.json`, for a new run.

    A recipe's `about` says what it is for, and is no setting.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"--config {path} is not a file: give one of recipes/ or a run's config.json"
        )
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ValueError(f"--config {path} is neither a recipe nor a run's config.json")
    settings.pop("about", None)
    return config_from_settings(settings, path)
