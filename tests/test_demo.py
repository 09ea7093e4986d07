import math

import numpy as np
import pytest

from corpus.shards import open_shards
from demo import new_name, unigram_loss


def test_unigram_loss_worked_by_hand(tmp_path):
    np.save(tmp_path / "train_0.npy", np.array([0, 0, 0, 1], np.uint16))
    np.save(tmp_path / "val_0.npy", np.array([0, 1, 2], np.uint16))
    # Three ids, one added to each count: 4/7, 2/7 and 1/7.
    expected = -(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3
    train, val = (open_shards(tmp_path, split) for split in ("train", "val"))
    assert unigram_loss(train, val, vocab_size=3) == pytest.approx(expected)


def test_new_name_is_of_no_earlier_run_or_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert new_name() == "demo"
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "exported/demo-2").mkdir(parents=True)
    assert new_name() == "demo-3"
