import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

from bench import recipes
from bench.recipes import Run, Scale
from runtime.files import read_json

RUNS = (
    Run("tiny", 12, "reference", 1e-2),
    Run("tiny", 12, "reference", -1.0),
    Run("tiny", 12, "fast", 1e-2),
    Run("tiny", 12, "muon", 1e-2, seed=7),
    Run("tiny", 12, "muon", 1e-2, "batch warm-up", 7),
)


@pytest.fixture
def forked_runs(commands, monkeypatch):
    """Training runs are forks, one after the other, and find no compiler: tiny ones need none."""

    def run(command, env, **_):
        assert command[:3] == [sys.executable, "-m", "bench.trials"]
        environment = {"PATH": "/nonexistent", "CXX": "", "OMP_NUM_THREADS": env["OMP_NUM_THREADS"]}
        done = commands.run(ROOT / "bench" / "trials.py", *command[3:], **environment)
        return SimpleNamespace(returncode=done.code, stderr=done.stderr)

    monkeypatch.setattr(recipes, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(recipes, "usable_cores", lambda: 1)


@pytest.mark.usefixtures("forked_runs")
def test_command_trains_and_compares_recipes_and_goes_on(tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "RUNS", RUNS)
    monkeypatch.setitem(recipes.SCALES, "tiny", Scale(1, 1, 16, 8, 32))
    places = [f"--out-dir={tmp_path}/runs", f"--results-dir={tmp_path}/results"]
    flags = ["recipes.py", f"--data-dir={tiny_data}", "--device=cpu", *places]
    monkeypatch.setattr(sys, "argv", [*flags, "--only=huge"])
    with pytest.raises(ValueError, match="--only 'huge' is in no run's name"):
        recipes.main()
    monkeypatch.setattr(sys, "argv", [*flags, "--only=reference"])
    recipes.main()
    shown = capsys.readouterr().out
    assert "tiny_12_reference_0.01: " in shown
    assert "tiny_12_reference_-1: failed: --max-lr must be above 0, not -1.0" in shown
    (tmp_path / "runs").rename(tmp_path / "elsewhere")  # as on another machine
    monkeypatch.setattr(sys, "argv", flags)
    recipes.main()
    assert "1 of 5 runs were trained before" in capsys.readouterr().out
    results = read_json(tmp_path / "results/runs.json")
    runs = results["runs"]
    names = ["tiny_12_reference_0.01", "tiny_12_fast_0.01"]
    names += ["tiny_12_muon_0.01_7", "tiny_12_muon_0.01_batch-warm-up_7"]
    assert list(runs) == names
    reference, fast, muon, trial = (runs[name]["curve"] for name in names)
    # Without a change, and with one: the same initial weights, but for another seed.
    assert reference[0] == fast[0] != muon[0] == trial[0]
    assert len({curve[-1][1] for curve in (reference, fast, muon, trial)}) == 4
    assert [point[0] for point in fast] == list(range(13))
    table = (tmp_path / "results/runs.md").read_text()
    assert table.count("\n| ") == len(names) + 1
    for name in ("summary.png", "comparisons.png"):
        assert (tmp_path / "results" / name).stat().st_size > 10_000
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other/train_000001.npy", np.arange(9000, dtype=np.uint16))
    monkeypatch.setattr(sys, "argv", ["recipes.py", f"--data-dir={tmp_path}/other", *flags[2:]])
    with pytest.raises(ValueError, match="is of other data than"):
        recipes.main()
