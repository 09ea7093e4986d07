"""Changes to a recipe that were tried, each alone: `TRIALS`. What won became a recipe's setting.

Run as a module it trains like `train_gpt2.py`, with one of them:

    python -m bench.trials "batch warm-up" --config recipes/gpt2-124m-fast.json …

Such a run cannot be resumed, because the changes count its steps.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import AdamW

import dataloader
import train_gpt2
from bench.switches import Switch
from corpus.shards import TokenArray, TokenShards
from dataloader import Batch, IndexArray
from lr_schedule import wsd_lr
from optimizers import Muon
from runtime.cli import run_command
from tokenizer import gpt2_encoding

train_step, read_windows = train_gpt2.train_step, dataloader.read_windows  # the product's own
Step = Callable[[train_gpt2.Trainer, Iterator[Batch], float], train_gpt2.StepResult]


def adamw(**changes: Any) -> Switch:  # noqa: ANN401 - AdamW's arguments
    """AdamW with other settings, of what is not Muon's too."""
    return Switch(definition=("train_gpt2", "AdamW", lambda g, **own: AdamW(g, **own | changes)))


class ScaledAdamW(AdamW):
    """AdamW whose rate is a multiple of the schedule's."""

    factor = 1.0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update at `factor` times the rate."""
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = self.factor * rate
        super().step(closure)


def scaled_adamw(factor: float) -> Switch:
    """Another rate for embeddings, biases and LayerNorms than for the blocks' matrices."""
    scaled = type("AdamW", (ScaledAdamW,), {"factor": factor})
    return Switch(definition=("train_gpt2", "AdamW", scaled))


def muon_of_whole_matrices(groups: Iterable[dict[str, Any]], **settings: Any) -> Muon:  # noqa: ANN401
    """Muon that does not take queries, keys and values apart."""
    return Muon([group | {"parts": 1} for group in groups], **settings)


def schedule(function: Callable[..., float]) -> Switch:
    """Another learning-rate schedule in the place of both."""
    both = {"cosine": function, "wsd": function}
    return Switch(definition=("train_gpt2", "SCHEDULES", both))


def to_zero(function: Callable[..., float], **arguments: float) -> Callable[..., float]:
    """A schedule that ends at a rate of 0."""

    def rate(step: int, **settings: float) -> float:
        return function(step, **settings | {"min_lr": 0.0} | arguments)

    return rate


def replaced_step(step: Step) -> Switch:
    """Another `train_step`."""
    return Switch(definition=("train_gpt2", "train_step", step))


def at_first(share: float, early_step: Step) -> Step:
    """Another `train_step` in the first `share` of the run."""
    done = 0

    def step(
        trainer: train_gpt2.Trainer, batches: Iterator[Batch], lr: float
    ) -> train_gpt2.StepResult:
        nonlocal done
        done += 1
        is_early = done <= share * trainer.config.max_steps
        return (early_step if is_early else train_step)(trainer, batches, lr)

    return step


def small_batches(
    trainer: train_gpt2.Trainer, batches: Iterator[Batch], lr: float
) -> train_gpt2.StepResult:
    """Four updates in the place of one, each with a quarter of the tokens, at half the rate.

    Batch-size warm-up; the rate follows the batch's square root (McCandlish et al. 2018).
    """
    split = (
        Batch(*rows)
        for inputs, targets in batches
        for rows in zip(inputs.chunk(4), targets.chunk(4), strict=True)
    )
    results = [train_step(trainer, split, lr / 2) for _ in range(4)]
    return results[-1]._replace(loss=sum(result.loss for result in results) / 4)


def short_contexts(
    trainer: train_gpt2.Trainer, batches: Iterator[Batch], lr: float
) -> train_gpt2.StepResult:
    """As many tokens, in contexts of a quarter of the length.

    Source: Li, Zhang & He 2022, The Stability-Efficiency Dilemma (sequence-length warm-up).
    """
    length = trainer.config.block_size // 4
    short = (Batch(i.reshape(-1, length), t.reshape(-1, length)) for i, t in batches)
    return train_step(trainer, short, lr)


def averaged_weights(share: float = 0.2) -> Step:
    """End with the mean of the weights after each update of the run's last `share`.

    Source: Polyak & Juditsky 1992; Izmailov et al. 2018 (stochastic weight averaging).
    """
    done, averaged, sums = 0, 0, list[torch.Tensor]()

    @torch.no_grad()
    def step(
        trainer: train_gpt2.Trainer, batches: Iterator[Batch], lr: float
    ) -> train_gpt2.StepResult:
        nonlocal done, averaged, sums
        with torch.enable_grad():
            result = train_step(trainer, batches, lr)
        done += 1
        parameters: list[torch.Tensor] = list(trainer.raw_model.parameters())
        if done > (1 - share) * trainer.config.max_steps:
            sums = sums or [torch.zeros_like(p) for p in parameters]
            torch._foreach_add_(sums, parameters)
            averaged += 1
        if done == trainer.config.max_steps:
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.copy_(total / averaged)
        return result

    return step


def document_windows(
    shards: TokenShards, windows: IndexArray, block_size: int, vocab_size: int
) -> TokenArray:
    """Training windows that begin where a document begins, if one begins inside the window.

    Validation windows stay as they are. Tokens before that place are left out, those after the
    window's end come twice.
    """
    tokens = read_windows(shards, windows, block_size, vocab_size)
    if "train" not in shards.paths[0].name:
        return tokens
    last = shards.total_tokens - block_size - 1
    for row, window in enumerate(windows.tolist()):
        starts = np.flatnonzero(tokens[row, :block_size] == gpt2_encoding().eot_token)
        if len(starts):
            first = min(window * block_size + int(starts[0]), last)
            tokens[row] = shards.read(first, block_size + 1)
    return tokens


TRIALS = {
    "": Switch(),
    "warm-up of 4 %": Switch({"warmup_steps": 38}),  # of 960 steps; the default is a tenth
    "no decay": Switch({"weight_decay": 0.0}),
    "beta2 0.95": adamw(betas=(0.9, 0.95)),
    "beta2 0.99": adamw(betas=(0.9, 0.99)),
    "beta2 0.999": adamw(betas=(0.9, 0.999)),
    "AdamW at 1/2 of the rate": scaled_adamw(0.5),
    "AdamW at twice the rate": scaled_adamw(2.0),
    "linear to 0": schedule(to_zero(wsd_lr, decay_fraction=1.0)),
    "WSD, 20 % to 0": schedule(to_zero(wsd_lr, decay_fraction=0.2)),
    "WSD, 50 % to 0": schedule(to_zero(wsd_lr, decay_fraction=0.5)),
    "batch warm-up": replaced_step(at_first(0.1, small_batches)),
    "length warm-up": replaced_step(at_first(0.25, short_contexts)),
    "averaged weights": replaced_step(averaged_weights()),
    "document windows": Switch(definition=("dataloader", "read_windows", document_windows)),
    "q, k, v as one matrix": Switch(definition=("train_gpt2", "Muon", muon_of_whole_matrices)),
}


def main() -> None:
    """Train with the trial that the first argument names; the others are train_gpt2.py's."""
    name, *flags = sys.argv[1:] or [""]
    if name not in TRIALS:
        raise ValueError(f"{name!r} is no trial: give one of {', '.join(map(repr, TRIALS))}")
    TRIALS[name].apply()
    train_gpt2.main(flags)


if __name__ == "__main__":
    run_command(main)
