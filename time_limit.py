"""`--max-minutes`: choose the number of steps from the time of a step and of the evaluations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

from evaluation import run_evaluation, score_hellaswag, validate
from runtime.distributed import all_reduce_max, print0
from training.plan import time_call
from training.run import Run
from training.trainer import Numbers, Trainer

TIMED_BATCHES, TIMED_EXAMPLES = 8, 64  # per evaluation


def fit_max_minutes(trainer: Trainer, train_step: Callable[[Trainer, int], Numbers]) -> Run:
    """Return the run with the number of steps that fits into `--max-minutes`.

    Time a step, a part of a validation and a part of HellaSwag. Every process must call this. The
    trainer's weights change, so build another one for training.
    """
    begun, run, config = perf_counter(), trainer.run, trainer.run.config
    assert config.max_minutes is not None
    device, timed_seconds = run.ranks.device, min(5.0, 0.6 * config.max_minutes)

    def step() -> None:
        run.stop.raise_if_requested()  # as the evaluations do
        trainer.make(train_step, config.max_steps - 1)  # if the batch grows, this is the largest

    with trainer.batches:
        step_seconds = time_call(step, device, timed_seconds)
    run = trainer.run  # with the micro-batch that fits
    tokens = TIMED_BATCHES * run.ranks.world_size * run.micro_batch_size * config.block_size
    val_tokens = min(config.val_tokens, run.val_shards.total_tokens)
    examples = run.hellaswag[:: max(1, len(run.hellaswag) // TIMED_EXAMPLES)]
    trainer.run = replace(run, hellaswag=examples, config=replace(config, val_tokens=tokens))
    seconds_per_step, fixed_seconds = step_seconds, 0.0
    for every, measure, n_parts in (
        (config.val_every, validate, val_tokens / tokens),
        (config.hellaswag_every, score_hellaswag, len(run.hellaswag) / max(1, len(examples))),
    ):
        if every > 0:
            seconds = time_call(partial(run_evaluation, measure, trainer), device, timed_seconds)
            seconds *= max(1.0, n_parts)
            seconds_per_step += seconds / every
            fixed_seconds += 1.5 * seconds  # they also run at the start and at the end
    left = 60 * config.max_minutes - (perf_counter() - begun) - fixed_seconds
    steps = -all_reduce_max(-max(1, int(left / seconds_per_step)))
    print0(
        f"--max-minutes {config.max_minutes:g}: --max-steps {steps} instead of {config.max_steps}, "
        f"{step_seconds:.3g} s each; other flags, such as --embedding-decay, are unchanged"
    )
    return replace(run, config=replace(config, max_steps=steps, max_minutes=None))
