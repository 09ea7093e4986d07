"""Train a GPT-2: TF32, bfloat16 autocast, torch.compile, flash attention, fused AdamW, DDP.

    python train_gpt2.py                                  one process: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train_gpt2.py             eight GPUs (or gloo on CPUs)

Without flags this is the 124M reproduction on FineWeb-Edu: 10B tokens in 19,073 steps.
"""

import gc
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import cast

import runtime.threads  # noqa: F401 - before torch, which reads what it sets

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from dataloader import Batch, ShardedDataLoader, validation_batches
from formats import checkpoint
from formats.load import load_model
from hellaswag import evaluate_hellaswag
from lr_schedule import learning_rate
from model import GPT
from ops import IGNORE_INDEX, CompiledBlocks, checkpoint_activations
from optimizers import Muon, share_by_spelling
from runtime import distributed
from runtime.cli import run_command
from runtime.device import autocast, eval_mode, make_deterministic, tune_malloc
from runtime.distributed import DistInfo, print0
from sample import generate_tokens
from tokenizer import END_OF_TEXT, gpt2_encoding, token_bytes
from training.checks import check_gradients, check_optimizers, run_preflight
from training.plan import CHECKPOINT_BYTES_PER_PARAMETER, print_plan, seconds_of
from training.resume import parse_config, run_model_config
from training.run import Run, open_run

TIMED_BATCHES, TIMED_EXAMPLES = 8, 64  # of an evaluation, for --max-minutes
SAMPLE_COUNT, SAMPLE_TOKENS, SAMPLE_TOP_K = 4, 32, 50
PROMPT_TOKENS = 16  # of the validation split, without --sample-prompt


@dataclass(frozen=True)
class Trainer:
    """What learns."""

    raw_model: GPT  # neither compiled nor wrapped: for HellaSwag, sampling and saving
    model: nn.Module  # the same parameters, compiled and wrapped: for training and validation
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # of the loss, for float16 only
    batches: ShardedDataLoader  # this rank's micro-batches


def main(args: Sequence[str] | None = None) -> None:
    """Print the plan, check the machines, or join the other processes and train."""
    config, resumed = parse_config(sys.argv[1:] if args is None else args)
    if config.plan:
        print_plan(config, run_model_config(config, resumed))
        return
    if config.deterministic:
        make_deterministic()  # before the process group: NCCL then sums in another way
    with distributed.setup_distributed(
        config.device, config.cpu_offload, config.step_timeout
    ) as dist_info:
        if config.preflight:
            run_preflight(config, resumed, dist_info)
            return
        with open_run(config, resumed, dist_info) as run:
            if run is not None:  # None: it is finished
                if config.max_minutes is not None and resumed is None:
                    run = fit_max_minutes(run, build(run))
                train(run, build(run))


# --- what learns ------------------------------------------------------------------------------


def build(run: Run) -> Trainer:
    """Build the model, its optimizers and batches; load the checkpoint, if any."""
    device = run.dist_info.device
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: float32 products on tensor cores
    elif device.type == "cpu":
        make_deterministic()
        tune_malloc()
    batches = ShardedDataLoader(
        run.train_shards,
        block_size=run.model_config.block_size,
        micro_batch_size=run.micro_batch_size,
        grad_accum_steps=run.grad_accum_steps,
        seed=run.config.seed,
        shuffle=run.config.shuffle,
        vocab_size=run.model_config.vocab_size,
        dist_info=run.dist_info,
        start_step=run.start_step,
    )
    raw_model = build_model(run)
    model = compile_and_wrap(raw_model, run)
    optimizers = build_optimizers(raw_model, run)
    scaler = torch.amp.GradScaler(device.type, enabled=run.dtype == torch.float16)
    if run.resumed is not None:
        checkpoint.load_checkpoint(run.resumed, raw_model, optimizers, scaler)
        print0(f"resumed from {run.resumed.path}")
    return Trainer(raw_model, model, optimizers, scaler, batches)


def build_model(run: Run) -> GPT:
    """The raw model with new weights or those of `--init-from`; a checkpoint is loaded later."""
    config, dist_info = run.config, run.dist_info
    torch.manual_seed(config.seed)  # the same initial weights on every rank
    new_gpt = partial(GPT, run.model_config, run.loss_chunks)
    with dist_info.device:
        if config.is_sharded:
            model = distributed.build_sharded(
                new_gpt,
                dist_info,
                replicate=config.parallel == "hsdp",
                reshard_after_forward=config.reshard_after_forward,
                cpu_offload=config.cpu_offload,
                dtype=run.dtype,
            )
        else:
            model = new_gpt()
    checkpoint_activations(model.transformer.h, config.activation_checkpointing)
    if config.init_from is not None and run.resumed is None:
        with distributed.raise_on_all_ranks():
            source = load_model(config.init_from)
        checkpoint.copy_weights(source, model)
    torch.manual_seed(config.seed + dist_info.rank)  # dropout differs from rank to rank
    return model


def compile_and_wrap(model: GPT, run: Run) -> nn.Module:
    """Return the model to train: compiled, and averaging its gradients over all ranks."""
    trained: nn.Module = model
    if run.compiles and is_one_graph(run):
        trained = cast(nn.Module, torch.compile(model, dynamic=False))
    elif run.compiles:
        trained = CompiledBlocks(model)
    if run.dist_info.world_size == 1 or run.config.is_sharded:  # FSDP2 has wrapped the blocks
        return trained
    device = run.dist_info.device
    trained = DistributedDataParallel(
        trained,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    trained.broadcast_buffers = False  # `train_step` does it; torch deprecates the argument
    return trained


def is_one_graph(run: Run) -> bool:
    """Whether to compile the model as one graph instead of block by block.

    On an H200, one graph of 12 layers is 1.2 % faster and starts 12 to 20 s later; of 48 layers,
    it was not compiled after 100 s. On two CPU cores, 124M starts after 79 s instead of 36 s, and
    is not faster. Under DDP, gradients are exchanged as soon as a block's backward pass ends.
    """
    is_one_gpu = run.dist_info.device.type == "cuda" and run.dist_info.world_size == 1
    return is_one_gpu and not run.config.is_sharded and run.model_config.n_layer <= 12


def build_optimizers(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    """AdamW as GPT-3 had it (Brown et al. 2020, appendix B), fused: one pass over the state.

    With `--optimizer muon`, the blocks' matrices are Muon's. Matrices decay, those outside the
    blocks by `--embedding-decay`; biases and LayerNorm gains, which have one dimension, do not. A
    group's `lr_scale`, 1 by default, multiplies the learning rate.
    """
    config, parameters = run.config, dict(model.named_parameters())
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        names = [name for name, p in parameters.items() if ".h." in name and p.dim() == 2]
        muon = Muon(
            # Queries, keys and values are three matrices, stacked.
            [{"params": [parameters.pop(n)], "parts": 3 if "c_attn" in n else 1} for n in names],
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            dist_info=run.dist_info,
            dtype=torch.float32 if run.dtype == torch.float16 else run.dtype,
            compile=run.compiles and run.dist_info.device.type == "cuda",  # no faster on a CPU
        )
        optimizers.append(muon)
    matrices = {name: p for name, p in parameters.items() if p.dim() >= 2}
    embeddings = [matrices.pop(name) for name in list(matrices) if ".h." not in name]
    others = [p for p in parameters.values() if p.dim() < 2]
    groups = [
        {"params": list(matrices.values()), "weight_decay": config.weight_decay},
        {"params": embeddings, "weight_decay": config.embedding_weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.adam_beta2)
    optimizers.append(AdamW(groups, lr=0.0, betas=betas, eps=1e-8, fused=True))
    check_optimizers(model, optimizers, config.max_lr)
    if config.spelling_share:  # the first optimizer's step comes before all updates
        wte = model.get_parameter("transformer.wte.weight")
        optimizers[0].register_step_pre_hook(share_by_spelling(wte, config.spelling_share))
    return optimizers


# --- training ---------------------------------------------------------------------------------


def train(run: Run, trainer: Trainer) -> None:
    """Train to `max_steps`: a turn is one optimizer step, the last only evaluates and saves."""
    with run.recording(), trainer.batches:
        if run.begins_elsewhere:
            save(run, trainer, run.start_step)  # so that this run can be resumed by itself
        for step in range(run.start_step, run.config.max_steps + 1):
            evaluate(run, trainer, step)
            if run.saves(step):
                save(run, trainer, step)
            if run.ends(step):
                run.finish(step)
                break
            loss, grad_norm = train_step(run, trainer, step)
            lr = learning_rate(run.config, step)
            run.log.step(step + 1, lr=lr, loss=loss, grad_norm=grad_norm)
            if step == run.start_step:
                gc.collect()  # later, all that was compiled would be gone through again,
                gc.freeze()  # for half a second on one rank, while the others wait


def train_step(run: Run, trainer: Trainer, step: int) -> tuple[float, float]:
    """Make the update after `step` updates: accumulate, average over ranks, clip, update.

    Returns:
        Over the global batch, the mean loss and the gradient's global norm before clipping.

    Raises:
        FloatingPointError: loss or gradient are not finite, on every rank alike; the weights are as
            they were.
    """
    device, raw_model, model = run.dist_info.device, trainer.raw_model, trainer.model
    lr, scaler = learning_rate(run.config, step), trainer.scaler
    loss_sum = torch.zeros((), device=device)
    for micro_step in range(run.grad_accum_steps):
        # The ranks' gradients are averaged in the last backward pass only.
        distributed.set_gradient_sync((model, raw_model), micro_step == run.grad_accum_steps - 1)
        inputs, targets = next(trainer.batches)
        with autocast(device, run.dtype):
            _, loss = model(inputs, targets)
        scaler.scale(loss / run.grad_accum_steps).backward()
        loss_sum += loss.detach() / run.grad_accum_steps
    if step == run.start_step:
        check_gradients(raw_model)
    for optimizer in trainer.optimizers:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), run.config.grad_clip)
    norm = distributed.full_tensor(norm).to(device)
    # All ranks decide alike whether to update and whether to stop.
    mean_loss, mean_norm, asked = distributed.average_over_ranks(loss_sum, norm, run.stop.is_asked)
    if asked:
        run.stop.sync()
    is_finite = math.isfinite(mean_loss) and math.isfinite(mean_norm)
    if not is_finite:
        raise_unless_overflow(mean_loss, mean_norm, scaler, run.log.next_text())
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        if is_finite:  # not `scaler.step`, by which one optimizer may step and another not
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    distributed.sync_buffers(raw_model)  # GPT-2 has none
    return mean_loss, mean_norm


def raise_unless_overflow(
    loss: float, norm: float, scaler: torch.amp.GradScaler, its_text: str
) -> None:
    """Stop before an update that would spoil the weights.

    A float16 gradient may overflow: then this step makes no update, and the next has half the
    scale, down to 1.
    """
    if not math.isfinite(loss) or scaler.get_scale() <= 1:  # 1 without float16
        raise FloatingPointError(
            f"loss {loss:.4f}, gradient norm {norm}: no update was made; {its_text} shows the text"
        )
    print0("a float16 gradient overflowed: no update was made, the loss scale is halved")


# --- evaluation -------------------------------------------------------------------------------


def evaluate(run: Run, trainer: Trainer, step: int) -> None:
    """Run and log what is due after `step` updates.

    Every rank runs equally many batches: `distributed.rank_batches` splits them so. Before each,
    `run.stop.interrupt_evaluation` lets a signal stop all ranks.
    """
    config = run.config
    evaluations = (  # steps between two; from run and trainer to metrics of `metrics.jsonl`
        (config.val_every, validate),
        (config.hellaswag_every, score_hellaswag),
        (config.sample_every, write_samples),
    )
    due = [measure for every, measure in evaluations if run.is_due(every, step)]
    if not due:
        return
    with run.log.evaluation(step) as record, eval_mode(trainer.raw_model), run.stop.interruptible():
        for measure in due:
            record |= measure(run, trainer)


def validate(run: Run, trainer: Trainer) -> dict[str, float]:
    """Validate, over the same windows whatever the number of ranks."""
    batches = validation_batches(
        run.val_shards,
        block_size=run.model_config.block_size,
        micro_batch_size=run.micro_batch_size,
        max_tokens=run.config.val_tokens,
        vocab_size=run.model_config.vocab_size,
        dist_info=run.dist_info,
        before_batch=run.stop.interrupt_evaluation,
    )
    vocab_size = run.model_config.vocab_size
    return evaluate_loss(trainer.model, batches, vocab_size, run.dtype, run.dist_info)


@torch.no_grad()
def evaluate_loss(
    model: nn.Module,
    batches: Iterable[Batch],
    vocab_size: int,
    dtype: torch.dtype,
    dist_info: DistInfo,
) -> dict[str, float]:
    """The mean loss over all ranks' batches: `val_loss`, nats per token; `val_bpb`, bits per byte.

    Losses, tokens and their bytes are summed over the ranks and divided once, so that the results
    do not depend on the ranks' number. Ids that are not GPT-2's have no `val_bpb`.
    """
    lengths = torch.from_numpy(token_bytes(vocab_size)).to(dist_info.device)
    exact = torch.float32 if dist_info.device.type == "mps" else torch.float64  # MPS has no float64
    totals = torch.zeros(3, dtype=exact, device=dist_info.device)
    for inputs, targets in batches:
        with autocast(dist_info.device, dtype):
            _, loss = model(inputs, targets)
        counts = targets != IGNORE_INDEX
        totals[0] += torch.where(counts.any(), loss * counts.sum(), 0.0)
        totals[1] += counts.sum()
        totals[2] += (lengths[targets.clamp(min=0)] * counts).sum()
    loss_sum, count_sum, byte_sum = distributed.all_reduce_sum(totals).tolist()
    metrics = {"val_loss": loss_sum / count_sum}
    if byte_sum:
        metrics["val_bpb"] = loss_sum / math.log(2) / byte_sum
    return metrics


def score_hellaswag(run: Run, trainer: Trainer) -> dict[str, float]:
    """HellaSwag's accuracies; none where its examples could not be had."""
    if not run.hellaswag:
        return {}
    before_batch = run.stop.interrupt_evaluation
    score = evaluate_hellaswag(
        trainer.raw_model, run.hellaswag, run.dist_info, run.dtype, before_batch=before_batch
    )
    return score.metrics()


def write_samples(run: Run, trainer: Trainer) -> dict[str, float]:
    """Continue the prompt, from a random generator of its own, into `samples.txt`.

    Every rank does this, so that none waits long for another; rank 0 writes.
    """
    device, encoding = run.dist_info.device, gpt2_encoding()
    prompt = run.val_shards.read(0, PROMPT_TOKENS).tolist()
    if (text := run.config.sample_prompt) is not None:
        prompt = encoding.encode_ordinary(text) or [END_OF_TEXT]
    sequences = generate_tokens(
        trainer.raw_model,
        torch.tensor([prompt] * SAMPLE_COUNT, device=device),
        SAMPLE_TOKENS,
        top_k=SAMPLE_TOP_K,
        generator=torch.Generator(device).manual_seed(run.config.seed),
        dtype=run.dtype,
        stop_token=None,  # as many tokens on every rank, which a sharded model needs
    )
    run.log.samples([encoding.decode(sequence) for sequence in sequences])
    return {"samples": len(sequences)}


# --- saving -----------------------------------------------------------------------------------


def save(run: Run, trainer: Trainer, step: int) -> None:
    """Begin this step's checkpoint; training goes on while it is written.

    Raises:
        FloatingPointError: the weights or the optimizers' state are not finite, on every rank.
    """
    model, optimizers = trainer.raw_model, trainer.optimizers
    with run.log.paused():
        distributed.reshard(model)  # else FSDP would save what an evaluation has left gathered
        if name := checkpoint.find_nonfinite(model, optimizers):
            raise FloatingPointError(f"{name} is not finite after step {step}, which is not saved")
        state = checkpoint.RunState(
            step=step,
            tokens_seen=step * run.config.total_batch_size,
            model_config=asdict(model.config),
            train_config=run.config.saved(),
            data_fingerprint=run.train_shards.fingerprint,
            val_fingerprint=run.val_shards.fingerprint,
            rng_states=checkpoint.rng_states(),
            grad_scaler=trainer.scaler.state_dict(),
            optimizers=[type(optimizer).__name__ for optimizer in optimizers],
            optimizer_values=checkpoint.optimizer_state(model, optimizers, tensors=False),
            code_logits=checkpoint.code_logits(model.config),
        )
        run.writer.save(state, model, optimizers)


# --- a time budget ----------------------------------------------------------------------------


def fit_max_minutes(run: Run, trainer: Trainer) -> Run:
    """The run with as many steps as `--max-minutes` leaves time for.

    Optimizer steps are timed, and a part of each evaluation; samples are not counted. The trainer
    cannot be used any more.
    """
    config, begun = run.config, perf_counter()
    few = run.hellaswag[:: max(1, len(run.hellaswag) // TIMED_EXAMPLES)]
    few_tokens = run.dist_info.world_size * run.micro_batch_size * run.model_config.block_size
    few_tokens *= TIMED_BATCHES
    part = replace(run, hellaswag=few, config=replace(config, val_tokens=few_tokens))
    val_tokens = min(config.val_tokens, run.val_shards.total_tokens)
    evaluations = (
        (config.val_every, validate, max(1, val_tokens / few_tokens)),
        (config.hellaswag_every, score_hellaswag, len(run.hellaswag) / max(1, len(few))),
    )
    with trainer.batches:
        step = partial(train_step, run, trainer, 0)
        step_seconds = seconds_of(step, run.dist_info)
        with eval_mode(trainer.raw_model):
            others = [
                (every, parts * seconds_of(partial(measure, part, trainer), run.dist_info))
                for every, measure, parts in evaluations
                if every
            ]
    save_seconds = CHECKPOINT_BYTES_PER_PARAMETER * run.model_config.n_params / 1e9  # 1 GB/s
    others.append((config.checkpoint_every or sys.maxsize, save_seconds))
    # Each comes one or two times more than its share of the steps: at the start, and at the end.
    left = 60 * cast(float, config.max_minutes) - (perf_counter() - begun)
    left -= sum(1.5 * seconds for _, seconds in others)
    seconds_per_step = step_seconds + sum(seconds / every for every, seconds in others)
    steps = -distributed.all_reduce_max(-max(1, int(left / seconds_per_step)))
    print0(f"--max-minutes {config.max_minutes:g}: --max-steps {steps}, {step_seconds:.3g} s each")
    run.log.config = replace(config, max_steps=steps, max_minutes=None)
    return replace(run, config=run.log.config)


if __name__ == "__main__":
    run_command(main)
