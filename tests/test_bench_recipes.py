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


def test_committed_results_are_what_the_documents_say():
    lines = (ROOT / "bench/results/recipes/proxy.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    losses = {(run["scale"], run["recipe"], run["seed"]): run["val_loss"] for run in runs}
    document = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")

    def given(start):
        (row,) = (line for line in document.splitlines() if line.startswith(f"| {start}"))
        return [float(loss) for loss in re.findall(r"\b\d\.\d{3}\b", row)]

    def found(scale, label):
        return [losses[scale, label, s] for s in (1, 2, 3) if (scale, label, s) in losses]

    for label, start in (
        ("published", "`gpt2-124m`, the published one | 1"),
        ("adamw 0.0018", "AdamW, three times its rate |"),
        ("adamw 0.0018, half the batch", "the same, half the batch"),
        ("adamw 0.0054", "AdamW, nine times"),
        ("anchor", "AdamW, three times its rate, `wsd`"),
        ("fast", "`gpt2-124m-fast` | 0.35"),
        ("fast, half the decay", "the same, half the decay"),
        ("fast, whole batch", "also the whole batch"),
    ):
        assert given(start) == pytest.approx(found("S29", label), abs=6e-4)
    text = " ".join(document.split())
    for scale in ("S117", "M29"):
        values = (found(scale, label) for label in ("published", "fast", "fast, half the decay"))
        long, fast, half = (", ".join(f"{loss:.3f}" for loss in seeds) for seeds in values)
        sentence = f"published {long}, fast {fast}, half the decay {half}"
        assert sentence in text[text.index(f"{scale}, w") :]
    assert f"the whole batch, too, {losses['S117', 'fast, whole batch', 1]:.3f}." in text
    tried = {
        run: loss
        for run, loss in losses.items()
        if run[1].startswith("fast, ")
        if not re.search(r"as it was|of the tokens|(whole batch|half the decay)$", run[1])
    }
    whole = losses["S29", "fast, whole batch", 1]
    worse = [tried.pop(run) for run in list(tried) if "whole batch" in run[1]]
    assert min(worse) > whole
    part = document[document.index("Tried with the fast recipe") : document.index("## Small texts")]
    numbers = sorted(map(float, re.findall(r"\b[34]\.\d{3}\b", part)))
    assert numbers == pytest.approx(sorted([*tried.values(), min(worse), max(worse)]), abs=6e-4)
    for scale, label in (("S29", "fast, half the decay"), ("M29", "fast"), ("S117", "fast")):
        assert max(found(scale, label)) < min(found(scale, "published"))
    pairs = zip(found("S29", "fast"), found("S29", "published"), strict=True)
    assert sum(fast > long for fast, long in pairs) == 2  # of three, as recipes/ says, too
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    labels = ("fast", "published", "adamw 0.0018, half the batch", "fast, 0.55 of the tokens")
    fast, long, adamw, longer = (losses["S117", label, 1] for label in labels)
    assert f"ended at {fast:.3f} after 0.35 of the tokens, at {long:.3f} by" in readme
    assert longer < adamw < fast
    assert f"lower, at {adamw:.3f} after all; the fast recipe reached {longer:.3f} after" in readme
    assert f"fast reaches {longer:.3f}, AdamW with three times its rate" in text
    assert f"half the batch {adamw:.3f} with all" in text
    tuned = losses["M29", "adamw 0.0018, half the batch", 1]
    assert f"AdamW with half the batch {tuned:.3f}." in text


def test_the_document_has_the_committed_losses_of_small_texts():
    runs = json.loads((ROOT / "bench/results/recipes/spelling.json").read_text())["runs"]
    ends = {f"{losses[-1][1]:.3f}" for losses in runs.values()}
    document = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    start = document.index("| layers, `--spelling-share`, batch by rule")
    part = document[start : document.index("**Another offset")]
    assert ends >= set(re.findall(r"\b[2-7]\.\d{3}\b", part))
    for token, character in re.findall(r"(\d\.\d{3}) \((\d\.\d{3})\)", part):
        # nanoGPT's split has 36,059 tokens to validate on, which are 111,540 characters.
        assert float(token) * 36_059 / 111_540 == pytest.approx(float(character), abs=6e-4)
