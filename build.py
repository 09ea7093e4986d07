"""The parts of a training run, each made from its configuration: data, model, optimizer."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch._functorch.config as functorch_config
from torch import nn

from checkpoint import load_model, read_state
from dataloader import count_windows
from device import compiler_problem, failure_to_compile, select_dtype
from distributed import (
    DistributedContext,
    failing_together,
    require_same,
    say,
    shard_model,
    shard_of,
    wrap_model,
)
from model import GPT, GPTConfig
from shards import TokenShards, open_shards
from train_config import TrainConfig


def open_data(config: TrainConfig, context: DistributedContext) -> tuple[TokenShards, TokenShards]:
    """Open and check both splits, which must be the same on every process."""
    with failing_together(context):
        train_shards = open_shards(config.data_dir, "train")
        val_shards = open_shards(config.data_dir, "val")
        if config.val_every and not count_windows(val_shards.total_tokens, config.block_size):
            raise ValueError(
                f"the validation split has {val_shards.total_tokens} tokens, fewer than "
                f"--block-size {config.block_size} + 1: give more data, or --val-every 0"
            )
    content = [
        f"{path} of {len(array):,} tokens"
        for shards in (train_shards, val_shards)
        for path, array in zip(shards.paths, shards.arrays, strict=True)
    ]
    fingerprints = f"fingerprints {train_shards.fingerprint} and {val_shards.fingerprint}"
    require_same("the data shards", [*content, fingerprints], context)
    return train_shards, val_shards


def model_dimensions(config: TrainConfig, checkpoint: Path | None) -> GPTConfig:
    """The dimensions that the flags give or, with `--init-from`, its model's or the run's."""
    if config.init_from is None:
        return config.model_config()
    if checkpoint is not None:  # the run has long left its source
        return GPTConfig(**read_state(checkpoint).model_config)
    return replace(load_model(config.init_from).config, block_size=config.block_size)


def build_model(
    config: TrainConfig, checkpoint: Path | None, dtype: torch.dtype, context: DistributedContext
) -> tuple[GPT, nn.Module]:
    """The raw model, the same on every process, and the one that trains: compiled and wrapped.

    It is new, or `--init-from`'s; with a checkpoint, its weights are yet to be loaded.
    """
    with failing_together(context):
        refuse_impossible_modes(config, context)
    source = config.init_from if checkpoint is None else None
    if config.is_sharded:
        model = build_sharded_model(config, checkpoint, source, dtype, context)
        return model, model
    if source is None:
        with context.device:
            model = GPT(model_dimensions(config, checkpoint))
        draw_weights(model, config.seed)
    else:
        model = load_model(source, context.device)
        model.crop_block_size(config.block_size)
    if can_compile(config, context):
        return model, wrap_model(cast(nn.Module, torch.compile(model, dynamic=False)), context)
    return model, wrap_model(model, context)


def refuse_impossible_modes(config: TrainConfig, context: DistributedContext) -> None:
    """Refuse what this device or these processes cannot do.

    Raises:
        ValueError: naming what they can.
    """
    for name in ("cpu_offload", "activation_offload"):
        if getattr(config, name) and context.device.type != "cuda":
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} needs GPUs, and this device is {context.device.type}")
    if config.is_sharded and select_dtype(config.dtype, context.device) == torch.float16:
        raise ValueError(
            f"--parallel {config.parallel} is for bfloat16 or float32, and this GPU has no "
            f"bfloat16: use --dtype float32, or --parallel ddp"
        )
    if config.is_sharded and not torch.distributed.is_initialized():
        start = "--standalone --nproc_per_node=2 train_gpt2.py"
        if config.parallel == "hsdp":
            start = "--nnodes=2 --nproc_per_node=8 ... on each of two machines"
        raise ValueError(
            f"--parallel {config.parallel} is for processes that torchrun starts, as in "
            f"torchrun {start}; alone, use --parallel ddp"
        )
    world_size, local = context.world_size, context.local_world_size
    if config.parallel == "hsdp" and (world_size == local or world_size % local):
        raise ValueError(
            f"--parallel hsdp shards within a machine and replicates over machines, and here "
            f"{local} of {world_size} processes are on this one: use --parallel fsdp, or several "
            f"machines with equally many each"
        )


def build_sharded_model(
    config: TrainConfig,
    checkpoint: Path | None,
    source: str | None,
    dtype: torch.dtype,
    context: DistributedContext,
) -> GPT:
    """The model shared out over all processes; blocks are compiled one by one."""
    with torch.device("meta"):
        model = GPT(model_dimensions(config, checkpoint))
    if can_compile(config, context):
        for block in model.transformer.h:
            block.compile(dynamic=False)
    shard_model(
        model,
        model.transformer.h,
        context,
        methods=["encode"],
        replicate=config.parallel == "hsdp",
        reshard_after_forward=config.reshard_after_forward,
        cpu_offload=config.cpu_offload,
        dtype=dtype,
    )
    if source is None:
        draw_weights(model, config.seed)
        return model
    loaded = load_model(source)
    loaded.crop_block_size(config.block_size)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), loaded.parameters(), strict=True):
            parameter.copy_(shard_of(value, parameter))
    return model


@torch.no_grad()
def draw_weights(model: GPT, seed: int) -> None:
    """Initialise a model, sharded or not, with the same numbers for the same seed."""
    torch.manual_seed(seed)
    for parameter, value in model.initial_values():
        parameter.copy_(shard_of(value, parameter))


def can_compile(config: TrainConfig, context: DistributedContext) -> bool:
    """Whether to compile; where that cannot be, say why."""
    if not config.compile:
        return False
    problem = compiler_problem(context.device) or failure_to_compile(context.device)
    if problem is not None:
        say(context, f"warning: not compiled, training will be slower: {problem}")
        return False
    say(context, "compiling: the first validation and the first step take longer")
    # Compiled code is kept from run to run, that of our own autograd functions only if asked to.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    if context.device.type == "cpu":  # GELU again in the backward pass: 0.6 GiB less of 3.9
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
