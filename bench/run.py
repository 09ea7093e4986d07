"""One training run with some of the product's optimizations switched off, to be timed.

    python -m bench.run SETTINGS STEPS CONFIG       (`run_in_process` starts this)

SETTINGS is a JSON object with the fields of `Settings`, CONFIG a JSON file of train_gpt2.py's
flags; the result is one JSON line on stdout. Each run has a process to itself, because it changes
the process's numerics and because peak memory is counted per process.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW, Optimizer

import ops
import train_gpt2
from bench.measurement import run_python, seconds_of
from bench.switches import ALL_SWITCHES
from model import GPT, ModelOutput
from runtime import device as device_module
from runtime.cli import run_command
from runtime.device import DtypeName, select_dtype, synchronize
from runtime.distributed import DistInfo, setup_distributed
from runtime.files import LockedFolder, write_json
from runtime.huggingface import save_pretrained
from runtime.metrics import peak_flops
from training.config import TrainConfig
from training.run_dir import parse_config

MATMUL_SIZE, MATMUL_REPEATS = 2048, 10


@dataclass(frozen=True)
class Settings:
    """Which optimizations are on. The ladder's first configuration has none."""

    tf32: bool = False
    """Multiply float32 matrices in TF32."""
    dtype: DtypeName = "float32"
    """Dtype of matrix products."""
    compile: bool = False
    flash_attention: bool = False
    """torch's fused attention, which never stores all attention scores."""
    padded_vocabulary: bool = False
    """50,304 embedding rows, a multiple of 128, instead of 50,257."""
    fused_adamw: bool = False
    accumulate: bool = False
    """Accumulate the gradients of several micro-batches before an update."""
    product: bool = False
    """Everything else that train_gpt2.py does with its default flags."""
    hugging_face: bool = False
    """Hugging Face's model instead of ours."""
    switch: str = ""
    """A change of `bench.switches` on top."""
    processes: int = 1


ALL_OPTIMIZATIONS = Settings(
    compile=True, flash_attention=True, padded_vocabulary=True, fused_adamw=True, product=True
)


@dataclass(frozen=True)
class RunResult:
    """What one run measured."""

    tokens_per_step: int
    micro_batch_size: int
    grad_accum_steps: int
    start_seconds: float
    """Building the trainer, and a first step that compiles and allocates."""
    step_seconds: list[float]
    losses: list[float]
    """The loss after 0, 1, 2, … updates, in nats per token."""
    peak_memory_gib: float | None
    """Of the GPU's allocator, or resident in the process."""
    device_flops: float | None
    """The peak that MFU is relative to, in FLOP/s; None where it is not known."""

    @property
    def tokens_per_second(self) -> float:
        """At the median step time."""
        return self.tokens_per_step / statistics.median(self.step_seconds)

    @property
    def compile_seconds(self) -> float:
        """The start's time minus that of a median step."""
        return max(0.0, self.start_seconds - statistics.median(self.step_seconds))


def run_in_process(
    settings: Settings, config: TrainConfig, steps: int, cache: Path, **environment: str
) -> RunResult:
    """Run once in a fresh process, or several, with compiled code in the folder `cache`.

    Raises:
        ValueError: the run failed; the message says why in one line.
    """
    cache.mkdir(exist_ok=True)
    write_json(cache / "config.json", config.saved())
    arguments = (json.dumps(asdict(settings)), str(steps), cache / "config.json")
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    environment |= ALL_SWITCHES[settings.switch].environment
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={settings.processes}"]
    ranks = launcher if settings.processes > 1 else []
    output = run_python(*ranks, "-m", "bench.run", *arguments, **environment)
    return RunResult(**json.loads(output.splitlines()[-1]))


def run_training(settings: Settings, config: TrainConfig, steps: int) -> RunResult:
    """Train from new weights in this process: one step that is not timed, then `steps` more."""
    with setup_distributed(config.device) as dist_info:
        device_flops = measure_flops(dist_info.device)
        times = [perf_counter()]
        trainer = build_trainer(settings, config, dist_info)
        losses = []
        with attention(settings), train_gpt2.training_loader(trainer, 0) as batches:
            for step in range(steps + 1):
                lr = train_gpt2.learning_rate(config, step)
                losses.append(train_gpt2.train_step(trainer, batches, lr).loss)
                synchronize(dist_info.device)
                times.append(perf_counter())
        start_seconds, *step_seconds = [end - start for start, end in itertools.pairwise(times)]
        return RunResult(
            tokens_per_step=config.total_batch_size,
            micro_batch_size=trainer.batch.micro_batch_size,
            grad_accum_steps=trainer.batch.grad_accum_steps,
            start_seconds=start_seconds,
            step_seconds=step_seconds,
            losses=losses,
            peak_memory_gib=device_module.peak_memory_gib(dist_info.device),
            device_flops=device_flops,
        )


def build_trainer(
    settings: Settings, config: TrainConfig, dist_info: DistInfo
) -> train_gpt2.Trainer:
    """The product's own trainer, without the optimizations that the settings switch off."""
    if settings.product and dist_info.device.type == "cpu":
        device_module.tune_malloc()  # as train_gpt2.py does before it sets up
    if not settings.product:
        # A block longer than the context: the model then uses torch's own attention.
        ops.QUERY_BLOCKS = 2 * config.block_size
    ALL_SWITCHES[settings.switch].apply()
    trainer = train_gpt2.setup(config, None, LockedFolder(Path("unused")), dist_info)
    if settings.product:
        return trainer
    if not settings.padded_vocabulary:
        unpad_vocabulary(trainer.raw_model)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    model: nn.Module = trainer.raw_model
    if settings.hugging_face:
        model = HuggingFaceGPT2(trainer.raw_model)
        trainer.raw_model.to("meta")  # frees its memory, so that the peak is the peer's alone
    optimizers = train_gpt2.build_optimizers(model, config, dist_info)
    if not settings.fused_adamw:
        optimizers = tuple(map(unfused, optimizers))
    if settings.compile:
        model = torch.compile(model, dynamic=False)  # type: ignore[assignment]
    return replace(trainer, model=model, optimizers=optimizers)


@torch.no_grad()
def unpad_vocabulary(model: GPT) -> None:
    """Cut the padding rows off the token embedding, which is the LM head's weight too."""
    weight = nn.Parameter(model.lm_head.weight[: model.config.vocab_size].clone())
    model.transformer.wte.weight = model.lm_head.weight = weight


def attention(settings: Settings) -> contextlib.AbstractContextManager[None]:
    """Without flash attention: the matrix products of attention's definition, one by one."""
    return contextlib.nullcontext() if settings.flash_attention else sdpa_kernel(SDPBackend.MATH)


def unfused(optimizer: Optimizer) -> Optimizer:
    """The same AdamW, in the implementation that torch chooses by default."""
    names = ("params", "weight_decay", "lr", "betas", "eps")
    return AdamW([{name: group[name] for name in names} for group in optimizer.param_groups])


class HuggingFaceGPT2(nn.Module):
    """Hugging Face's GPT-2 with the weights of ours; returns the loss only, as ours does."""

    def __init__(self, source: GPT) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(source, Path(folder) / "gpt2")
            self.model = AutoModelForCausalLM.from_pretrained(
                Path(folder) / "gpt2", attn_implementation="sdpa", use_cache=False
            )
        self.to(source.lm_head.weight.device)

    def forward(self, idx: Tensor, targets: Tensor) -> ModelOutput:
        """Hugging Face's loss; `shift_labels` says that the targets are already one ahead."""
        output = self.model(input_ids=idx, labels=targets, shift_labels=targets)
        return ModelOutput(None, output.loss)


def measure_flops(device: torch.device) -> float | None:
    """The peak that MFU is relative to, in FLOP/s: a GPU's data sheet, or a CPU's fastest product.

    On a CPU it is measured with two square matrices in the dtype that training uses.
    """
    if device.type != "cpu":
        return peak_flops(device_module.device_name(device))
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE).to(select_dtype("auto", device))
    seconds = min(seconds_of(lambda: a @ b) for _ in range(MATMUL_REPEATS))
    return 2 * MATMUL_SIZE**3 / seconds


def main() -> None:
    """Do the run that the arguments describe; a failure is one line and exit code 2."""
    if len(sys.argv) != 4:
        raise ValueError("`python -m bench` starts this module: run that")
    settings, steps, config_path = sys.argv[1:]
    config, _ = parse_config([f"--config={config_path}"])
    try:
        result = run_training(Settings(**json.loads(settings)), config, int(steps))
    except Exception as error:  # anything that torch, its compiler or a peer may raise
        first_line = next(iter(str(error).splitlines()), "")
        raise ValueError(f"{type(error).__name__}: {first_line}") from None
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(asdict(result)))


if __name__ == "__main__":
    run_command(main)
