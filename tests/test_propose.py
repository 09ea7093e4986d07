"""The training command that fineweb.py proposes for a text."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT

from corpus.shards import Manifest, ShardInfo
from training.propose import propose_training

SMALL = "--total-batch-size {} --max-steps {} --embedding-decay {} --spelling-share 0.3"
EVERY = " --val-every {0} --sample-every {0} --checkpoint-every {0}"


def proposed(tokens):
    shards = (ShardInfo("v", "val", 10**9, ""), ShardInfo("t", "train", tokens, ""))
    return propose_training(Path("data/my text"), Manifest({}, "", 1, shards))


@pytest.mark.parametrize(
    ("tokens", "recipe", "flags"),
    [
        (9, "4m", SMALL.format(256, 1, "7.5e+02") + EVERY.format(1)),
        (1_000, "4m", SMALL.format(256, 19, 39) + EVERY.format(3)),
        (25_600, "4m", SMALL.format(256, 500, 1.5)),
        (3_000_000, "4m", SMALL.format(4096, 3662, 0.2)),
        (7_300_000, "4m", ""),
        (1_900_000_000, "82m", ""),
        (2_000_000_000, "124m-fast", ""),
    ],
)
def test_propose_training_makes_five_passes_at_most_and_five_samples(
    tokens, recipe, flags, monkeypatch
):
    monkeypatch.chdir(ROOT)
    flags = f"--data-dir 'data/my text' --run-name 'my text' {flags}".strip()
    expected = f"next: python train_gpt2.py --config recipes/gpt2-{recipe}.json {flags}"
    assert proposed(tokens) == expected


@pytest.mark.parametrize(
    ("gpus", "tokens", "launcher"),
    [
        (8, 2_000_000_000, "torchrun --standalone --nproc_per_node=8"),
        (3, 2_000_000_000, "python"),  # its batch cannot be divided by three
        (8, 1_000_000, "python"),  # its batch does not even fill one
    ],
)
def test_propose_training_uses_the_gpus_that_a_batch_fills(
    gpus, tokens, launcher, monkeypatch, tmp_path
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.chdir(tmp_path)
    start = f"next: {launcher} {ROOT}/train_gpt2.py --config {ROOT}/recipes/gpt2-"
    assert proposed(tokens).startswith(start)
