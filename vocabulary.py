"""Train GPT-2 with embedding rows for a text's token ids only (`--vocabulary text`).

The embeddings of ids that never occur get the same gradient in each step. If they start equal, they
stay equal, so one shared row stands for all K of them. This trains the same GPT-2 as with a row for
each id, but a step computes fewer logits:

- log K is added to the shared row's logit, so that it has the probability of all K ids.
- The shared row's gradient is the sum over K ids. The backward pass divides it by √K, so that it
  counts K times in the gradient's norm, and `divide_gradient` divides it by √K again.

The inputs, targets and logits of the model have GPT-2's ids, and checkpoints have a row for each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corpus.shards import TokenShards
from model import GPT, IGNORE_INDEX, VOCAB_MULTIPLE, GPTConfig, Linear, Loss, lm_logits
from parallel import Ranks
from runtime.errors import UserError

TOKENS_AT_ONCE = 1 << 24  # tokens that are read and counted together
BY_ID = ("transformer.wte.weight", "lm_head.weight")  # ends of names of tensors with a row per id
TOLERANCE = 1e-3  # relative difference up to which rows are equal: rounding adds up


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Rows of the running model: one for each id of the text, the shared row, then padding."""

    ids: Tensor
    """(n_rows,) int64 ids from which the rows take their initial values."""
    rows: Tensor
    """(padded_vocab_size,) int64 row of each id."""
    n_own: int
    """Number of ids of the text, and index of the shared row."""

    @property
    def counts(self) -> Tensor:
        """Number of ids for which each row stands, (n_rows,) int64; 1 for unused padding."""
        return torch.bincount(self.rows, minlength=len(self.ids)).clamp(min=1)

    def divide_gradient(self, weight: Tensor, ranks: Ranks) -> Callable[..., None]:
        """Return an optimizer pre-step hook for the gradient of the LM head, (n_rows, C)."""
        factors = ranks.shard(self.counts.rsqrt()[:, None].to(weight.device), weight)

        def divide(*_: object) -> None:
            if weight.grad is not None:
                weight.grad.mul_(factors)

        return divide

    def expand(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the running model with a row for each id, as a checkpoint has them."""
        return {n: x[self.rows] if _is_by_id(n, x, self.ids) else x for n, x in tensors.items()}

    def select(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors with the rows of the running model.

        Raise UserError if the rows of the ids that share one are not equal.
        """
        by_id = {name: x for name, x in tensors.items() if _is_by_id(name, x, self.rows)}
        for name, tensor in by_id.items():
            shared = tensor[self.rows == self.n_own]
            if (shared - shared[0]).abs().max() > TOLERANCE * shared[0].abs().max():
                problem = f"{name} has different rows for ids that the text does not have"
                raise UserError(f"{problem}: use --vocabulary gpt2")
        return {**tensors, **{name: tensor[self.ids] for name, tensor in by_id.items()}}


def _is_by_id(name: str, tensor: Tensor, rows: Tensor) -> bool:
    """Return whether a tensor of the model or of an optimizer has these rows."""
    return name.endswith(BY_ID) and tensor.dim() > 0 and len(tensor) == len(rows)


def text_vocabulary(shards: TokenShards, config: GPTConfig) -> Vocabulary | None:
    """Return the vocabulary of a text; None if the text has every id."""
    counts = np.zeros(1 << 16, np.int64)  # the loader raises if an id is too large
    for start in range(0, shards.total_tokens, TOKENS_AT_ONCE):
        counts += np.bincount(shards.read(start, TOKENS_AT_ONCE), minlength=len(counts))
    is_own = torch.from_numpy(counts[: config.vocab_size] > 0)
    own, others = is_own.nonzero().squeeze(1), (~is_own).nonzero().squeeze(1)
    if not len(others):
        return None
    n_rows = -(-(len(own) + 2) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE  # at least one is padding
    ids = torch.full((n_rows,), config.padded_vocab_size - 1)
    ids[: len(own)], ids[len(own)] = own, others[0]
    rows = torch.full((config.padded_vocab_size,), len(own))
    rows[own], rows[config.vocab_size :] = torch.arange(len(own)), len(own) + 1
    return Vocabulary(ids, rows, len(own))


class DividedHead:
    """LM head whose shared row gets its gradient divided by √K."""

    def __init__(self, lm_head: Linear, factors: Tensor) -> None:
        self.lm_head = lm_head
        self.factors = factors

    @property
    def weight(self) -> Tensor:
        """The same values, whose gradient is multiplied by the factors."""
        weight = self.lm_head.weight
        return torch.lerp(weight.detach(), weight, self.factors)


class TextLoss(Loss):
    """Loss of GPT-2's ids over the whole vocabulary, with a logit for each row."""

    def __init__(self, model: GPT, chunks: int, vocabulary: Vocabulary, rows: Tensor) -> None:
        counts = vocabulary.counts.to(rows.device)
        head: Any = DividedHead(model.lm_head, counts.rsqrt()[:, None])
        config = replace(model.config, vocab_size=vocabulary.n_own + 1)
        super().__init__(model.transformer, head, config, chunks)
        self.rows, self.log_counts = rows, counts.log()

    def lm_logits(self, hidden: Tensor, weight: Tensor, *settings: Any) -> Tensor:  # noqa: ANN401
        """Return the logits of all rows, with the probability of all their ids."""
        return lm_logits(hidden, weight, *settings) + self.log_counts

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss; an id without a row has the shared row's probability over K."""
        is_counted = targets != IGNORE_INDEX
        rows = self.rows[targets.clamp(min=0)]
        loss = super().forward(x, rows.masked_fill(~is_counted, IGNORE_INDEX))
        return loss + (self.log_counts[rows] * is_counted).sum() / is_counted.sum()


class TextGPT(GPT):
    """A GPT-2 of GPT-2's ids that computes with the rows of a vocabulary.

    All other parameters have the initial values of a GPT-2 with the same seed.
    """

    def __init__(self, vocabulary: Vocabulary, config: GPTConfig, loss_chunks: int) -> None:
        super().__init__(config, loss_chunks)
        wte, lm_head = self.transformer.wte, self.lm_head
        ids, self.rows = (x.to(wte.weight.device) for x in (vocabulary.ids, vocabulary.rows))
        kept = {p: nn.Parameter(p.detach()[ids]) for p in (wte.weight, lm_head.weight)}
        wte.weight, lm_head.weight = kept[wte.weight], kept[lm_head.weight]
        self.embed.register_forward_pre_hook(lambda _, args: (self.rows[args[0]], *args[1:]))
        self.loss = TextLoss(self, loss_chunks, vocabulary, self.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of all of GPT-2's ids: (..., vocab_size)."""
        return super().logits(hidden)[..., self.rows[: self.config.vocab_size]]
