"""GPT-2, and nothing else (Radford et al. 2019), with Hugging Face's parameter names.

Shapes in comments: B sequences, T tokens, C channels (`n_embd`), H heads, D = C / H, V ids.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from ops import KVCache, mean_in_chunks, scaled_dot_product_attention

GPT2_SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 350M
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
IGNORE_INDEX = -100  # a target with this value is not counted in the loss
VOCAB_MULTIPLE = 128  # tensor cores are fast if the LM head's rows are a multiple of this


@dataclass(frozen=True)
class GPTConfig:
    """The dimensions of a GPT-2; the defaults are the 124M model.

    A field that `training.config.TrainConfig` also has is a flag of `train_gpt2.py`.

    Raises:
        ValueError: a dimension is not positive, or `n_embd` is not a multiple of `n_head`.
    """

    block_size: int = 1024
    """Longest context, in tokens."""
    vocab_size: int = 50257
    """Token ids: 50,000 merges, 256 bytes, `<|endoftext|>`."""
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} must be a multiple of n_head {self.n_head}")

    @property
    def residual_std(self) -> float:
        """Standard deviation of the initial `c_proj` weights (GPT-2 paper, section 2.3).

        Each of the 2 * n_layer residual additions adds variance; smaller weights compensate.
        """
        return 0.02 / math.sqrt(2 * self.n_layer)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `VOCAB_MULTIPLE`."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @cached_property
    def n_params(self) -> int:
        """Parameters of the model, padding rows and position embeddings included."""
        with torch.device("meta"):  # allocates no memory
            return sum(parameter.numel() for parameter in GPT(self).parameters())


class ModelOutput(NamedTuple):
    """Output of a forward pass: exactly one of the two fields is not None."""

    logits: Tensor | None  # (B, T, vocab_size)
    loss: Tensor | None  # scalar, float32


class Linear(nn.Linear):
    """A linear layer with GPT-2's initial values: weights N(0, std), biases 0.

    If its weight stacks matrices, such as queries, keys and values, `n_out` has the rows of each.
    """

    def __init__(
        self, n_in: int, n_out: int | tuple[int, ...], *, bias: bool = True, std: float = 0.02
    ) -> None:
        self.rows = n_out if isinstance(n_out, tuple) else (n_out,)
        self.std = std  # set first: `super().__init__` calls `reset_parameters`
        super().__init__(n_in, sum(self.rows), bias)

    def reset_parameters(self) -> None:
        """Set the initial values."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with GPT-2's initial values: N(0, 0.02)."""

    def reset_parameters(self) -> None:
        """Set the initial values."""
        nn.init.normal_(self.weight, std=0.02)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the past, in training, validation, HellaSwag and sampling.

    torch's function runs flash attention (Dao 2023), which never stores all attention scores.

    Args:
        q: (B, H, T, D) queries.
        k: (B, H, S, D) keys. With a cache, S >= T: the queries belong to the last T tokens.
        v: (B, H, S, D) values.
    """
    if q.device.type == "mps":  # torch 2.11 would mix up the sequences (pytorch/pytorch#181133)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    n_queries, n_keys = q.size(2), k.size(2)
    # One query alone is the last token, which attends to all keys.
    bias = None if n_queries in (1, n_keys) else causal_lower_right(n_queries, n_keys)
    return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=n_queries == n_keys)


class CausalSelfAttention(nn.Module):
    """Multi-head attention over the past (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * (config.n_embd,))  # queries, keys, values
        self.c_proj = Linear(config.n_embd, config.n_embd, std=config.residual_std)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(self.c_attn.rows, dim=2)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = causal_attention(q, k, v)  # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


def gelu(x: Tensor) -> Tensor:
    """Return GPT-2's tanh-approximated GELU (Hendrycks & Gimpel 2016, section 2)."""
    if x.is_cuda and torch.compiler.is_compiling():
        # The same function with one exponential, since 0.5 (1 + tanh u) is the sigmoid of 2u. On a
        # GPU, tanh takes longer than reading and writing the tensor.
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate="tanh")


class MLP(nn.Module):
    """Position-wise feed-forward: four times the width, tanh-approximated GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, std=config.residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.c_proj(gelu(self.c_fc(x)))


class Block(nn.Module):
    """One pre-norm transformer layer: attention and MLP, each with a residual connection."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """GPT-2's layers under Hugging Face's names; `GPT.hidden_states` is their forward pass."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=1e-5)


def residual_stream(x: Tensor) -> Tensor:
    """Cast the residual stream to bfloat16 under bfloat16 autocast; float16's range is too small.

    This halves the memory traffic of LayerNorms and residual additions.
    """
    kind = x.device.type
    is_enabled = kind != "meta" and torch.is_autocast_enabled(kind)  # autocast does not know `meta`
    return x.bfloat16() if is_enabled and torch.get_autocast_dtype(kind) == torch.bfloat16 else x


class Embeddings(nn.Module):
    """Token plus position embeddings; a module, so that it can be compiled alone."""

    def __init__(self, transformer: Transformer) -> None:
        super().__init__()
        self.shared = (transformer,)  # a tuple: its parameters are not registered a second time

    def forward(self, idx: Tensor, past: int) -> Tensor:
        """Embed (B, T) ids and their positions from `past` on: (B, T, C)."""
        (transformer,) = self.shared
        positions = torch.arange(past, past + idx.size(1), device=idx.device)
        return residual_stream(transformer.wte(idx) + transformer.wpe(positions))


def lm_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of training, validation, HellaSwag and sampling, in float32.

    (..., C) hidden states and the (padded_vocab_size, C) LM head -> (..., padded_vocab_size). The
    padding makes the product fast.
    """
    return F.linear(hidden, weight).float()


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Return the mean cross-entropy of (N, V) float32 logits and (N,) targets, in nats per token.

    Columns from `vocab_size` on are padding and are left out.
    """
    if logits.is_cuda and torch.compiler.is_compiling():
        # 50,257 columns would make a GPU load two bytes at a time; a CPU is faster with the slice.
        is_padding = torch.arange(logits.size(-1), device=logits.device) >= vocab_size
        logits = logits.masked_fill(is_padding, -math.inf)
    else:
        logits = logits[:, :vocab_size]
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)


def training_loss(logits: Tensor, targets: Tensor, config: GPTConfig) -> Tensor:
    """Return the loss that training minimizes; validation always measures `cross_entropy`.

    A loss of your own may ignore the padding: its ids are then trained like ids that never occur,
    and they are never sampled. To leave them out, use `logits[:, :config.vocab_size]`.

    Args:
        logits: (N, padded_vocab_size) float32, of some of the tokens.
        targets: (N,) int64 next tokens; the mean leaves out `IGNORE_INDEX`.
        config: may have coefficients of the loss.
    """
    return cross_entropy(logits, targets, config.vocab_size)


class Loss(nn.Module):
    """Last LayerNorm, LM head and loss; a module, so that it can be compiled alone."""

    lm_logits = staticmethod(lm_logits)  # overridden in vocabulary.py

    def __init__(
        self, transformer: Transformer, lm_head: Linear, config: GPTConfig, chunks: int
    ) -> None:
        super().__init__()
        self.shared = transformer, lm_head  # see `Embeddings`
        self.config = config
        self.chunks = chunks

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of (B, T, C) outputs of the last layer; see `GPT.forward`."""
        transformer, lm_head = self.shared
        hidden, targets = (
            transformer.ln_f(x).flatten(0, 1),
            targets.flatten(),
        )  # (B * T, C), (B * T)
        if self.chunks == 1 and not torch.compiler.is_compiling():
            return self.mean_loss(hidden, lm_head.weight, targets)
        is_counted = targets != IGNORE_INDEX
        tensors = hidden, lm_head.weight, targets, is_counted
        return mean_in_chunks(self.mean_loss, *tensors, self.chunks)

    def mean_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of (N, C) hidden states and their (N,) targets."""
        logits = self.lm_logits(hidden, weight)
        if self.training:
            return training_loss(logits, targets, self.config)
        return cross_entropy(logits, targets, self.config.vocab_size)


class GPT(nn.Module):
    """The language model; `loss_chunks` is for `ops.mean_in_chunks`."""

    def __init__(self, config: GPTConfig, loss_chunks: int = 1) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied: one parameter
        self.embed = Embeddings(self.transformer)
        self.loss = Loss(self.transformer, self.lm_head, config, loss_chunks)

    def residual(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the last layer's output before it is normalized; see `hidden_states`."""
        x = self.embed(idx, 0 if cache is None else cache.length)  # (B, T, C)
        for block in self.transformer.h:
            x = block(x, cache)
        if cache is not None:
            cache.length += idx.size(1)
        return x

    def hidden_states(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the last layer's normalized output: (B, T, C), in the autocast dtype or float32.

        `cache` holds keys and values of earlier tokens; this call appends its own.
        """
        return self.transformer.ln_f(self.residual(idx, cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states (..., C): (..., vocab_size), without the padding.

        They are computed in float32 even under autocast: bfloat16 would round near logits to ties.
        """
        kind = "cpu" if hidden.is_meta else hidden.device.type  # autocast does not know `meta`
        with torch.autocast(kind, enabled=False):
            logits = lm_logits(hidden.float(), self.lm_head.weight.float())
        return logits[..., : self.config.vocab_size]

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> ModelOutput:
        """Return `(logits, None)` or, with `targets`, `(None, loss)`.

        The loss is float32, in nats per token: `training_loss` in training mode, else
        `cross_entropy`.

        Args:
            idx: (B, T) int64 token ids, T <= block_size.
            targets: (B, T) int64 ids of the next tokens; `IGNORE_INDEX` is not counted.
            cache: see `hidden_states`.
        """
        x = self.residual(idx, cache)  # (B, T, C)
        if targets is None:
            return ModelOutput(self.logits(self.transformer.ln_f(x)), None)
        return ModelOutput(None, self.loss(x, targets))
