"""Train GPT-2: TF32, bfloat16 autocast, torch.compile, flash attention, fused AdamW, DDP.

    python train_gpt2.py                                  one process: CUDA, MPS or CPU
    torchrun --nproc_per_node=8 train_gpt2.py             eight GPUs (or gloo on CPUs)

Without flags, this reproduces GPT-2 124M on FineWeb-Edu: 10B tokens in 19,073 steps.

The file reads from top to bottom: model, compiling, optimizers, the loop, the step, saving.
`Run` is what is fixed, such as the settings; `Trainer` is what changes, and what acts on it.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import runtime.threads  # noqa: F401 - sets variables that torch reads when it is imported

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from dataloader import ShardedDataLoader
from evaluation import evaluate
from formats.checkpoint import copy_weights
from formats.load import load_model
from lr_schedule import settings_at, windows_at
from model import GPT, IGNORE_INDEX, Block, Linear
from ops import checkpoint_activations
from optimizers import Muon
from runtime.cli import run_command
from runtime.distributed import raise_on_all_ranks
from runtime.precision import autocast
from spelling import share_by_spelling
from time_limit import fit_max_minutes
from training.run import Run, start_run
from training.trainer import Numbers, Trainer
from vocabulary import TextGPT


def main(args: Sequence[str] | None = None) -> None:
    """Train a GPT-2, with the settings that the flags give."""
    with start_run(args) as run:
        if run is None:  # finished, or only `--plan` or `--preflight`
            return
        if run.config.max_minutes is not None and run.resumed is None:
            run = fit_max_minutes(build(run), train_step)  # its trainer is freed here
        train(build(run))


# --- model and optimizers ---------------------------------------------------------------------


def build(run: Run) -> Trainer:
    """Build the model, its optimizers and batches; load the checkpoint, if any."""
    if run.ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: float32 matmuls on tensor cores
    raw_model = build_model(run)
    trainer = Trainer(
        run=run,
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
        ),
    )
    if run.resumed is not None:
        trainer.restore(run.resumed)  # last: an edit builds its own state above
    return trainer


def build_model(run: Run) -> GPT:
    """Build the raw model, with new weights or the weights of the `--init-from` model."""
    torch.manual_seed(run.config.seed)  # the same initial weights on every rank
    gpt = GPT if run.vocabulary is None else partial(TextGPT, run.vocabulary)
    model = run.ranks.build(partial(gpt, run.model_config, run.loss_chunks), unit=Block)
    checkpoint_activations(model.transformer.h, run.config.activation_checkpointing)
    if run.config.init_from is not None and run.resumed is None:
        with raise_on_all_ranks():
            source = load_model(run.config.init_from)
        copy_weights(source, model, run.ranks)
    torch.manual_seed(run.config.seed + run.ranks.rank)  # dropout differs from rank to rank
    return model


def compile_model(model: GPT, run: Run) -> nn.Module:
    """Compile the model as one graph on one GPU, or else block by block.

    One graph makes a step of 12 layers a little faster, but compiles longer, and of 48 layers far
    too long. On a CPU it is not faster. With several processes, blocks let the exchange of
    gradients overlap the backward pass.
    """
    if not run.compiles:
        return model
    is_one_gpu = run.ranks.device.type == "cuda" and run.ranks.world_size == 1
    if is_one_gpu and run.config.parallel == "ddp" and run.model_config.n_layer <= 12:
        return cast(nn.Module, torch.compile(model, dynamic=False))
    return compile_by_block(model)


def compile_by_block(model: GPT) -> GPT:
    """Compile embeddings, blocks and loss in place, one by one."""
    for part in (model.embed, *model.transformer.h, model.loss):
        part.compile(dynamic=False)
    return model


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
    adamw = AdamW(groups, lr=config.max_lr, betas=betas, eps=1e-8, fused=True)
    if config.spelling_share:
        wte = model.get_parameter("transformer.wte.weight")
        share = share_by_spelling(wte, config.spelling_share, run.ranks, run.vocabulary)
        adamw.register_step_pre_hook(share)  # changes the gradient of `wte`
    if run.vocabulary is not None:
        divide = run.vocabulary.divide_gradient(model.lm_head.weight, run.ranks)
        adamw.register_step_pre_hook(divide)
    return [*optimizers, adamw]


# --- training ---------------------------------------------------------------------------------


def train(trainer: Trainer) -> None:
    """Train to `max_steps`.

    A step is saved before it is evaluated, so that nothing is lost if the evaluation fails or the
    process is killed in it; the checkpoint is written meanwhile.

    A GPU never waits for the host: `train_step` only queues its work, and the numbers of a step are
    read once the next step is queued. `save` and `evaluate` first read all that are left.
    """
    with trainer:  # writes the log and checkpoints, and reads batches
        for step in trainer.steps():  # one turn more than updates: the last only saves, evaluates
            if trainer.saves(step):
                save(trainer, step)
            evaluate(trainer, step)
            if trainer.saves(step):  # a signal came during the evaluation
                save(trainer, step)
            if trainer.ends(step):
                break
            trainer.log(trainer.make(train_step, step))
        trainer.finish(step)


def train_step(trainer: Trainer, step: int) -> Numbers:
    """Make the update after `step` updates: accumulate, average over ranks, clip, update.

    To log a scalar tensor of your own, pass it to `numbers.add`, which averages over micro-steps,
    or to `numbers.set`; both are averaged over ranks. A module may keep a number from its forward
    pass in an attribute, such as `self.entropy`.

    Returns:
        The numbers to log, on the device: the mean loss of the global batch, its gradient's global
        norm before clipping, and your own. `Trainer.read_numbers` raises an error if the loss or
        the norm is not finite, or if a target is masked; nothing that follows from it is saved.
    """
    run, raw_model, scaler = trainer.run, trainer.raw_model, trainer.scaler
    factors = settings_at(run.config, step)
    trainer.settings.multiply(factors)
    micro_steps = windows_at(run.config, step) // (run.micro_batch_size * run.ranks.world_size)
    numbers = Numbers(step + 1, lr=run.config.max_lr * factors.get("lr", 1.0))
    for micro_step in range(micro_steps):
        inputs, targets = next(trainer.batches)
        # Backward passes add up gradients, so each loss is divided by the number of micro-steps.
        # Only the last one averages the gradients over the ranks: once per step is enough.
        with run.ranks.accumulate(trainer.model, is_last=micro_step == micro_steps - 1):
            with autocast(run.ranks.device, run.dtype):
                loss = trainer.model(inputs, targets).loss
            scaler.scale(loss / micro_steps).backward()
        numbers.add(micro_steps, train_loss=loss, masked=(targets == IGNORE_INDEX).any())
    for optimizer in trainer.optimizers:
        scaler.unscale_(optimizer)
    norm = run.ranks.grad_norm(raw_model.parameters())
    numbers.set(grad_norm=norm, stop=run.stop.signal)
    trainer.check_step(step, numbers)
    # The numbers' one all-reduce. It also lets all ranks stop together if one received a signal.
    numbers.average(run.ranks)
    # With float16, both optimizers skip an overflow together, so the numbers are read here.
    is_finite = not scaler.is_enabled() or trainer.is_finite(numbers)
    if run.config.grad_clip:
        nn.utils.clip_grads_with_norm_(raw_model.parameters(), run.config.grad_clip, norm)
    for optimizer in trainer.optimizers:
        if is_finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    run.ranks.sync_buffers(raw_model)  # GPT-2 has none
    return numbers


# --- saving -----------------------------------------------------------------------------------


def save(trainer: Trainer, step: int) -> None:
    """Start to save a checkpoint; training continues while it is written.

    Raises:
        DivergedError: on every rank, if a weight or the optimizers' state is not finite.
    """
    trainer.read_numbers()
    with trainer.run_log.paused():
        contents = trainer.contents()  # tensors and numbers of model and optimizers, by name
        trainer.check_finite(step, contents)
        # The state has all the rest: step, position, settings, random generators, …
        trainer.writer.save(trainer.state_after(step, contents), contents)


if __name__ == "__main__":
    run_command(main)
