import sys

import pytest

from bench import recipes
from bench.recipes import Run, Scale
from runtime.files import read_json

TINY_RUNS = (
    Run("tiny", 8, "reference", 1e-3),
    Run("tiny", 8, "reference", 1e-2),
    Run("tiny", 8, "muon", 1e-2),
    Run("tiny", 8, "fast", 1e-2),
    Run("tiny", 8, "muon", 1e-2, "batch warm-up", 7),
)


def test_command_trains_and_compares_recipes_and_goes_on(
    tiny_data, tmp_path, monkeypatch, capsys, without_compiler
):
    monkeypatch.setattr(recipes, "RUNS", TINY_RUNS)
    monkeypatch.setitem(recipes.SCALES, "tiny", Scale(1, 1, 16, 16, 256))
    places = [f"--out-dir={tmp_path}/runs", f"--results-dir={tmp_path}/results"]
    flags = ["recipes.py", f"--data-dir={tiny_data}", "--device=cpu", *places]
    monkeypatch.setattr(sys, "argv", [*flags, "--only=reference"])
    recipes.main()
    assert "tiny_8_reference_0.01: " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", flags)
    recipes.main()
    shown = capsys.readouterr().out
    assert shown.count("trained before") == 2
    assert "failed" not in shown
    results = read_json(tmp_path / "results/recipes.json")
    runs = results["runs"]
    assert len(runs) == len(TINY_RUNS)
    starts = {run["curve"][0][1] for run in runs.values() if run["seed"] == 1337}
    assert len(starts) == 1  # the same initial weights and validation tokens
    ends = {run["curve"][-1][1] for run in runs.values()}
    assert len(ends) == len(TINY_RUNS)
    assert [point[0] for point in runs["tiny_8_fast_0.01"]["curve"]] == list(range(9))
    table = (tmp_path / "results/recipes.md").read_text()
    assert table.count("\n| ") == len(TINY_RUNS) + 1
    for name in ("recipes.png", "recipes_all.png"):
        assert (tmp_path / "results" / name).stat().st_size > 10_000


@pytest.fixture
def without_compiler(monkeypatch):
    """No compiler is found: tiny runs need none."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CC", "")


def test_a_run_that_fails_is_named_and_the_others_go_on(
    tiny_data, tmp_path, monkeypatch, capsys, without_compiler
):
    runs = (Run("tiny", 8, "reference", 1e-3), Run("tiny", 8, "reference", -1.0))
    monkeypatch.setattr(recipes, "RUNS", runs)
    monkeypatch.setitem(recipes.SCALES, "tiny", Scale(1, 1, 16, 16, 256))
    flags = [f"--data-dir={tiny_data}", f"--out-dir={tmp_path}", f"--results-dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["recipes.py", *flags, "--device=cpu"])
    recipes.main()
    shown = capsys.readouterr().out
    assert "tiny_8_reference_-1: failed: --max-lr must be above 0, not -1.0" in shown
    assert "tiny_8_reference_0.001: 10" in shown
    monkeypatch.setattr(sys, "argv", ["recipes.py", *flags, "--only=huge"])
    with pytest.raises(ValueError, match="--only 'huge' is in no run's name"):
        recipes.main()
