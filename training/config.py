"""Flags of `train_gpt2.py`: every setting of a run, with its default and its limits."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from lr_schedule import SCHEDULES, default_warmup_steps
from model import GPT2_SIZES, GPTConfig
from ops import ActivationCheckpointing
from runtime.cli import PathOrName, check_settings
from runtime.device import DeviceName
from runtime.files import read_json
from runtime.flops import GPUS
from runtime.precision import DtypeName
from training.trackers import TrackerName

ROOT = Path(__file__).parent.parent
ABOVE_ZERO = (
    *("block_size", "total_batch_size", "micro_batch_size", "max_steps", "val_tokens"),
    *("log_every", "max_lr", "loss_chunks", "gpus", "max_minutes"),
)
# Flags that select, name or plan a run, so they are not among its settings.
NOT_SAVED = ("config", "resume", "plan", "preflight", "run_name", "max_minutes", "gpus", "gpu")


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT-2. Without flags: the 124M model on 10B tokens of FineWeb-Edu.

    `--help` shows only the first sentence of each field's docstring.
    """

    HELP_GROUPS: ClassVar = {  # titles of the groups, keyed by their first field
        "data_dir": "most used",
        "shuffle": "data",
        "n_layer": "model",
        "max_minutes": "optimizer and schedule",
        "val_tokens": "evaluation",
        "out_dir": "run",
        "loss_chunks": "memory",
        "parallel": "several processes",
        "device": "machine",
        "preflight": "plan or check a run without training",
    }
    OTHER_NAMES: ClassVar = read_json(ROOT / "assets" / "other_flags.json")

    data_dir: Path = Path("data/fineweb-edu-10BT")
    """Folder of token shards, as fineweb.py writes it."""
    size: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Model size: 124M, 350M, 774M or 1558M parameters."""
    total_batch_size: int = 524_288
    """Tokens per optimizer step, over all processes. Gradients are accumulated over as many
    micro-steps as needed."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Sequences per forward pass on each process; auto picks the largest that fits in memory and
    still adds speed."""
    max_steps: int = 19_073
    """Total number of optimizer steps."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, the usual choice; or muon, which needs fewer tokens for the same loss, with a larger
    --max-lr. Muon updates the blocks' matrices, and AdamW all other parameters. The recipes whose
    names end with -fast use it."""
    max_lr: float = 6e-4
    """Peak learning rate."""
    val_every: int = 250
    """Steps between validations; 0 = never."""
    run_name: str | None = None
    """Name of the run's folder; default: model size and time."""
    resume: PathOrName | None = None
    """Resume from a run folder or a checkpoint; auto = the latest checkpoint of --run-name, or a
    new run if there is none."""
    config: Path | None = None
    """Read the defaults of all other flags from a file: recipes/NAME.json for a tested recipe, or a
    run's config.json to repeat its settings."""
    plan: bool = False
    """Print the run's plan (memory, batch, time) and exit."""

    shuffle: bool = True
    """Read the training windows in a new random order each epoch; off reads them in sequence."""
    seed: int = 1337
    """Random seed for initial weights, data order and samples."""

    n_layer: int | None = None
    """Number of transformer blocks; overrides --size."""
    n_head: int | None = None
    """Number of attention heads; overrides --size."""
    n_embd: int | None = None
    """Embedding width; overrides --size."""
    block_size: int = 1024
    """Context length in tokens; default with --init-from: that model's context length."""
    init_from: PathOrName | None = None
    """Start from the weights of a model, in its size: a run, a checkpoint, a Hugging Face folder or
    a GPT-2 on the hub (gpt2, OWNER/NAME)."""
    vocabulary: Literal["gpt2", "text"] = "gpt2"
    """Rows of the embeddings in training: gpt2, one for each of GPT-2's token ids; or text, one for
    each id in the training text and one that all other ids share. The shared row is trained like
    equal rows, in less time. Checkpoints have all rows."""

    max_minutes: float | None = None
    """Train for about this many minutes: time a few steps, then set --max-steps to match. A resumed
    run keeps its --max-steps."""
    min_lr: float = 6e-5
    """Learning rate at the end of the schedule, usually a tenth of --max-lr: change both."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; default: 715 or a tenth of --max-steps, whichever is smaller."""
    lr_schedule: str = "cosine"
    """How the learning rate falls from --max-lr to --min-lr after the warm-up: cosine (over all
    steps), wsd (over the last 20 %, so that a run can be extended from a checkpoint before them) or
    wsd-long (over the last 60 %)."""
    weight_decay: float = 0.1
    """Weight decay of matrices; biases and LayerNorms are not decayed."""
    embedding_decay: float | None = None
    """Weight decay of the embeddings: raise it if val_loss rises on a small text, because
    embeddings overfit first; default: --weight-decay."""
    spelling_share: float = 0.0
    """Let each token's embedding also learn from similarly spelled tokens: on a small text, where
    many tokens are rare, try 0.3; 0 = off. The gradients of these tokens are added to its gradient,
    scaled by this factor."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float | None = None
    """AdamW's second-moment decay; default: 0.95 for batches of at least 524,288 tokens, closer to
    1 for smaller ones. The average then covers the same number of tokens."""
    momentum: float = 0.95
    """Muon's momentum."""
    grad_clip: float = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0 = never."""

    val_tokens: int = 10_485_760
    """Tokens per validation, spread over the split; the whole split if it is smaller."""
    hellaswag_every: int = 250
    """Steps between scores on HellaSwag, a multiple-choice test of common sense in English: use 0
    (never) for a small model, which can only guess, or for other languages."""
    hellaswag_data: Path | None = None
    """HellaSwag JSONL file; default: download it once."""
    sample_every: int = 250
    """Steps between samples; 0 = never."""
    sample_prompt: str | None = None
    """Text that samples continue; default: the start of the validation split, and "" = a new
    document."""

    out_dir: Path = Path("runs")
    """Folder in which run folders are created."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; 0 = only at the end. The last step is always saved."""
    keep_checkpoints: int = 0
    """Keep this many of the newest checkpoints, and the one with the lowest validation loss; 0 =
    keep all."""
    step_timeout: float = 20.0
    """With several processes, exit with an error if one has waited this many minutes for another:
    raise it if a slow disk or evaluation takes longer; 0 = no limit."""
    log_every: int = 1
    """Steps between console lines; metrics.jsonl has every step."""
    logger: tuple[TrackerName, ...] = ()
    """Send metrics to these trackers: tensorboard, wandb, trackio."""

    loss_chunks: int | None = None
    """Compute the logits of a micro-batch in this many chunks: if memory runs out, try 8;
    default: as few as fit on an NVIDIA GPU, 4 on a CPU, 8 on MPS. Results do not change."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Recompute activations in the backward pass: none, or full (whole blocks). Saves memory, costs
    time, does not change results. Blocks with buffers save their activations."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every process holds the whole model; fsdp: parameters, gradients and optimizer state are
    sharded over all processes."""
    reshard_after_forward: bool = True
    """With fsdp: free a block's parameters after its forward pass and gather them again for the
    backward pass (ZeRO-3); off keeps them (ZeRO-2), faster but more memory."""
    cpu_offload: bool = False
    """With fsdp on GPUs: keep parameters, gradients and optimizer state in CPU memory."""

    device: DeviceName = "auto"
    """Device to train on; auto = CUDA, else MPS, else the CPU."""
    dtype: DtypeName = "auto"
    """Dtype for matrix multiplications; auto = bfloat16 where it is fast, float16 on older NVIDIA
    GPUs, else float32."""
    cpu_attention: Literal["auto", "torch", "blocks"] = "auto"
    """Attention in code compiled for a CPU: torch (PyTorch's), or blocks, whose backward pass is
    faster on AMD's Zen 5, in bfloat16 and for contexts of 1,024 to 2,048 tokens; auto = blocks
    there, else torch. A resumed run keeps the choice."""
    deterministic: bool = False
    """Use deterministic GPU kernels, so that a resumed run repeats its losses bit for bit; slower.
    CPU training is always deterministic."""
    compile: bool = True
    """Compile the model with torch.compile, if a compiler is available."""

    preflight: bool = False
    """Check that the run can start (network, software, data, disk) and exit. Each check prints a
    line."""
    gpus: int | None = None
    """With --plan: plan for this many GPUs instead of this machine."""
    gpu: str = "H100"
    """With --gpus: GPU model, such as A100, H200, B200, L4, T4 or 4090."""

    def __post_init__(self) -> None:
        check_settings(self, ABOVE_ZERO, *self._conflicts())

    def _conflicts(self) -> Iterator[str]:
        """Describe values that are out of range and flags that conflict."""
        if self.min_lr > self.max_lr > 0:
            yield f"--min-lr {self.min_lr} exceeds --max-lr: also use --min-lr {self.max_lr / 10:g}"
        if self.lr_schedule not in SCHEDULES:
            yield f"--lr-schedule {self.lr_schedule} is not {' or '.join(SCHEDULES)}"
        for flag in ("beta1", "beta2", "momentum"):
            if (value := getattr(self, flag)) is not None and value >= 1:
                yield f"--{flag} {value} is not below 1"
        if self.warmup >= self.max_steps > 0 and self.max_minutes is None:
            steps = f"--warmup-steps {self.warmup} is not shorter than --max-steps {self.max_steps}"
            yield f"{steps}: use --warmup-steps {self.max_steps // 10}"
        if self.val_every and 0 < self.val_tokens < self.block_size:
            yield f"--val-tokens {self.val_tokens} is below --block-size {self.block_size}"
        if (name := self.run_name) is not None:
            is_plain = Path(name).name == name and name not in ("", "..")
            if not (is_plain and name.isprintable()):
                yield f"--run-name {name!r} must be a plain folder name"
        if self.cpu_offload and self.parallel != "fsdp":
            yield "--cpu-offload requires --parallel fsdp"
        if self.vocabulary == "text" and self.init_from is not None:
            yield "--vocabulary text requires new weights: leave it out, or leave out --init-from"
        if self.gpu not in GPUS:
            yield f"--gpu {self.gpu} is not {', '.join(GPUS)}"
        if self.gpus and not self.plan:
            command = f"torchrun --standalone --nproc_per_node={self.gpus} train_gpt2.py"
            yield f"--gpus requires --plan; to train on {self.gpus} GPUs: {command}"
        try:
            self.model_config()
        except ValueError as error:
            if str(error).partition(" ")[0] not in {field.name for field in fields(GPTConfig)}:
                raise  # a mistake in the code
            yield str(error).replace("n_", "--n-")

    @property
    def warmup(self) -> int:
        """Number of warm-up steps: `warmup_steps`, or the default if it is None."""
        default = default_warmup_steps(self.max_steps)
        return default if self.warmup_steps is None else self.warmup_steps

    @property
    def embedding_weight_decay(self) -> float:
        """Weight decay of matrices outside the blocks: `embedding_decay`, else `weight_decay`."""
        return self.weight_decay if self.embedding_decay is None else self.embedding_decay

    @property
    def adam_beta2(self) -> float:
        """AdamW's beta2: `beta2`, else a value that depends on the batch size.

        For batches below 524,288 tokens, it averages over as many tokens as 0.95 does at 524,288
        (Marek et al. 2025).
        """
        default = 0.95 ** min(1.0, self.total_batch_size / 524_288)
        return default if self.beta2 is None else self.beta2

    def model_config(self) -> GPTConfig:
        """Return the size with its overrides, and every other field that both classes have."""
        names = {field.name for field in fields(GPTConfig)} & {field.name for field in fields(self)}
        overrides = {name: v for name in names if (v := getattr(self, name)) is not None}
        return GPTConfig(**(GPT2_SIZES[self.size] | overrides))

    def saved(self) -> dict[str, Any]:
        """Return the settings as JSON values, for `config.json` and checkpoints.

        A default that depends on other settings is stored as None, so that it follows them.
        """
        settings = {name: value for name, value in asdict(self).items() if name not in NOT_SAVED}
        paths = {name: str(value) for name, value in settings.items() if isinstance(value, Path)}
        return settings | paths | {"logger": list(self.logger)}
