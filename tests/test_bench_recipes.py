import itertools
import json
import math
import re
import sys

import pytest
from conftest import ROOT
from forked import fork_trainers

from bench import recipes
from bench.proxy import first_merges, vocab_size
from bench.recipes import PUBLISHED_STEPS, RECIPES, SCALES, Scale, scaled
from tokenizer import VOCAB_SIZE, gpt2_encoding
from training.config import read_recipe

TEXT = "Häuser und Bäume; 12 houses, <|endoftext|> 3 trees.\n" * 180


def test_command_trains_what_is_missing_and_goes_on(commands, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(recipes.SCALES, "S29", Scale(64, 512, 8))
    monkeypatch.setattr(recipes, "VAL_TOKENS", 256)
    monkeypatch.setattr(recipes, "VAL_SPLIT", 300)
    known = {label: RECIPES[label] for label in ("published", "fast")}
    monkeypatch.setattr(recipes, "RECIPES", known)
    fork_trainers(monkeypatch, commands, recipes)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "mine.json").write_text((ROOT / "recipes/gpt2-124m.json").read_text())
    path = tmp_path / "results/proxy.jsonl"

    def call(*flags):
        places = [f"--out-dir={tmp_path}/runs", f"--results-dir={tmp_path}/results", "--jobs=1"]
        monkeypatch.setattr(sys, "argv", ["recipes.py", *places, *flags])
        recipes.main()
        runs = [json.loads(line) for line in path.read_text().splitlines()]
        return capsys.readouterr().out, {(run["recipe"], run["seed"]): run for run in runs}

    with pytest.raises(ValueError, match=r"proxy.jsonl has no run of --scale S29: use --source"):
        call()
    source = f"--source={tmp_path}/text.txt"
    call(source, "--seeds=1")
    (tmp_path / "runs").rename(tmp_path / "elsewhere")  # as on another machine
    shown, runs = call(source, "--seeds=2", f"--recipe={tmp_path}/mine.json")
    trained = [*(tmp_path / "runs").glob("*/metrics.jsonl")]
    assert len(trained) == 4  # two of six before
    assert [*runs] == [
        *(("published", 1), ("fast", 1), ("mine", 1)),
        *(("published", 2), ("fast", 2), ("mine", 2)),
    ]
    losses = {key: run["val_loss"] for key, run in runs.items()}
    assert losses["mine", 1] == losses["published", 1] != losses["fast", 1]
    assert [len(run["curve"]) for run in runs.values()] == [8, 6, 8] * 2
    first = runs["published", 1]["curve"][0]
    assert first == pytest.approx(math.log(2048), abs=0.5)  # of its vocabulary, well begun
    pairs = [losses["fast", seed] - losses["published", seed] for seed in (1, 2)]
    assert f"fast | 2 | {(losses['fast', 1] + losses['fast', 2]) / 2:.4f}" in shown
    assert f"| {sum(pairs) / 2:+.4f}" in shown
    assert call()[0] == shown[shown.index("recipe |") :]  # trains nothing
    mine = read_recipe(tmp_path / "mine.json").saved() | {"max_lr": 0.003}
    (tmp_path / "mine.json").write_text(json.dumps(mine))
    _, again = call(source, "--seeds=1", f"--recipe={tmp_path}/mine.json")
    assert again["mine", 1]["val_loss"] != losses["mine", 1]  # edited, so trained again
    assert again | {("mine", 1): 0} == runs | {("mine", 1): 0}
    assert (tmp_path / "results/S29.png").stat().st_size > 10_000
    (tmp_path / "text.txt").write_text(TEXT + "other", encoding="utf-8")
    with pytest.raises(ValueError, match=r"proxy.jsonl has runs on another text: use"):
        call(source)
    (tmp_path / "text.txt").write_text(TEXT[:3800], encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"trains on 4,096 tokens in at most 2 passes, but --source has only "
    ):
        call(source)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("label", RECIPES)
def test_small_model_has_the_proportions_of_124m(label, scale):
    file, own = RECIPES[label]
    recipe, small = read_recipe(ROOT / f"recipes/{file}.json"), SCALES[scale]
    settings = scaled(recipe, own, small, seed=1)
    large = recipe.saved() | own
    share = large["max_steps"] / PUBLISHED_STEPS
    assert settings["max_steps"] == round(share * small.steps)
    assert settings["total_batch_size"] / small.batch == large["total_batch_size"] / 524_288

    def decayed(values):  # the part of the weights, over a run at the peak rate
        return values["max_lr"] * values["weight_decay"] * values["max_steps"]

    assert decayed(settings) == pytest.approx(decayed(large), rel=0.002)
    embeddings = vocab_size(small.width) / (12 * 6 * small.width)  # per parameter of the blocks
    assert embeddings == pytest.approx(50_257 / (12 * 12 * 768), rel=0.03)


def test_first_merges_are_an_exact_smaller_bpe():
    gpt2, few = gpt2_encoding(), first_merges(2048)
    assert first_merges(VOCAB_SIZE).encode_ordinary(TEXT) == gpt2.encode_ordinary(TEXT)
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
    lines = (ROOT / "bench/results/recipes/proxy.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    losses = {(run["scale"], run["recipe"], run["seed"]): run["val_loss"] for run in runs}
    document = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")

    def found(scale, label):
        return [losses[scale, label, s] for s in (1, 2, 3) if (scale, label, s) in losses]

    shown = set()
    none = "none of the embeddings"
    tables = {
        "| recipe | tokens | S29": {
            "`gpt2-124m` (published) 100 %": "published",
            "AdamW, 3x the learning rate 100 %": "adamw 0.0018",
            "AdamW, 9x the learning rate 100 %": "adamw 0.0054",
            "AdamW, 3x the learning rate, half the batch 100 %": "adamw 0.0018, half the batch",
            "AdamW, 3x the learning rate, `wsd` 60 %": "anchor",
            "`gpt2-124m-fast` 35 %": "fast",
            "`gpt2-124m-fast` 55 %": "fast, 0.55 of the tokens",
            "fast, half the weight decay 35 %": "fast, half the decay",
            "fast, full batch 35 %": "fast, whole batch",
        },
        "| variant | S29": {
            "a quarter of the batch": "fast, a quarter of the batch",
            "1.4x the learning rate": "fast, 1.4 times the rate",
            "half the weight decay, a quarter of the batch": (
                "fast, half the decay, a quarter of the batch"
            ),
            "half the weight decay, 0.7x the learning rate": (
                "fast, half the decay, 0.7 times the rate"
            ),
            "half the weight decay, none for the embeddings": f"fast, half the decay, {none}",
            "half the weight decay, none for the embeddings, 1.4x the learning rate": (
                f"fast, half the decay, {none}, 1.4 times the rate"
            ),
            "a quarter of the weight decay": "fast, a quarter of the decay",
            "a quarter of the weight decay, none for the embeddings": (
                f"fast, a quarter of the decay, {none}"
            ),
            "cautious weight decay": (
                "fast, decay of 8 / (rate x steps) where update and weight agree"
            ),
        },
    }
    for header, labels in tables.items():
        rows = rows_of(document, header)
        assert [" ".join(row[:-3]) for row in rows] == [*labels]
        for row, label in zip(rows, labels.values(), strict=True):
            for cell, scale in zip(row[-3:], ("S29", "S117", "M29"), strict=True):
                assert losses_in(cell) == pytest.approx(found(scale, label), abs=6e-4)
                shown.add((scale, label))
    changes = {
        "none": "",
        "`c_proj` weights start at 0": ", c_proj begins at 0",
        "embeddings: 2x the learning rate": ", embeddings at twice the rate",
        "EMA-Nesterov ([arXiv 2605.25395](https://arxiv.org/abs/2605.25395))": ", EMA-Nesterov",
        "LayerNorm gains and biases: 4x the learning rate": (
            ", gains and biases at four times the rate"
        ),
        "2x the learning rate": ", twice the rate",
        "embeddings: half the learning rate": ", embeddings at half the rate",
        "all but the embeddings: half the learning rate": (
            ", half the rate for all but the embeddings"
        ),
    }
    rows = dict(rows_of(document, "| change | loss |"))
    assert [*rows] == [*changes]
    assert [*rows.values()] == sorted(rows.values())  # none of them helps
    for change, label in changes.items():
        loss = losses["S29", f"fast, whole batch{label}", 1]
        assert losses_in(rows[change]) == pytest.approx([loss], abs=6e-4)
        shown.add(("S29", f"fast, whole batch{label}"))
    left_out = {label for scale, label, _ in losses if (scale, label) not in shown}
    assert all(re.search("as it was|all of the candidate|0.65 of the", label) for label in left_out)

    for scale, label in (("S29", "fast, half the decay"), ("M29", "fast"), ("S117", "fast")):
        assert max(found(scale, label)) < min(found(scale, "published"))
    pairs = zip(found("S29", "fast"), found("S29", "published"), strict=True)
    assert sum(fast > long for fast, long in pairs) == 2  # of three, as recipes/ says, too
    for scale, label in (("S29", "fast, half the decay"), ("S117", "fast")):
        quarter = losses[scale, f"{label}, a quarter of the batch", 1]
        assert losses[scale, label, 1] - quarter == pytest.approx(0.03, abs=0.002)
    labels = ("fast", "published", "adamw 0.0018, half the batch", "fast, 0.55 of the tokens")
    fast, long, adamw, longer = quoted = [losses["S117", label, 1] for label in labels]
    assert longer < adamw < fast < long
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {*re.findall(r"\b3\.\d{3}\b", readme)} == {f"{loss:.3f}" for loss in quoted}


def test_the_document_has_the_committed_losses_of_small_texts():
    folder = ROOT / "bench/results/recipes"
    runs = json.loads((folder / "spelling.json").read_text())["runs"]
    ends = {f"{losses[-1][1]:.3f}" for losses in runs.values()}
    document = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
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
    assert f"a decay of 1 instead of 0.1 lowered the loss from {before:.3f} to {after:.3f}" in text
    runs = json.loads((folder / "offsets.json").read_text())["runs"]
    ends = {name: losses[-1][1] for name, losses in runs.items()}
    gains = [ends[n] - ends[n.replace("same", "offsets")] for n in ends if n.endswith("same")]
    assert f"this lowered the loss by {sum(gains) / len(gains):.3f} on average" in text
