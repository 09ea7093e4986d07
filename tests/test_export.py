import sys

import pytest
import torch
from test_checkpoint import new_training, save, train

import export
from model import GPTConfig
from runtime.checkpoint import load_model


def save_run(run_dir):
    """Train a step, save it in a run's folder, and return the model."""
    model, optimizers = new_training(GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=8))
    train(model, optimizers, 1)
    save(run_dir / "checkpoints", 1, model, optimizers)
    return model


def test_main_exports_a_run_that_transformers_loads(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    model = save_run(tmp_path / "run")
    out = tmp_path / "exported"
    monkeypatch.setattr(sys, "argv", ["export.py", f"--model={tmp_path}/run", f"--out={out}"])
    export.main()
    last_line = capsys.readouterr().out.splitlines()[-1].strip()
    assert last_line == f'transformers.pipeline("text-generation", "{out.as_posix()}")'
    idx = torch.randint(0, 50257, (1, 8))
    with torch.no_grad():
        expected = model(idx).logits
        theirs = transformers.GPT2LMHeadModel.from_pretrained(out)(idx).logits
        ours = load_model(out)(idx).logits
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-4)
    assert torch.equal(ours, expected)


def test_main_needs_a_place_to_write(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["export.py", "--model=gpt2"])
    with pytest.raises(ValueError, match="--out"):
        export.main()
