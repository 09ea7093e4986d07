"""Checkpoints of earlier versions resume: their exact state, and one line about what is gone.

`fixtures/trainer_state_1f2b603.json` was written by commit 1f2b603, after step 4 of a run on the
fixture `tiny_data`. That commit's `train_gpt2.py --resume` printed the losses below.
"""

import shutil

import pytest
import torch
from checkpoints import write_manifest
from conftest import ROOT, series
from run_files import append_records
from safetensors.torch import save_file

from formats.metrics import validations
from runtime.files import read_json
from train_gpt2 import main

pytestmark = pytest.mark.gpt2

STATE = ROOT / "tests/fixtures/trainer_state_1f2b603.json"
SHAPES = ROOT / "tests/fixtures/shapes_1f2b603.json"  # of the parameters, by their names then
TRAIN_LOSSES = {5: 10.9363861, 6: 10.9172211, 7: 10.9402771, 8: 10.9625311}
ROUNDING = 2e-5  # step counts of zero in the optimizer would change the losses by 3e-4


def waves(shape, start):
    """Numbers between -1 and 1 that any machine computes alike."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (numbers * 0.7 + start).cos().float().view(shape)


def write_old_checkpoint(run_dir):
    """Write a checkpoint in the format of commit 1f2b603, with tensors that follow a rule."""
    path = run_dir / "checkpoints/step_00000004"
    path.mkdir(parents=True)
    shutil.copy(STATE, path / "trainer_state.json")
    weights, moments = {}, {}
    for start, (name, shape) in enumerate(read_json(SHAPES).items()):
        weights[name] = 0.5 * waves(shape, start)
        moments[f"exp_avg.{name}"] = 0.02 * waves(shape, start + 0.5)
        moments[f"exp_avg_sq.{name}"] = 1e-3 * waves(shape, start + 0.5).square() + 1e-4
        moments[f"step.{name}"] = torch.tensor(4.0)
    save_file(weights, path / "model.safetensors")
    save_file(moments, path / "optimizer.safetensors")
    write_manifest(path)
    return path


def test_checkpoint_of_1f2b603_resumes_exactly_with_a_line_about_each_thing_that_is_gone(
    tiny_data, tmp_path, capsys
):
    path = write_old_checkpoint(tmp_path / "old")
    run_dir, state = path.parent.parent, read_json(path / "trainer_state.json")
    for record in (
        {"val_fingerprint": state["val_fingerprint"]},
        {"step": 0, "tokens_seen": 0, "val_loss": 1.0},  # of other windows: never the best
    ):
        append_records(run_dir, record)
    main([f"--resume={path}", f"--data-dir={tiny_data}", f"--out-dir={tmp_path}"])
    said = capsys.readouterr()
    notes = [line for line in said.out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2
    assert notes[0].startswith(f"note: {path} has values that this version ignores: code_logits")
    assert notes[1].startswith("note: val_loss is measured on windows spread over the split from")
    assert "warning: " not in said.out + said.err
    assert series(run_dir, "train_loss") == pytest.approx(TRAIN_LOSSES, abs=ROUNDING)
    assert validations(run_dir).keys() == {4, 8}
    assert all(record["val_loss"] > 10 for record in validations(run_dir).values())
    assert series(run_dir, "tokens_seen")[8] == 2048
    state = read_json(path.with_name("step_00000008") / "trainer_state.json")
    assert state["step"] == 8
    assert state["val_fingerprint"].endswith(" (8 of 62 windows, spread)")
    assert state["train_config"]["cpu_attention"] == "torch"  # it had no other
    assert state["code"]
