"""Gradient sharing between similarly spelled tokens, for small datasets (`--spelling-share`)."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from parallel import Ranks
from runtime.errors import UserError
from tokenizer import END_OF_TEXT, VOCAB_SIZE, gpt2_encoding
from vocabulary import Vocabulary


def share_by_spelling(
    embedding: nn.Parameter, factor: float, ranks: Ranks, vocabulary: Vocabulary | None = None
) -> Callable[..., None]:
    """Return an optimizer pre-step hook that shares gradients between similarly spelled tokens.

    The embedding of a rare token gets few gradients. To each token's gradient, the hook adds
    `factor` times a weighted sum of the gradients of all tokens that share parts of its spelling.
    The model stays a GPT-2, and the hook has no state to save. All ranks must call it; each
    computes the same. `embedding` is (V, C), with a row for each of GPT-2's token ids, or with a
    vocabulary's rows, of which the shared row is left out.
    """
    if vocabulary is None and len(embedding) < VOCAB_SIZE:
        raise UserError(f"the {len(embedding)} ids are not GPT-2's: leave out --spelling-share")
    (ids, parts), weights = map(torch.from_numpy, spelling_features())
    if vocabulary is not None:
        ids = vocabulary.rows[ids]
        ids, parts, weights = (x[ids < vocabulary.n_own] for x in (ids, parts, weights))
    sums = []  # over the ids of each part, then over the parts of each id
    for rows, columns, n in ((parts, ids, int(parts.max()) + 1), (ids, parts, len(embedding))):
        order = rows.argsort(stable=True)
        starts = torch.searchsorted(rows[order], torch.arange(n))
        sums.append([t.to(embedding.device) for t in (columns[order], starts, weights[order])])

    @torch.no_grad()
    def add_gradients(*_: object) -> None:
        if (gradient := embedding.grad) is not None:
            shared = ranks.gather(gradient)  # (V, C)
            for items, starts, w in sums:  # faster than with sparse matrices
                shared = F.embedding_bag(items, shared, starts, mode="sum", per_sample_weights=w)
            gradient.add_(ranks.shard(shared, gradient), alpha=factor)

    return add_gradients


def spelling_features() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the spelling features of GPT-2's token ids, with weights.

    The features are the token's letters, its first three and four and last two and three letters
    and, with less weight, a space, a capital, its length, first and last letter and frequency.
    Merges are sorted by frequency, so `id.bit_length()` stands for it. `<|endoftext|>` has no
    features.

    Returns:
        (2, n) int64 ids and feature numbers, and (n,) float32 weights. The squared weights of each
        id add up to 1.
    """
    encoding, numbers = gpt2_encoding(), dict[str, int]()
    pairs, weights = list[tuple[int, int]](), list[float]()
    for id in range(END_OF_TEXT):
        text = encoding.decode_single_token_bytes(id).decode(errors="surrogateescape")
        word = text.strip().lower() or text
        starts = [f"{word[:n]} " for n in (3, 4) if n < len(word)]
        ends = [f" {word[-n:]}" for n in (2, 3) if n < len(word)]
        forms = (" " in text, text != text.lower(), len(word), word[0], word[-1], id.bit_length())
        features = {word: 2.0} | dict.fromkeys(starts + ends, 0.7)
        features |= {f"form {n} {form}": 0.3 for n, form in enumerate(forms)}
        pairs += [(id, numbers.setdefault(name, len(numbers))) for name in features]
        weights += [weight / math.hypot(*features.values()) for weight in features.values()]
    return np.array(pairs, np.int64).T, np.array(weights, np.float32)
