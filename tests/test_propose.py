"""The training command that fineweb.py proposes for a text."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from corpus.shards import Manifest, ShardInfo, ShardWriter
from runtime.distributed import DistInfo
from runtime.errors import UserError
from tokenizer import VOCAB_SHA256
from training.checks import check_ranks_agree
from training.memory import find_device, split_batch
from training.propose import propose_training
from training.resume import parse_config

SMALL = "--total-batch-size {} --max-steps {} --embedding-decay {} --spelling-share 0.3"
EVERY = " --val-every {0} --sample-every {0} --checkpoint-every {0}"


def proposed(tokens):
    shards = (ShardInfo("v", "val", 10**9, ""), ShardInfo("t", "train", tokens, ""))
    return shlex.join(propose_training(Path("data/my text"), Manifest({}, "", 1, shards)))


@pytest.mark.parametrize(
    ("tokens", "recipe", "flags"),
    [
        (1_000, "4m", SMALL.format(256, 19, 39) + EVERY.format(3)),
        (25_600, "4m", SMALL.format(256, 500, 1.5)),
        (3_000_000, "4m", SMALL.format(4096, 3662, 0.2)),
        (7_300_000, "4m", ""),
        (1_900_000_000, "82m", ""),
        (2_000_000_000, "124m", ""),
    ],
)
def test_propose_training_makes_five_passes_at_most_and_five_samples(
    tokens, recipe, flags, monkeypatch
):
    monkeypatch.chdir(ROOT)
    flags = f"--data-dir 'data/my text' --run-name 'my text' {flags}".strip()
    expected = f"python train_gpt2.py --config recipes/gpt2-{recipe}.json {flags}"
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
    start = f"{launcher} {ROOT}/train_gpt2.py --config {ROOT}/recipes/gpt2-"
    assert proposed(tokens).startswith(start)


@pytest.mark.parametrize("val_share", [None, 0.5])
def test_proposed_command_for_a_short_text_passes_the_checks_of_training_or_is_left_out(
    tmp_path, monkeypatch, val_share
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/2600").mkdir(parents=True)  # the folder of an earlier run
    source = {"val share": val_share} if val_share else {}
    for n_tokens in (2, 257, 285, 287, 514, 2569, 2600):
        folder = Path(f"data/{n_tokens}")
        writer = ShardWriter(folder, Manifest(source, VOCAB_SHA256, 10**6))
        writer.add(np.arange(n_tokens, dtype=np.uint16))
        manifest = writer.close()
        n_train = sum(shard.tokens for shard in manifest.shards if shard.split == "train")
        if n_train <= 256:  # fewer than one window of the smallest recipe
            reason = f"no training is proposed: the text in {folder} is too small for this batch "
            reason += f"({n_train} tokens, but one step needs 257): add text"
            with pytest.raises(UserError, match=re.escape(reason)):
                propose_training(folder, manifest)
            continue
        config, _ = parse_config(propose_training(folder, manifest)[2:])
        device = find_device(config, DistInfo())
        train, val = check_ranks_agree(config, None, device)
        assert split_batch(config, device).micro_batch_size >= 1
        assert bool(config.val_every) == (val.total_tokens >= 257)
        assert train.total_tokens == n_train
        assert (config.run_name is None) == (n_tokens == 2600)
