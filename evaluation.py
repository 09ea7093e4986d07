"""Evaluations during training: validation loss, HellaSwag and samples.

Each is a function `(trainer) -> dict[str, float]`, whose numbers are logged under their names.
"""

import math
from collections.abc import Callable
from contextlib import suppress

import torch

from corpus.shards import TokenShards
from dataloader import validation_batches
from generation import cache_agrees, generate_tokens
from hellaswag import evaluate_hellaswag
from model import IGNORE_INDEX
from runtime.distributed import all_reduce_sum
from runtime.errors import UserError
from runtime.precision import autocast, eval_mode
from tokenizer import gpt2_encoding, prompt_ids, token_bytes
from training.config import TrainConfig
from training.stopping import StopRequested
from training.trainer import Trainer

SAMPLE_COUNT, SAMPLE_TOKENS, SAMPLE_TOP_K = 4, 32, 50
PROMPT_TOKENS = 16  # without --sample-prompt, samples continue the start of the validation split
Evaluation = Callable[[Trainer], dict[str, float]]


def evaluations(config: TrainConfig) -> list[tuple[int, Evaluation]]:
    """Return each evaluation with the number of steps between two of them; 0 = never.

    An evaluation must run the same number of batches on every rank: `rank_batches` of
    `runtime.distributed` splits them. Before each batch, `run.stop.raise_if_requested` raises an
    exception on all ranks if one of them received a signal.
    """
    return [
        (config.val_every, validate),
        (config.hellaswag_every, score_hellaswag),
        (config.sample_every, write_samples),
    ]


def evaluate(trainer: Trainer, step: int) -> None:
    """Run and log the evaluations that are due after `step` updates."""
    due = [
        (number, measure)
        for number, (every, measure) in enumerate(evaluations(trainer.run.config), start=1)
        if trainer.is_due(every, step)
    ]
    if not due:
        return
    trainer.read_numbers()
    with trainer.run_log.evaluation(step) as record, suppress(StopRequested):
        for number, measure in due:
            metrics = run_evaluation(measure, trainer)
            trainer.run_log.claim_names(f"evaluation {number}", metrics)
            record |= metrics


def run_evaluation(measure: Evaluation, trainer: Trainer) -> dict[str, float]:
    """Run an evaluation in eval mode; return its metrics.

    Only `validate` runs compiled, because its batches have the shape of training. Batches of other
    shapes would compile anew for each one.
    """
    stance = "default" if measure is validate else "force_eager"
    with eval_mode(trainer.raw_model), torch.compiler.set_stance(stance):
        metrics = measure(trainer)
    trainer.run.ranks.reshard(trainer.raw_model)  # the forward passes left parameters gathered
    return metrics


@torch.no_grad()
def validate(
    trainer: Trainer, split: TokenShards | None = None, name: str = "val"
) -> dict[str, float]:
    """Return the loss on a text, `NAME_loss` in nats per token and `NAME_bpb` in bits per byte.

    The text is `--val-tokens` of a split, by default of the validation split, in windows that are
    spread over it; for text of your own, pass `open_shards(folder, "all")`. The windows are the
    same at any number of ranks. Losses, tokens and bytes are summed over the ranks and then divided
    once, so that the results do not depend on the number of ranks. Bits per byte are left out if
    the ids are not GPT-2's.
    """
    run = trainer.run
    device, vocab_size = run.ranks.device, run.model_config.vocab_size
    batches = validation_batches(
        run.val_shards if split is None else split,
        block_size=run.model_config.block_size,
        micro_batch_size=run.micro_batch_size,
        max_tokens=run.config.val_tokens,
        vocab_size=vocab_size,
        dist_info=run.ranks,
        before_batch=run.stop.raise_if_requested,
    )
    lengths = torch.from_numpy(token_bytes(vocab_size)).to(device)
    exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    totals = torch.zeros(3, dtype=exact, device=device)
    for inputs, targets in batches:
        with autocast(device, run.dtype):
            _, loss = trainer.model(inputs, targets)
        is_counted = targets != IGNORE_INDEX
        totals[0] += torch.where(is_counted.any(), loss * is_counted.sum(), 0.0)
        totals[1] += is_counted.sum()
        totals[2] += (lengths[targets.clamp(min=0)] * is_counted).sum()
    loss_sum, count_sum, byte_sum = all_reduce_sum(totals).tolist()
    if not count_sum:
        raise UserError(f"the text of {name}_loss is shorter than --block-size: use a longer text")
    metrics = {f"{name}_loss": loss_sum / count_sum}
    if byte_sum:
        metrics[f"{name}_bpb"] = loss_sum / math.log(2) / byte_sum
    return metrics


def score_hellaswag(trainer: Trainer) -> dict[str, float]:
    """Score HellaSwag; return no metrics if its examples could not be loaded."""
    run = trainer.run
    if not run.hellaswag:
        return {}
    before_batch = run.stop.raise_if_requested
    score = evaluate_hellaswag(
        trainer.raw_model, run.hellaswag, run.ranks, run.dtype, before_batch=before_batch
    )
    return score.metrics()


def write_samples(trainer: Trainer) -> dict[str, float]:
    """Append continuations of the prompt to `samples.txt`, from a separate random generator.

    Every rank samples, so that no rank waits long for another; rank 0 writes.
    """
    run, encoding = trainer.run, gpt2_encoding()
    device = run.ranks.device
    text = run.config.sample_prompt
    start = run.val_shards.read(0, PROMPT_TOKENS).tolist()
    prompt = start if start and text is None else prompt_ids(text or "")
    cache_agrees.cache_clear()  # the weights have changed
    sequences = generate_tokens(
        trainer.raw_model,
        torch.tensor([prompt] * SAMPLE_COUNT, device=device),
        SAMPLE_TOKENS,
        top_k=SAMPLE_TOP_K,
        generator=torch.Generator(device).manual_seed(run.config.seed),
        dtype=run.dtype,
        stop_token=None,  # a sharded model needs the same number of tokens on every rank
    )
    trainer.run_log.samples([encoding.decode(sequence) for sequence in sequences])
    return {"samples": len(sequences)}
