"""Train a GPT-2: TF32, bfloat16 autocast, torch.compile, flash attention, fused AdamW, DDP.

    python train_gpt2.py                                  one process: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train_gpt2.py             eight GPUs (or gloo on CPUs)

Without flags this is the 124M reproduction on FineWeb-Edu: 10B tokens in 19,073 steps.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.compiler import set_stance
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from corpus.shards import TokenShards
from dataloader import Batch, ShardedDataLoader, open_data, validation_batches
from hellaswag import Example, evaluate_hellaswag, examples_or_none
from lr_schedule import SCHEDULES
from model import GPT
from ops import IGNORE_INDEX
from optimizers import Muon
from plot import plot_run
from runtime import checkpoint, device, distributed, metrics
from runtime.cli import run_command
from runtime.distributed import DistInfo, print0
from runtime.files import LockedFolder
from runtime.run_log import RunLog
from runtime.stopping import EvaluationStopped, StopRequest, Watchdog
from sample import generate
from tokenizer import gpt2_encoding
from training import memory, run_dir
from training.cluster import print_plan
from training.config import TrainConfig
from training.preflight import check_parallel_mode, check_software, run_preflight

SAMPLE_PROMPT = "Hello, I'm a language model,"
SAMPLE_COUNT, SAMPLE_TOKENS, SAMPLE_TOP_K = 4, 32, 50


@dataclass(frozen=True)
class Trainer:
    """Everything that the training loop works with."""

    config: TrainConfig
    dist_info: DistInfo
    folder: LockedFolder
    resumed_from: Path | None
    batch: memory.BatchPlan
    dtype: torch.dtype
    raw_model: GPT  # neither compiled nor wrapped: for evaluation, sampling and saving
    model: nn.Module  # the same parameters, compiled and wrapped: for training
    optimizers: tuple[torch.optim.Optimizer, ...]
    scaler: torch.amp.GradScaler
    train_shards: TokenShards
    val_shards: TokenShards
    hellaswag: Sequence[Example]
    writer: checkpoint.CheckpointWriter
    stop: StopRequest
    flops_per_token: int

    def is_due(self, every: int, step: int) -> bool:
        """Whether something that happens `every` so many steps, and at the end, happens now."""
        return every > 0 and (step % every == 0 or step == self.config.max_steps)

    @property
    def run_dir(self) -> Path:
        """The run's folder, which may be moved while the run trains."""
        return self.folder.path


def main(args: Sequence[str] | None = None) -> None:
    """Print the plan, check the machines, or join the other processes and train."""
    args = sys.argv[1:] if args is None else args
    config, resume_from = run_dir.parse_config(args)
    if config.plan:
        print_plan(config, run_dir.model_dimensions(config, resume_from))
    elif config.preflight:
        run_preflight(config, resume_from)
    else:
        if config.deterministic:
            device.make_deterministic()  # now, since NCCL then sums in another way, too
        with distributed.setup_distributed(config.device, config.cpu_offload) as dist_info:
            check_software(config, dist_info)
            with run_dir.open_run(args, config, resume_from, dist_info) as opened:
                run(*opened, dist_info)


def run(
    folder: LockedFolder, config: TrainConfig, resume_from: Path | None, dist_info: DistInfo
) -> None:
    """Set up, resume if asked to, train; a function, so that the DDP model ends with it."""
    if distributed.broadcast_int(run_dir.is_finished(resume_from, config)):
        print0(f"{folder.path} is finished: give a larger --max-steps to train on")
        return
    if dist_info.device.type == "cpu":
        device.tune_malloc()
    with run_dir.explain_failures(folder.path):
        trainer = setup(config, resume_from, folder, dist_info)
        start_step = resume(trainer)
        batches = training_loader(trainer, start_step)
        run_dir.label_run(folder.path, config, resume_from, dist_info)
        with trainer.stop:
            train(trainer, batches, start_step)


# --- setting up -------------------------------------------------------------------------------


def setup(
    config: TrainConfig, resume_from: Path | None, folder: LockedFolder, dist_info: DistInfo
) -> Trainer:
    """Open the data, build model and optimizers for the run in `folder`; nothing is written yet."""
    described = [checkpoint.describe_checkpoint(resume_from)]
    distributed.check_same_on_all_ranks("the checkpoints to resume from", described)
    if dist_info.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: float32 products on tensor cores
    elif dist_info.device.type == "cpu":
        device.make_deterministic()
    dtype = device.select_dtype(config.dtype, dist_info.device)  # of matrix products: bfloat16
    train_shards, val_shards = open_data(
        config.data_dir, config.block_size, validates=config.val_every > 0
    )
    raw_model = init_model(config, resume_from, dtype, dist_info)
    raw_model.loss_chunks = memory.loss_chunks(config, dist_info.device.type)
    raw_model.set_activation_checkpointing(config.activation_checkpointing)
    model = compile_and_wrap(raw_model, config, dist_info)
    hellaswag: Sequence[Example] = []
    if config.hellaswag_every:
        hellaswag = examples_or_none(config.hellaswag_data, config.block_size, dist_info)
    shape = raw_model.config
    batch = memory.choose_batch(config, shape, model, dtype, dist_info)
    what = "the batches that fit (set --micro-batch-size)"
    distributed.check_same_on_all_ranks(what, [str(batch)])
    return Trainer(
        config=config,
        dist_info=dist_info,
        folder=folder,
        resumed_from=resume_from,
        batch=batch,
        dtype=dtype,
        raw_model=raw_model,
        model=model,
        optimizers=build_optimizers(raw_model, config, dist_info),
        scaler=torch.amp.GradScaler(dist_info.device.type, enabled=dtype == torch.float16),
        train_shards=train_shards,
        val_shards=val_shards,
        hellaswag=hellaswag,
        writer=checkpoint.CheckpointWriter(
            folder.path / "checkpoints" if dist_info.is_main else None,
            config.keep_checkpoints,
            warn=lambda line: print0(f"warning: {line}"),
        ),
        stop=StopRequest(
            dist_info,
            config.stop_on_write_error,
            Watchdog(config.step_timeout, lambda: run_dir.resume_hint(folder.path)),
        ),
        flops_per_token=metrics.flops_per_token(shape),
    )


def init_model(
    config: TrainConfig, resume_from: Path | None, dtype: torch.dtype, dist_info: DistInfo
) -> GPT:
    """The raw model with new weights or those of `--init-from`; a checkpoint is loaded later."""
    with distributed.raise_on_all_ranks():
        check_parallel_mode(config, dist_info)
    dimensions = run_dir.model_dimensions(config, resume_from)
    # A sharded model begins without memory, so that no process ever holds all of it.
    with torch.device("meta") if config.is_sharded else dist_info.device:
        model = GPT(dimensions)
    if config.is_sharded:
        distributed.shard_model(
            model,
            dist_info,
            replicate=config.parallel == "hsdp",
            reshard_after_forward=config.reshard_after_forward,
            cpu_offload=config.cpu_offload,
            dtype=dtype,
        )
    if config.init_from is not None and resume_from is None:
        checkpoint.copy_weights(checkpoint.load_model(config.init_from), model)
    else:
        init_weights(model, config.seed)
    return model


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Initialise a model, sharded or not; the same seed gives the same weights."""
    torch.manual_seed(seed)
    for parameter, value in model.initial_values():
        parameter.copy_(distributed.distribute_like(value, parameter))


def compile_and_wrap(model: GPT, config: TrainConfig, dist_info: DistInfo) -> nn.Module:
    """The model to train: compiled, and averaging its gradients over all processes."""
    compiles = config.compile and can_compile(dist_info)
    if config.is_sharded:  # FSDP2 has wrapped the blocks already; each is compiled by itself
        for block in model.transformer.h if compiles else ():
            block.compile(dynamic=False)
        return model
    trained = cast(nn.Module, torch.compile(model, dynamic=False)) if compiles else model
    if dist_info.world_size == 1:
        return trained
    device_ids = [dist_info.device.index] if dist_info.device.type == "cuda" else None
    return DistributedDataParallel(trained, device_ids=device_ids, gradient_as_bucket_view=True)


def can_compile(dist_info: DistInfo) -> bool:
    """Whether torch.compile works here; if not, a warning says why."""
    takes = "the first validation and the first step take longer, on a CPU up to a minute"
    print0(f"compiling: {takes}")
    problem = device.prepare_compiler(dist_info.device)
    if problem is not None:
        print0(f"warning: not compiled, training will be slower: {problem}")
    return problem is None


def build_optimizers(
    model: nn.Module, config: TrainConfig, dist_info: DistInfo
) -> tuple[torch.optim.Optimizer, ...]:
    """AdamW as GPT-3 had it (Brown et al. 2020, appendix B), fused: one pass over the state.

    With `--optimizer muon`, the blocks' matrices are Muon's. Matrices decay; biases and LayerNorm
    gains, which have one dimension, do not. Several optimizers share the parameters: each is
    stepped, saved and resumed.
    """
    parameters, decay, beta2 = dict(model.named_parameters()), config.weight_decay, 0.95
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        names = [name for name, p in parameters.items() if ".h." in name and p.dim() == 2]
        dtype = device.select_dtype(config.dtype, dist_info.device)
        on_gpu = dist_info.device.type == "cuda"  # compiled for a CPU it is no faster
        muon = Muon(
            # Queries, keys and values are three matrices, stacked.
            [{"params": [parameters.pop(n)], "parts": 3 if "c_attn" in n else 1} for n in names],
            weight_decay=decay,
            dist_info=dist_info,
            dtype=torch.float32 if dtype == torch.float16 else dtype,
            compile=config.compile and on_gpu and not device.prepare_compiler(dist_info.device),
        )
        optimizers.append(muon)
        # An embedding's row has a gradient only where its token occurs. So what is left to AdamW
        # remembers as many tokens with small batches as with 524,288 (Marek et al. 2025).
        beta2 **= min(1.0, config.total_batch_size / 524_288)
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return (*optimizers, AdamW(groups, lr=0.0, betas=(0.9, beta2), eps=1e-8, fused=True))


def resume(trainer: Trainer) -> int:
    """Load the checkpoint to resume from, if there is one; return the updates done.

    Raises:
        ValueError: the checkpoint is damaged, or of a run on another model, data or batch.
    """
    path = trainer.resumed_from
    if path is None:
        return 0
    with distributed.raise_on_all_ranks():
        run_dir.check_resume_compatible(
            path, trainer.raw_model.config, trainer.config, trainer.train_shards.fingerprint
        )
    state = checkpoint.load_checkpoint(
        path,
        trainer.raw_model,
        trainer.optimizers,
        trainer.scaler,
        verified=trainer.config.resume == "auto",  # it was chosen by its hashes
    )
    print0(f"resumed from {path}")
    return state.step


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


# --- training ---------------------------------------------------------------------------------


def train(trainer: Trainer, batches: ShardedDataLoader, start_step: int) -> None:
    """Train from `start_step` to `max_steps`; a turn of the loop is one optimizer step."""
    config, dist_info, stop = trainer.config, trainer.dist_info, trainer.stop
    model_config = trainer.raw_model.config
    print0(memory.describe_plan(config, model_config, trainer.batch, dist_info))
    print0(run_dir.describe_run(trainer.run_dir))
    log = RunLog(
        trainer.run_dir,
        settings=config.saved(),
        trackers=config.logger,
        start_step=start_step,
        max_steps=config.max_steps,
        tokens_per_step=config.total_batch_size,
        log_every=config.log_every,
        flops_per_token=trainer.flops_per_token,
        device=dist_info.device,
        dtype=trainer.dtype,
        on_write_error=stop.on_write_error,
        draw_figures=lambda: plot_run(trainer.run_dir),
    )
    with log, trainer.writer, batches:
        log_start(trainer, log, start_step)
        own = trainer.resumed_from is None or run_dir.is_own(trainer.resumed_from, trainer.run_dir)
        saved = start_step if own else None
        stop.sync_stop()  # from here on `train_step` does it
        for step in range(start_step, config.max_steps + 1):
            stop.watchdog.beat(step)
            follow_run_dir(trainer)
            with log.paused():
                is_complete = evaluate(trainer, step, log)
            stopping = stop.reason is not None or step == config.max_steps
            if step != saved and (stopping or trainer.is_due(config.checkpoint_every, step)):
                with log.paused():
                    save(trainer, step, log)
            if stopping:  # the last turn only evaluates and saves
                break
            lr = learning_rate(config, step)
            result = train_step(trainer, batches, lr)
            log.step(step + 1, loss=result.loss, lr=lr, grad_norm=result.grad_norm)
            with stop.on_write_error():
                trainer.writer.check()  # has a checkpoint failed since the last step?
        with stop.on_write_error(at_end=True):
            trainer.writer.wait()
        stop.sync_stop()
    is_complete = is_complete and step == config.max_steps
    run_dir.finish_run(trainer.run_dir, step, is_complete, stop, dist_info)


class StepResult(NamedTuple):
    """What an optimizer step did, over the global batch."""

    loss: float  # mean cross-entropy, nats per token
    grad_norm: float  # global, before clipping


def train_step(trainer: Trainer, batches: Iterator[Batch], lr: float) -> StepResult:
    """One optimizer step: accumulate, average over processes, clip, update.

    Args:
        trainer: model, optimizers and settings.
        batches: yields this process's micro-batches; the step takes `grad_accum_steps` of them.
        lr: the learning rate of this update.

    Raises:
        FloatingPointError: loss or gradient are not finite, on every process alike; the weights
            are as they were.
    """
    config, dist_info, model = trainer.config, trainer.dist_info, trainer.model
    grad_accum_steps = trainer.batch.grad_accum_steps
    loss_sum = torch.zeros((), device=dist_info.device)
    for micro_step in range(grad_accum_steps):
        distributed.set_gradient_sync(model, micro_step == grad_accum_steps - 1)
        trainer.stop.watchdog.beat()
        inputs, targets = next(batches)
        with (
            device.autocast(dist_info.device, trainer.dtype),
            device.saved_activations(dist_info.device, config.activation_offload),
        ):
            _, loss = model(inputs, targets)
        trainer.scaler.scale(loss / grad_accum_steps).backward()
        loss_sum += loss.detach() / grad_accum_steps
    for optimizer in trainer.optimizers:
        trainer.scaler.unscale_(optimizer)
    norm = distributed.clip_gradients(model, config.grad_clip).to(dist_info.device)
    # The step's only wait for the device: no update may be made if these are not finite. All
    # processes have the same norm, but for its last bits, which must not decide on an update.
    # Whether any process was asked to stop comes along.
    asked = torch.full_like(norm, trainer.stop.is_asked)
    totals = distributed.all_reduce_mean(torch.stack([loss_sum, norm, asked]))
    loss_value, norm_value, any_asked = totals.tolist()
    if any_asked:
        trainer.stop.sync_stop()
    result = StepResult(loss_value, norm_value)
    check_finite(result, trainer.scaler)
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        trainer.scaler.step(optimizer)  # float16: skips an update whose gradient overflowed
        optimizer.zero_grad(set_to_none=True)
    trainer.scaler.update()
    return result


def check_finite(result: StepResult, scaler: torch.amp.GradScaler) -> None:
    """Stop before an update that would spoil the weights, on every process alike.

    A float16 gradient may overflow: its update is skipped and the scale halved, down to 1.
    """
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        return
    if not math.isfinite(result.loss) or scaler.get_scale() <= 1:  # 1 without float16
        raise FloatingPointError(
            f"loss {result.loss:.4f}, gradient norm {result.grad_norm}: no update was made"
        )


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of the update after `step`."""
    return SCHEDULES[config.lr_schedule](
        step,
        max_lr=config.max_lr,
        min_lr=config.min_lr,
        warmup_steps=config.warmup,
        max_steps=config.max_steps,
    )


# --- evaluation -------------------------------------------------------------------------------


def validate(trainer: Trainer, _: RunLog, __: int) -> dict[str, float]:
    """The validation loss, over the same windows whatever the number of processes."""
    batches = validation_batches(
        trainer.val_shards,
        block_size=trainer.raw_model.config.block_size,
        micro_batch_size=trainer.batch.micro_batch_size,
        max_tokens=trainer.config.val_tokens,
        vocab_size=trainer.raw_model.config.vocab_size,
        dist_info=trainer.dist_info,
        between=trainer.stop.interrupt_evaluation,
    )
    loss = evaluate_loss(trainer.model, batches, trainer.dtype, trainer.dist_info)
    return {"val_loss": loss}


@torch.no_grad()
def evaluate_loss(
    model: nn.Module, batches: Iterable[Batch], dtype: torch.dtype, dist_info: DistInfo
) -> float:
    """Mean cross-entropy over all processes' batches, in nats per token.

    Losses and counts are summed over the processes and divided once, so that the result does not
    depend on their number.
    """
    exact = torch.float32 if dist_info.device.type == "mps" else torch.float64  # MPS has none
    totals = torch.zeros(2, dtype=exact, device=dist_info.device)
    for inputs, targets in batches:
        with device.autocast(dist_info.device, dtype):
            _, loss = model(inputs, targets)
        count = (targets != IGNORE_INDEX).sum()
        totals[0] += torch.where(count > 0, loss * count, 0.0)
        totals[1] += count
    loss_sum, count_sum = distributed.all_reduce_sum(totals).tolist()
    return float(loss_sum / count_sum)


def score_hellaswag(trainer: Trainer, _: RunLog, __: int) -> dict[str, float]:
    """HellaSwag's accuracies; none where its examples could not be had."""
    if not trainer.hellaswag:
        return {}
    with uncompiled(trainer.config):
        score = evaluate_hellaswag(
            trainer.raw_model,
            trainer.hellaswag,
            trainer.dist_info,
            trainer.dtype,
            progress=True,
            between=trainer.stop.interrupt_evaluation,
        )
    return score.metrics()


def write_samples(trainer: Trainer, log: RunLog, step: int) -> dict[str, float]:
    """Continue a fixed prompt, from a random generator of its own, into `samples.txt`.

    Every process does this, so that none waits long for another; rank 0 writes.
    """
    dist_info, encoding = trainer.dist_info, gpt2_encoding()
    prompt = torch.tensor(encoding.encode_ordinary(SAMPLE_PROMPT), device=dist_info.device)
    with uncompiled(trainer.config):
        sequences = generate(
            trainer.raw_model,
            prompt.repeat(SAMPLE_COUNT, 1),
            SAMPLE_TOKENS,
            top_k=SAMPLE_TOP_K,
            generator=torch.Generator(dist_info.device).manual_seed(trainer.config.seed),
            dtype=trainer.dtype,
            stop_token=None,  # as many tokens on every process, which a sharded model needs
        )
    lines = [f"step {step} | sample: {encoding.decode(sequence)!r}" for sequence in sequences]
    log.samples(step, lines)
    return {"samples": len(lines)}


class Evaluation(NamedTuple):
    """Something measured between steps; all processes call it, with equally many batches.

    `distributed.rank_batches` splits batches so, and `Trainer.stop.interrupt_evaluation` between
    them lets a signal stop all processes before the same one.
    """

    every: str
    """The flag that says how many steps lie between two."""
    run: Callable[[Trainer, RunLog, int], dict[str, float]]
    """From the trainer, the log and the step to the metrics of one record in `metrics.jsonl`."""


EVALUATIONS = {  # by a metric that each logs
    "val_loss": Evaluation("val_every", validate),
    "hellaswag_acc": Evaluation("hellaswag_every", score_hellaswag),
    "samples": Evaluation("sample_every", write_samples),
}


def evaluate(trainer: Trainer, step: int, log: RunLog) -> bool:
    """Run the evaluations that are due after `step` updates, and log them; whether all were run."""
    record: dict[str, float] = {}
    begun, is_complete = time.perf_counter(), False
    with suppress(EvaluationStopped):
        for evaluation in EVALUATIONS.values():
            if trainer.is_due(getattr(trainer.config, evaluation.every), step):
                record |= evaluation.run(trainer, log, step)
        is_complete = True
    log.evaluation(step, record, time.perf_counter() - begun)
    return is_complete


def uncompiled(config: TrainConfig) -> AbstractContextManager[object]:
    """Let a sharded model compute eagerly: its blocks are compiled for the training shape only."""
    return set_stance("force_eager") if config.compile and config.is_sharded else nullcontext()


# --- saving and logging -----------------------------------------------------------------------


def save(trainer: Trainer, step: int, log: RunLog) -> None:
    """Begin this step's checkpoint; training goes on while it is written.

    Raises:
        FloatingPointError: the weights or the optimizer's state are not finite, on every process.
    """
    config, model, optimizers = trainer.config, trainer.raw_model, trainer.optimizers
    distributed.reshard(model)  # after an evaluation
    if name := checkpoint.find_nonfinite(model, optimizers):
        raise FloatingPointError(
            f"{name} is not finite after step {step}, which is not saved: use a lower --max-lr"
        )
    state = checkpoint.TrainerState(
        step=step,
        tokens_seen=step * config.total_batch_size,
        model_config=asdict(model.config),
        train_config=config.saved(),
        data_fingerprint=trainer.train_shards.fingerprint,
        rng_states=checkpoint.rng_states(),
        grad_scaler=trainer.scaler.state_dict(),
    )

    def on_saved(path: Path) -> None:
        print0(f"step {step} | saved {path}")
        log.record(saved_step=step)
        with trainer.stop.on_write_error():
            run_dir.clear_preemption(trainer.run_dir)

    with trainer.stop.on_write_error():
        trainer.writer.wait()  # the checkpoint before this one may have failed
    trainer.writer.save(state, model, optimizers, on_saved)


def follow_run_dir(trainer: Trainer) -> None:
    """If the run's folder was moved or deleted, stop, and save into what it is now."""
    was = trainer.run_dir
    if trainer.folder.follow():
        trainer.writer.checkpoints_dir = trainer.run_dir / "checkpoints"
        trainer.stop.fail(
            ValueError(
                f"{was} was moved or deleted while it trained: the run is saved and stopped in "
                f"{trainer.run_dir}, go on with --resume {trainer.run_dir}"
            )
        )


def log_start(trainer: Trainer, log: RunLog, start_step: int) -> None:
    """Log where a resumed run begins, the machine and the data."""
    if trainer.config.resume is not None:
        log.record(resumed_from=start_step)
    info = trainer.dist_info
    environment = device.describe_environment(info.device, trainer.dtype, info.world_size)
    log.record(environment=environment, data_fingerprint=trainer.train_shards.fingerprint)


if __name__ == "__main__":
    run_command(main, optional_output=True)
