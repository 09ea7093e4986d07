"""An exported model computes the run's logits; its card says what the run's files say, no more."""

import os
import re
import shutil
import sys

import huggingface_hub
import pytest
import torch
from checkpoints import save_run
from run_files import append_records
from safetensors.torch import load_file

import export
from formats import checkpoint, load
from formats.huggingface import save_pretrained
from formats.load import load_model
from formats.tensors import read_tensors
from model import GPT, GPTConfig
from runtime.errors import UserError

pytestmark = pytest.mark.gpt2

CONFIG = {
    "data_dir": "/home/SECRET/corpora/my-stories",
    "out_dir": "/home/SECRET/runs",
    "hellaswag_data": "/home/SECRET/hellaswag.jsonl",
    "init_from": "gpt2",
    "max_lr": 0.003,
    "max_steps": 40,
    "warmup_steps": None,
    "optimizer": "muon",
    "momentum": 0.9,
    "embedding_decay": 0.0,
    "my_setting": 7,  # of an edit
    "checkpoint_every": 3,
}


def run_export(monkeypatch, source, out, *flags):
    """Run `export.py`; returns the card."""
    monkeypatch.setattr(sys, "argv", ["export.py", f"--model={source}", f"--out={out}", *flags])
    export.main()
    return (out / "README.md").read_text()


def test_main_exports_a_run_that_loads_with_the_same_logits(tmp_path, monkeypatch, capsys):
    model, out = save_run(tmp_path / "run"), tmp_path / "new" / "exported"
    card = run_export(monkeypatch, tmp_path / "run", out, "--license=mit")
    first_line, last_line = capsys.readouterr().out.splitlines()
    assert last_line.strip() == f'transformers.pipeline("text-generation", "{out.as_posix()}")'
    tensors = load_file(out / "model.safetensors").values()
    n_params = f"{sum(tensor.numel() for tensor in tensors):,} parameters"
    assert n_params in first_line
    assert n_params in card
    assert huggingface_hub.ModelCard(card).data.license == "mit"
    idx = torch.randint(0, 50257, (1, 8))
    with torch.no_grad():
        assert torch.equal(load_model(out)(idx).logits, model(idx).logits)


def test_export_into_an_existing_folder_leaves_the_folder_in_place(tmp_path, monkeypatch):
    """A mount point can be neither renamed nor deleted."""
    model, out = save_run(tmp_path / "run"), tmp_path / "mounted"
    (out / ".tmp").mkdir(parents=True)  # of an export that was killed
    (out / ".tmp" / "model.safetensors").touch()
    (out / ".mine").touch()
    before = out.stat().st_ino
    run_export(monkeypatch, tmp_path / "run", out)
    assert out.stat().st_ino == before
    assert {path.name for path in out.glob(".*")} == {".mine"}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "mounted"}
    idx = torch.randint(0, 50257, (1, 8))
    with torch.no_grad():
        for name in ("model.safetensors", "config.json"):  # a file stands for its folder
            assert torch.equal(load_model(out / name)(idx).logits, model(idx).logits)
    with pytest.raises(UserError, match="mounted is not empty"):
        run_export(monkeypatch, tmp_path / "run", out)


def test_card_explains_the_results_that_it_has_and_is_right_for_a_count_of_1(tmp_path, monkeypatch):
    save_pretrained(GPT(GPTConfig(1, n_layer=1, n_head=1, n_embd=2)), tmp_path / "model")
    card = run_export(monkeypatch, tmp_path / "model", tmp_path / "small")
    assert not re.search(r"\b1 \w+s\b", card)
    result = {"step": 1, "val_loss": 3.0, "val_bpb": 1.0, "hellaswag_acc_norm": 0.3}
    save_run(tmp_path / "run", {"optimizer": "adamw", "momentum": 0.9})
    append_records(tmp_path / "run", result)
    card = run_export(monkeypatch, tmp_path / "run", tmp_path / "scored")
    for said in ("val_loss is in nats", "val_bpb is in bits", "HellaSwag is scored zero-shot"):
        assert said in card
    assert not re.search(r"\b1 \w+s\b|momentum", card)


def test_card_has_the_settings_and_the_results_of_the_checkpoints_step(tmp_path, monkeypatch):
    records = [
        {"step": 20, "val_loss": 3.25, "val_bpb": None, "hellaswag_total": 20},
        {"step": 30, "val_loss": 1.0, "hellaswag_acc_norm": 0.9, "hellaswag_total": 10042},
    ]
    save_run(tmp_path / "run", CONFIG, step=20)
    append_records(tmp_path / "run", *records)
    card = run_export(monkeypatch, tmp_path / "run", tmp_path / "tales")
    data = huggingface_hub.ModelCard.load(tmp_path / "tales" / "README.md").data
    assert (data.pipeline_tag, data.tags, data.license) == ("text-generation", ["gpt2"], None)
    assert data.base_model == "openai-community/gpt2"
    for line in (
        "# tales",
        "1,280 tokens of `my-stories`, until step 20.",
        "| max_lr | 0.003 |",
        "| embedding_decay | 0.0 |",
        "| momentum | 0.9 |",
        "| my_setting | 7 |",
        "| optimizer | muon |",
        "| val_loss | 3.25 |",
        "| hellaswag_total | 20 |",
    ):
        assert line in card.splitlines()
    for name in ("hellaswag_acc_norm", "val_bpb", "checkpoint_every", "step"):
        assert f"| {name} |" not in card
    assert "zero-shot" not in card
    assert "val_loss is in nats per token" in card
    assert "SECRET" not in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("is_run", [True, False])
def test_card_of_a_model_without_metrics_has_no_results(tmp_path, monkeypatch, is_run):
    source = tmp_path / "model"
    if is_run:
        save_run(source)
    else:
        save_pretrained(GPT(GPTConfig(16, n_layer=2, n_head=2, n_embd=8)), source)
    card = run_export(monkeypatch, source, tmp_path / "out")
    assert ("| setting or result | value |" in card) == is_run
    assert "| val_loss" not in card
    assert "base_model" not in card
    assert "Only the results listed in this card were measured" in card


def test_main_writes_through_a_link_and_into_no_folder_that_has_files(tmp_path, monkeypatch):
    run, out, disk = (tmp_path / name for name in ("run", "out", "disk"))
    (disk / "export").mkdir(parents=True)
    out.symlink_to(disk / "export")  # stays a link
    save_run(run)
    run_export(monkeypatch, run, out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    run_export(monkeypatch, run, out)  # the same again
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert os.listdir(disk) == ["export"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "out", "run"]
    (out / "mine.txt").touch()
    with pytest.raises(ValueError, match="out is not empty: delete it, or choose another with"):
        run_export(monkeypatch, run, out)
    assert before.items() < {path: path.read_bytes() for path in out.iterdir()}.items()


def test_export_keeps_an_earlier_one_that_differs(tmp_path, monkeypatch, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    save_run(run)
    run_export(monkeypatch, run, out)
    (out / "README.md").write_text("my own card")
    assert "license: mit" in run_export(monkeypatch, run, out, "--license=mit")
    (earlier,) = tmp_path.glob("out.*")
    assert (earlier / "README.md").read_text() == "my own card"
    assert (
        f"the earlier export in {out} differs: it is {earlier.name} now" in capsys.readouterr().out
    )


def test_card_names_a_base_model_of_the_hub_and_no_local_one(tmp_path, monkeypatch):
    cache = tmp_path / "cache/models--OWNER--NAME"
    (cache / "snapshots/abc").mkdir(parents=True)
    (cache / "snapshots/abc/config.json").write_text("{}")
    (cache / "refs").mkdir()
    (cache / "refs/v1").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for number, (start, base) in enumerate(
        [
            ("OWNER/NAME@v1", "OWNER/NAME"),
            ("exported/gone", None),
            ("gpt2-xl", "openai-community/gpt2-xl"),
        ]
    ):
        save_run(tmp_path / f"run{number}", CONFIG | {"init_from": start})
        run_export(monkeypatch, tmp_path / f"run{number}", tmp_path / f"out{number}")
        card = huggingface_hub.ModelCard.load(tmp_path / f"out{number}" / "README.md")
        assert card.data.base_model == base


@pytest.mark.parametrize("read", [checkpoint.verify_checkpoint, read_tensors])
def test_a_checkpoint_that_is_deleted_while_it_is_read_gives_way_to_the_next(
    tmp_path, monkeypatch, read
):
    save_run(tmp_path / "run", step=1)
    model = save_run(tmp_path / "run", step=2)

    def delete_then_read(*args):
        shutil.rmtree(tmp_path / "run/checkpoints/step_00000001", ignore_errors=True)
        return read(*args)

    first = tmp_path / "run/checkpoints/step_00000001"
    found = iter([first])  # as if step 2 was saved after the first look
    look = load.find_checkpoint
    monkeypatch.setattr(load, "find_checkpoint", lambda path: next(found, None) or look(path))
    owner = load if read is read_tensors else checkpoint
    monkeypatch.setattr(owner, read.__name__, delete_then_read)
    run_export(monkeypatch, tmp_path / "run", tmp_path / "out")
    idx = torch.randint(0, 50257, (1, 8))
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "out")(idx).logits, model(idx).logits)
    with pytest.raises(UserError, match="step_00000001 does not exist"):
        load_model(first)


def test_a_runs_checkpoints_folder_is_the_run_and_a_file_is_its_checkpoint(tmp_path):
    model = save_run(tmp_path / "run")
    for path in ("checkpoints", "checkpoints/step_00000001/model.safetensors", "metrics.jsonl"):
        (tmp_path / "run/metrics.jsonl").touch()
        loaded = load_model(tmp_path / "run" / path)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    shutil.move(tmp_path / "run/checkpoints", tmp_path / "moved")
    with pytest.raises(UserError, match=r"holds models: use one .*/moved/step_00000001$"):
        load_model(tmp_path / "moved")


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_folder_of_several_models_names_the_newest(tmp_path, file):
    for step in (1000, 200):  # as the Trainer of transformers saves models and peft's adapters
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / file).write_text("{}")
        os.utime(tmp_path / f"checkpoint-{step}", (step, step))
    with pytest.raises(UserError, match=r"holds models: use one .*/checkpoint-1000$"):
        load_model(tmp_path)
