"""A plain trainer of the kind many projects use: the baseline for the benchmarks.

    python -m bench.plain OPTIMIZATIONS --n-layer 2 …        (`bench` starts this)

Each optimization is off unless the first argument lists it, as in "compile,fused AdamW"; the other
arguments are flags of train_gpt2.py. Windows and initial weights are the same as with
`train_gpt2.py --no-shuffle` on one process. It does not accumulate gradients.
"""

import itertools
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from time import perf_counter

import runtime.threads  # noqa: F401 - must be imported before torch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from corpus.shards import open_shards
from formats.huggingface import save_pretrained
from model import GPT, ModelOutput
from runtime.cli import run_command
from runtime.device import peak_memory_gib, select_device
from runtime.precision import autocast, select_dtype
from train_plain import build_optimizer, read_batches
from training.config import TrainConfig
from training.resume import parse_config

OPTIMIZATIONS = (  # in the ladder's order
    "TF32",  # float32 matmuls use TF32
    "bfloat16",  # matmuls use bfloat16, on older GPUs float16
    "compile",
    "flash attention",  # torch's fused attention, which never stores all attention scores
    "padded vocabulary",  # 50,304 embedding rows, a multiple of 128, instead of 50,257
    "fused AdamW",
)
HUGGING_FACE = "Hugging Face"  # may also be listed: uses the model of `transformers`


def main() -> None:
    """Train with the optimizations that the first argument lists."""
    names, *flags = sys.argv[1:]
    config, _ = parse_config(flags)
    device = select_device(config.device)
    start = perf_counter()
    for loss in train(names.split(","), config, device):
        seconds, start = perf_counter() - start, perf_counter()
        memory_gib = peak_memory_gib(device) or float("nan")
        speed = f"{config.total_batch_size / seconds:.1f} tok/s, {memory_gib:.3g} GiB"
        print(f"loss {loss:.4f} | {speed}", flush=True)


def train(enabled: Collection[str], config: TrainConfig, device: torch.device) -> Iterator[float]:
    """Train new weights with the constant learning rate `max_lr`; yield the loss of each step."""
    dtype = select_dtype("auto" if "bfloat16" in enabled else "float32", device)
    torch.set_float32_matmul_precision("high" if "TF32" in enabled else "highest")
    model = plain_model(enabled, config, device)
    is_fused = "fused AdamW" in enabled or None  # None: torch chooses the implementation
    optimizer = build_optimizer(model, config.max_lr, config.weight_decay, is_fused)
    batch_size = config.total_batch_size // config.block_size
    shards = open_shards(config.data_dir, "train")
    batches = read_batches(shards, config.block_size, batch_size, device)
    compiled = torch.compile(model, dynamic=False) if "compile" in enabled else model
    flash = nullcontext() if "flash attention" in enabled else sdpa_kernel(SDPBackend.MATH)
    with flash:
        for inputs, targets in itertools.islice(batches, config.max_steps):
            with autocast(device, dtype):
                loss = compiled(inputs, targets).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield loss.item()  # waits for the device


def plain_model(enabled: Collection[str], config: TrainConfig, device: torch.device) -> nn.Module:
    """Build a new GPT-2, or Hugging Face's model with the same weights."""
    torch.manual_seed(config.seed)
    with device:
        model = GPT(config.model_config())
    if HUGGING_FACE in enabled:
        return HuggingFaceGPT2(model)
    if "padded vocabulary" not in enabled:
        weight = nn.Parameter(model.lm_head.weight[: model.config.vocab_size].detach().clone())
        model.transformer.wte.weight = model.lm_head.weight = weight
    return model


class HuggingFaceGPT2(nn.Module):
    """Hugging Face's GPT-2 with the weights of a `GPT`; like `GPT`, it returns only the loss."""

    def __init__(self, source: GPT) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        options = {"attn_implementation": "sdpa", "use_cache": False}
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(source, folder)
            self.model = AutoModelForCausalLM.from_pretrained(folder, **options)
        self.to(source.lm_head.weight.device)

    def forward(self, idx: Tensor, targets: Tensor) -> ModelOutput:
        """Return Hugging Face's loss; with `shift_labels`, targets are already one token ahead."""
        loss = self.model(input_ids=idx, labels=targets, shift_labels=targets).loss
        return ModelOutput(None, loss)


if __name__ == "__main__":
    run_command(main)
