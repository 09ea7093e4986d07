import json
import sys

import numpy as np
import pytest
import torch
from conftest import change_function, tiny_run

import read_step
from dataloader import Batch
from formats.load import load_model
from lr_schedule import windows_at
from tokenizer import gpt2_encoding
from train_gpt2 import build, main


@pytest.fixture
def read(monkeypatch, capsys):
    """Run the command; the titles and the texts that it prints."""

    def run(*flags):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["read_step.py", *map(str, flags)])
        read_step.main()
        blocks = capsys.readouterr().out.removeprefix("--- ").split("\n\n--- ")
        return [tuple(block.strip("\n").split("\n", 1)) for block in blocks]

    return run


@pytest.mark.parametrize("is_warmup", [False, True])
def test_read_step_prints_the_windows_that_the_step_trained_on(
    read, tiny_flags, tiny_data, tmp_path, monkeypatch, is_warmup
):
    """Of the step that the log calls 3, and with a model the highest loss first."""
    sizes = [8, 8, 8, 8]  # windows of each step
    if is_warmup:
        sizes = [4, 8, 16, 8]
        change_function(monkeypatch, windows_at, lambda config, step: (4, 8, 16, 8)[step])
    main([*tiny_flags, "--run-name=a", "--max-steps=4"])
    run_dir, texts = tmp_path / "runs/a", []
    settings = {"block_size": 32, "total_batch_size": 256, "micro_batch_size": 4, "max_steps": 4}
    with tiny_run(tiny_data, tmp_path / "other", **settings) as run:
        with build(run).batches as batches:
            seen = [next(batches) for _ in range(sum(sizes[:3]) // 4)][-sizes[2] // 4 :]
        decode = gpt2_encoding().decode
        for inputs, targets in seen:
            rows = torch.cat([inputs, targets[:, -1:]], dim=1)
            texts += [decode(row.tolist()) for row in rows]
    printed = read(run_dir, "--step=3")
    assert [text for _, text in printed] == [text.strip("\n") for text in texts]
    for title, text in printed:
        shard, offset = title.split(", token ")
        tokens = np.load(tiny_data / shard)
        start = int(offset.replace(",", ""))
        assert decode(tokens[start : start + 33].tolist()).startswith(text[:20])

    model, losses = load_model(run_dir), []
    with torch.no_grad():
        for inputs, targets in seen:
            for row in range(4):
                batch = Batch(inputs[row : row + 1], targets[row : row + 1])
                losses.append((float(model(*batch).loss), texts[len(losses)].strip("\n")))
    scored = read(run_dir, "--step=3", f"--model={run_dir}")
    assert len(scored) == sizes[2]
    for (title, text), (loss, expected) in zip(scored, sorted(losses, reverse=True), strict=True):
        assert text == expected
        assert float(title.split(", loss ")[1]) == pytest.approx(loss, abs=1e-4)


def test_read_step_refuses_other_data_than_the_runs(read, tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=a", "--max-steps=1"])
    config = tmp_path / "runs/a/config.json"
    (tmp_path / "runs/a/metrics.jsonl").write_text(json.dumps({"data_fingerprint": "other"}))
    with pytest.raises(ValueError, match="has changed since"):
        read(tmp_path / "runs/a", "--step=1")
    config.unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is not a file"):
        read(tmp_path / "runs/a", "--step=1")
    with pytest.raises(ValueError, match="step must be"):
        read(tmp_path / "runs/a", "--step=0")
