import sys

import torch
from conftest import save_run

import export
from runtime.checkpoint import load_model


def test_main_exports_a_run_that_loads_with_the_same_logits(tmp_path, monkeypatch, capsys):
    model = save_run(tmp_path / "run")
    out = tmp_path / "exported"
    monkeypatch.setattr(sys, "argv", ["export.py", f"--model={tmp_path}/run", f"--out={out}"])
    export.main()
    last_line = capsys.readouterr().out.splitlines()[-1].strip()
    assert last_line == f'transformers.pipeline("text-generation", "{out.as_posix()}")'
    idx = torch.randint(0, 50257, (1, 8))
    with torch.no_grad():
        assert torch.equal(load_model(out)(idx).logits, model(idx).logits)
