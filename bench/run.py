"""One training run with some of the product's speed taken away, for `bench.py` to time.

    python bench_run.py SETTINGS STEPS --config=FILE

SETTINGS is a JSON object of the fields of `Settings`; the result is a JSON line on stdout. A run
has a process to itself: it changes the process's numerics, and peak memory is never forgotten.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import contextlib
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import model
from model import GPT, ModelOutput
from runtime.cli import run_command
from runtime.device import (
    DtypeName,
    device_name,
    peak_memory_gib,
    select_dtype,
    synchronize,
    tune_malloc,
)
from runtime.distributed import DistInfo, setup_distributed
from runtime.huggingface import to_hf_state_dict
from runtime.metrics import peak_flops
from train_gpt2 import (
    Trainer,
    build_optimizer,
    build_trainer,
    init_weights,
    learning_rate,
    train_step,
    training_loader,
)
from training.config import TrainConfig
from training.run_dir import parse_config

MATMUL_SIZE, MATMUL_REPEATS = 2048, 10
PADDED = model.VOCAB_MULTIPLE  # before a run changes it


@dataclass(frozen=True)
class Settings:
    """What a contestant has switched on. The lowest rung of the ladder has nothing."""

    tf32: bool = False
    """Multiply float32 matrices in TF32."""
    dtype: DtypeName = "float32"
    """Type of matrix products."""
    compile: bool = False
    flash_attention: bool = False
    """Torch's fused attention, which never holds all the scores."""
    padded_vocabulary: bool = False
    """50,304 embedding rows, a multiple of 128, instead of 50,257."""
    fused_adamw: bool = False
    accumulate: bool = False
    """Add up the gradients of several micro-batches before an update."""
    product: bool = False
    """Whatever else train_gpt2.py does with its default flags."""
    hugging_face: bool = False
    """Hugging Face's model instead of ours."""


@dataclass(frozen=True)
class RungResult:
    """What one run measured."""

    tokens_per_step: int
    micro_batch_size: int
    grad_accum_steps: int
    start_seconds: float
    """Building the contestant, and a first step that compiles and allocates."""
    step_seconds: list[float]
    losses: list[float]
    """The loss after 0, 1, 2, … updates, in nats a token."""
    peak_memory_gib: float | None
    """Of the GPU's allocator, or resident in the process."""
    device_flops: float | None
    """The peak that MFU is counted against, in FLOP/s; None where it is not known."""

    @property
    def tokens_per_second(self) -> float:
        """Over the median step."""
        return self.tokens_per_step / statistics.median(self.step_seconds)

    @property
    def compile_seconds(self) -> float:
        """What it took to start, but for an ordinary step."""
        return max(0.0, self.start_seconds - statistics.median(self.step_seconds))


def run_rung(settings: Settings, config: TrainConfig, steps: int) -> RungResult:
    """Train from new weights in this process, which is best a fresh one.

    Args:
        settings: what is switched on; `config` agrees with it (see `bench.train_config`).
        config: model, data, batch, type and device.
        steps: optimizer steps to time, after one that is not.
    """
    with setup_distributed(config.device) as dist_info:
        device = dist_info.device
        device_flops = measure_flops(device)
        clock = [time.perf_counter()]
        trainer = build_contestant(settings, config, dist_info)
        losses = []
        with attention(settings), training_loader(trainer, 0) as batches:
            for step in range(steps + 1):
                result = train_step(
                    trainer.model,
                    trainer.optimizer,
                    batches,
                    grad_accum_steps=trainer.batch.grad_accum_steps,
                    lr=learning_rate(config, step),
                    grad_clip=config.grad_clip,
                    dtype=trainer.dtype,
                    scaler=trainer.scaler,
                    dist_info=dist_info,
                )
                synchronize(device)
                clock.append(time.perf_counter())
                losses.append(result.loss)
        start_seconds, *step_seconds = [end - begin for begin, end in itertools.pairwise(clock)]
        return RungResult(
            tokens_per_step=config.total_batch_size,
            micro_batch_size=trainer.batch.micro_batch_size,
            grad_accum_steps=trainer.batch.grad_accum_steps,
            start_seconds=start_seconds,
            step_seconds=step_seconds,
            losses=losses,
            peak_memory_gib=peak_memory_gib(device),
            device_flops=device_flops,
        )


def build_contestant(settings: Settings, config: TrainConfig, dist_info: DistInfo) -> Trainer:
    """The product's own trainer, with what the settings leave out taken away from it."""
    if not settings.padded_vocabulary:
        model.VOCAB_MULTIPLE = 1
    if settings.product and dist_info.device.type == "cpu":
        tune_malloc()  # as train_gpt2.run does
    if not settings.product:
        model.QUERY_BLOCKS = 2 * config.block_size  # no length divides: torch's own attention
    trainer = build_trainer(config, Path("unused"), None, dist_info)
    if settings.product:
        return trainer
    if not settings.padded_vocabulary:
        start_as_padded(trainer.raw_model, config.seed)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    network: nn.Module = trainer.raw_model
    if settings.hugging_face:
        network = HuggingFaceGPT2(trainer.raw_model)
        trainer.raw_model.to("meta")  # frees its memory: the peer's peak is to be its own
    optimizer = build_optimizer(network, config.weight_decay)
    if not settings.fused_adamw:
        optimizer = unfused(optimizer)
    if settings.compile:
        network = torch.compile(network, dynamic=False)  # type: ignore[assignment]
    return replace(trainer, model=network, optimizer=optimizer)


@torch.no_grad()
def start_as_padded(network: GPT, seed: int) -> None:
    """Give a model without padding the weights that the padded one is born with.

    The losses of all contestants are then to agree, but for rounding.
    """
    model.VOCAB_MULTIPLE, multiple = PADDED, model.VOCAB_MULTIPLE
    with network.lm_head.weight.device:
        padded = GPT(network.config)
    init_weights(padded, seed)
    model.VOCAB_MULTIPLE = multiple
    for parameter, larger in zip(network.parameters(), padded.parameters(), strict=True):
        parameter.copy_(larger[: len(parameter)])


def attention(settings: Settings) -> contextlib.AbstractContextManager[None]:
    """Without flash attention, the plain products that its definition asks for."""
    return contextlib.nullcontext() if settings.flash_attention else sdpa_kernel(SDPBackend.MATH)


def unfused(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """The same AdamW in whatever form torch chooses by itself."""
    groups = [
        {name: group[name] for name in ("params", "weight_decay", "lr", "betas", "eps")}
        for group in optimizer.param_groups
    ]
    return torch.optim.AdamW(groups)


class HuggingFaceGPT2(nn.Module):
    """Hugging Face's GPT-2 with the weights of ours, called as `train_step` calls a model.

    Compiled, the whole of this is: its logits, which are not asked for, are not kept either.
    """

    def __init__(self, source: GPT) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, GPT2Config

        config = GPT2Config(
            vocab_size=source.config.vocab_size,
            n_positions=source.config.block_size,
            n_layer=source.config.n_layer,
            n_head=source.config.n_head,
            n_embd=source.config.n_embd,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            use_cache=False,
        )
        self.network = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation="sdpa"
        )
        self.network.load_state_dict(to_hf_state_dict(source), strict=False)  # lm_head is tied
        self.to(source.lm_head.weight.device)

    def forward(self, idx: Tensor, targets: Tensor) -> ModelOutput:
        """Hugging Face's own loss; `shift_labels` says that the targets are one ahead already."""
        return ModelOutput(
            None, self.network(input_ids=idx, labels=targets, shift_labels=targets).loss
        )


def measure_flops(device: torch.device) -> float | None:
    """The peak to count MFU against, in FLOP/s: a GPU's from its data sheet, a CPU's measured.

    A CPU's is what a product of two square matrices reaches, in the type that training uses.
    """
    if device.type != "cpu":
        return peak_flops(device_name(device))
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE).to(select_dtype("auto", device))
    seconds = []
    for _ in range(MATMUL_REPEATS):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / statistics.median(seconds)


def main() -> None:
    """Do the run that the arguments describe; what went wrong is one line and exit code 2."""
    if len(sys.argv) < 3:
        raise ValueError("bench.py starts this: run python bench.py")
    settings, steps, *flags = sys.argv[1:]
    config, _ = parse_config(flags)
    try:
        result = run_rung(Settings(**json.loads(settings)), config, int(steps))
    except Exception as error:  # whatever torch, its compiler or a peer make of this machine
        first_line = next(iter(str(error).splitlines()), "")
        raise ValueError(f"{type(error).__name__}: {first_line}") from None
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    run_command(main)
