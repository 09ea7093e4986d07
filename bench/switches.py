"""Changes to the product's defaults that a measurement on a GPU is to decide: `ALL_SWITCHES`.

Each is applied in the process of one run, before its trainer is built.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from model import GPTConfig, Transformer
from ops import IGNORE_INDEX


@dataclass(frozen=True)
class Switch:
    """One change to the product."""

    flags: dict[str, Any] = field(default_factory=dict)
    """Of train_gpt2.py."""
    environment: dict[str, str] = field(default_factory=dict)
    """torch's settings; set in Python, one thread's would not reach another, such as autograd's."""
    definition: tuple[str, str, Any] | None = None
    """A module, a name in it, and what that name is to stand for."""
    gpu_only: bool = False
    """Whether it is of no use elsewhere."""

    def apply(self) -> None:
        """Change this process's code; not the flags and the environment."""
        if self.definition:
            module, name, value = self.definition
            setattr(import_module(module), name, value)


def masked_lm_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, _: int
) -> Tensor:
    """As `ops.lm_head_loss` in one chunk; the padding is at -inf, instead of cut off."""
    padding = torch.arange(weight.size(0), device=weight.device) >= vocab_size
    logits = F.linear(hidden, weight).float().masked_fill(padding, -math.inf)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)


class NarrowTransformer(Transformer):
    """A Transformer whose residual stream is bfloat16, as far as matrix products are.

    From the sum of the embeddings on; without autocast it stays float32.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.h[0].register_forward_pre_hook(self._narrow)

    @staticmethod
    def _narrow(_: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        return (x.bfloat16() if torch.is_autocast_enabled(x.device.type) else x, *others)


def compressing_ddp(*args: Any, **arguments: Any) -> DistributedDataParallel:  # noqa: ANN401
    """DDP that averages gradients in bfloat16."""
    model = DistributedDataParallel(*args, **arguments)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return model


def ddp(**arguments: Any) -> Switch:  # noqa: ANN401
    """More arguments for DDP."""
    return replace_ddp(partial(DistributedDataParallel, **arguments))


def replace_ddp(wrap: Callable[..., DistributedDataParallel]) -> Switch:
    """Another way to make a DDP model."""
    definition = ("train_gpt2", "DistributedDataParallel", wrap)
    return Switch(definition=definition, gpu_only=True)


COORDINATE_DESCENT = {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}
MAX_AUTOTUNE = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"} | COORDINATE_DESCENT
SWITCHES = {
    "masked padding": Switch(
        {"loss_chunks": 1}, definition=("model", "lm_head_loss", masked_lm_head_loss)
    ),
    "2 loss chunks": Switch({"loss_chunks": 2}),
    "4 loss chunks": Switch({"loss_chunks": 4}),
    "bfloat16 residual": Switch(definition=("model", "Transformer", NarrowTransformer)),
    "micro-batch 32": Switch({"micro_batch_size": 32}, gpu_only=True),
    "coordinate descent": Switch(environment=COORDINATE_DESCENT, gpu_only=True),
    "max-autotune-no-cudagraphs": Switch(environment=MAX_AUTOTUNE, gpu_only=True),
}
DDP_SWITCHES = {  # of several processes
    "optimize_ddp off": Switch(
        definition=("torch._dynamo.config", "optimize_ddp", False), gpu_only=True
    ),
    "static_graph": ddp(static_graph=True),  # not with accumulation: pytorch/pytorch#187732
    "buckets of 10 MiB": ddp(bucket_cap_mb=10),  # by default 25
    "buckets of 100 MiB": ddp(bucket_cap_mb=100),
    "bf16_compress_hook": replace_ddp(compressing_ddp),
    "batched_grad_copy": ddp(batched_grad_copy=True),  # torch 2.11 has none
}
ALL_SWITCHES = {"": Switch()} | SWITCHES | DDP_SWITCHES
