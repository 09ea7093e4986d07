"""Attention for code compiled for a CPU: the same as torch's, in half the time.

Shapes in comments use the letters of `model.py`.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

QUERY_BLOCKS = 4  # more blocks skip more of the scores but compile longer
MAX_BLOCK_CAUSAL_TOKENS = 2048  # the scores of one block take memory that grows with T squared


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

    Plain causal attention uses `BlockCausalAttention` in code compiled for a CPU; in eager mode, it
    would be slower. With a mask or other `options`, torch's function is called.
    """
    is_plain = is_causal and attn_mask is None and not options
    if not (is_plain and torch.compiler.is_compiling() and fits_blocks(q, k, v)):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, **options)
    heads = (tensor.flatten(0, 1) for tensor in (q * q.size(-1) ** -0.5, k, v))
    y: Tensor = BlockCausalAttention.apply(*heads)  # type: ignore[no-untyped-call]
    return y.view(q.shape)


def fits_blocks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether `BlockCausalAttention` supports these queries, keys and values."""
    is_uniform = q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype
    if q.device.type != "cpu" or q.dim() != 4 or not is_uniform:
        return False
    T = q.size(2)
    return T % QUERY_BLOCKS == 0 and T <= MAX_BLOCK_CAUSAL_TOKENS


class BlockCausalAttention(torch.autograd.Function):
    """Causal attention from plain matmuls, one block of queries at a time.

    A block skips the keys after its last query: with 4 blocks, three eighths of the scores.
    The backward pass recomputes the probabilities from their log-sum-exp instead of saving them
    (FlashAttention-2, Dao 2023, algorithms 1 and 2).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ANN401
        """Attend; the arguments and the result are (B, T, D), where B is batch times heads.

        The queries are already scaled by 1/√D; T is a multiple of `QUERY_BLOCKS`.
        """
        outputs, log_sums = [], []
        for rows, end in query_blocks(q.size(1)):
            future = future_keys(rows, end, q.device)
            scores = (q[:, rows] @ k[:, :end].mT).float()
            scores = scores.masked_fill(future, -math.inf)
            log_sums.append(scores.logsumexp(dim=-1, keepdim=True))
            probs = (scores - log_sums[-1]).exp().to(v.dtype)
            outputs.append(probs @ v[:, :end])
        output, log_sum = torch.cat(outputs, dim=1), torch.cat(log_sums, dim=1)
        ctx.save_for_backward(q, k, v, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        """Return the gradients of queries, keys and values, (B, T, D) each."""
        q, k, v, output, log_sum = ctx.saved_tensors
        T = q.size(1)
        # Softmax's gradient subtracts this from every score of a row.
        shift = (d_output.float() * output.float()).sum(dim=-1, keepdim=True)
        d_q, d_k, d_v = [], [], []
        for rows, end in query_blocks(T):
            # Transposed, (B, keys, queries): otherwise the compiler recognizes the matmuls of the
            # forward pass and saves their results instead of recomputing them.
            future = future_keys(rows, end, q.device).mT
            scores = (k[:, :end] @ q[:, rows].mT).float()
            probs = (scores - log_sum[:, rows].mT).exp().masked_fill(future, 0.0)
            d_probs = (v[:, :end] @ d_output[:, rows].mT).float()
            d_scores = (probs * (d_probs - shift[:, rows].mT)).to(q.dtype)
            skipped_keys = (0, 0, 0, T - end)
            d_q.append(d_scores.mT @ k[:, :end])
            d_k.append(F.pad(d_scores @ q[:, rows], skipped_keys))
            d_v.append(F.pad(probs.to(v.dtype) @ d_output[:, rows], skipped_keys))
        return torch.cat(d_q, dim=1), sum(d_k[1:], d_k[0]), sum(d_v[1:], d_v[0])


def query_blocks(T: int) -> list[tuple[slice, int]]:
    """Return the rows of each block of queries and the end of the keys that they attend to."""
    size = T // QUERY_BLOCKS
    return [(slice(end - size, end), end) for end in range(size, T + 1, size)]


def future_keys(rows: slice, end: int, device: torch.device) -> Tensor:
    """Return a (queries, keys) bool mask: whether a key lies in the query's future."""
    queries = torch.arange(rows.start, rows.stop, device=device)
    return torch.arange(end, device=device) > queries[:, None]
