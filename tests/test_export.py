"""An exported model computes the run's logits; its card says what the run's files say, no more."""

import math
import sys

import huggingface_hub
import torch
from checkpoints import new_training
from conftest import save_run
from safetensors.torch import load_file

import export
from formats.huggingface import save_pretrained
from formats.load import load_model
from formats.model_card import MARK
from model import GPTConfig

CONFIG = {
    "data_dir": "/home/SECRET/corpora/my-stories",
    "out_dir": "/home/SECRET/runs",
    "hellaswag_data": "/home/SECRET/hellaswag.jsonl",
    "init_from": "gpt2",
    "max_lr": 0.003,
    "optimizer": "muon",
    "val_tokens": 4096,
    "dtype": "auto",
}


def run_export(monkeypatch, source, out, *flags):
    """Run `export.py`; returns the card."""
    monkeypatch.setattr(sys, "argv", ["export.py", f"--model={source}", f"--out={out}", *flags])
    export.main()
    return (out / "README.md").read_text()


def test_main_exports_a_run_that_loads_with_the_same_logits(tmp_path, monkeypatch, capsys):
    model, out = save_run(tmp_path / "run"), tmp_path / "exported"
    card = run_export(monkeypatch, tmp_path / "run", out)
    first_line, last_line = capsys.readouterr().out.splitlines()
    assert last_line.strip() == f'transformers.pipeline("text-generation", "{out.as_posix()}")'
    tensors = load_file(out / "model.safetensors").values()
    n_params = f"{sum(tensor.numel() for tensor in tensors):,} parameters"
    assert n_params in first_line
    assert n_params in card
    idx = torch.randint(0, 50257, (1, 8))
    with torch.no_grad():
        assert torch.equal(load_model(out)(idx).logits, model(idx).logits)


def test_card_says_what_the_run_says(tmp_path, monkeypatch):
    records = [
        {"step": 10, "val_loss": 5.5, "hellaswag_acc_norm": 0.25, "hellaswag_total": 10042},
        {"step": 20, "val_loss": 3.25},
        {"step": 30, "val_loss": 1.0, "hellaswag_acc_norm": 0.9, "hellaswag_total": 10042},
    ]
    save_run(tmp_path / "run", CONFIG, records, step=20)
    card = run_export(monkeypatch, tmp_path / "run", tmp_path / "tales")
    data = huggingface_hub.ModelCard.load(tmp_path / "tales" / "README.md").data
    assert (data.pipeline_tag, data.tags, data.license) == ("text-generation", ["gpt2"], None)
    assert data.base_model == "openai-community/gpt2"
    for line in (
        "# tales",
        "1,280 tokens of `my-stories` in 20 steps",
        "| `max_lr` | 0.003 |",
        "| `optimizer` | muon |",
    ):
        assert line in card.splitlines()
    assert "| val_loss at step 20 | 3.25 | nats per token, over at most 4,096 tokens" in card
    assert "| hellaswag_acc_norm at step 10 | 0.25 | zero-shot, lowest mean loss" in card
    assert "10,042 examples; not" in card
    assert "| `dtype` |" not in card  # which one `auto` came to depends on the machine
    assert "SECRET" not in card
    assert str(tmp_path) not in card


def test_card_says_what_was_not_measured_and_what_is_no_benchmark(tmp_path, monkeypatch):
    save_run(tmp_path / "run")  # without metrics, and with one setting
    card = run_export(monkeypatch, tmp_path / "run", tmp_path / "a")
    assert "Results" not in card
    assert "Only the results listed in this card were measured" in card
    assert "base_model" not in card
    record = {"step": 1, "hellaswag_acc_norm": 0.5, "hellaswag_total": 20, "val_loss": math.nan}
    save_run(tmp_path / "sample", {}, [record])
    card = run_export(monkeypatch, tmp_path / "sample", tmp_path / "b")
    assert "20 examples, which is NOT the full benchmark;" in card
    assert "val_loss" not in card  # it is not finite


def test_card_names_the_licence_that_is_given(tmp_path, monkeypatch):
    save_run(tmp_path / "run")
    card = run_export(monkeypatch, tmp_path / "run", tmp_path / "out", "--license=mit")
    assert huggingface_hub.ModelCard(card).data.license == "mit"


def test_card_of_a_model_that_was_not_trained_here_is_short(tmp_path, monkeypatch):
    size = GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=8)
    save_pretrained(new_training(size)[0], tmp_path / "theirs")
    card = run_export(monkeypatch, tmp_path / "theirs", tmp_path / "out")
    assert "## Results" not in card
    assert "## Limits" in card


def test_card_that_its_owner_has_written_stays(tmp_path, monkeypatch):
    save_run(tmp_path / "run")
    card = run_export(monkeypatch, tmp_path / "run", tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text(card + "more")
    assert run_export(monkeypatch, tmp_path / "run", tmp_path / "out") == card
    own = card.replace(MARK, "") + "Licence: MIT\n"
    (tmp_path / "out" / "README.md").write_text(own)
    assert run_export(monkeypatch, tmp_path / "run", tmp_path / "out") == own
