"""Train GPT-2 in the plainest way: the first chapter of this library.

    python fineweb.py --source stdlib --data-dir data/stdlib      tokens, once
    python train_plain.py --data-dir data/stdlib                  a minute on two cores

A single process trains `model.py` in float32 on windows of tokens in order, with AdamW, and prints
the loss of each step. `train_gpt2.py` trains the same model with the same losses, and adds what
larger runs need: speed, several processes, a schedule, evaluations and checkpoints.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import runtime.threads  # noqa: F401 - sets variables that torch reads when it is imported

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW

from corpus.shards import TokenShards, open_shards
from dataloader import Batch, count_windows, read_windows, to_batch
from model import GPT, GPTConfig
from runtime.cli import parse_flags, run_command
from runtime.errors import UserError

STEPS = 80
BATCH_SIZE = 8  # windows in a step
LEARNING_RATE, WEIGHT_DECAY, BETAS = 1e-3, 0.1, (0.9, 0.95)
MAX_GRAD_NORM = 1.0
SEED = 1337
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PlainConfig:
    """Flags: the data and the model."""

    data_dir: Path = Path("data/stdlib")
    """Folder of token shards, which fineweb.py writes."""
    n_layer: int = 4
    """Number of layers."""
    n_head: int = 4
    """Attention heads per layer."""
    n_embd: int = 128
    """Width of the embeddings."""
    block_size: int = 128
    """Context length, in tokens."""

    def model_config(self) -> GPTConfig:
        """Return the dimensions of the model; its vocabulary is GPT-2's."""
        sizes = {"n_layer": self.n_layer, "n_head": self.n_head, "n_embd": self.n_embd}
        try:
            return GPTConfig(block_size=self.block_size, **sizes)
        except ValueError as error:
            raise UserError(f"{error}: change the flag") from None


def main(args: Sequence[str] | None = None) -> None:
    """Train new weights; print each step's loss, in nats per token."""
    config = parse_flags(PlainConfig, args)
    torch.manual_seed(SEED)
    model = GPT(config.model_config())
    optimizer = build_optimizer(model, LEARNING_RATE, WEIGHT_DECAY)
    batches = read_batches(open_shards(config.data_dir, "train"), config.block_size, BATCH_SIZE)
    for step, (inputs, targets) in enumerate(islice(batches, STEPS), start=1):
        loss = model(inputs, targets).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}/{STEPS} | loss {loss.item():.6f}", flush=True)


def read_batches(
    shards: TokenShards, block_size: int, batch_size: int, device: torch.device = CPU
) -> Iterator[Batch]:
    """Yield `batch_size` windows of the training tokens at a time: in order, again and again.

    `targets` are `inputs` one token ahead: (B, T) int64 each.
    """
    if not (n_windows := count_windows(shards.total_tokens, block_size)):
        problem = (
            f"the text has {shards.total_tokens} tokens, no more than --block-size {block_size}"
        )
        raise UserError(f"{problem}: use a smaller --block-size, or add text")
    for first in count(0, batch_size):
        windows = np.arange(first, first + batch_size) % n_windows
        tokens = read_windows(shards, windows * block_size, block_size, GPTConfig().vocab_size)
        yield to_batch(tokens, device)


def build_optimizer(
    model: nn.Module, lr: float, weight_decay: float, fused: bool | None = None
) -> AdamW:
    """Build AdamW with GPT-3's settings: matrices decay; biases and LayerNorm gains do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=BETAS, eps=1e-8, fused=fused)


if __name__ == "__main__":
    run_command(main)
