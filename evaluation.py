"""Evaluations during training: validation loss, HellaSwag and samples.

Each is a function `(run, trainer) -> dict[str, float]`, whose numbers are logged under their names.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from corpus.shards import TokenShards
from dataloader import Batch, validation_batches
from hellaswag import evaluate_hellaswag
from ops import IGNORE_INDEX
from runtime.distributed import DistInfo, all_reduce_sum
from runtime.precision import autocast, eval_mode
from sample import generate_tokens
from tokenizer import gpt2_encoding, prompt_ids, token_bytes
from training.config import TrainConfig
from training.run import Run, Trainer

TIMED_BATCHES, TIMED_EXAMPLES = 8, 64  # how much of an evaluation --max-minutes times
SAMPLE_COUNT, SAMPLE_TOKENS, SAMPLE_TOP_K = 4, 32, 50
PROMPT_TOKENS = 16  # without --sample-prompt, samples continue the start of the validation split
Evaluation = Callable[[Run, Trainer], dict[str, float]]


def evaluations(config: TrainConfig) -> list[tuple[int, Evaluation]]:
    """Return each evaluation with the number of steps between two of them; 0 = never.

    An evaluation must run the same number of batches on every rank: `rank_batches` of
    `runtime.distributed` splits them. Before each batch, `run.stop.interrupt_evaluation` raises an
    exception on all ranks if one of them received a signal.
    """
    return [
        (config.val_every, validate),
        (config.hellaswag_every, score_hellaswag),
        (config.sample_every, write_samples),
    ]


def evaluate(run: Run, trainer: Trainer, step: int) -> None:
    """Run and log the evaluations that are due after `step` updates."""
    due = []
    for number, (every, measure) in enumerate(evaluations(run.config), start=1):
        name = getattr(getattr(measure, "func", measure), "__name__", "")  # `func` of a partial
        if run.is_due(every, step):
            due.append((measure, f"{name} (evaluation {number})"))
    if not due:
        return
    with run.log.evaluation(step) as record, eval_mode(trainer.raw_model), run.stop.interruptible():
        for measure, name in due:
            metrics = measure(run, trainer)
            run.ranks.reshard(trainer.raw_model)  # its forward passes left parameters gathered
            run.log.claim_names(name, metrics)
            record |= metrics


def validate(
    run: Run, trainer: Trainer, split: TokenShards | None = None, name: str = "val"
) -> dict[str, float]:
    """Return the loss on a text, `NAME_loss` in nats per token and `NAME_bpb` in bits per byte.

    The text is the first `--val-tokens` of a split, by default of the validation split; for text of
    your own, pass `open_shards(folder, "all")`. The windows are the same at any number of ranks.
    """
    batches = validation_batches(
        run.val_shards if split is None else split,
        block_size=run.model_config.block_size,
        micro_batch_size=run.micro_batch_size,
        max_tokens=run.config.val_tokens,
        vocab_size=run.model_config.vocab_size,
        dist_info=run.ranks,
        before_batch=run.stop.interrupt_evaluation,
    )
    vocab_size = run.model_config.vocab_size
    return evaluate_loss(trainer.model, batches, vocab_size, run.dtype, run.ranks, name)


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    vocab_size: int,
    dtype: torch.dtype,
    dist_info: DistInfo,
    name: str = "val",
) -> dict[str, float]:
    """Return the mean loss of all ranks' batches, see `validate`.

    Losses, tokens and bytes are summed over the ranks and then divided once, so that the results
    do not depend on the number of ranks. Bits per byte are left out if the ids are not GPT-2's.
    """
    lengths = torch.from_numpy(token_bytes(vocab_size)).to(dist_info.device)
    exact = torch.float32 if dist_info.device.type == "mps" else torch.float64  # MPS has no float64
    totals = torch.zeros(3, dtype=exact, device=dist_info.device)
    for inputs, targets in batches:
        with autocast(dist_info.device, dtype):
            _, loss = model(inputs, targets)
        is_counted = targets != IGNORE_INDEX
        totals[0] += torch.where(is_counted.any(), loss * is_counted.sum(), 0.0)
        totals[1] += is_counted.sum()
        totals[2] += (lengths[targets.clamp(min=0)] * is_counted).sum()
    loss_sum, count_sum, byte_sum = all_reduce_sum(totals).tolist()
    if not count_sum:
        raise ValueError(f"the text of {name}_loss is shorter than --block-size: use a longer text")
    metrics = {f"{name}_loss": loss_sum / count_sum}
    if byte_sum:
        metrics[f"{name}_bpb"] = loss_sum / math.log(2) / byte_sum
    return metrics


def score_hellaswag(run: Run, trainer: Trainer) -> dict[str, float]:
    """Score HellaSwag; return no metrics if its examples could not be loaded."""
    if not run.hellaswag:
        return {}
    before_batch = run.stop.interrupt_evaluation
    score = evaluate_hellaswag(
        trainer.raw_model, run.hellaswag, run.ranks, run.dtype, before_batch=before_batch
    )
    return score.metrics()


def write_samples(run: Run, trainer: Trainer) -> dict[str, float]:
    """Append continuations of the prompt to `samples.txt`, from a separate random generator.

    Every rank samples, so that no rank waits long for another; rank 0 writes.
    """
    device, encoding = run.ranks.device, gpt2_encoding()
    text = run.config.sample_prompt
    start = run.val_shards.read(0, PROMPT_TOKENS).tolist()
    prompt = start if text is None else prompt_ids(text)
    sequences = generate_tokens(
        trainer.raw_model,
        torch.tensor([prompt] * SAMPLE_COUNT, device=device),
        SAMPLE_TOKENS,
        top_k=SAMPLE_TOP_K,
        generator=torch.Generator(device).manual_seed(run.config.seed),
        dtype=run.dtype,
        stop_token=None,  # a sharded model needs the same number of tokens on every rank
    )
    run.log.samples([encoding.decode(sequence) for sequence in sequences])
    return {"samples": len(sequences)}


def timed_parts(run: Run, trainer: Trainer) -> list[tuple[int, float, Callable[[], object]]]:
    """Return what `--max-minutes` times of validation and HellaSwag: see `Run.fit_max_minutes`."""
    config, block_size = run.config, run.model_config.block_size
    examples = run.hellaswag[:: max(1, len(run.hellaswag) // TIMED_EXAMPLES)]
    tokens = TIMED_BATCHES * run.ranks.world_size * run.micro_batch_size * block_size
    part = replace(run, hellaswag=examples, config=replace(config, val_tokens=tokens))
    val_tokens = min(config.val_tokens, run.val_shards.total_tokens)
    validations, scores = val_tokens / tokens, len(run.hellaswag) / max(1, len(examples))
    parts = [
        (config.val_every, max(1.0, validations), partial(validate, part, trainer)),
        (config.hellaswag_every, scores, partial(score_hellaswag, part, trainer)),
    ]
    return [each for each in parts if each[0]]  # 0 = never
