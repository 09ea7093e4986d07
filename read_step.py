"""Print the text of one training step: `python read_step.py runs/NAME --step 12345`.

The data of a step is a pure function of the step, so its text can be read again, for example after
a spike in the loss. With `--model`, each text is printed with its loss under that
model, highest loss first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import runtime.threads  # noqa: F401 - before torch, which reads what it sets

import torch

from corpus.shards import TokenArray, open_shards
from dataloader import ShardedDataLoader, to_batch
from formats.load import RUN_CONFIG_NAME, load_model
from formats.metrics import METRICS_NAME, find_run, logged_values
from lr_schedule import position_at, windows_at
from runtime.cli import POSITIONAL, PathOrName, check_settings, parse_flags, run_command
from runtime.device import select_device
from runtime.distributed import DistInfo
from runtime.errors import UserError
from tokenizer import gpt2_encoding
from training.recipe import read_recipe


@dataclass(frozen=True)
class ReadStepConfig:
    """Print the texts of one training step, each with its shard and its first token's position."""

    runs: tuple[PathOrName, ...] = field(metadata=POSITIONAL)
    """Run folders, such as runs/my-run, or names of runs in runs/."""
    step: int
    """Number of the step, as in the log: the first is 1."""
    model: PathOrName | None = None
    """Print the loss of each text under this model: a run, RUN@best, a checkpoint, gpt2, …"""
    data_dir: Path | None = None
    """Folder of the runs' data, if it was moved."""

    def __post_init__(self) -> None:
        check_settings(self, ("step",))


@torch.no_grad()
def main() -> None:
    """Print each run's texts of the step in training order or, with a model, highest loss first."""
    config, device = parse_flags(ReadStepConfig), select_device("auto")
    model = load_model(config.model, device) if config.model else None
    for run_dir in map(find_run, config.runs):
        texts = list[tuple[float, str]]()
        for shard, offset, tokens in read_step(run_dir, config.step, config.data_dir):
            loss, title = 0.0, f"--- {shard}, token {offset:,}"
            if model is not None:
                if (length := len(tokens) - 1) > (size := model.config.block_size):
                    problem = f"{config.model} has a context of {size} tokens, not {length}"
                    raise UserError(f"{problem}: use a --model with a longer context")
                loss = float(model(*to_batch(tokens[None], device)).loss)
                title += f", loss {loss:.4f}"
            texts.append((loss, f"{title}\n{gpt2_encoding().decode(tokens.tolist())}\n"))
        print(*(text for _, text in sorted(texts, key=lambda each: -each[0])), sep="\n")


def read_step(
    run_dir: Path, step: int, data_dir: Path | None = None
) -> Iterator[tuple[Path, int, TokenArray]]:
    """Yield each window of a run's step: its shard, offset and (T + 1,) uint16 tokens."""
    run = read_recipe(run_dir / RUN_CONFIG_NAME)
    if step > run.max_steps:
        raise UserError(f"--step {step} is above the {run.max_steps} steps of {run_dir}")
    data_dir, T = data_dir or run.data_dir, run.block_size
    shards = open_shards(data_dir, "train")
    if shards.fingerprint not in logged_values(run_dir / METRICS_NAME, "data_fingerprint"):
        raise UserError(f"{data_dir} has changed since {run_dir} was trained on it")
    batches = ShardedDataLoader(shards, T, 1, run.seed, run.shuffle, 1 << 16, DistInfo())
    position, count = position_at(run, step - 1), windows_at(run, step - 1)
    for start in batches.window_starts(position, count).tolist():
        yield *shards.locate(start), shards.read(start, T + 1)


if __name__ == "__main__":
    run_command(main)
