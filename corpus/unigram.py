"""Unigram baseline: the loss of predicting every token from its frequency alone."""

import math

import numpy as np

from corpus.shards import TokenShards
from tokenizer import VOCAB_SIZE, token_bytes

MAX_TOKENS = 10_485_760  # read at most this many tokens of each split


def unigram_baseline(train: TokenShards, val: TokenShards) -> tuple[float, float]:
    """Return the baseline's loss on the validation tokens: nats per token and bits per byte.

    The model predicts each token with its frequency in the training tokens, after add-one
    smoothing.
    """
    counts = 1 + np.bincount(train.read(0, MAX_TOKENS), minlength=1 << 16)  # one per uint16
    losses = np.log(counts[:VOCAB_SIZE].sum()) - np.log(counts)
    ids = val.read(0, MAX_TOKENS)
    bits = losses[ids].sum() / math.log(2)
    return float(losses[ids].mean()), float(bits / max(1, token_bytes(len(counts))[ids].sum()))
