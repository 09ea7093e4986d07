"""Train GPT-2: TF32, bfloat16 autocast, torch.compile, flash attention, fused AdamW, DDP.

    python train_gpt2.py                                  one process: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train_gpt2.py             eight GPUs (or gloo on CPUs)

Without flags, this reproduces GPT-2 124M on FineWeb-Edu: 10B tokens in 19,073 steps.
"""

import gc
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import cast

import runtime.threads  # noqa: F401 - sets variables that torch reads when it is imported

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
from training.plan import CHECKPOINT_BYTES_PER_PARAMETER, print_plan, time_call
from training.resume import parse_config, run_model_config
from training.run import Run, open_run

TIMED_BATCHES, TIMED_EXAMPLES = 8, 64  # how much of an evaluation --max-minutes times
SAMPLE_COUNT, SAMPLE_TOKENS, SAMPLE_TOP_K = 4, 32, 50
PROMPT_TOKENS = 16  # without --sample-prompt, samples continue the start of the validation split


@dataclass(frozen=True)
class Trainer:
    """State of the training loop: model, optimizers, loss scaler and batches."""

    raw_model: GPT  # neither compiled nor wrapped: for HellaSwag, sampling and saving
    model: nn.Module  # the same parameters, compiled and wrapped: for training and validation
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # scales the loss; enabled for float16 only
    batches: ShardedDataLoader  # this rank's micro-batches


def main(args: Sequence[str] | None = None) -> None:
    """Train, or only print the plan (`--plan`) or check the machines (`--preflight`)."""
    config, resumed = parse_config(sys.argv[1:] if args is None else args)
    if config.plan:
        print_plan(config, run_model_config(config, resumed))
        return
    if config.deterministic:
        make_deterministic()  # before the process group, because it changes how NCCL sums
    with distributed.setup_distributed(
        config.device, config.cpu_offload, config.step_timeout
    ) as dist_info:
        if config.preflight:
            run_preflight(config, resumed, dist_info)
            return
        with open_run(config, resumed, dist_info) as run:
            if run is not None:  # it is None if the run is finished
                if config.max_minutes is not None and resumed is None:
                    run = fit_max_minutes(run, build(run))
                train(run, build(run))


# --- model and optimizers ---------------------------------------------------------------------


def build(run: Run) -> Trainer:
    """Build the model, its optimizers and batches; load the checkpoint, if any."""
    device = run.dist_info.device
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: float32 matmuls on tensor cores
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
    """Build the raw model, with new weights or the weights of the `--init-from` model."""
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
    """Wrap the raw model for training: compile it and average its gradients over all ranks."""
    trained: nn.Module = model
    if run.compiles and is_one_graph(run):
        trained = cast(nn.Module, torch.compile(model, dynamic=False))
    elif run.compiles:
        trained = CompiledBlocks(model)
    if run.dist_info.world_size == 1 or run.config.is_sharded:  # FSDP2 averages by itself
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
    """Return whether to compile the model as one graph instead of block by block.

    On an H200, one graph of 12 layers is 1.2 % faster and starts 12 to 20 s later; a graph of 48
    layers had not compiled after 100 s. On two CPU cores, one graph of 124M is not faster and
    starts after 79 s instead of 36 s. With several processes, blocks let the exchange of gradients
    overlap the backward pass.
    """
    is_one_gpu = run.dist_info.device.type == "cuda" and run.dist_info.world_size == 1
    return is_one_gpu and not run.config.is_sharded and run.model_config.n_layer <= 12


def build_optimizers(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    """Build AdamW with GPT-3's settings (Brown et al. 2020, appendix B) and, if chosen, Muon.

    With `--optimizer muon`, Muon updates the matrices of the blocks. Weight decay applies to
    matrices, with `--embedding-decay` for the matrices outside the blocks, and not to biases and
    LayerNorm gains. The learning rate is multiplied by a group's `lr_scale`, 1 by default.
    """
    config, parameters = run.config, dict(model.named_parameters())
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        names = [name for name, p in parameters.items() if ".h." in name and p.dim() == 2]
        muon = Muon(
            # `c_attn` stacks three matrices: queries, keys and values.
            [{"params": [parameters.pop(n)], "stacked": 3 if "c_attn" in n else 1} for n in names],
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            dist_info=run.dist_info,
            dtype=torch.float32 if run.dtype == torch.float16 else run.dtype,
            compile=run.compiles and run.dist_info.device.type == "cuda",  # not faster on CPUs
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
    if config.spelling_share:  # the hook must run before any optimizer updates the weights
        wte = model.get_parameter("transformer.wte.weight")
        optimizers[0].register_step_pre_hook(share_by_spelling(wte, config.spelling_share))
    return optimizers


# --- training ---------------------------------------------------------------------------------


def train(run: Run, trainer: Trainer) -> None:
    """Train to `max_steps`; the last turn of the loop only evaluates and saves."""
    with run.recording(), trainer.batches:
        if run.starts_from_other_run:
            save(run, trainer, run.start_step)  # so that it can be resumed without the other run
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
                # Later collections would rescan all compiled objects, for half a second on one
                # rank while the others wait.
                gc.collect()
                gc.freeze()


def train_step(run: Run, trainer: Trainer, step: int) -> tuple[float, float]:
    """Make the update after `step` updates: accumulate, average over ranks, clip, update.

    Returns:
        The mean loss of the global batch, and its gradient's global norm before clipping.

    Raises:
        FloatingPointError: on every rank, if the loss or the gradient is not finite; the weights
            are unchanged.
    """
    device, raw_model, model = run.dist_info.device, trainer.raw_model, trainer.model
    lr, scaler = learning_rate(run.config, step), trainer.scaler
    loss_sum = torch.zeros((), device=device)
    for micro_step in range(run.grad_accum_steps):
        # Gradients are averaged over the ranks in the last backward pass only.
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
    # Every rank must make the same decisions: whether to update and whether to stop.
    mean_loss, mean_norm, stop = distributed.average_over_ranks(loss_sum, norm, run.stop.signaled)
    if stop:
        run.stop.sync()
    is_finite = math.isfinite(mean_loss) and math.isfinite(mean_norm)
    if not is_finite:
        raise_unless_overflow(mean_loss, mean_norm, scaler, run.log.inspect_command())
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        if is_finite:  # with `scaler.step`, one optimizer could step and another could not
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    distributed.sync_buffers(raw_model)  # GPT-2 has none
    return mean_loss, mean_norm


def raise_unless_overflow(
    loss: float, norm: float, scaler: torch.amp.GradScaler, inspect_command: str
) -> None:
    """Raise if the loss or gradient is not finite, unless a float16 gradient overflowed.

    An overflow only skips this update and halves the loss scale, which never goes below 1.
    """
    if not math.isfinite(loss) or scaler.get_scale() <= 1:  # 1 without float16
        raise FloatingPointError(
            f"loss {loss:.4f}, gradient norm {norm}: no update was made; to see the text of the "
            f"step, run {inspect_command}"
        )
    print0("a float16 gradient overflowed: no update was made, the loss scale is halved")


# --- evaluation -------------------------------------------------------------------------------


def evaluate(run: Run, trainer: Trainer, step: int) -> None:
    """Run and log the evaluations that are due after `step` updates.

    Every rank must run the same number of batches: `distributed.rank_batches` splits them. Before
    each batch, `run.stop.interrupt_evaluation` lets a signal stop all ranks.
    """
    config = run.config
    evaluations = (  # steps between two evaluations; function that returns metrics to log
        (config.val_every, validate),
        (config.hellaswag_every, score_hellaswag),
        (config.sample_every, write_samples),
    )
    due = [measure for every, measure in evaluations if run.is_due(every, step)]
    if not due:
        return
    with run.log.evaluation(step) as record, eval_mode(trainer.raw_model), run.stop.interruptible():
        for measure in due:
            metrics = measure(run, trainer)
            run.log.claim_names(getattr(measure, "__name__", repr(measure)), metrics)
            record |= metrics


def validate(run: Run, trainer: Trainer) -> dict[str, float]:
    """Validate on the same windows at any number of ranks."""
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
    """Return the mean loss of all ranks' batches: `val_loss`, in nats per token, and `val_bpb`.

    Losses, tokens and bytes are summed over the ranks and then divided once, so that the results
    do not depend on the number of ranks. `val_bpb`, in bits per byte, is left out if the ids are
    not GPT-2's.
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
    loss_sum, count_sum, byte_sum = distributed.all_reduce_sum(totals).tolist()
    metrics = {"val_loss": loss_sum / count_sum}
    if byte_sum:
        metrics["val_bpb"] = loss_sum / math.log(2) / byte_sum
    return metrics


def score_hellaswag(run: Run, trainer: Trainer) -> dict[str, float]:
    """Score HellaSwag; return no metrics if its examples could not be loaded."""
    if not run.hellaswag:
        return {}
    before_batch = run.stop.interrupt_evaluation
    score = evaluate_hellaswag(
        trainer.raw_model, run.hellaswag, run.dist_info, run.dtype, before_batch=before_batch
    )
    return score.metrics()


def write_samples(run: Run, trainer: Trainer) -> dict[str, float]:
    """Append continuations of the prompt to `samples.txt`, from a separate random generator.

    Every rank samples, so that no rank waits long for another; rank 0 writes.
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
        stop_token=None,  # a sharded model needs the same number of tokens on every rank
    )
    run.log.samples([encoding.decode(sequence) for sequence in sequences])
    return {"samples": len(sequences)}


# --- saving -----------------------------------------------------------------------------------


def save(run: Run, trainer: Trainer, step: int) -> None:
    """Start to save a checkpoint; training continues while it is written.

    Raises:
        FloatingPointError: on every rank, if a weight or the optimizers' state is not finite.
    """
    model, optimizers = trainer.raw_model, trainer.optimizers
    with run.log.paused():
        distributed.reshard(model)  # an evaluation leaves parameters gathered
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
    """Return the run with the number of steps that fits into `--max-minutes`.

    Times the optimizer step and a part of each evaluation, without samples. The trainer cannot be
    used afterwards.
    """
    config, start = run.config, perf_counter()
    examples = run.hellaswag[:: max(1, len(run.hellaswag) // TIMED_EXAMPLES)]
    tokens = run.dist_info.world_size * run.micro_batch_size * run.model_config.block_size
    tokens *= TIMED_BATCHES
    timed_run = replace(run, hellaswag=examples, config=replace(config, val_tokens=tokens))
    val_tokens = min(config.val_tokens, run.val_shards.total_tokens)
    evaluations = (  # steps between two evaluations, function, times as long as the timed part
        (config.val_every, validate, max(1, val_tokens / tokens)),
        (config.hellaswag_every, score_hellaswag, len(run.hellaswag) / max(1, len(examples))),
    )
    with trainer.batches:
        step = partial(train_step, run, trainer, 0)
        step_seconds = time_call(step, run.dist_info)
        with eval_mode(trainer.raw_model):
            others = [
                (every, times * time_call(partial(measure, timed_run, trainer), run.dist_info))
                for every, measure, times in evaluations
                if every
            ]
    save_seconds = CHECKPOINT_BYTES_PER_PARAMETER * run.model_config.n_params / 1e9  # at 1 GB/s
    others.append((config.checkpoint_every or sys.maxsize, save_seconds))
    # Evaluations also run at the start and at the end, which is once or twice more.
    left = 60 * cast(float, config.max_minutes) - (perf_counter() - start)
    left -= sum(1.5 * seconds for _, seconds in others)
    seconds_per_step = step_seconds + sum(seconds / every for every, seconds in others)
    steps = -distributed.all_reduce_max(-max(1, int(left / seconds_per_step)))
    print0(f"--max-minutes {config.max_minutes:g}: --max-steps {steps}, {step_seconds:.3g} s each")
    run.log.config = replace(config, max_steps=steps, max_minutes=None)
    return replace(run, config=run.log.config)


if __name__ == "__main__":
    run_command(main)
