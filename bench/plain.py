"""A plain trainer, as many projects have one: what the product is compared with.

    python -m bench.plain OPTIMIZATIONS --n-layer 2 …        (`bench.ladder` starts this)

Each of torch's optimizations is off unless the first argument names it, such as
"compile,fused AdamW"; the other arguments are train_gpt2.py's flags. It trains on the same windows
from the same weights as `train_gpt2.py --no-shuffle` on one process, and logs the same losses and
times to `metrics.jsonl`.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

import runtime.threads  # noqa: F401 - before torch, which reads what it sets

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

import model as gpt2
from corpus.shards import open_shards
from formats.huggingface import save_pretrained
from model import GPT, ModelOutput
from runtime.cli import parse_flags, run_command
from runtime.device import autocast, peak_memory_gib, select_device, select_dtype
from training.config import TrainConfig

OPTIMIZATIONS = (  # in the ladder's order
    "TF32",  # float32 matrices are multiplied in TF32
    "bfloat16",  # matrix products take bfloat16, on older GPUs float16
    "compile",
    "flash attention",  # torch's fused attention, which never stores all attention scores
    "padded vocabulary",  # 50,304 embedding rows, a multiple of 128, instead of 50,257
    "fused AdamW",
)
HUGGING_FACE = "Hugging Face"  # may be named, too: its model instead of ours


def main() -> None:
    """Train with the optimizations that the first argument names."""
    names, *flags = sys.argv[1:]
    config = parse_flags(TrainConfig, flags)
    path = config.out_dir / (config.run_name or "plain") / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for record in train(names.split(","), config):
            print(json.dumps(record), file=file, flush=True)


def train(on: Collection[str], config: TrainConfig) -> Iterator[dict[str, float | None]]:
    """Train from new weights at the rate `max_lr`; yields a record per step."""
    device = select_device(config.device)
    dtype = select_dtype("auto" if "bfloat16" in on else "float32", device)
    torch.set_float32_matmul_precision("high" if "TF32" in on else "highest")
    model = plain_model(on, config, device)
    optimizer = build_optimizer(model, config, fused="fused AdamW" in on)
    compiled = torch.compile(model, dynamic=False) if "compile" in on else model
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    flash = nullcontext() if "flash attention" in on else sdpa_kernel(SDPBackend.MATH)
    assert isinstance(config.micro_batch_size, int)
    micro_steps = config.total_batch_size // (config.micro_batch_size * config.block_size)
    batches = read_batches(config, config.micro_batch_size, device)
    with flash:
        for step in range(1, config.max_steps + 1):
            start, loss_sum = perf_counter(), 0.0
            for inputs, targets in itertools.islice(batches, micro_steps):
                with autocast(device, dtype):
                    loss = compiled(inputs, targets).loss / micro_steps
                scaler.scale(loss).backward()
                loss_sum += loss.detach()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            yield {
                "step": step,
                "train_loss": float(loss_sum),  # waits for the device
                "step_time_ms": 1000 * (perf_counter() - start),
                "peak_memory_gib": peak_memory_gib(device),
            }


def read_batches(
    config: TrainConfig, sequences: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, (B, T) int64 each, of the training tokens in sequence."""
    shape, count = (sequences, config.block_size), sequences * config.block_size
    shards = open_shards(config.data_dir, "train")
    used = (shards.total_tokens - 1) // count * count
    for start in itertools.count(0, count):
        tokens = shards.read(start % used, count + 1).astype(np.int64)
        on_device = torch.from_numpy(tokens).to(device)
        yield on_device[:-1].view(shape), on_device[1:].view(shape)


def plain_model(on: Collection[str], config: TrainConfig, device: torch.device) -> nn.Module:
    """A new GPT-2, or Hugging Face's with the same weights."""
    # torch's attention, where the product has its own: compiled for a CPU.
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    vars(gpt2)["causal_attention"] = attention
    torch.manual_seed(config.seed)
    with device:
        model = GPT(config.model_config())
    if HUGGING_FACE in on:
        return HuggingFaceGPT2(model)
    if "padded vocabulary" not in on:
        weight = nn.Parameter(model.lm_head.weight[: model.config.vocab_size].detach().clone())
        model.transformer.wte.weight = model.lm_head.weight = weight
    return model


class HuggingFaceGPT2(nn.Module):
    """Hugging Face's GPT-2 with the weights of ours; returns the loss only, as ours does."""

    def __init__(self, source: GPT) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(source, Path(folder, "gpt2"))
            self.model = AutoModelForCausalLM.from_pretrained(
                f"{folder}/gpt2", attn_implementation="sdpa", use_cache=False
            )
        self.to(source.lm_head.weight.device)

    def forward(self, idx: Tensor, targets: Tensor) -> ModelOutput:
        """Hugging Face's loss; `shift_labels` says that the targets are already one ahead."""
        output = self.model(input_ids=idx, labels=targets, shift_labels=targets)
        return ModelOutput(None, output.loss)


def build_optimizer(model: nn.Module, config: TrainConfig, fused: bool) -> AdamW:
    """AdamW with the product's settings; by default torch chooses the implementation."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.max_lr, betas=(0.9, 0.95), eps=1e-8, fused=fused or None)


if __name__ == "__main__":
    run_command(main)
