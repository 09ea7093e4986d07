"""Train GPT-2: TF32, bfloat16 autocast, torch.compile, flash attention, fused AdamW, DDP.

    python train_gpt2.py                                  one process: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train_gpt2.py             eight GPUs (or gloo on CPUs)

Without flags, this reproduces GPT-2 124M on FineWeb-Edu: 10B tokens in 19,073 steps.

The file reads from top to bottom: model, compiling, optimizers, the loop, the step, saving.
`run` holds what is fixed during training, such as the settings; `trainer` holds what changes.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import runtime.threads  # noqa: F401 - sets variables that torch reads when it is imported

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dataloader import ShardedDataLoader
from evaluation import evaluate, fit_max_minutes
from lr_schedule import settings_at
from model import GPT, Block, Linear
from ops import IGNORE_INDEX, CompiledBlocks, checkpoint_activations
from optimizers import Muon
from runtime.cli import run_command
from training.run import Numbers, Run, StepNumbers, Trainer, start_run


def main(args: Sequence[str] | None = None) -> None:
    """Train a GPT-2, with the settings that the flags give."""
    with start_run(args) as run:
        if run is None:  # finished, or only `--plan` or `--preflight`
            return
        if run.config.max_minutes is not None and run.resumed is None:
            run = fit_max_minutes(run, build(run), train_step)  # its trainer is freed here
        train(run, build(run))


# --- model and optimizers ---------------------------------------------------------------------


def build(run: Run) -> Trainer:
    """Build the model, its optimizers and batches; load the checkpoint, if any."""
    if run.ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: float32 matmuls on tensor cores
    raw_model = build_model(run)
    trainer = Trainer(
        raw_model=raw_model,
        model=run.ranks.wrap(compile_model(raw_model, run)),
        optimizers=build_optimizers(raw_model, run),
        scaler=torch.amp.GradScaler(run.ranks.device.type, enabled=run.dtype == torch.float16),
        batches=ShardedDataLoader(
            run.train_shards,
            block_size=run.model_config.block_size,
            micro_batch_size=run.micro_batch_size,
            seed=run.config.seed,
            shuffle=run.config.shuffle,
            vocab_size=run.model_config.vocab_size,
            dist_info=run.ranks,
            position=run.resumed.state.position if run.resumed else 0,
        ),
    )
    if run.resumed is not None:
        trainer.load(run.resumed, run.ranks)
    return trainer


def build_model(run: Run) -> GPT:
    """Build the raw model, with new weights or the weights of the `--init-from` model."""
    torch.manual_seed(run.config.seed)  # the same initial weights on every rank
    model = run.ranks.build(partial(GPT, run.model_config, run.loss_chunks), unit=Block)
    checkpoint_activations(model.transformer.h, run.config.activation_checkpointing)
    run.copy_init_weights(model)  # with `--init-from`
    torch.manual_seed(run.config.seed + run.ranks.rank)  # dropout differs from rank to rank
    return model


def compile_model(model: GPT, run: Run) -> nn.Module:
    """Compile the model as one graph or, where that is not faster, block by block.

    On an H200, one graph of 12 layers is 1.2 % faster and starts 12 to 20 s later; a graph of 48
    layers had not compiled after 100 s. On two CPU cores, one graph of 124M is not faster and
    starts after 79 s instead of 36 s. With several processes, blocks let the exchange of gradients
    overlap the backward pass.
    """
    if not run.compiles:
        return model
    is_one_gpu = run.ranks.device.type == "cuda" and run.ranks.world_size == 1
    if is_one_gpu and run.config.parallel == "ddp" and run.model_config.n_layer <= 12:
        return cast(nn.Module, torch.compile(model, dynamic=False))
    return CompiledBlocks(model)


def build_optimizers(model: GPT, run: Run) -> list[Optimizer]:
    """Build AdamW with GPT-3's settings (Brown et al. 2020, appendix B) and, if chosen, Muon.

    A parameter of a block, such as the weight of any `nn.Linear` or a bare `nn.Parameter`, is a
    matrix if at least two of its dimensions are above 1. With `--optimizer muon`, Muon updates
    those with exactly two dimensions; what `model.Linear` stacks is cut into its matrices. Matrices
    outside the blocks are embeddings, with a separate weight decay. All other parameters, such as
    biases, LayerNorm gains or a temperature of (H, 1, 1), are vectors, which are not decayed.

    A group may have an `lr`, `weight_decay` or `momentum` of its own, which the factors of
    `lr_schedule.settings_at` multiply.
    """
    config, parameters = run.config, list(model.parameters())
    in_blocks = set(model.transformer.h.parameters())
    is_matrix = {p: sum(size > 1 for size in p.shape) > 1 for p in parameters}
    matrices = [p for p in parameters if is_matrix[p] and p in in_blocks]
    embeddings = [p for p in parameters if is_matrix[p] and p not in in_blocks]
    vectors = [p for p in parameters if not is_matrix[p]]

    optimizers: list[Optimizer] = []
    if config.optimizer == "muon":
        rows = {layer.weight: layer.rows for layer in model.modules() if isinstance(layer, Linear)}
        muon = Muon(
            [{"params": [p], "rows": rows.get(p, ())} for p in matrices if p.dim() == 2],
            lr=config.max_lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            ranks=run.ranks,
            dtype=torch.float32 if run.dtype == torch.float16 else run.dtype,
            compile=run.compiles and run.ranks.device.type == "cuda",  # not faster on CPUs
        )
        optimizers.append(muon)
        matrices = [p for p in matrices if p.dim() > 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": embeddings, "weight_decay": config.embedding_weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.adam_beta2)
    optimizers.append(AdamW(groups, lr=config.max_lr, betas=betas, eps=1e-8, fused=True))
    run.share_by_spelling(model, optimizers[-1])  # with `--spelling-share`
    return optimizers


# --- training ---------------------------------------------------------------------------------


def train(run: Run, trainer: Trainer) -> None:
    """Train to `max_steps`.

    The loop has one turn more than there are updates: the last turn only saves and evaluates. A
    step is saved before it is evaluated, so that nothing is lost if the evaluation fails or the
    process is killed in it; the checkpoint is written meanwhile.

    A GPU never waits for the host: `train_step` only queues its work, and the numbers of a step are
    read once the next step is queued. `save` and `evaluate` first read all that are left.
    """
    with run.recording(trainer), trainer.batches:
        for step in range(run.start_step, run.config.max_steps + 1):
            is_saved = run.saves(step)
            if is_saved:
                save(run, trainer, step)
            evaluate(run, trainer, step)
            if run.ends(step):
                if run.saves(step) and not is_saved:  # a signal came during the evaluation
                    save(run, trainer, step)
                run.finish(step)
                break
            trainer.unread.append(run.fit_micro_batch(train_step, trainer, step))
            run.read_numbers(trainer, keep=run.reads_late)  # on a GPU, of the step before
            if step == run.start_step:
                trainer.after_first_step(run.writer)


def train_step(run: Run, trainer: Trainer, step: int) -> StepNumbers:
    """Make the update after `step` updates: accumulate, average over ranks, clip, update.

    To log a number of your own, add a scalar tensor to `scalars`, which are averaged over
    micro-steps and ranks, or to `totals`, which are averaged over ranks. A module may keep a number
    from its forward pass in an attribute, such as `self.entropy`.

    Returns:
        The numbers to log, on the device: the mean loss of the global batch, its gradient's global
        norm before clipping, and your own. `Run.read_numbers` raises an error if the loss or the
        norm is not finite, or if a target is masked; nothing that follows from it is saved.
    """
    ranks, raw_model, scaler = run.ranks, trainer.raw_model, trainer.scaler
    trainer.settings.multiply(settings_at(run.config, step))
    micro_steps, sums = run.micro_steps(step), dict[str, Tensor]()
    for micro_step in range(micro_steps):
        inputs, targets = next(trainer.batches)
        # Backward passes add up gradients, so each loss is divided by the number of micro-steps.
        # Only the last one averages the gradients over the ranks: once per step is enough.
        with ranks.accumulate(trainer.model, is_last=micro_step == micro_steps - 1):
            with run.autocast():
                loss = trainer.model(inputs, targets).loss
            scaler.scale(loss / micro_steps).backward()
        scalars = Numbers(train_loss=loss, masked=(targets == IGNORE_INDEX).any())
        for name, scalar in scalars.items():
            mean = torch.as_tensor(scalar).detach() / micro_steps
            sums[name] = sums[name] + mean if name in sums else mean
    for optimizer in trainer.optimizers:
        scaler.unscale_(optimizer)
    totals = Numbers(sums)
    totals["grad_norm"] = norm = ranks.grad_norm(raw_model.parameters())
    # The numbers' one all-reduce. It also lets all ranks stop together if one received a signal.
    totals["stop"] = run.stop.signal
    trainer.check_step(step - run.start_step, totals)
    numbers = StepNumbers(step + 1, trainer.batches.tokens_seen, ranks.average(totals))
    # With float16, both optimizers skip an overflow together, so the numbers are read here.
    is_finite = not scaler.is_enabled() or run.is_finite(trainer, numbers)
    if run.config.grad_clip:
        nn.utils.clip_grads_with_norm_(raw_model.parameters(), run.config.grad_clip, norm)
    for optimizer in trainer.optimizers:
        if is_finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    ranks.sync_buffers(raw_model)  # GPT-2 has none
    return numbers


# --- saving -----------------------------------------------------------------------------------


def save(run: Run, trainer: Trainer, step: int) -> None:
    """Start to save a checkpoint; training continues while it is written.

    Raises:
        DivergedError: on every rank, if a weight or the optimizers' state is not finite.
    """
    run.read_numbers(trainer)
    with run.log.paused():
        trainer.check_finite(step, run)
        # The state has all that is not a tensor: step, position, settings, random generators, …
        run.writer.save(trainer.run_state(step, run), trainer)


if __name__ == "__main__":
    run_command(main)
