"""The card of an exported model: what it says is what the run's files say, and no more."""

import math
import sys

import huggingface_hub
from conftest import save_run
from test_checkpoint import new_training

import export
from model import GPTConfig
from runtime.huggingface import save_pretrained
from runtime.model_card import MARK

MODEL = GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=8)
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


def export_card(monkeypatch, source, out):
    monkeypatch.setattr(sys, "argv", ["export.py", f"--model={source}", f"--out={out}"])
    export.main()
    return (out / "README.md").read_text()


def test_card_says_what_the_run_says(tmp_path, monkeypatch):
    records = [
        {"step": 10, "val_loss": 5.5, "hellaswag_acc_norm": 0.25, "hellaswag_total": 10042},
        {"step": 20, "val_loss": 3.25},
        {"step": 30, "val_loss": 1.0, "hellaswag_acc_norm": 0.9, "hellaswag_total": 10042},
    ]
    save_run(tmp_path / "run", CONFIG, records, step=20)
    card = export_card(monkeypatch, tmp_path / "run", tmp_path / "tales")
    _, front, body = card.split("---\n", 2)
    assert front.splitlines() == [
        *("library_name: transformers", "pipeline_tag: text-generation"),
        *("base_model: openai-community/gpt2", "tags:", "- gpt2"),
    ]
    for line in (
        "# tales",
        "- `my-stories`, tokenised with GPT-2's BPE",
        "- fingerprint of the training tokens: `abc`",
        "- 1,280 tokens seen in 20 steps",
        "| `max_lr` | 0.003 |",
        "| `optimizer` | muon |",
    ):
        assert line in body.splitlines()
    assert (
        "| validation loss at step 20 | 3.2500 nats per token | the mean over at most 4,096 tokens"
        in body
    )
    assert "| HellaSwag, acc_norm at step 10 | 0.2500 | completion style" in body
    assert "10,042 examples |" in body
    assert "| `dtype` |" not in body  # which one `auto` came to depends on the machine
    assert "SECRET" not in card
    assert str(tmp_path) not in card


def test_card_says_what_was_not_measured_and_what_is_no_benchmark(tmp_path, monkeypatch):
    save_run(tmp_path / "run")  # without metrics, and with one setting
    card = export_card(monkeypatch, tmp_path / "run", tmp_path / "a")
    assert "| validation loss | not measured | |" in card
    assert "| HellaSwag | not measured | |" in card
    assert "base_model" not in card
    records = [{"step": 1, "hellaswag_acc_norm": 0.5, "hellaswag_total": 20, "val_loss": None}]
    save_run(tmp_path / "sample", {}, records)
    card = export_card(monkeypatch, tmp_path / "sample", tmp_path / "b")
    assert "20 examples, which is NOT the whole benchmark |" in card
    assert "| validation loss | not measured | |" in card
    records = [{"step": 1, "hellaswag_acc_norm": 0.5, "val_loss": math.nan}]  # of another writer
    save_run(tmp_path / "other", {}, records)
    card = export_card(monkeypatch, tmp_path / "other", tmp_path / "c")
    assert "| validation loss | not measured | |" in card
    assert "| HellaSwag | not measured | |" in card


def test_card_of_a_model_that_was_not_trained_here_is_short(tmp_path, monkeypatch):
    save_pretrained(new_training(MODEL)[0], tmp_path / "theirs")
    card = export_card(monkeypatch, tmp_path / "theirs", tmp_path / "out")
    assert "## Results" not in card
    assert "## Intended use and limits" in card
    assert str(tmp_path) not in card


def test_card_that_its_owner_has_written_stays(tmp_path, monkeypatch):
    save_run(tmp_path / "run")
    card = export_card(monkeypatch, tmp_path / "run", tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text(card + "more")
    assert export_card(monkeypatch, tmp_path / "run", tmp_path / "out") == card
    own = card.replace(MARK, "") + "Licence: MIT\n"
    (tmp_path / "out" / "README.md").write_text(own)
    assert export_card(monkeypatch, tmp_path / "run", tmp_path / "out") == own


def test_card_has_metadata_that_the_hub_reads(tmp_path, monkeypatch):
    save_run(tmp_path / "run", CONFIG, [])
    export_card(monkeypatch, tmp_path / "run", tmp_path / "out")
    data = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert data["pipeline_tag"] == "text-generation"
    assert data["tags"] == ["gpt2"]
