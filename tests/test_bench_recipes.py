import re
import sys

import numpy as np
import pytest
from conftest import ROOT
from forked import fork_trainers

from bench import recipes
from bench.recipes import RUNS, reached_after
from runtime.files import read_json


def test_command_trains_what_is_missing_and_draws_both(
    commands, tiny_data, tmp_path, monkeypatch, capsys
):
    names = ["tiny_16_reference_0.01", "tiny_16_fast_0.01"]
    monkeypatch.setattr(recipes, "RUNS", names)
    sizes = {"n_layer": 1, "n_embd": 64, "block_size": 8, "total_batch_size": 32}
    monkeypatch.setitem(recipes.SCALES, "tiny", sizes)
    fork_trainers(monkeypatch, commands, recipes)

    def call(*flags):
        places = [f"--out-dir={tmp_path}/runs", f"--results-dir={tmp_path}/results"]
        monkeypatch.setattr(sys, "argv", ["recipes.py", "--device=cpu", *places, *flags])
        recipes.main()
        return capsys.readouterr().out

    data, path = f"--data-dir={tiny_data}", tmp_path / "results/runs.json"
    with pytest.raises(ValueError, match=f"no result of {' and '.join(names)}: give --data-dir"):
        call()
    monkeypatch.setattr(recipes, "RUNS", names[:1] * 2)
    call(data)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")  # as on another machine
    monkeypatch.setattr(recipes, "RUNS", names)
    assert str(tmp_path / "results/summary.png") in call(data)
    assert not (tmp_path / "runs" / names[0]).exists()  # it was trained before
    runs = read_json(path)["runs"]
    assert list(runs) == names
    reference, fast = (record["curve"] for record in runs.values())
    assert reference[0] == fast[0]  # the same initial weights
    assert reference[-1][1] != fast[-1][1]
    assert [point[0] for point in fast] == list(range(17))
    assert all(record["versions"]["torch"] for record in runs.values())
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other/train_000001.npy", np.arange(9000, dtype=np.uint16))
    with pytest.raises(ValueError, match="is of other data than"):
        call(f"--data-dir={tmp_path}/other")


def best_by_row(runs):
    """Both recipes' best curves, by width and steps that both have, as the table is sorted."""
    curves = {}
    for name, run in runs.items():
        scale, steps, recipe, *_ = name.split("_")
        of = curves.setdefault((int(scale[1:]), int(steps)), {"reference": [], "fast": []})
        of[recipe].append(run["curve"])
    return [
        [min(each, key=lambda curve: curve[-1][1]) for each in curves[row].values()]
        for row in sorted(curves)
        if all(curves[row].values())
    ]


def test_committed_results_are_what_the_document_says():
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \d+, . layers .* \| ([\d.]+) .* \| ([\d.]+) \| ([\d.]+) \|$", text, re.M
    )
    results = read_json(ROOT / "bench/results/recipes/runs.json")
    for row, (reference, fast) in zip(rows, best_by_row(results["runs"]), strict=True):
        losses = [reference[-1][1], fast[-1][1]]
        assert list(map(float, row[:2])) == pytest.approx(losses, abs=6e-4)
        assert float(row[2]) == pytest.approx(reached_after(reference, fast), abs=0.006)
    assert {*RUNS} <= results["runs"].keys()


def curve(*losses):
    """A validation every 10 steps."""
    return [(10 * place, loss) for place, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("end", "losses", "share"),
    [
        (5.0, (10.0, 6.0, 5.0, 4.0, 3.0), 0.5),
        (4.25, (10.0, 6.0, 5.0, 4.0, 3.0), (20 + 7.5) / 40),  # between two validations
        (3.0, (10.0, 6.0, 5.0, 4.0, 3.0), 1.0),
        (2.9, (10.0, 6.0, 5.0, 4.0, 3.0), None),
        (5.0, (10.0, 4.0, 6.0, 4.0, 3.0), (20 + 5) / 40),  # it must stay there
    ],
)
def test_share_of_the_steps_worked_by_hand(end, losses, share):
    reached = reached_after(curve(10.0, end), curve(*losses))
    assert reached == (share if share is None else pytest.approx(share))
