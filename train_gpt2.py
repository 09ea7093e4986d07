"""Train a GPT-2.

    python train_gpt2.py                                  one process: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train_gpt2.py             eight GPUs (or gloo on CPUs)

With no flags this is the 124M reproduction on FineWeb-Edu: 10B tokens in 19,073 steps.
"""

if __name__ == "__main__":
    from runtime.startup import exit_on_ctrl_c

    exit_on_ctrl_c()  # the imports below take seconds

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.compiler import set_stance
from tqdm import tqdm

from corpus.shards import TokenShards
from dataloader import Batch, ShardedDataLoader, open_data, validation_batches
from hellaswag import Example, evaluate_hellaswag, examples_or_none
from lr_schedule import cosine_lr, wsd_lr
from model import GPT, IGNORE_INDEX, GPTConfig
from runtime.checkpoint import (
    CheckpointWriter,
    TrainerState,
    describe_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    rng_states,
)
from runtime.cli import RunStopped, run_command
from runtime.device import (
    autocast,
    compile_failure,
    compiler_problem,
    device_name,
    is_out_of_memory,
    peak_memory_gib,
    saved_activations,
    select_dtype,
    set_numerics,
    tune_malloc,
)
from runtime.distributed import (
    DistInfo,
    all_reduce_mean,
    all_reduce_sum,
    barrier,
    broadcast_int,
    check_same_on_all_ranks,
    clip_gradients,
    distribute_like,
    is_lost_process,
    print0,
    raise_on_all_ranks,
    read_dist_env,
    reshard,
    set_gradient_sync,
    setup_distributed,
    shard_model,
    wrap_model,
)
from runtime.files import append_atomically
from runtime.metrics import (
    MetricsLogger,
    RecentNorms,
    StepTimer,
    flops_per_token,
    format_step,
    mfu,
    peak_flops,
)
from runtime.stopping import EvaluationStopped, StopRequest
from sample import generate
from tokenizer import gpt2_encoding
from training.cluster import describe_scaling
from training.config import TrainConfig
from training.memory import (
    BatchPlan,
    choose_batch,
    describe_contexts,
    describe_plan,
    loss_chunks,
    plan_batch,
)
from training.preflight import check_parallel_mode, run_preflight
from training.run_dir import (
    Preemption,
    check_resume_compatible,
    choose_run_dir,
    clear_preemption,
    model_dimensions,
    open_run,
    parse_config,
    read_preemption,
)

SAMPLE_PROMPT = "Hello, I'm a language model,"
SAMPLE_COUNT, SAMPLE_TOKENS, SAMPLE_TOP_K = 4, 32, 50


@dataclass(frozen=True)
class Trainer:
    """Everything that the training loop works with."""

    config: TrainConfig
    dist_info: DistInfo
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
    norms: RecentNorms
    stop: StopRequest

    def is_due(self, every: int, step: int) -> bool:
        """Whether what happens every so many steps happens now; at the end all of it does."""
        return every > 0 and (step % every == 0 or step == self.config.max_steps)


def main(args: Sequence[str] | None = None) -> None:
    """Print the plan, check the machines, or join the other processes and run."""
    config, checkpoint = parse_config(sys.argv[1:] if args is None else args)
    if config.plan:
        if os.environ.get("RANK", "0") == "0":
            print_plan(config, model_dimensions(config, checkpoint))
        return
    if config.preflight:
        run_preflight(config, checkpoint)
        return
    with setup_distributed(config.device, config.cpu_offload) as dist_info:
        run(config, checkpoint, dist_info)


def print_plan(config: TrainConfig, model: GPTConfig) -> None:
    """What the run would take: on this machine or, with `--gpus`, on those."""
    if config.gpus is not None:
        print(describe_scaling(config, model))
        return
    dist_info = read_dist_env(config.device)
    print(describe_plan(config, model, plan_batch(config, model, dist_info), dist_info))
    print()
    print(describe_contexts(config, model, select_dtype(config.dtype, dist_info.device), dist_info))


def run(config: TrainConfig, checkpoint: Path | None, dist_info: DistInfo) -> None:
    """Set up, resume if asked to, train."""
    if dist_info.device.type == "cpu":
        tune_malloc()
    run_dir = choose_run_dir(config, checkpoint, dist_info)
    with explaining_failures(run_dir, dist_info):
        trainer = build_trainer(config, run_dir, checkpoint, dist_info)
        start = resume(trainer, checkpoint)
        if start.step > config.max_steps or (start.step == config.max_steps and start.evaluated):
            print0(dist_info, f"{run_dir} is finished: {start.step} steps are done")
            return
        batches = training_loader(trainer, start.step)
        with open_run(run_dir, config, checkpoint, dist_info), trainer.stop:
            train(trainer, batches, start)


@contextmanager
def explaining_failures(run_dir: Path, dist_info: DistInfo) -> Iterator[None]:
    """Say what is left of a run that fails in the body, and what to do."""
    try:
        yield
    except FloatingPointError as error:
        barrier(dist_info)  # all come here, the main process when its last save is done
        raise FloatingPointError(f"{error}; {resume_hint(run_dir)}") from None
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise ValueError(
                "the device ran out of memory: give a smaller --micro-batch-size"
            ) from None
        if is_lost_process(error):
            raise RunStopped(
                f"another process of this run is gone; {resume_hint(run_dir)}"
            ) from None
        raise


def resume_hint(run_dir: Path) -> str:
    """The last checkpoint, and the flags that go on from it."""
    checkpoint = latest_checkpoint(run_dir)
    if checkpoint is None:
        return f"no checkpoint yet, begin again with --resume auto --run-name {run_dir.name}"
    return f"last checkpoint {checkpoint.name}, go on with --resume {run_dir}"


# --- the training section ---------------------------------------------------------------------


class Start(NamedTuple):
    """Where training begins."""

    step: int  # optimizer updates done
    evaluated: bool  # the evaluations due after them are done
    saved: bool  # the run's folder has them


def train(trainer: Trainer, batches: ShardedDataLoader, start: Start) -> None:
    """Train from the start to `max_steps`. One turn is one optimizer step."""
    config, dist_info, model = trainer.config, trainer.dist_info, trainer.raw_model.config
    print0(dist_info, describe_plan(config, model, trainer.batch, dist_info))
    timer = StepTimer(start.step, config.max_steps, config.total_batch_size)
    metrics_path = trainer.run_dir / "metrics.jsonl" if dist_info.is_main else None
    with (
        MetricsLogger(metrics_path) as logger,
        trainer.writer,
        batches,
        progress_bar(trainer, start.step) as bar,
    ):
        if config.resume is not None:
            log(trainer, logger, resumed_from=start.step)
        for step in range(start.step, config.max_steps + 1):  # the last turn only evaluates
            last, first = step == config.max_steps, step == start.step
            with timer.paused():
                evaluated = (first and start.evaluated) or evaluate(trainer, step, logger)
                with tolerate_write_errors(trainer):
                    trainer.writer.check()
                stopping = trainer.stop.sync_stop()
                save_due = stopping or last or trainer.is_due(config.checkpoint_every, step)
                if save_due and not (first and start.saved):
                    save(trainer, step)
            if stopping or last:
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
                dist_info=dist_info,
                norm_limit=trainer.norms.limit(),
                offload=config.activation_offload,
            )
            trainer.norms.extend([result.grad_norm])
            bar.update()
            log_step(trainer, logger, timer, step + 1, lr, result)
        try:
            trainer.writer.wait()
        except OSError as error:  # at the end, a warning is not enough
            trainer.stop.fail(error)
        trainer.stop.sync_stop()
    finish(trainer, step, evaluated)


class StepResult(NamedTuple):
    """What an optimizer step did, over the whole global batch."""

    loss: float  # mean cross-entropy, nats a token
    grad_norm: float  # global, before clipping
    skipped: bool = False  # no update was made, the norm being above the limit


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
    dist_info: DistInfo,
    norm_limit: float = math.inf,
    offload: bool = False,
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
        dist_info: rank, world size and device of this process.
        norm_limit: no update is made if the gradient's norm is above this.
        offload: keep in the CPU's memory what the backward pass needs.

    Raises:
        FloatingPointError: loss or gradient are not finite, on every process alike; the weights
            are as they were.
    """
    loss_sum = torch.zeros((), device=dist_info.device)
    for micro_step in range(grad_accum_steps):
        set_gradient_sync(model, micro_step == grad_accum_steps - 1)
        inputs, targets = next(batches)
        with autocast(dist_info.device, dtype), saved_activations(dist_info.device, offload):
            _, loss = model(inputs, targets)
        scaler.scale(loss / grad_accum_steps).backward()
        loss_sum += loss.detach() / grad_accum_steps
    scaler.unscale_(optimizer)
    norm = clip_gradients(model, grad_clip).to(dist_info.device)  # from the CPU, if offloaded
    # The step's only wait for the device: the update must not happen if this is not finite.
    # The norm is the same on all processes; to the last bit, if it is to decide on updates.
    result = StepResult(*all_reduce_mean(torch.stack([loss_sum, norm]), dist_info).tolist())
    check_finite(result, scaler)
    for group in optimizer.param_groups:
        group["lr"] = lr
    skipped = result.grad_norm > norm_limit
    if not skipped:
        scaler.step(optimizer)  # with float16, skips an update whose gradient overflowed
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return result._replace(skipped=skipped)


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


def evaluate(trainer: Trainer, step: int, logger: MetricsLogger) -> bool:
    """Validate, score HellaSwag and sample, each if it is due after `step` updates.

    Returns:
        False if that was broken off, because the processes are to stop.
    """
    config, dist_info, watch = trainer.config, trainer.dist_info, trainer.stop.watch
    record: dict[str, float] = {}
    try:
        if trainer.is_due(config.val_every, step):
            batches = watch(validation_loader(trainer))
            record["val_loss"] = evaluate_loss(trainer.model, batches, trainer.dtype, dist_info)
        if trainer.is_due(config.hellaswag_every, step) and trainer.hellaswag:
            with uncompiled(config):
                score = evaluate_hellaswag(
                    trainer.raw_model,
                    trainer.hellaswag,
                    dist_info,
                    trainer.dtype,
                    progress=sys.stderr.isatty(),
                    watch=watch,
                )
            record["hellaswag_acc"] = score.acc
            record["hellaswag_acc_norm"] = score.acc_norm
            record["hellaswag_total"] = score.total
    except EvaluationStopped:
        return False
    if record:
        log(trainer, logger, step=step, tokens_seen=step * config.total_batch_size, **record)
        values = " | ".join(f"{name} {value:.5g}" for name, value in record.items())
        print0(dist_info, f"step {step} | {values}")
    if trainer.is_due(config.sample_every, step):
        write_samples(trainer, step)
    return True


def uncompiled(config: TrainConfig) -> AbstractContextManager[object]:
    """Let the raw model compute as it is: a sharded one's blocks are compiled, for one shape."""
    return set_stance("force_eager") if config.compile and config.is_sharded else nullcontext()


@torch.no_grad()
def evaluate_loss(
    model: nn.Module, batches: Iterable[Batch], dtype: torch.dtype, dist_info: DistInfo
) -> float:
    """Mean cross-entropy over all processes' batches, in nats a token.

    Sums and counts are added up over the processes and divided once, so that the result does not
    depend on how many there are.
    """
    exact = torch.float32 if dist_info.device.type == "mps" else torch.float64  # MPS has no float64
    totals = torch.zeros(2, dtype=exact, device=dist_info.device)
    for inputs, targets in batches:
        with autocast(dist_info.device, dtype):
            _, loss = model(inputs, targets)
        count = (targets != IGNORE_INDEX).sum()
        totals[0] += torch.where(count > 0, loss * count, 0.0)
        totals[1] += count
    loss_sum, count_sum = all_reduce_sum(totals, dist_info).tolist()
    return float(loss_sum / count_sum)


def write_samples(trainer: Trainer, step: int) -> None:
    """Continue a fixed prompt, from a generator of its own, into `samples.txt`.

    Every process does this, so that none waits long for another; the main one writes.
    """
    dist_info, encoding = trainer.dist_info, gpt2_encoding()
    prompt = torch.tensor(encoding.encode_ordinary(SAMPLE_PROMPT), device=dist_info.device)
    generator = torch.Generator(dist_info.device).manual_seed(trainer.config.seed)
    with uncompiled(trainer.config):
        sequences = generate(
            trainer.raw_model,
            prompt.repeat(SAMPLE_COUNT, 1),
            SAMPLE_TOKENS,
            top_k=SAMPLE_TOP_K,
            generator=generator,
            dtype=trainer.dtype,
            stop_token=None,  # equally many on every process, which a sharded model needs
        )
    if not dist_info.is_main:
        return
    lines = [f"step {step} | sample: {encoding.decode(sequence)!r}" for sequence in sequences]
    with tolerate_write_errors(trainer), FileIO(trainer.run_dir / "samples.txt", "a") as file:
        append_atomically(file, "".join(line + "\n" for line in lines).encode())
    for line in lines:
        print0(dist_info, line)


def save(trainer: Trainer, step: int) -> None:
    """Begin a checkpoint of this step; it is written while training goes on."""
    config, dist_info = trainer.config, trainer.dist_info
    state = TrainerState(
        step=step,
        tokens_seen=step * config.total_batch_size,
        model_config=asdict(trainer.raw_model.config),
        train_config=config.saved(),
        data_fingerprint=trainer.train_shards.fingerprint,
        rng_states=rng_states(),
        grad_scaler=trainer.scaler.state_dict(),
        grad_norms=trainer.norms.as_list(),
    )

    def on_saved(path: Path) -> None:
        clear_preemption(trainer.run_dir)
        print0(dist_info, f"step {step} | saved {path}")

    reshard(trainer.raw_model)  # after an evaluation
    with tolerate_write_errors(trainer):
        trainer.writer.wait()  # the last one may have failed
    trainer.writer.save(state, trainer.raw_model, (trainer.optimizer,), on_saved)


def log(trainer: Trainer, logger: MetricsLogger, **values: float | str | None) -> None:
    """Append a record to `metrics.jsonl`."""
    with tolerate_write_errors(trainer):
        logger.log(**values)


@contextmanager
def tolerate_write_errors(trainer: Trainer) -> Iterator[None]:
    """Where the body cannot write, warn and go on or, if the flags say so, ask all to stop."""
    try:
        yield
    except OSError as error:
        if trainer.config.stop_on_write_error:
            trainer.stop.fail(error)
        else:
            print0(trainer.dist_info, f"warning: {error}")


def log_step(
    trainer: Trainer,
    logger: MetricsLogger,
    timer: StepTimer,
    step: int,
    lr: float,
    result: StepResult,
) -> None:
    """Log a training record to `metrics.jsonl` and, every `log_every` steps, on the console."""
    config, dist_info, model = trainer.config, trainer.dist_info, trainer.raw_model.config
    timing = timer.lap(step)
    per_token = flops_per_token(model.n_params, model.n_layer, model.n_embd, model.block_size)
    peak = peak_flops(device_name(dist_info.device))
    record = {
        "step": step,
        "tokens_seen": step * config.total_batch_size,
        "train_loss": result.loss,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "step_time_ms": timing.step_time_ms,
        "tokens_per_second": timing.tokens_per_second,
        "mfu": mfu(timing.tokens_per_second, per_token, peak, dist_info.world_size),
        "peak_memory_gib": peak_memory_gib(dist_info.device),
    }
    if result.skipped:
        record["update_skipped"] = True
        print0(dist_info, f"step {step} | update skipped: gradient norm {result.grad_norm:.4g}")
    log(trainer, logger, **record)
    if step % config.log_every == 0 or step == config.max_steps:
        print0(dist_info, format_step(record, config.max_steps, timing.eta_seconds))


def finish(trainer: Trainer, step: int, evaluated: bool) -> None:
    """Say how the run has ended, and mark one that is to go on.

    Raises:
        KeyboardInterrupt: it was stopped by Ctrl-C.
        OSError: a file could not be written, and the run was to stop for that.
    """
    dist_info, run_dir, reason = trainer.dist_info, trainer.run_dir, trainer.stop.reason
    if step == trainer.config.max_steps and evaluated and reason != "failure":
        reason = None  # a signal that came when all was done
    if dist_info.is_main:
        with tolerate_write_errors(trainer):
            if reason is None:
                clear_preemption(run_dir)
            else:
                Preemption(step, reason, evaluated).save(run_dir)
    barrier(dist_info)  # all is written
    if reason is None:
        print0(dist_info, f"done: {run_dir}")
        return
    trainer.stop.raise_failure()
    line = f"after step {step}; {resume_hint(run_dir)}"
    if reason == "SIGINT":
        raise KeyboardInterrupt(line) if dist_info.is_main else SystemExit(130)
    print0(dist_info, f"{reason}: stopped {line}")


# --- setting up -------------------------------------------------------------------------------


def build_trainer(
    config: TrainConfig, run_dir: Path, checkpoint: Path | None, dist_info: DistInfo
) -> Trainer:
    """Open the data, build model and optimizer; nothing is written yet."""
    device = dist_info.device
    check_same_on_all_ranks(
        "the checkpoints to resume from", [describe_checkpoint(checkpoint)], dist_info
    )
    set_numerics(device)
    dtype = select_dtype(config.dtype, device)
    train_shards, val_shards = open_data(
        config.data_dir, config.block_size, dist_info, config.val_every > 0
    )
    raw_model, model = build_model(config, checkpoint, dtype, dist_info)
    raw_model.loss_chunks = loss_chunks(config, device.type)
    raw_model.set_checkpointing(config.activation_checkpointing)
    hellaswag: Sequence[Example] = []
    if config.hellaswag_every:
        hellaswag = examples_or_none(config.hellaswag_data, config.block_size, dist_info)
    batch = choose_batch(config, raw_model.config, model, dtype, dist_info)
    check_same_on_all_ranks(
        "the batches that fit (set --micro-batch-size)", [str(batch)], dist_info
    )
    return Trainer(
        config=config,
        dist_info=dist_info,
        run_dir=run_dir,
        batch=batch,
        dtype=dtype,
        raw_model=raw_model,
        model=model,
        optimizer=build_optimizer(raw_model, config.weight_decay),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype == torch.float16),
        train_shards=train_shards,
        val_shards=val_shards,
        hellaswag=hellaswag,
        writer=CheckpointWriter(
            run_dir / "checkpoints" if dist_info.is_main else None, config.keep_checkpoints
        ),
        norms=RecentNorms(config.skip_grad_norm_zscore),
        stop=StopRequest(dist_info),
    )


def build_model(
    config: TrainConfig, checkpoint: Path | None, dtype: torch.dtype, dist_info: DistInfo
) -> tuple[GPT, nn.Module]:
    """The raw model, the same on every process, and the one that trains: compiled and wrapped.

    It is new, or `--init-from`'s; with a checkpoint, its weights are yet to be loaded.
    """
    with raise_on_all_ranks(dist_info):
        check_parallel_mode(config, dist_info)
    source = config.init_from if checkpoint is None else None
    if config.is_sharded:
        model = build_sharded_model(config, checkpoint, source, dtype, dist_info)
        return model, model
    if source is None:
        with dist_info.device:
            model = GPT(model_dimensions(config, checkpoint))
        init_weights(model, config.seed)
    else:
        model = load_model(source, dist_info.device)
        model.crop_block_size(config.block_size)
    if can_compile(config, dist_info):
        return model, wrap_model(cast(nn.Module, torch.compile(model, dynamic=False)), dist_info)
    return model, wrap_model(model, dist_info)


def build_sharded_model(
    config: TrainConfig,
    checkpoint: Path | None,
    source: str | None,
    dtype: torch.dtype,
    dist_info: DistInfo,
) -> GPT:
    """The model shared out over all processes; blocks are compiled one by one."""
    with torch.device("meta"):
        model = GPT(model_dimensions(config, checkpoint))
    if can_compile(config, dist_info):
        for block in model.transformer.h:
            block.compile(dynamic=False)
    shard_model(
        model,
        model.transformer.h,
        dist_info,
        methods=["encode"],
        replicate=config.parallel == "hsdp",
        reshard_after_forward=config.reshard_after_forward,
        cpu_offload=config.cpu_offload,
        dtype=dtype,
    )
    if source is None:
        init_weights(model, config.seed)
        return model
    loaded = load_model(source)
    loaded.crop_block_size(config.block_size)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), loaded.parameters(), strict=True):
            parameter.copy_(distribute_like(value, parameter))
    return model


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Initialise a model, sharded or not, with the same numbers for the same seed."""
    torch.manual_seed(seed)
    for parameter, value in model.initial_values():
        parameter.copy_(distribute_like(value, parameter))


def can_compile(config: TrainConfig, dist_info: DistInfo) -> bool:
    """Whether to compile; where that cannot be, say why."""
    if not config.compile:
        return False
    problem = compiler_problem(dist_info.device) or compile_failure(dist_info.device)
    if problem is not None:
        print0(dist_info, f"warning: not compiled, training will be slower: {problem}")
        return False
    print0(dist_info, "compiling: the first validation and the first step take longer")
    # Compiled code is kept from run to run, that of our own autograd functions only if asked to.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    if dist_info.device.type == "cpu":  # GELU again in the backward pass: 0.6 GiB less of 3.9
        functorch_config.ban_recompute_materialized_backward = False
    return True


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


def resume(trainer: Trainer, checkpoint: Path | None) -> Start:
    """Put model, optimizer and generators back, if there is a checkpoint.

    Raises:
        ValueError: the checkpoint is damaged, or of a run on another model, data or batch.
    """
    dist_info = trainer.dist_info
    if checkpoint is None:
        return Start(0, evaluated=False, saved=True)
    with raise_on_all_ranks(dist_info):
        check_resume_compatible(
            checkpoint,
            trainer.raw_model.config,
            trainer.config,
            trainer.train_shards.fingerprint,
        )
        state = load_checkpoint(
            checkpoint,
            trainer.raw_model,
            (trainer.optimizer,),
            trainer.scaler,
            verified=trainer.config.resume == "auto",  # which has chosen it by its hashes
        )
        mark = read_preemption(checkpoint.parent.parent)
    trainer.norms.extend(state.grad_norms)
    print0(dist_info, f"resumed from {checkpoint}")
    owed = mark is not None and mark.step == state.step and not mark.evaluated
    evaluated = not broadcast_int(owed, dist_info)  # machines may see a shared disk at other times
    here = checkpoint.absolute().parent.parent == trainer.run_dir.absolute()
    return Start(state.step, evaluated, saved=here)


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
        dist_info=trainer.dist_info,
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
        dist_info=trainer.dist_info,
    )


def progress_bar(trainer: Trainer, start_step: int) -> "tqdm[Any]":
    """A bar over the run's steps, where the main process's output is a terminal."""
    return tqdm(
        total=trainer.config.max_steps,
        initial=start_step,
        unit="step",
        disable=None if trainer.dist_info.is_main else True,
    )


if __name__ == "__main__":
    run_command(main)
