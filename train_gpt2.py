"""Train a GPT-2: TF32, bfloat16 autocast, torch.compile, flash attention, fused AdamW, DDP.

    python train_gpt2.py                                  one process: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train_gpt2.py             eight GPUs (or gloo on CPUs)

Without flags this is the 124M reproduction on FineWeb-Edu: 10B tokens in 19,073 steps.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, cast

import runtime.threads  # noqa: F401 - before torch, which reads what it sets

import torch
from torch import nn
from torch.compiler import set_stance
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from corpus.shards import TokenShards
from dataloader import Batch, ShardedDataLoader, validation_batches
from hellaswag import Example, evaluate_hellaswag, examples_or_none
from model import GPT
from ops import IGNORE_INDEX, checkpoint_activations
from optimizers import Muon
from runtime import checkpoint, device, distributed
from runtime.checkpoint import Checkpoint
from runtime.cli import run_command
from runtime.distributed import DistInfo, print0
from runtime.metrics import flops_per_token
from runtime.stopping import EvaluationStopped, StopRequest
from sample import encode, generate
from tokenizer import gpt2_encoding
from training import plan, run_dir
from training.config import TrainConfig, learning_rate
from training.preflight import open_same_data, run_preflight
from training.run_log import RunLog

SAMPLE_COUNT, SAMPLE_TOKENS, SAMPLE_TOP_K = 4, 32, 50


@dataclass(frozen=True)
class Trainer:
    """Everything that the training loop works with."""

    config: TrainConfig
    dist_info: DistInfo
    batch: plan.BatchPlan
    dtype: torch.dtype  # of matrix products
    raw_model: GPT  # neither compiled nor wrapped: for HellaSwag, sampling and saving
    model: nn.Module  # the same parameters, compiled and wrapped: for training and validation
    optimizers: tuple[torch.optim.Optimizer, ...]
    scaler: torch.amp.GradScaler
    val_shards: TokenShards
    batches: ShardedDataLoader  # this process's training micro-batches
    hellaswag: Sequence[Example]
    stop: StopRequest
    log: RunLog
    writer: checkpoint.CheckpointWriter

    def is_due(self, every: int, step: int) -> bool:
        """Whether to do now what is done `every` so many steps and after the last; 0 = never."""
        return every > 0 and (step % every == 0 or step == self.config.max_steps)


def main(args: Sequence[str] | None = None) -> None:
    """Print the plan, check the machines, or join the other processes and train."""
    config, resumed = run_dir.parse_config(sys.argv[1:] if args is None else args)
    if config.plan:
        plan.print_plan(config, run_dir.model_dimensions(config, resumed))
    elif config.preflight:
        run_preflight(config, resumed)
    else:
        if config.deterministic:
            device.make_deterministic()  # before the process group: NCCL then sums in another way
        with distributed.setup_distributed(
            config.device, config.cpu_offload, config.step_timeout
        ) as dist_info:
            run(config, resumed, dist_info)


def run(config: TrainConfig, resumed: Checkpoint | None, dist_info: DistInfo) -> None:
    """Set up, resume if asked to, train. The DDP model must die before its process group does."""
    splits = open_same_data(config, resumed, dist_info)
    if run_dir.is_finished(resumed, config):
        print0("the run is finished: give a larger --max-steps to train on")
        return
    with run_dir.open_run(config, resumed) as folder, run_dir.explain_failures(folder):
        trainer = setup(config, resumed, splits, folder, dist_info)
        run_dir.write_config(folder, config)
        with trainer.stop, trainer.log, trainer.writer, trainer.batches:
            trainer.log.start(splits[0].fingerprint)
            if resumed is not None and not run_dir.is_own(resumed, folder):
                save(trainer, resumed.state.step)  # so that this run can be resumed by itself
            step, is_complete = train(trainer)
            run_dir.finish_run(folder, step, is_complete, trainer.stop)


# --- setting up -------------------------------------------------------------------------------


def setup(
    config: TrainConfig,
    resumed: Checkpoint | None,
    splits: tuple[TokenShards, TokenShards],
    folder: Path,
    dist_info: DistInfo,
) -> Trainer:
    """Build the model, its optimizers and what records the run; load the checkpoint, if any."""
    if dist_info.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: float32 products on tensor cores
    elif dist_info.device.type == "cpu":
        device.make_deterministic()
        device.tune_malloc()
    dtype = device.select_dtype(config.dtype, dist_info.device)  # of matrix products: bfloat16
    model_config = run_dir.model_dimensions(config, resumed)
    batch = plan.plan_batch(config, model_config, dist_info)
    batches = ShardedDataLoader(  # raises if the data are too few for a step
        splits[0],
        block_size=model_config.block_size,
        micro_batch_size=batch.micro_batch_size,
        grad_accum_steps=batch.grad_accum_steps,
        seed=config.seed,
        shuffle=config.shuffle,
        vocab_size=model_config.vocab_size,
        dist_info=dist_info,
        start_step=resumed.state.step if resumed else 0,
    )
    tokens = splits[0].total_tokens
    print0(plan.describe_plan(config, model_config, batch, dist_info, tokens))
    compiles = config.compile and can_compile(dist_info)
    raw_model = build_model(config, resumed, dtype, dist_info)
    model = compile_and_wrap(raw_model, config, dist_info, compiles)
    optimizers = build_optimizers(raw_model, config, dist_info, dtype, compiles)
    scaler = torch.amp.GradScaler(dist_info.device.type, enabled=dtype == torch.float16)
    if resumed is not None:
        checkpoint.load_checkpoint(resumed, raw_model, optimizers, scaler)
        print0(f"resumed from {resumed.path}")
    hellaswag: Sequence[Example] = []
    if config.hellaswag_every:
        hellaswag = examples_or_none(config.hellaswag_data, config.block_size, dist_info)
    stop = StopRequest(config.stop_on_write_error)
    log = RunLog(
        folder,
        config,
        start_step=batches.start_step,
        flops_per_token=flops_per_token(raw_model.config),
        device=dist_info.device,
        dtype=dtype,
        on_write_error=stop.on_write_error,
    )
    return Trainer(
        config=config,
        dist_info=dist_info,
        batch=batch,
        dtype=dtype,
        raw_model=raw_model,
        model=model,
        optimizers=optimizers,
        scaler=scaler,
        val_shards=splits[1],
        batches=batches,
        hellaswag=hellaswag,
        stop=stop,
        log=log,
        writer=checkpoint.CheckpointWriter(
            folder / "checkpoints" if distributed.is_main() else None,
            config.keep_checkpoints,
            on_error=stop.write_failed,
            on_saved=log.saved,
        ),
    )


def can_compile(dist_info: DistInfo) -> bool:
    """Whether torch.compile works here; if not, a warning says why."""
    print0("compiling: the first validation and the first step take longer, up to a minute")
    problem = device.prepare_compiler(dist_info.device)
    if problem is not None:
        print0(f"warning: not compiled, training will be slower: {problem}")
    return problem is None


def build_model(
    config: TrainConfig, resumed: Checkpoint | None, dtype: torch.dtype, dist_info: DistInfo
) -> GPT:
    """The raw model with new weights or those of `--init-from`; a checkpoint is loaded later."""
    # A sharded model begins without memory, so that no process ever holds all of it.
    with torch.device("meta") if config.is_sharded else dist_info.device:
        model = GPT(run_dir.model_dimensions(config, resumed))
    model.loss_chunks = plan.loss_chunks(config, dist_info.device.type)
    if config.is_sharded:
        distributed.shard_model(
            model,
            dist_info,
            replicate=config.parallel == "hsdp",
            reshard_after_forward=config.reshard_after_forward,
            cpu_offload=config.cpu_offload,
            dtype=dtype,
        )
    checkpoint_activations(model.transformer.h, config.activation_checkpointing)
    if config.init_from is not None and resumed is None:
        with distributed.raise_on_all_ranks():
            source = checkpoint.load_model(config.init_from)
        checkpoint.copy_weights(source, model)
    else:
        init_weights(model, config.seed)
    torch.manual_seed(config.seed + dist_info.rank)  # of dropout, if a layer has it
    return model


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Initialise a model, sharded or not; the same seed gives the same weights."""
    torch.manual_seed(seed)
    for parameter, value in model.initial_values():
        parameter.copy_(distributed.distribute_like(value, parameter))


def compile_and_wrap(
    model: GPT, config: TrainConfig, dist_info: DistInfo, compiles: bool
) -> nn.Module:
    """The model to train: compiled, and averaging its gradients over all processes."""
    if config.is_sharded:  # FSDP2 has wrapped the blocks already; each is compiled by itself
        if compiles:
            for block in model.transformer.h:
                block.compile(dynamic=False)
        return model
    trained = cast(nn.Module, torch.compile(model, dynamic=False)) if compiles else model
    if dist_info.world_size == 1:
        return trained
    device_ids = [dist_info.device.index] if dist_info.device.type == "cuda" else None
    return DistributedDataParallel(trained, device_ids=device_ids, gradient_as_bucket_view=True)


def build_optimizers(
    model: nn.Module,
    config: TrainConfig,
    dist_info: DistInfo,
    dtype: torch.dtype = torch.float32,
    compiles: bool = False,
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
        muon = Muon(
            # Queries, keys and values are three matrices, stacked.
            [{"params": [parameters.pop(n)], "parts": 3 if "c_attn" in n else 1} for n in names],
            weight_decay=decay,
            dist_info=dist_info,
            dtype=torch.float32 if dtype == torch.float16 else dtype,
            compile=compiles and dist_info.device.type == "cuda",  # for a CPU it is no faster
        )
        optimizers.append(muon)
        # An embedding's row has a gradient only where its token occurs: AdamW's second moment
        # averages over as many tokens as 0.95 does at 524,288 per step (Marek et al. 2025).
        beta2 **= min(1.0, config.total_batch_size / 524_288)
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return (*optimizers, AdamW(groups, lr=0.0, betas=(0.9, beta2), eps=1e-8, fused=True))


# --- training ---------------------------------------------------------------------------------


def train(trainer: Trainer) -> tuple[int, bool]:
    """Train to `max_steps`; a turn of the loop is one optimizer step.

    Returns the updates done, and whether the run is complete with its last evaluation.
    """
    config, stop, writer = trainer.config, trainer.stop, trainer.writer
    start_step = trainer.batches.start_step  # 0, or what is saved already
    stop.sync_stop()  # from here on `train_step` does it
    for step in range(start_step, config.max_steps + 1):
        is_evaluated = evaluate(trainer, step)
        stopping = stop.reason is not None or step == config.max_steps
        if step > start_step and (stopping or trainer.is_due(config.checkpoint_every, step)):
            save(trainer, step)
        if stopping:  # the last turn only evaluates and saves
            break
        lr = learning_rate(config, step)
        result = train_step(trainer, lr)
        trainer.log.step(step + 1, lr=lr, loss=result.loss, grad_norm=result.grad_norm)
    writer.wait()
    if writer.error is not None:
        stop.write_failed(writer.error, at_end=True)
    stop.sync_stop()
    return step, step == config.max_steps and is_evaluated


class StepResult(NamedTuple):
    """What an optimizer step did, over the global batch."""

    loss: float  # mean cross-entropy, nats per token
    grad_norm: float  # global, before clipping


def train_step(trainer: Trainer, lr: float) -> StepResult:
    """One optimizer step: accumulate, average over processes, clip, update.

    Raises:
        FloatingPointError: loss or gradient are not finite, on every process alike; the weights
            are as they were.
    """
    config, dist_info, model = trainer.config, trainer.dist_info, trainer.model
    grad_accum_steps = trainer.batch.grad_accum_steps
    loss_sum = torch.zeros((), device=dist_info.device)
    for micro_step in range(grad_accum_steps):
        distributed.set_gradient_sync(model, micro_step == grad_accum_steps - 1)
        inputs, targets = next(trainer.batches)
        with device.autocast(dist_info.device, trainer.dtype):
            _, loss = model(inputs, targets)
        trainer.scaler.scale(loss / grad_accum_steps).backward()
        loss_sum += loss.detach() / grad_accum_steps
    for optimizer in trainer.optimizers:
        trainer.scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    norm = distributed.full_tensor(norm).to(dist_info.device)
    # The step's only wait for the device: no update may be made if these are not finite. The
    # norms of the ranks may differ in their last bits, so the average decides for all. Whether
    # any rank was asked to stop comes along.
    asked = torch.full_like(norm, trainer.stop.is_asked)
    sums = distributed.all_reduce_sum(torch.stack([loss_sum, norm, asked]))
    loss_value, norm_value, any_asked = (sums / dist_info.world_size).tolist()
    if any_asked:
        trainer.stop.sync_stop()
    result = StepResult(loss_value, norm_value)
    is_finite = check_finite(result, trainer.scaler)
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        if is_finite:  # not `scaler.step`, by which one optimizer may step and another not
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    trainer.scaler.update()
    return result


def check_finite(result: StepResult, scaler: torch.amp.GradScaler) -> bool:
    """Whether to update; stops before an update that would spoil the weights, on all ranks alike.

    A float16 gradient may overflow: then this step makes no update, and the next has half the
    scale, down to 1.
    """
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        return True
    if not math.isfinite(result.loss) or scaler.get_scale() <= 1:  # 1 without float16
        raise FloatingPointError(
            f"loss {result.loss:.4f}, gradient norm {result.grad_norm}: no update was made"
        )
    print0("a float16 gradient overflowed: no update was made, the loss scale is halved")
    return False


# --- evaluation -------------------------------------------------------------------------------


def validate(trainer: Trainer, _: int) -> dict[str, float]:
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
    exact = torch.float32 if dist_info.device.type == "mps" else torch.float64  # MPS has no float64
    totals = torch.zeros(2, dtype=exact, device=dist_info.device)
    for inputs, targets in batches:
        with device.autocast(dist_info.device, dtype):
            _, loss = model(inputs, targets)
        count = (targets != IGNORE_INDEX).sum()
        totals[0] += torch.where(count > 0, loss * count, 0.0)
        totals[1] += count
    loss_sum, count_sum = distributed.all_reduce_sum(totals).tolist()
    return float(loss_sum / count_sum)


def score_hellaswag(trainer: Trainer, _: int) -> dict[str, float]:
    """HellaSwag's accuracies; none where its examples could not be had."""
    if not trainer.hellaswag:
        return {}
    with uncompiled(trainer.config):
        score = evaluate_hellaswag(
            trainer.raw_model,
            trainer.hellaswag,
            trainer.dist_info,
            trainer.dtype,
            between=trainer.stop.interrupt_evaluation,
        )
    return score.metrics()


def write_samples(trainer: Trainer, step: int) -> dict[str, float]:
    """Continue the prompt, from a random generator of its own, into `samples.txt`.

    Every process does this, so that none waits long for another; rank 0 writes.
    """
    dist_info, encoding = trainer.dist_info, gpt2_encoding()
    prompt = torch.tensor(encode(trainer.config.sample_prompt), device=dist_info.device)
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
    trainer.log.samples(step, lines)
    return {"samples": len(lines)}


EVALUATIONS: tuple[tuple[str, Callable[[Trainer, int], dict[str, float]]], ...] = (
    # The flag that says how often; from the trainer and the step to the metrics of one record in
    # `metrics.jsonl`. Every rank runs equally many batches: `distributed.rank_batches` splits them
    # so, and `Trainer.stop.interrupt_evaluation` between them lets a signal stop all ranks.
    ("val_every", validate),
    ("hellaswag_every", score_hellaswag),
    ("sample_every", write_samples),
)


def evaluate(trainer: Trainer, step: int) -> bool:
    """Run what is due of `EVALUATIONS` and log it; False if a request to stop cut it short."""
    config, stop = trainer.config, trainer.stop
    due = [run for flag, run in EVALUATIONS if trainer.is_due(getattr(config, flag), step)]
    if not due:
        return True
    if stop.reason is not None:
        return False
    record: dict[str, float] = {}
    with trainer.log.paused(), device.eval_mode(trainer.raw_model):
        begun = time.perf_counter()
        with suppress(EvaluationStopped):
            for run_evaluation in due:
                record |= run_evaluation(trainer, step)
        trainer.log.evaluation(step, record, time.perf_counter() - begun)
    return stop.reason is None


def uncompiled(config: TrainConfig) -> AbstractContextManager[object]:
    """Let a sharded model compute eagerly: its blocks are compiled for the training shape only."""
    return set_stance("force_eager") if config.compile and config.is_sharded else nullcontext()


# --- saving -----------------------------------------------------------------------------------


def save(trainer: Trainer, step: int) -> None:
    """Begin this step's checkpoint; training goes on while it is written.

    Raises:
        FloatingPointError: the weights or the optimizer's state are not finite, on every process.
    """
    config, model, optimizers = trainer.config, trainer.raw_model, trainer.optimizers
    with trainer.log.paused():
        distributed.reshard(model)  # an evaluation leaves FSDP's parameters gathered
        if name := checkpoint.find_nonfinite(model, optimizers):
            raise FloatingPointError(f"{name} is not finite after step {step}, which is not saved")
        state = checkpoint.TrainerState(
            step=step,
            tokens_seen=step * config.total_batch_size,
            model_config=asdict(model.config),
            train_config=config.saved(),
            data_fingerprint=trainer.batches.shards.fingerprint,
            val_fingerprint=trainer.val_shards.fingerprint,
            rng_states=checkpoint.rng_states(),
            grad_scaler=trainer.scaler.state_dict(),
        )
        trainer.writer.save(state, model, optimizers)


if __name__ == "__main__":
    run_command(main)
