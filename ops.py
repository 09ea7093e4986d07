"""The same results in less time or memory: cached keys, a loss in chunks, recomputed activations.

`model.py` states GPT-2 in plain terms; nothing here knows it. Shapes use the letters of `model.py`.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.utils.checkpoint import checkpoint

ModelConfig = Any  # a GPTConfig; model.py imports this module
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden, weight, targets) -> scalar

# --- generation ------------------------------------------------------------------------------


class KVCache:
    """Keys and values of the tokens seen so far, for generation.

    It has room for `n_tokens` tokens in each of `batch_size` sequences. `dtype` is attention's
    dtype: the autocast dtype, else float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        n_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        head_size = config.n_embd // config.n_head
        shape = (config.n_layer, batch_size, config.n_head, n_tokens, head_size)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new (B, H, T, D) keys and values; return all keys and values so far."""
        end = self.length + k.size(2)
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


# --- loss -------------------------------------------------------------------------------------


def mean_in_chunks(
    mean_loss: LossFunction,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    is_counted: Tensor,
    n_chunks: int,
) -> Tensor:
    """Return `mean_loss(hidden, weight, targets)`, computed in chunks of the N tokens.

    Only one chunk's logits exist at a time: less memory, the same gradients.

    Args:
        mean_loss: a mean over the counted tokens, a float32 scalar.
        hidden: (N, C) the last layer's output.
        weight: (padded_vocab_size, C) the LM head.
        targets: (N,) int64 next tokens.
        is_counted: (N,) bool, whether `mean_loss` counts a target.
        n_chunks: number of chunks.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # cast once, not for each chunk
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    needs_grad = torch.is_grad_enabled()
    return ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, is_counted, n_chunks, mean_loss, needs_grad
    )


class ChunkedLoss(torch.autograd.Function):
    """A loss and its gradients, one chunk of the tokens at a time.

    The forward pass already computes the gradients, so that a chunk's logits are needed only once.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        is_counted: Tensor,
        n_chunks: int,
        mean_loss: LossFunction,
        needs_grad: bool,
    ) -> Tensor:
        """Return the loss, see `mean_in_chunks`; `hidden` and `weight` have the matmuls' dtype."""

        def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            # The mean's gradient would underflow in float16.
            return mean_loss(hidden, weight, targets) * len(targets)

        n_counted = is_counted.sum()
        total = torch.zeros((), device=hidden.device)
        d_hidden, d_weight = [], torch.zeros_like(weight, dtype=torch.float32)
        chunks = (tensor.chunk(n_chunks) for tensor in (hidden, targets, is_counted))
        for h, target, counted in zip(*chunks, strict=True):
            fraction = counted.sum() / len(target)
            if not needs_grad:
                total += weigh(summed_loss(h, weight, target), fraction)
                continue
            # This changes no value, but makes the chunk wait for the gradient of the chunk before.
            # A compiler for GPUs would otherwise compute all chunks' logits first.
            h = h.masked_fill(d_weight[0, 0].isnan(), math.nan)
            (d_h, d_w), value = grad_and_value(summed_loss, argnums=(0, 1))(h, weight, target)
            total += weigh(value, fraction)
            d_hidden.append(weigh(d_h, fraction))
            d_weight += weigh(d_w, fraction)
        if needs_grad:
            ctx.save_for_backward(torch.cat(d_hidden), d_weight, n_counted)
        return total / n_counted

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Scale the gradients by the count; in the forward pass, float16 would underflow."""
        d_hidden, d_weight, n_counted = ctx.saved_tensors
        scale, dtype = d_loss / n_counted, d_hidden.dtype
        return (d_hidden * scale).to(dtype), (d_weight * scale).to(dtype), *5 * (None,)


def weigh(value: Tensor, fraction: Tensor) -> Tensor:
    """Return value times fraction, and 0 if no token is counted, where the value is NaN."""
    return torch.where(fraction > 0, value * fraction, 0.0)


# --- activation checkpointing -----------------------------------------------------------------

ActivationCheckpointing = Literal["none", "full"]


def checkpoint_activations(blocks: Iterable[nn.Module], mode: ActivationCheckpointing) -> None:
    """Make the backward pass of each block recompute activations instead of saving them.

    This replaces the blocks' `forward`; torch's wrapper would rename their parameters. A block with
    buffers saves its activations, because it would update the buffers twice.

    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.

    Args:
        blocks: modules without side effects other than on buffers.
        mode: `none` saves all activations, `full` only a block's inputs.
    """
    if mode == "full":
        for block in blocks:
            if not list(block.buffers()):
                block.forward = partial(_checkpointed, block.forward)


def _checkpointed(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
    """Return a block's output; evaluations save no activations and need no recomputation."""
    if torch.is_grad_enabled():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return forward(*args, **kwargs)
