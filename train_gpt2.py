"""Train a GPT-2.

    python train_gpt2.py                                  one process: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train_gpt2.py             eight GPUs (or gloo on CPUs)

With no flags this is the 124M reproduction on FineWeb-Edu: 10B tokens in 19,073 steps.
"""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch._functorch.config as functorch_config
from torch import nn
from tqdm import tqdm

from checkpoint import (
    CheckpointWriter,
    TrainerState,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    read_state,
    rng_states,
)
from cli import run_command
from dataloader import Batch, ShardedDataLoader, count_windows, validation_batches
from device import (
    autocast,
    compiler_problem,
    device_name,
    failure_to_compile,
    is_out_of_memory,
    keep_freed_memory,
    peak_memory_gib,
    select_device,
    select_dtype,
    set_numerics,
)
from distributed import (
    DistributedContext,
    all_reduce_mean,
    all_reduce_sum,
    barrier,
    set_gradient_sync,
    setup_distributed,
    wrap_model,
)
from hellaswag import Example, check_lengths, download_hellaswag, evaluate_hellaswag, load_examples
from lr_schedule import cosine_lr, wsd_lr
from metrics import MetricsLogger, StepTimer, flops_per_token, format_step, mfu, peak_flops
from model import GPT, IGNORE_INDEX, GPTConfig
from plan import BatchPlan, choose_batch, describe_plan, plan_batch
from runs import choose_run_dir, open_run, parse_config, refuse_another_run
from sample import generate
from shards import TokenShards, open_shards
from tokenizer import gpt2_encoding
from train_config import TrainConfig

SAMPLE_PROMPT = "Hello, I'm a language model,"
SAMPLE_COUNT, SAMPLE_TOKENS, SAMPLE_TOP_K = 4, 32, 50


@dataclass(frozen=True)
class Trainer:
    """Everything that the training loop works with."""

    config: TrainConfig
    context: DistributedContext
    run_dir: Path
    batch: BatchPlan
    dtype: torch.dtype
    raw_model: GPT  # what evaluation, sampling and saving use
    model: nn.Module  # the same weights, compiled and wrapped
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    train_shards: TokenShards
    val_shards: TokenShards
    hellaswag: Sequence[Example]
    writer: CheckpointWriter


def main(args: Sequence[str] | None = None) -> None:
    """Print the plan, or join the other processes and run."""
    config, checkpoint = parse_config(sys.argv[1:] if args is None else args)
    if config.plan:
        device, world_size = select_device(config.device), int(os.environ.get("WORLD_SIZE", 1))
        if os.environ.get("RANK", "0") == "0":
            model = model_dimensions(config, checkpoint)
            batch = plan_batch(config, model, device, world_size)
            print(describe_plan(config, model, batch, device, world_size))
        return
    with setup_distributed(config.device) as context:
        run(config, checkpoint, context)


def run(config: TrainConfig, checkpoint: Path | None, context: DistributedContext) -> None:
    """Set up, resume if asked to, train."""
    if context.device.type == "cpu":
        keep_freed_memory()
    run_dir = choose_run_dir(config.out_dir, config.run_name, config.size, checkpoint, context)
    trainer = build_trainer(config, run_dir, checkpoint, context)
    start_step = resume(trainer, checkpoint) if checkpoint else 0
    if start_step >= config.max_steps:
        say(context, f"{run_dir} is finished: {start_step} steps are done")
        return
    batches = training_loader(trainer, start_step)
    with open_run(run_dir, config, checkpoint, context):
        try:
            train(trainer, batches, start_step)
        except FloatingPointError as error:
            barrier(context)  # all come here, the main process when its last save is done
            kept = latest_checkpoint(run_dir) or "none yet"
            raise FloatingPointError(f"{error} (last checkpoint: {kept})") from None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            size = trainer.batch.micro_batch_size
            raise ValueError(
                f"the device ran out of memory: --micro-batch-size must be below {size}"
            ) from None


# --- the training section ---------------------------------------------------------------------


def train(trainer: Trainer, batches: ShardedDataLoader, start_step: int) -> None:
    """Train from `start_step` to `max_steps`. One turn is one optimizer step."""
    config, context, model = trainer.config, trainer.context, trainer.raw_model.config
    say(context, describe_plan(config, model, trainer.batch, context.device, context.world_size))
    timer = StepTimer(start_step, config.max_steps, config.total_batch_size)
    metrics_path = trainer.run_dir / "metrics.jsonl" if context.is_main else None
    with (
        MetricsLogger(metrics_path) as logger,
        trainer.writer as writer,
        batches,
        progress_bar(trainer, start_step) as bar,
    ):
        if config.resume is not None:
            logger.log(resumed_from=start_step)
        for step in range(start_step, config.max_steps + 1):  # the last turn only evaluates
            writer.check()  # a full disk is to stop the run now, not at its next save
            with timer.paused():
                if step > start_step or not start_step:
                    evaluate_and_save(trainer, step, logger)
            if step == config.max_steps:
                break
            lr = learning_rate(config, step)
            result = train_step(
                trainer.model,
                trainer.optimizer,
                batches,
                grad_accum_steps=trainer.batch.grad_accum_steps,
                lr=lr,
                grad_clip=config.grad_clip,
                dtype=trainer.dtype,
                scaler=trainer.scaler,
                context=context,
            )
            bar.update()
            log_step(trainer, logger, timer, step + 1, lr, result)
    say(context, f"done: {trainer.run_dir}")


class StepResult(NamedTuple):
    """What an optimizer step did, over the whole global batch."""

    loss: float  # mean cross-entropy, nats a token
    grad_norm: float  # global, before clipping


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    *,
    grad_accum_steps: int,
    lr: float,
    grad_clip: float,
    dtype: torch.dtype,
    scaler: torch.amp.GradScaler,
    context: DistributedContext,
) -> StepResult:
    """One optimizer step: accumulate, average over processes, clip, update.

    Args:
        model: the compiled and wrapped model.
        optimizer: over its parameters.
        batches: where `grad_accum_steps` micro-batches are taken from.
        grad_accum_steps: micro-batches of this process in the step.
        lr: the learning rate of this update.
        grad_clip: largest global gradient norm.
        dtype: of matrix products.
        scaler: scales the loss where `dtype` is float16; disabled elsewhere.
        context: this process's place.

    Raises:
        FloatingPointError: loss or gradient are not finite, on every process alike; the weights
            are as they were.
    """
    loss_sum = torch.zeros((), device=context.device)
    for micro_step in range(grad_accum_steps):
        set_gradient_sync(model, micro_step == grad_accum_steps - 1)
        inputs, targets = next(batches)
        with autocast(context.device, dtype):
            _, loss = model(inputs, targets)
        scaler.scale(loss / grad_accum_steps).backward()
        loss_sum += loss.detach() / grad_accum_steps
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    # The step's only wait for the device: the update must not happen if this is not finite.
    result = StepResult(*torch.stack([all_reduce_mean(loss_sum, context), norm]).tolist())
    check_finite(result, scaler)
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.step(optimizer)  # with float16, skips an update whose gradient overflowed
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return result


def check_finite(result: StepResult, scaler: torch.amp.GradScaler) -> None:
    """Stop before an update that would spoil the weights; every process comes to the same end.

    A float16 gradient may overflow: its update is skipped and the scale halved, down to 1.
    """
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        return
    if not math.isfinite(result.loss) or scaler.get_scale() <= 1:  # 1 where scaling is off
        raise FloatingPointError(
            f"loss {result.loss:.4f}, gradient norm {result.grad_norm}: no update was made"
        )


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of the update after `step`."""
    schedule = {"cosine": cosine_lr, "wsd": wsd_lr}[config.lr_schedule]
    return schedule(
        step,
        max_lr=config.max_lr,
        min_lr=config.min_lr,
        warmup_steps=config.warmup_steps,
        max_steps=config.max_steps,
    )


# --- what happens between steps ---------------------------------------------------------------


def evaluate_and_save(trainer: Trainer, step: int, logger: MetricsLogger) -> None:
    """Validate, score HellaSwag, sample and save, each if it is due after `step` updates."""
    config, context = trainer.config, trainer.context

    def due(every: int) -> bool:
        return every > 0 and (step % every == 0 or step == config.max_steps)

    record: dict[str, float] = {}
    if due(config.val_every):
        record["val_loss"] = evaluate_loss(
            trainer.model, validation_loader(trainer), trainer.dtype, context
        )
    if due(config.hellaswag_every) and trainer.hellaswag:
        score = evaluate_hellaswag(
            trainer.raw_model,
            trainer.hellaswag,
            context,
            trainer.dtype,
            progress=sys.stderr.isatty(),
        )
        record["hellaswag_acc"] = score.acc
        record["hellaswag_acc_norm"] = score.acc_norm
        record["hellaswag_total"] = score.total
    if record:
        logger.log(step=step, tokens_seen=step * config.total_batch_size, **record)
        values = " | ".join(f"{name} {value:.5g}" for name, value in record.items())
        say(context, f"step {step} | {values}")
    if due(config.sample_every):
        write_samples(trainer, step)
    if step and (due(config.checkpoint_every) or step == config.max_steps):
        save(trainer, step)


@torch.no_grad()
def evaluate_loss(
    model: nn.Module, batches: Iterable[Batch], dtype: torch.dtype, context: DistributedContext
) -> float:
    """Mean cross-entropy over all processes' batches, in nats a token.

    Sums and counts are added up over the processes and divided once, so that the result does not
    depend on how many there are.
    """
    exact = torch.float32 if context.device.type == "mps" else torch.float64  # MPS has no float64
    totals = torch.zeros(2, dtype=exact, device=context.device)
    for inputs, targets in batches:
        with autocast(context.device, dtype):
            _, loss = model(inputs, targets)
        count = (targets != IGNORE_INDEX).sum()
        totals[0] += torch.where(count > 0, loss * count, 0.0)
        totals[1] += count
    loss_sum, count_sum = all_reduce_sum(totals, context).tolist()
    return float(loss_sum / count_sum)


def write_samples(trainer: Trainer, step: int) -> None:
    """Continue a fixed prompt, from a generator of its own, into `samples.txt`.

    Every process does this, so that none waits long for another; the main one writes.
    """
    context, encoding = trainer.context, gpt2_encoding()
    prompt = torch.tensor(encoding.encode_ordinary(SAMPLE_PROMPT), device=context.device)
    generator = torch.Generator(context.device).manual_seed(trainer.config.seed)
    sequences = generate(
        trainer.raw_model,
        prompt.repeat(SAMPLE_COUNT, 1),
        SAMPLE_TOKENS,
        top_k=SAMPLE_TOP_K,
        generator=generator,
        dtype=trainer.dtype,
    )
    if not context.is_main:
        return
    with (trainer.run_dir / "samples.txt").open("a", encoding="utf-8") as file:
        for sequence in sequences:
            line = f"step {step} | sample: {encoding.decode(sequence)!r}"
            print(line, file=file)
            say(context, line)


def save(trainer: Trainer, step: int) -> None:
    """Begin a checkpoint of this step; it is written while training goes on."""
    config, context = trainer.config, trainer.context
    if not context.is_main:
        return
    state = TrainerState(
        step=step,
        tokens_seen=step * config.total_batch_size,
        model_config=asdict(trainer.raw_model.config),
        train_config=config.saved(),
        data_fingerprint=trainer.train_shards.fingerprint,
        rng_states=rng_states(),
        grad_scaler=trainer.scaler.state_dict(),
    )
    trainer.writer.save(
        state,
        trainer.raw_model,
        trainer.optimizer,
        on_saved=lambda path: say(context, f"step {step} | saved {path}"),
    )


def log_step(
    trainer: Trainer,
    logger: MetricsLogger,
    timer: StepTimer,
    step: int,
    lr: float,
    result: StepResult,
) -> None:
    """Log a training record to `metrics.jsonl` and, every `log_every` steps, on the console."""
    config, context, model = trainer.config, trainer.context, trainer.raw_model.config
    timing = timer.lap(step)
    per_token = flops_per_token(model.n_params, model.n_layer, model.n_embd, model.block_size)
    peak = peak_flops(device_name(context.device))
    record = {
        "step": step,
        "tokens_seen": step * config.total_batch_size,
        "train_loss": result.loss,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "step_time_ms": timing.step_time_ms,
        "tokens_per_second": timing.tokens_per_second,
        "mfu": mfu(timing.tokens_per_second, per_token, peak, context.world_size),
        "peak_memory_gib": peak_memory_gib(context.device),
    }
    logger.log(**record)
    if step % config.log_every == 0 or step == config.max_steps:
        say(context, format_step(record, config.max_steps, timing.eta_seconds))


# --- setting up -------------------------------------------------------------------------------


def build_trainer(
    config: TrainConfig, run_dir: Path, checkpoint: Path | None, context: DistributedContext
) -> Trainer:
    """Open the data, build model and optimizer; nothing is written yet."""
    device = context.device
    set_numerics(device)
    dtype = select_dtype(config.dtype, device)
    train_shards, val_shards = open_data(config)
    raw_model = build_model(config, checkpoint, device)
    raw_model.loss_chunks = config.loss_chunks or (4 if device.type == "cpu" else 1)
    model = wrap_model(compile_model(raw_model, config, context), context)
    return Trainer(
        config=config,
        context=context,
        run_dir=run_dir,
        batch=choose_batch(config, raw_model.config, model, dtype, context),
        dtype=dtype,
        raw_model=raw_model,
        model=model,
        optimizer=build_optimizer(raw_model, config.weight_decay),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        train_shards=train_shards,
        val_shards=val_shards,
        hellaswag=open_hellaswag(config, context),
        writer=CheckpointWriter(run_dir / "checkpoints"),
    )


def open_data(config: TrainConfig) -> tuple[TokenShards, TokenShards]:
    """Open and check both splits."""
    train_shards = open_shards(config.data_dir, "train")
    val_shards = open_shards(config.data_dir, "val")
    if config.val_every and not count_windows(val_shards.total_tokens, config.block_size):
        raise ValueError(
            f"the validation split has {val_shards.total_tokens} tokens, fewer than "
            f"--block-size {config.block_size} + 1: give more data, or --val-every 0"
        )
    return train_shards, val_shards


def open_hellaswag(config: TrainConfig, context: DistributedContext) -> Sequence[Example]:
    """The examples to score; none, with a warning, where they cannot be had."""
    if not config.hellaswag_every:
        return []
    try:
        examples = load_examples(config.hellaswag_data or download_hellaswag(context))
        check_lengths(examples, config.block_size)
    except (OSError, ValueError) as error:
        if config.hellaswag_data is not None:
            raise
        say(context, f"warning: HellaSwag will not be scored: {error}")
        examples = []
    # Scoring takes all processes together: where one has no examples, none may begin.
    ready = all_reduce_sum(torch.tensor(float(bool(examples)), device=context.device), context)
    return examples if int(ready) == context.world_size else []


def model_dimensions(config: TrainConfig, checkpoint: Path | None) -> GPTConfig:
    """The dimensions that the flags give or, with `--init-from`, its model's or the run's."""
    if config.init_from is None:
        return config.model_config()
    if checkpoint is not None:  # the run has long left its source
        return GPTConfig(**read_state(checkpoint).model_config)
    return replace(load_model(config.init_from).config, block_size=config.block_size)


def build_model(config: TrainConfig, checkpoint: Path | None, device: torch.device) -> GPT:
    """The raw model, the same on every process: new, or `--init-from`'s; or to be resumed into."""
    torch.manual_seed(config.seed)
    if config.init_from is None or checkpoint is not None:
        with device:
            return GPT(model_dimensions(config, checkpoint))
    model = load_model(config.init_from, device)
    model.crop_block_size(config.block_size)
    return model


def compile_model(model: GPT, config: TrainConfig, context: DistributedContext) -> nn.Module:
    """The model compiled, loss and all; the model itself, with a warning, where that cannot be."""
    if not config.compile:
        return model
    problem = compiler_problem(context.device) or failure_to_compile(context.device)
    if problem is not None:
        say(context, f"warning: not compiled, training will be slower: {problem}")
        return model
    say(context, "compiling: the first validation and the first step take longer")
    # Compiled code is kept from run to run, that of our own autograd functions only if asked to.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    if context.device.type == "cpu":  # GELU again in the backward pass: 0.6 GiB less of 3.9
        functorch_config.ban_recompute_materialized_backward = False
    return cast(nn.Module, torch.compile(model, dynamic=False))


def build_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW as GPT-3 had it (Brown et al. 2020, appendix B), fused: one pass over the state.

    Matrices decay; biases and LayerNorm gains, which have one dimension, do not.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)


def resume(trainer: Trainer, checkpoint: Path) -> int:
    """Put model, optimizer and generators back; return the updates done.

    Raises:
        ValueError: the checkpoint is damaged, or of a run on another model, data or batch.
    """
    refuse_another_run(
        checkpoint,
        trainer.raw_model.config,
        trainer.config,
        trainer.train_shards.fingerprint,
    )
    step = load_checkpoint(checkpoint, trainer.raw_model, trainer.optimizer, trainer.scaler).step
    say(trainer.context, f"resumed from {checkpoint}")
    return step


def training_loader(trainer: Trainer, start_step: int) -> ShardedDataLoader:
    """This process's training micro-batches, from `start_step` on."""
    return ShardedDataLoader(
        trainer.train_shards,
        block_size=trainer.raw_model.config.block_size,
        micro_batch_size=trainer.batch.micro_batch_size,
        grad_accum_steps=trainer.batch.grad_accum_steps,
        seed=trainer.config.seed,
        shuffle=trainer.config.shuffle,
        vocab_size=trainer.raw_model.config.vocab_size,
        context=trainer.context,
        start_step=start_step,
    )


def validation_loader(trainer: Trainer) -> Iterator[Batch]:
    """This process's share of the validation windows."""
    return validation_batches(
        trainer.val_shards,
        block_size=trainer.raw_model.config.block_size,
        micro_batch_size=trainer.batch.micro_batch_size,
        max_tokens=trainer.config.val_tokens,
        vocab_size=trainer.raw_model.config.vocab_size,
        context=trainer.context,
    )


def progress_bar(trainer: Trainer, start_step: int) -> "tqdm[Any]":
    """A bar over the run's steps, where the main process's output is a terminal."""
    return tqdm(
        total=trainer.config.max_steps,
        initial=start_step,
        unit="step",
        disable=None if trainer.context.is_main else True,
    )


def say(context: DistributedContext, line: str) -> None:
    """Print a line once, above the progress bar if there is one."""
    if context.is_main:
        tqdm.write(line)
        sys.stdout.flush()  # a log file or a pipe is to have it at once


if __name__ == "__main__":
    run_command(main)
