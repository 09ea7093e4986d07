"""The same results in less time or memory: cached keys, attention, loss, recomputed activations.

`model.py` states GPT-2 in plain terms; nothing here knows it. Shapes use the letters of `model.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.nn import functional as F
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


# --- attention on a CPU -----------------------------------------------------------------------

QUERY_BLOCKS = 8  # more blocks skip more of the scores but compile longer
cpu_attention: Literal["torch", "blocks"] = "torch"  # set by training/run.py


def select_attention(
    device: str, cpu: Mapping[str, Any], dtype: torch.dtype, block_size: int
) -> Literal["torch", "blocks"]:
    """Return `blocks` where attention takes enough of a step to save 5 % of it, else `torch`.

    That is so on AMD's Zen 5, whose bfloat16 products are twice as fast as a Zen 4's: see
    `bench/results/README.md`. AVX512-VP2INTERSECT tells them apart.

    Args:
        device: the device's type.
        cpu: what `torch.cpu.get_capabilities` returns.
        dtype: dtype for matmuls.
        block_size: context length in tokens.
    """
    is_zen5 = cpu.get("avx512_vp2intersect") and "AMD" in cpu.get("cpu_name", "")
    is_long = 1024 <= block_size <= 2048  # one block's scores take memory that grows with T squared
    is_fast = is_zen5 and device == "cpu" and dtype == torch.bfloat16 and is_long
    return "blocks" if is_fast else "torch"


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    **options: Any,  # noqa: ANN401
) -> Tensor:
    """Do the same as `torch.nn.functional.scaled_dot_product_attention`.

    If `cpu_attention` is `blocks`, the gradients of causal attention in bfloat16 take less time in
    code compiled for a CPU. All other calls, such as with a mask or in eager mode, are torch's.
    """
    is_plain = cpu_attention == "blocks" and is_causal and attn_mask is None and not options
    is_square = q.dim() == 4 and q.shape == k.shape == v.shape and q.size(2) % QUERY_BLOCKS == 0
    is_supported = q.device.type == "cpu" and q.dtype == k.dtype == v.dtype == torch.bfloat16
    if not (is_plain and is_square and is_supported and torch.compiler.is_compiling()):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, **options)
    heads = (tensor.flatten(0, 1) for tensor in (q, k, v))
    y: Tensor = BlockAttention.apply(*heads)  # type: ignore[no-untyped-call]
    return y.view(q.shape)


class BlockAttention(torch.autograd.Function):
    """torch's causal attention with a backward pass of large matmuls, one block of queries each.

    The backward pass recomputes the probabilities from their log-sum-exp instead of saving them
    (FlashAttention-2, Dao 2023, algorithm 2). A block skips the keys after its last query.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ANN401
        """Attend; arguments and result are (B * H, T, D), and T is a multiple of QUERY_BLOCKS."""
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, log_sums = (out[0] for out in attend(q[None], k[None], v[None], 0.0, True))
        ctx.save_for_backward(q, k, v, y, log_sums)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        """Return the gradients of queries, keys and values."""
        q, k, v, y, log_sums = ctx.saved_tensors
        T, scale = q.size(1), q.size(2) ** -0.5
        shifts = (d_y.float() * y.float()).sum(dim=-1)  # softmax's gradient subtracts them
        d_q, d_k, d_v = [], [], []
        for end in range(T // QUERY_BLOCKS, T + 1, T // QUERY_BLOCKS):
            rows = slice(end - T // QUERY_BLOCKS, end)
            # All scores are transposed: (B * H, keys, queries).
            positions = torch.arange(end, device=q.device)
            is_future = positions[:, None] > positions[rows]
            scores = (k[:, :end] @ q[:, rows].mT).float() * scale
            probs = (scores - log_sums[:, None, rows]).exp().masked_fill(is_future, 0.0)
            d_probs = (v[:, :end] @ d_y[:, rows].mT).float()
            d_scores = (probs * (d_probs - shifts[:, None, rows]) * scale).to(q.dtype)
            skipped_keys = (0, 0, 0, T - end)
            d_q.append(d_scores.mT @ k[:, :end])
            d_k.append(F.pad(d_scores @ q[:, rows], skipped_keys))
            d_v.append(F.pad(probs.to(v.dtype) @ d_y[:, rows], skipped_keys))
        return torch.cat(d_q, dim=1), sum(d_k[1:], d_k[0]), sum(d_v[1:], d_v[0])


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
