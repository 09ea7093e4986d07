"""The unigram baseline, by hand."""

import math

import numpy as np
import pytest

from corpus.shards import open_shards
from corpus.unigram import unigram_baseline


def test_unigram_baseline_by_hand(tmp_path):
    """Add-one smoothing over GPT-2's vocabulary."""
    np.save(tmp_path / "train.npy", np.array([5, 5, 5, 7], np.uint16))
    np.save(tmp_path / "val.npy", np.array([5, 7, 9, 5], np.uint16))
    train, val = (open_shards(tmp_path, split) for split in ("train", "val"))
    five, seven, never = (math.log(50257 + 4) - math.log(count + 1) for count in (3, 1, 0))
    total = 2 * five + seven + never  # of four tokens of a byte each
    assert unigram_baseline(train, val) == pytest.approx((total / 4, total / 4 / math.log(2)))
