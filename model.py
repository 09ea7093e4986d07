"""GPT-2, and nothing else (Radford et al. 2019), with Hugging Face's parameter names.

Shapes in comments: B sequences, T tokens, C channels (`n_embd`), H heads, D = C / H, V ids.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

GPT2_SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 350M
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
VOCAB_MULTIPLE = 128  # tensor cores want the vocabulary matrix in multiples of this
QUERY_BLOCKS = 4  # of block_causal_attention; more leave out more and compile for longer
LONGEST_BLOCK_CAUSAL = 2048  # tokens
IGNORE_INDEX = -100  # a target with this value does not count towards the loss


@dataclass(frozen=True)
class GPTConfig:
    """The dimensions of a GPT-2; the defaults are the 124M model.

    Raises:
        ValueError: a dimension is not positive, or the heads do not divide the width.
    """

    block_size: int = 1024
    """Longest context, in tokens."""
    vocab_size: int = 50257
    """Token ids: 50,000 merges, 256 bytes, `<|endoftext|>`."""
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}: "
                f"--n-embd {self.n_head * round(self.n_embd / self.n_head) or self.n_head} would be"
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def block_params(self) -> int:
        """Parameters of one block."""
        return 12 * self.n_embd**2 + 13 * self.n_embd

    @property
    def n_params(self) -> int:
        """Parameters of the model, padding rows and position embeddings included."""
        embeddings = (self.padded_vocab_size + self.block_size) * self.n_embd
        return embeddings + self.n_layer * self.block_params + 2 * self.n_embd


class ModelOutput(NamedTuple):
    """What a forward pass returns: exactly one of the two is not None."""

    logits: Tensor | None  # (B, T, vocab_size)
    loss: Tensor | None  # scalar, float32


class KVCache:
    """Keys and values of the tokens seen so far, for generation.

    Args:
        config: the model's dimensions; the cache holds up to `config.block_size` tokens.
        batch_size: sequences, B.
        device: where the model is.
        dtype: the type that attention runs in (the autocast type, else float32).
    """

    def __init__(
        self, config: GPTConfig, batch_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (
            config.n_layer,
            batch_size,
            config.n_head,
            config.block_size,
            config.n_embd // config.n_head,
        )
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new (B, H, T, D) keys and values; return all of that layer's."""
        end = self.length + k.size(2)
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


Checkpointing = Literal["none", "selective", "full"]
ATEN = torch.ops.aten
SAVED_OPS = [  # what is slow to compute again: by `selective` it is kept
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
]


def prefers_block_causal(x: Tensor) -> bool:
    """Whether attention of (B, T, C) is faster by `BlockCausalAttention`: compiled, on a CPU.

    Not of long sequences: the scores of a block take memory that grows with T squared.
    """
    T = x.size(1)
    short = T % QUERY_BLOCKS == 0 and T <= LONGEST_BLOCK_CAUSAL
    return short and x.device.type == "cpu" and torch.compiler.is_compiling()


class BlockCausalAttention(torch.autograd.Function):
    """Causal attention by plain products, a block of queries at a time.

    A block leaves out the keys after it: three eighths of the scores are never computed. As in
    FlashAttention-2 (Dao 2023, algorithms 1 and 2), the backward pass computes the probabilities
    anew from the log of their sum, so that none is kept. Compiled for a CPU this takes half the
    time of torch's own flash attention there; eagerly it would be slower.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ANN401
        """Attend, with the heads in B.

        Args:
            ctx: autograd's.
            q: (B, T, D) queries, already scaled by 1/√D; `QUERY_BLOCKS` divides T.
            k: (B, T, D) keys.
            v: (B, T, D) values.

        Returns:
            (B, T, D).
        """
        outputs, log_sums = [], []
        for rows, end in query_blocks(q.size(1)):
            later = later_keys(rows, end, q.device)
            scores = (q[:, rows] @ k[:, :end].mT).float()
            scores = scores.masked_fill(later, -math.inf)
            log_sums.append(scores.logsumexp(dim=-1, keepdim=True))
            probs = (scores - log_sums[-1]).exp().to(v.dtype)
            outputs.append(probs @ v[:, :end])
        output, log_sum = torch.cat(outputs, dim=1), torch.cat(log_sums, dim=1)
        ctx.save_for_backward(q, k, v, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        """The gradients of queries, keys and values from the output's: (B, T, D) each."""
        q, k, v, output, log_sum = ctx.saved_tensors
        T = q.size(1)
        # What softmax's gradient subtracts from every score of a row.
        shift = (d_output.float() * output.float()).sum(dim=-1, keepdim=True)
        d_q, d_k, d_v = [], [], []
        for rows, end in query_blocks(T):
            # Transposed, (B, keys, queries). The same products as in the forward pass would be
            # found to be the same by the compiler, and kept from there.
            later = later_keys(rows, end, q.device).mT
            scores = (k[:, :end] @ q[:, rows].mT).float()
            probs = (scores - log_sum[:, rows].mT).exp().masked_fill(later, 0.0)
            d_probs = (v[:, :end] @ d_output[:, rows].mT).float()
            d_scores = (probs * (d_probs - shift[:, rows].mT)).to(q.dtype)
            rest = (0, 0, 0, T - end)  # the keys after the block get no gradient from it
            d_q.append(d_scores.mT @ k[:, :end])
            d_k.append(F.pad(d_scores @ q[:, rows], rest))
            d_v.append(F.pad(probs.to(v.dtype) @ d_output[:, rows], rest))
        return torch.cat(d_q, dim=1), sum(d_k[1:], d_k[0]), sum(d_v[1:], d_v[0])


def query_blocks(T: int) -> list[tuple[slice, int]]:
    """The rows of each block of queries, and where their last key ends."""
    size = T // QUERY_BLOCKS
    return [(slice(end - size, end), end) for end in range(size, T + 1, size)]


def later_keys(rows: slice, end: int, device: torch.device) -> Tensor:
    """(queries, keys) bool: whether a key lies in the query's future."""
    queries = torch.arange(rows.start, rows.stop, device=device)
    return torch.arange(end, device=device) > queries[:, None]


class CausalSelfAttention(nn.Module):
    """Multi-head attention over the past (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Attend; `mask` (True = may look) replaces the causal rule. (B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        # Without a mask, one new token may look at the whole cache; more start an empty one.
        is_causal = mask is None and T > 1
        if is_causal and prefers_block_causal(x):
            heads = (tensor.flatten(0, 1) for tensor in (q * q.size(-1) ** -0.5, k, v))
            y = BlockCausalAttention.apply(*heads)  # type: ignore[no-untyped-call]
            y = y.unflatten(0, (B, self.n_head))
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Position-wise feed-forward: four times the width, tanh-approximated GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the type of its input: a sharded block's parameters may come in another."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added after.

    `checkpointing` chooses what the backward pass computes again instead of keeping it (Chen et
    al. 2016, Training Deep Nets with Sublinear Memory Cost): `none`, all but products and
    attention (`selective`), or the whole block (`full`).
    """

    checkpointing: Checkpointing = "none"

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, eps=1e-5)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = LayerNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self.compute(x, mask, cache)
        again = partial(checkpoint, self.compute, x, mask, cache, use_reentrant=False)
        if self.checkpointing == "full":
            return again()
        return again(context_fn=partial(create_selective_checkpoint_contexts, SAVED_OPS))

    def compute(self, x: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Embeddings, the blocks, and the last LayerNorm: ids in, hidden states out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, eps=1e-5)

    def forward(
        self,
        idx: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The last layer's normalised output, before the vocabulary matrix.

        Args:
            idx: (B, T) int64 token ids.
            positions: (T,) or (B, T) int64 positions; by default 0…T-1, or on from the cache.
            mask: (B, 1, T, T) bool, True where a query may look; by default causal.
            cache: filled with this call's keys and values. It takes several tokens at once only
                while it is empty, and one at a time after.

        Returns:
            (B, T, C), in the autocast type or float32.
        """
        past = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(past, past + idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(positions)  # (B, T, C)
        for block in self.h:
            x = block(x, mask, cache)
        if cache is not None:
            cache.length += idx.size(1)
        return self.ln_f(x)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Vocabulary product and mean cross-entropy, a part of the tokens at a time.

    The gradients are computed with the loss, so that only one part's logits exist at once and
    none is computed twice. They are exact.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunks: int,
    ) -> Tensor:
        """The loss, a float32 scalar in nats a token.

        Args:
            ctx: autograd's.
            hidden: (N, C), of the type of the products.
            weight: (padded_vocab_size, C) of the same type.
            targets: (N,) int64; `IGNORE_INDEX` does not count.
            vocab_size: the ids after this are padding.
            chunks: parts, each of at most N / chunks tokens, rounded up.
        """
        ids = torch.arange(weight.size(0), device=weight.device)
        count = (targets != IGNORE_INDEX).sum()
        loss = torch.zeros((), device=hidden.device)
        d_hidden, d_weight = [], torch.zeros_like(weight, dtype=torch.float32)
        for h, target in zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True):
            logits = (h @ weight.T).float().masked_fill(ids >= vocab_size, -math.inf)
            log_sum = logits.logsumexp(dim=-1, keepdim=True)
            counts = target[:, None] != IGNORE_INDEX
            at_target = logits.gather(1, target[:, None].clamp(min=0))
            loss = loss + ((log_sum - at_target) * counts).sum()
            probs = (logits - log_sum).exp()
            d_logits = ((probs - (ids == target[:, None]).float()) * counts).to(h.dtype)
            d_hidden.append(d_logits @ weight)
            d_weight += d_logits.T @ h
        ctx.save_for_backward(torch.cat(d_hidden), d_weight, count)
        return loss / count

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Scale what the forward pass computed: only now, so that float16 does not underflow."""
        d_hidden, d_weight, count = ctx.saved_tensors
        scale, dtype = d_loss / count, d_hidden.dtype
        return (d_hidden * scale).to(dtype), (d_weight * scale).to(dtype), None, None, None


def in_autocast_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type that a product would cast them to here."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


class GPT(nn.Module):
    """The language model, initialised as GPT-2 was: N(0, 0.02), residual projections smaller.

    Args:
        config: the dimensions.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.loss_chunks = 1
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all parameters anew (GPT-2 paper, section 2.3)."""
        for parameter, value in self.initial_values():
            parameter.copy_(value)

    def initial_values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and what it begins as, whole, drawn one after the other."""
        # Each of the 2 * n_layer residual additions would add variance: shrink to compensate.
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            value = torch.zeros(parameter.shape, device=parameter.device)
            if parameter.dim() >= 2:
                value.normal_(std=residual_std if name.endswith("c_proj.weight") else 0.02)
            elif not name.endswith("bias"):
                value.fill_(1.0)  # LayerNorm gains
            yield parameter, value

    def set_checkpointing(self, checkpointing: Checkpointing) -> None:
        """Choose what the backward pass computes again; see `Block`."""
        for block in self.transformer.h:
            block.checkpointing = checkpointing  # type: ignore[assignment]

    def crop_block_size(self, block_size: int) -> None:
        """Shorten the longest context, forgetting the later position embeddings.

        Raises:
            ValueError: the model knows no positions beyond its own block size.
        """
        if block_size > self.config.block_size:
            raise ValueError(
                f"--block-size {block_size} is beyond this model's {self.config.block_size}"
            )
        self.config = replace(self.config, block_size=block_size)
        weight = self.transformer.wpe.weight
        self.transformer.wpe.weight = nn.Parameter(weight.detach()[:block_size].clone())

    def encode(
        self,
        idx: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """As `Transformer.forward`, by way of the whole model, which may be sharded."""
        return self.transformer(idx, positions, mask, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., vocab_size): the padding columns exist for the matrix product only."""
        return self.lm_head(hidden)[..., : self.config.vocab_size]

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> ModelOutput:
        """Next-token logits, or with `targets` the mean cross-entropy.

        Args:
            idx: (B, T) int64 token ids, T <= block_size.
            targets: (B, T) int64 ids of the next tokens; `IGNORE_INDEX` does not count.
            cache: see `Transformer.forward`.

        Returns:
            `(logits, None)` without targets; `(None, loss)` with, so that the full logits need
            never outlive the loss. The loss is float32, in nats a token.
        """
        hidden = self.transformer(idx, cache=cache)
        if targets is None:
            return ModelOutput(self.logits(hidden), None)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self.loss_chunks == 1:
            logits = self.logits(hidden).float()
            loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)
        elif torch.is_grad_enabled():
            loss = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
                *in_autocast_type(hidden, self.lm_head.weight),
                targets,
                self.config.vocab_size,
                self.loss_chunks,
            )
        else:
            loss = torch.zeros((), device=hidden.device)
            parts = (tensor.chunk(self.loss_chunks) for tensor in (hidden, targets))
            for h, target in zip(*parts, strict=True):
                logits = self.logits(h).float()
                loss += F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="sum")
            loss /= (targets != IGNORE_INDEX).sum()
        return ModelOutput(None, loss)
