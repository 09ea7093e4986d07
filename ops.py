"""Speed and memory optimizations: chunked loss, activation checkpointing, compiling by block.

`model.py` states GPT-2 in plain terms. Each function here computes one of these terms with the same
result in less time or memory. Shapes in comments use the letters of `model.py`.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ModelConfig = Any  # a GPTConfig; model.py imports this module
IGNORE_INDEX = -100  # a target with this value is not counted in the loss

# --- loss -------------------------------------------------------------------------------------


def training_loss(logits: Tensor, targets: Tensor, config: ModelConfig) -> Tensor:
    """Return the loss that training minimizes; validation always measures `cross_entropy`.

    A loss of your own may ignore the padding: its ids are then trained like ids that never occur,
    and they are never sampled. To leave them out, use `logits[:, :config.vocab_size]`.

    Args:
        logits: (N, padded_vocab_size) float32, of some of the tokens: see `lm_head_loss`.
        targets: (N,) int64 next tokens; `IGNORE_INDEX` is not counted.
        config: the model's `GPTConfig`, which may have coefficients of the loss.

    Returns:
        A mean over the counted tokens, a float32 scalar.
    """
    return cross_entropy(logits, targets, config.vocab_size)


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


def lm_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of training, validation, HellaSwag and sampling.

    Args:
        hidden: (..., C) the last layer's output.
        weight: (padded_vocab_size, C) the LM head. Its padding makes the product fast.

    Returns:
        (..., padded_vocab_size), float32.
    """
    return F.linear(hidden, weight).float()


def lm_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, config: ModelConfig, chunks: int, train: bool
) -> Tensor:
    """Return the mean loss of the LM head's logits.

    With several chunks, only one chunk's logits exist at a time: less memory, the same gradients.

    Args:
        hidden: (N, C) the last layer's output.
        weight: (padded_vocab_size, C) the LM head.
        targets: (N,) int64 next tokens; `IGNORE_INDEX` is not counted.
        config: the model's `GPTConfig`.
        chunks: number of chunks of the N tokens.
        train: whether the loss is `training_loss` or, for validation, `cross_entropy`.

    Returns:
        The loss, a float32 scalar.
    """

    def mean_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = lm_logits(hidden, weight)
        if train:
            return training_loss(logits, targets, config)
        return cross_entropy(logits, targets, config.vocab_size)

    if chunks == 1 and not torch.compiler.is_compiling():  # plain autograd
        return mean_loss(hidden, weight, targets)
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):  # cast once, not for each chunk
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)

    def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        # The mean's gradient would underflow in float16.
        return mean_loss(hidden, weight, targets) * len(targets)

    needs_grad = torch.is_grad_enabled()
    return ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, chunks, summed_loss, needs_grad
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
        chunks: int,
        summed_loss: Callable[[Tensor, Tensor, Tensor], Tensor],
        needs_grad: bool,
    ) -> Tensor:
        """Return the loss, see `lm_head_loss`; `hidden` and `weight` have the matmuls' dtype."""
        n_counted = (targets != IGNORE_INDEX).sum()
        total = torch.zeros((), device=hidden.device)
        d_hidden, d_weight = [], torch.zeros_like(weight, dtype=torch.float32)
        for h, target in zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True):
            fraction = (target != IGNORE_INDEX).sum() / len(target)  # that is counted
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
        return (d_hidden * scale).to(dtype), (d_weight * scale).to(dtype), None, None, None, None


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


# --- compiling --------------------------------------------------------------------------------


class CompiledBlocks(nn.Module):
    """A GPT that runs compiled, block by block, when it is called through this module.

    Its embeddings are another compiled part, and so is the loss with the last LayerNorm. Called
    directly, the same GPT runs eagerly, on inputs of any shape.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a GPT
        super().__init__()
        self.model = model
        compiled: Any = partial(torch.compile, dynamic=False)
        # A tuple keeps the blocks from being registered as submodules a second time.
        self.blocks = (nn.ModuleList(map(compiled, model.transformer.h)),)
        self.ends = {"embed": compiled(model.embed), "loss": compiled(model.loss)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a GPT's
        """Call the GPT with its parts replaced by the compiled ones."""
        model: Any = self.model
        eager = model.transformer.h
        (model.transformer.h,) = self.blocks
        vars(model).update(self.ends)
        try:
            return model(*args, **kwargs)
        finally:
            model.transformer.h = eager
            for name in self.ends:
                delattr(model, name)


# --- residual stream and activation ------------------------------------------------------------


def residual_stream(x: Tensor) -> Tensor:
    """Cast the residual stream to bfloat16 under bfloat16 autocast.

    This halves the memory traffic of LayerNorms and residual additions. float16's range would be
    too small.
    """
    kind = x.device.type
    is_enabled = kind != "meta" and torch.is_autocast_enabled(kind)  # autocast does not know `meta`
    return x.bfloat16() if is_enabled and torch.get_autocast_dtype(kind) == torch.bfloat16 else x


def gelu(x: Tensor) -> Tensor:
    """Return GPT-2's tanh-approximated GELU (Hendrycks & Gimpel 2016, section 2)."""
    if x.is_cuda and torch.compiler.is_compiling():
        # The same function with one exponential, since 0.5 (1 + tanh u) is the sigmoid of 2u. On a
        # GPU, tanh takes longer than reading and writing the tensor.
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate="tanh")
