import itertools
import json
import math
import re
import shlex
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT

from bench import recipes, trial
from bench.recipes import PUBLISHED_STEPS, RECIPES, SCALES, Scale, scaled
from formats.metrics import read_metrics
from runtime.files import read_json, write_json
from tokenizer import gpt2_encoding
from training.recipe import read_recipe

NOTES = ROOT / "bench/results/recipes/README.md"
TEXT = "Häuser und Bäume; 12 houses, <|endoftext|> 3 trees.\n" * 180


def test_command_compares_recipes_on_a_small_model(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(recipes.SCALES, "S29", Scale(64, 512, 8))
    monkeypatch.setattr(recipes, "VAL_TOKENS", 256)
    monkeypatch.setattr(recipes, "VAL_SPLIT", 300)
    monkeypatch.setattr(recipes, "RECIPES", tmp_path / "recipes.json")
    eager = {"recipe": "gpt2-124m", "compile": False}  # compiling takes a minute
    write_json(tmp_path / "recipes.json", {"published": eager})
    published = read_recipe(ROOT / "recipes/gpt2-124m.json").saved()
    write_json(tmp_path / "mine.json", published | {"max_lr": 0.003, "compile": False})
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")

    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["recipes.py", "--source=text.txt", *flags])
        recipes.main()
        return capsys.readouterr().out

    next_command = shlex.split(call("--recipe=mine.json"))
    assert next_command[:4] == ["next:", "python", "-m", "bench.trial"]
    shutil.copytree(checkout / "bench", "bench")  # the command is one of the project's folder
    monkeypatch.setattr(sys, "argv", [*next_command[3:], "--seeds=1", "--jobs=1"])
    trial.main()
    assert "\nmine: screened: val_loss 6." in capsys.readouterr().out
    runs = sorted((tmp_path / "runs/trials").glob("*/*/metrics.jsonl"))
    assert [path.parent.name.split("-")[0] for path in runs] == ["base", "mine"]
    first = read_metrics(runs[0])[0]["val_loss"]
    assert first == pytest.approx(math.log(2048), abs=0.5)  # of its vocabulary, well begun
    (tmp_path / "text.txt").write_text(TEXT[:3800], encoding="utf-8")
    with pytest.raises(ValueError, match=r"trains on 4,096 tokens in at most 2 passes, but --sour"):
        call()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("label", read_json(RECIPES))
def test_small_model_has_the_proportions_of_124m(label, scale):
    own, small = read_json(RECIPES)[label], SCALES[scale]
    recipe = replace(read_recipe(ROOT / f"recipes/{own.pop('recipe')}.json"), **own)
    large, settings = vars(recipe), scaled(recipe, small)
    share = large["max_steps"] / PUBLISHED_STEPS
    assert settings["max_steps"] == round(share * small.steps)
    assert settings["total_batch_size"] / small.batch == large["total_batch_size"] / 524_288

    def decayed(values):  # the part of the weights, over a run at the peak rate
        return values["max_lr"] * values["weight_decay"] * values["max_steps"]

    assert decayed(settings) == pytest.approx(decayed(large), rel=0.002)
    embeddings = 32 / (12 * 6)  # per parameter of the blocks
    assert embeddings == pytest.approx(50_257 / (12 * 12 * 768), rel=0.03)


def test_first_merges_are_an_exact_smaller_bpe():
    gpt2, few = gpt2_encoding(), gpt2_encoding(2048)
    ids = few.encode_ordinary(TEXT)
    assert few.decode(ids) == TEXT
    assert max(ids) < 2047
    assert few.encode_ordinary(" the") == gpt2.encode_ordinary(" the")  # an early merge
    assert len(ids) > len(gpt2.encode_ordinary(TEXT))


def rows_of(document, header):
    """The cells of the table below `header`, by row."""
    document = document.replace("\u00d7", "x")
    lines = document[document.index(header) :].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[2:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def losses_in(cell):
    return [float(loss) for loss in cell.split(", ") if loss]


def test_committed_results_are_what_the_documents_say():
    """Each row has the losses of one recipe, by seed, and each recipe that was run has a row."""
    lines = (ROOT / "bench/results/recipes/proxy.jsonl").read_text().splitlines()
    losses = {}
    for run in sorted(map(json.loads, lines), key=lambda run: run["seed"]):
        losses.setdefault((run["recipe"], run["scale"]), []).append(run["val_loss"])
    document = NOTES.read_text(encoding="utf-8")
    rows = [*rows_of(document, "| recipe | tokens | S29"), *rows_of(document, "| variant | S29")]
    changes = rows_of(document, "| change | loss |")
    assert changes == sorted(changes, key=lambda row: row[1])  # no change lowers the loss
    assert losses_in(changes[0][1])[0] == pytest.approx(losses["fast, whole batch", "S29"][0], 1e-3)
    rows += [[change, loss, "", ""] for change, loss in changes[1:]]
    assert len(rows) == 25
    shown = set()
    for row in rows:
        cells = {
            scale: losses_in(cell)
            for scale, cell in zip(("S29", "S117", "M29"), row[-3:], strict=True)
        }
        labels = {
            label
            for label, _ in losses
            if all(
                not cell or cell == pytest.approx(losses.get((label, scale), []), abs=6e-4)
                for scale, cell in cells.items()
            )
        }
        assert any(cells.values()), row
        assert labels, row
        shown |= labels
    left_out = {label for label, _ in losses} - shown
    assert all(re.search("as it was|all of the candidate|0.65 of the", label) for label in left_out)
    for label, scale in (("fast, half the decay", "S29"), ("fast", "M29"), ("fast", "S117")):
        assert max(losses[label, scale]) < min(losses["published", scale])
    means = {
        (*row[:2], *(f"{np.mean(losses_in(cell)):.3f}" if cell else "" for cell in row[2:]))
        for row in rows[:9]
    }
    guide = rows_of((ROOT / "docs/recipes.md").read_text(encoding="utf-8"), "| recipe | tokens |")
    assert len(guide) == 4
    for name, *cells in guide:
        name = name.removesuffix(", one seed")
        assert any(mean[0].startswith(name) and [*mean[1:]] == cells for mean in means), name
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = {float(loss) for loss in re.findall(r"\b3\.\d{3}\b", readme)}
    assert len(quoted) == 4
    ran = {round(values[0], 3) for (_, scale), values in losses.items() if scale == "S117"}
    assert quoted <= ran


def test_committed_losses_of_l29_are_what_the_documents_say():
    runs = read_json(NOTES.parent / "L29.json")["runs"]
    rows = rows_of(NOTES.read_text(encoding="utf-8"), "| recipe | tokens | L29")
    assert [float(loss) for *_, loss in rows] == [*runs.values()]
    guide = " ".join((ROOT / "docs/recipes.md").read_text(encoding="utf-8").split())
    assert f"({runs['fast']} against {runs['published']}, one seed" in guide


def test_the_documents_have_the_committed_losses_of_small_texts():
    folder = NOTES.parent
    runs = json.loads((folder / "spelling.json").read_text())["runs"]
    ends = {f"{losses[-1][1]:.3f}" for losses in runs.values()}
    document = NOTES.read_text(encoding="utf-8")
    texts = rows_of(document, "| model | `--spelling-share` | batch")
    languages = rows_of(document, "| text, `gpt2-4m` |")
    cells = [cell for row in texts for cell in (row[4], *row[6:])]
    cells += [cell for row in languages for cell in row[1:]]
    assert len(cells) == 42
    assert ends >= {loss for cell in cells for loss in cell.split(", ") if loss}
    for *_, token, character, _, _ in texts:
        # nanoGPT's split has 36,059 tokens to validate on, which are 111,540 characters.
        expected = [loss * 36_059 / 111_540 for loss in losses_in(token)[:1]]
        assert losses_in(character) == pytest.approx(expected, abs=6e-4)
    small = json.loads((folder / "small.json").read_text())["runs"]
    before, after = (small[f"code_{decay}"][-1][1] for decay in ("0.1", "1.0"))
    text = " ".join(document.split())
    guide = " ".join((ROOT / "docs/recipes.md").read_text(encoding="utf-8").split())
    assert (
        f"On Python code, 1 instead of 0.1 lowered the loss from {before:.3f} to {after:.3f}"
        in guide
    )
    assert f"lowered the loss from {texts[0][4]} to {texts[1][4].split(',')[0]}" in guide
    assert f"a decay of 1 instead of 0.1 lowered the loss from {before:.3f} to {after:.3f}" in text
    runs = json.loads((folder / "offsets.json").read_text())["runs"]
    ends = {name: losses[-1][1] for name, losses in runs.items()}
    gains = [ends[n] - ends[n.replace("same", "offsets")] for n in ends if n.endswith("same")]
    assert f"this lowered the loss by {sum(gains) / len(gains):.3f} on average" in text
