import json
import sys

import numpy as np
import pytest
import torch
from conftest import change_function, tiny_run

import read_step
from formats.load import load_model
from lr_schedule import windows_at
from runtime.cli import as_flags
from runtime.errors import UserError
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


def test_read_step_prints_the_windows_that_the_step_trained_on(
    read, tiny_flags, tiny_data, tmp_path, monkeypatch
):
    """Of the step that the log calls 3, and with a model the highest loss first."""
    sizes = (4, 8, 16, 8)  # windows of each step
    change_function(monkeypatch, windows_at, lambda config, step: (4, 8, 16, 8)[step])
    main([*tiny_flags, "--run-name=a", "--max-steps=4"])
    run_dir, decode = tmp_path / "runs/a", gpt2_encoding().decode
    settings = {"block_size": 32, "total_batch_size": 256, "micro_batch_size": 1, "max_steps": 4}
    with tiny_run(tiny_data, tmp_path / "other", **settings) as run, build(run).batches as batches:
        seen = [next(batches) for _ in range(sum(sizes[:3]))][-sizes[2] :]
    texts = [decode([*inputs[0].tolist(), int(targets[0, -1])]) for inputs, targets in seen]
    printed = read(run_dir, "--step=3")
    assert [text for _, text in printed] == [text.strip("\n") for text in texts]
    for title, text in printed:
        shard, offset = title.split(", token ")
        start = int(offset.replace(",", ""))
        tokens = np.load(tiny_data / shard)[start : start + 33]
        assert decode(tokens.tolist()).startswith(text[:20])

    model = load_model(run_dir)
    with torch.no_grad():
        losses = [float(model(*batch).loss) for batch in seen]
    expected = sorted(zip(losses, texts, strict=True), reverse=True)
    scored = read(run_dir, "--step=3", f"--model={run_dir}")
    assert [text for _, text in scored] == [text.strip("\n") for _, text in expected]
    printed_losses = [float(title.split(", loss ")[1]) for title, _ in scored]
    assert printed_losses == pytest.approx([loss for loss, _ in expected], abs=1e-4)

    tiny = {**settings, "block_size": 16, "max_steps": 1, "run_name": "short"}
    main([*tiny_flags, *as_flags(tiny)])
    monkeypatch.chdir(tmp_path)
    assert read("a", "--step=3", "--model=a") == scored  # names of runs in runs/
    with pytest.raises(
        UserError, match=r"^short has a context of 16 tokens, not 32: use a --model"
    ):
        read("a", "--step=3", "--model=short")

    for step in (5, 1_000_000):
        with pytest.raises(ValueError, match=rf"--step {step} is above the 4 steps of .*runs/a$"):
            read(run_dir, f"--step={step}")
    config = run_dir / "config.json"
    config.write_text(config.read_text().replace(str(tiny_data), "moved"))
    with pytest.raises(UserError, match=r"^moved has no tokens for training: .* use --data-dir if"):
        read(run_dir, "--step=3")
    assert read(run_dir, "--step=3", f"--data-dir={tiny_data}") == printed
    (run_dir / "metrics.jsonl").write_text(json.dumps({"data_fingerprint": "other"}))
    with pytest.raises(ValueError, match="has changed since"):
        read(run_dir, "--step=3", f"--data-dir={tiny_data}")


def test_read_step_refuses_a_folder_that_is_not_a_run_and_step_0(read, tmp_path):
    with pytest.raises(UserError, match=r"config\.json is not a file"):
        read(tmp_path, "--step=1")
    with pytest.raises(ValueError, match="step must be"):
        read(tmp_path, "--step=0")
