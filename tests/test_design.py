"""Designs of many factors: made-up responses with known effects, and runs of a tiny model."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from conftest import TINY_RUN

from bench import trial
from bench.design import MAX_FACTORS, effects, folded_design
from bench.factors import Design, describe_effects, parse_factor, plan_design
from bench.ledger import NAME, list_trials
from bench.trial import Trial, TrialConfig
from bench.variants import BASE, Variant, build_variants

SIZES = [*((n, runs) for runs, n in MAX_FACTORS.items()), (5, 16), (7, 24), (9, 32), (1, 16)]


def interactions(design):
    """The products of two factors in each run."""
    pairs = [*combinations(range(design.shape[1]), 2)]
    products = [design[:, a] * design[:, b] for a, b in pairs]
    return np.array(products).reshape(len(pairs), len(design)).T


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_factors", "runs"), SIZES)
def test_folded_design_has_no_effect_mixed_with_another_or_with_an_interaction(n_factors, runs):
    design = folded_design(n_factors, runs)
    assert design.shape == (runs, n_factors)
    assert {*design.flat} == {-1, 1}
    assert (design.T @ design == runs * np.eye(n_factors)).all()
    assert not design.sum(0).any()
    assert not (design.T @ interactions(design)).any()


def test_folded_design_of_24_runs_is_the_published_one_and_its_negative():
    """Plackett and Burman 1946, N = 12: the first row has the signs ++-+++---+-."""
    half = folded_design(12, 24)[:12, 1:]
    signs = {"".join("+" if level > 0 else "-" for level in row) for row in half}
    row = "++-+++---+-"
    assert signs == {row[n:] + row[:n] for n in range(11)} | {"-" * 11}


@pytest.mark.parametrize(("n_factors", "runs"), [(4, 16), (5, 32), (6, 32)])
def test_few_factors_have_no_two_interactions_that_are_mixed(n_factors, runs):
    products = interactions(folded_design(n_factors, runs))
    assert (products.T @ products == runs * np.eye(products.shape[1])).all()


@pytest.mark.parametrize(("n_factors", "runs"), [(9, 16), (13, 24), (13, 32), (0, 16), (4, 20)])
def test_a_size_that_does_not_fit_is_one_line(n_factors, runs):
    sizes = "at most 8 in 16 runs, 12 in 24 runs, 12 in 32 runs"
    message = f"^no design has {n_factors} factors in {runs} runs: use .*{sizes}$"
    with pytest.raises(ValueError, match=message):
        folded_design(n_factors, runs)


def coverage(n_factors, runs, missing=0, n_designs=1000):
    """The fraction of intervals that have the true effect, and of false effects of 0."""
    rng, design = np.random.default_rng(1), folded_design(n_factors, runs)
    products, covered, false = interactions(design), [], []
    for _ in range(n_designs):
        true = rng.normal(0, 0.1, n_factors) * (rng.random(n_factors) < 0.7)
        mixed = rng.normal(0, 0.01, products.shape[1])
        values = 5 + design @ true / 2 + products @ mixed / 2 + rng.normal(0, 0.015, runs)
        values[rng.choice(runs, missing, replace=False)] = np.nan
        found, half = effects(design, values, 5 + rng.normal(0, 0.015, 8))
        if np.isfinite(half).all():
            covered += [*(abs(found - true) <= half)]
            false += [*(abs(found) > half)[true == 0]]
    return np.mean(covered), np.mean(false)


@pytest.mark.parametrize(("n_factors", "runs"), SIZES[:-1])
def test_intervals_have_the_true_effects_in_95_percent_of_designs(n_factors, runs):
    covered, false = coverage(n_factors, runs)
    assert 0.93 <= covered <= 0.97
    assert 0.03 <= false <= 0.07


@pytest.mark.parametrize(("n_factors", "runs", "missing"), [(8, 16, 1), (12, 24, 3), (12, 32, 4)])
def test_intervals_are_wide_enough_where_runs_are_missing(n_factors, runs, missing):
    """An interaction does not cancel in a run whose mirrored run is missing."""
    assert coverage(n_factors, runs, missing)[0] >= 0.93


def test_effects_are_those_of_a_textbook():
    """Box, Hunter and Hunter 2005, table 5.1: temperature, concentration, catalyst."""
    yields = {
        "---": 60,
        "+--": 72,
        "-+-": 54,
        "++-": 68,
        "--+": 52,
        "+-+": 83,
        "-++": 45,
        "+++": 80,
    }
    design = folded_design(3, 16)
    keys = ["".join("+" if level > 0 else "-" for level in row) for row in design]
    found, half = effects(design, np.array([yields[key] for key in keys], float), [0.0, 2.0])
    assert found == pytest.approx([23, -5, 1.5])
    # t for 1 degree of freedom, 12.706, times the standard deviation sqrt(2) and 2 / sqrt(16)
    assert half == pytest.approx([12.706 * math.sqrt(2) / 2] * 3, rel=1e-4)


def test_the_sum_of_effects_has_the_interval_of_the_sum():
    rng, design = np.random.default_rng(3), folded_design(12, 24)
    values, base = rng.normal(size=24), rng.normal(size=8)
    (one, *_), (half, *_) = effects(design, values, base)
    (total,), (width,) = effects(design, values, base, np.ones((1, 12)))
    assert total == pytest.approx(effects(design, values, base)[0].sum())
    assert width == pytest.approx(half * math.sqrt(12))
    assert one == pytest.approx(values[design[:, 0] > 0].mean() - values[design[:, 0] < 0].mean())


def test_effects_that_the_other_runs_do_not_show_have_no_interval():
    design = folded_design(8, 16)
    values = np.zeros(16)
    values[[0, 8]] = np.nan  # mirrored runs
    assert np.isinf(effects(design, values, [0.0, 1.0])[1]).all()


# --- answers ----------------------------------------------------------------------------------


def base_variant(**settings):
    known = {"rotary": False, "norm": False, "mlp": "gelu", "max_lr": 0.006, "min_lr": 0.0006}
    known |= {"gate": True, "max_steps": 200, "heads": 1, "tokens": "64"}
    return Variant(BASE, None, "", ("--x=1",), known | settings, {})


BASE_VALUES = [5.0 + 0.015 * n for n in (-1.2, -0.9, -0.4, 0.0, 0.1, 0.5, 0.8, 1.1)]


def design_of(*texts, runs=16):
    """A design whose settings are those of the flags, as the code would read them."""
    base = base_variant()
    factors = [parse_factor(text, base) for text in texts]
    levels = folded_design(len(factors), runs)
    variants = []
    for row in levels > 0:
        changed = [factor.levels[int(level)] for factor, level in zip(factors, row, strict=True)]
        settings = {name: value for each in changed for name, value in each.items()}
        variants.append(base.changed(**settings)._replace(name="factors"))
    return Design(factors, levels, variants)


def answer(design, values, higher=False, base_values=BASE_VALUES):
    return describe_effects(design, base_variant(), values, base_values, higher)


TEXTS = ("rotary", "norm", "mlp=gelu,relu2", "gate", "max_lr*0.7,1.4")
SIZES_OF_TEXTS = np.array([-0.3, 0.1, -0.1, -0.001, 0.2])


def test_answer_has_effects_pairs_and_the_predicted_best_combination():
    design = design_of(*TEXTS)
    found = answer(design, 5 + design.levels @ SIZES_OF_TEXTS / 2)
    *effects_of, pairs, noise, mixed, best = found["lines"]
    half = 2.3646 * np.std(BASE_VALUES, ddof=1) * 2 / 4  # Student's t for 7 degrees of freedom
    assert effects_of == [
        f"rotary, off → on: -0.3 ± {half:.2g}",
        f"mlp, gelu → relu2: -0.1 ± {half:.2g}",
        f"gate, off → on: -0.001 ± {half:.2g} (not shown)",
        f"norm, off → on: +0.1 ± {half:.2g}",
        f"max_lr, 0.0042 → 0.0084: +0.2 ± {half:.2g}; the best combination keeps the base's 0.006",
    ]
    assert pairs == "pairs that cannot be told apart: none"
    assert noise.startswith("± is 95 %, from 8 runs of the base with a standard deviation of 0.01")
    assert noise.endswith(": if no factor acts, it shows 0.25 of 5 effects by chance")
    assert mixed == "interactions of two factors do not change an effect, and are not measured"
    # The base has norm off and gate on, which is as good; its max_lr is between the two levels.
    total = f"-0.4 ± {half * math.sqrt(2):.2g}"
    assert best == f"predicted best combination: base --rotary --mlp=relu2: {total}"
    assert found["best"] == {"rotary": True, "mlp": "relu2"}
    assert found["predicted"] == pytest.approx((-0.4, half * math.sqrt(2)), rel=1e-4)


def test_larger_values_are_better_if_the_metric_says_so():
    design = design_of(*TEXTS)
    found = answer(design, 5 + design.levels @ SIZES_OF_TEXTS / 2, higher=True)
    assert found["lines"][0].startswith("max_lr, 0.0042 → 0.0084: +0.2")
    assert found["best"] == {"norm": True}


def test_a_level_of_the_base_can_be_a_multiple_or_the_upper_level():
    design = design_of("max_lr*1,1.4", "gate", "heads=1,2")
    found = answer(design, 5 + design.levels @ np.array([-0.2, 0.2, 0.3]) / 2)
    assert found["best"] == {"max_lr": 0.0084, "min_lr": pytest.approx(0.00084), "gate": False}
    assert found["predicted"][0] == pytest.approx(-0.4)


def test_effects_that_are_nearly_equal_are_named_as_pairs():
    design = design_of("rotary", "norm", "mlp=gelu,relu2", "gate")
    found = answer(design, 5 + design.levels @ np.array([-0.1, -0.101, 0.3, 0.0]) / 2)
    assert "pairs that cannot be told apart: norm and rotary" in found["lines"]


def test_a_design_without_effects_predicts_that_the_base_is_best():
    found = answer(design_of(*TEXTS), np.full(16, 5.0))
    assert found["lines"][-1] == "predicted best combination: base: +0 ± 0"
    assert found["best"] == {}


def test_a_level_that_diverges_is_an_answer_and_leaves_the_other_effects():
    design = design_of("rotary", "norm", "mlp=gelu,relu2", "gate", "max_lr*0.7,3", runs=32)
    values = 5 + design.levels @ SIZES_OF_TEXTS / 2
    high = np.flatnonzero(design.levels[:, 4] > 0)
    diverged = high[[0, 3, 5, 14]]
    values[diverged] = np.nan
    lines = answer(design, values)["lines"]
    assert lines[0] == "max_lr, 0.0042 → 0.018: diverges at 0.018, in 4 of its 16 runs"
    assert not any(line.startswith("max_lr") for line in lines[1:])
    assert lines[1].startswith("rotary, off → on: -0.3 ± ")


def test_a_factor_that_diverges_in_half_of_the_runs_leaves_no_answer_for_the_others():
    design = design_of(*TEXTS)
    values = np.where(design.levels[:, 1] > 0, np.nan, 5.0)
    assert answer(design, values)["lines"] == [
        "norm, off → on: diverges at on, in 8 of its 8 runs",
        "no answer: 8 runs diverged, more than an eighth: leave out the factor that diverges, or "
        "use a lower --max-lr",
    ]


def test_one_diverged_run_is_at_a_level_of_each_factor_and_blames_none():
    design = design_of(*TEXTS)
    values = 5 + design.levels @ SIZES_OF_TEXTS / 2
    values[3] = np.nan
    found = answer(design, values)
    assert not any("diverges" in line for line in found["lines"])
    assert [size for _, size, _ in found["effects"]] == pytest.approx(SIZES_OF_TEXTS)


def test_no_answer_without_noise_or_with_mirrored_runs_that_diverged():
    design = design_of("rotary", "norm", "mlp=gelu,relu2", "gate", "heads=1,2", "max_lr*0.7,1.4")
    equal = answer(design, np.zeros(16), base_values=[5.0] * 8)
    assert equal["lines"][0].startswith("no answer: the runs of the base are equal, so the noise")
    full = folded_design(8, 16)
    values = np.zeros(16)
    values[[0, 8]] = np.nan
    found = answer(design._replace(levels=full[:, :6]), values)["lines"]
    assert found[0].startswith(("no answer", "rotary", "gate"))


@pytest.mark.parametrize(
    "text", ["mlp", "mlp=gelu", "mlp=a,b,c", "mlp*", "seed=1,2", "data_dir=a,b", "max_lr*a,b", ""]
)
def test_a_text_that_is_not_two_levels_is_one_line(text):
    message = f"--factors {text} is not two levels of a setting: use a switch (rotary), two values"
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_factor(text, base_variant())


def test_a_factor_is_a_switch_two_values_or_two_multiples():
    base = base_variant()
    assert parse_factor("rotary", base).levels == [{"rotary": False}, {"rotary": True}]
    assert parse_factor("--max-lr=1e-3,-2", base).levels == [{"max_lr": "1e-3"}, {"max_lr": "-2"}]
    low, high = parse_factor("max_lr*0.5,2", base).levels
    assert low == {"max_lr": 0.003, "min_lr": 0.0003}
    assert high == {"max_lr": 0.012, "min_lr": 0.0012}
    with pytest.raises(ValueError, match="mlp is gelu, not a number above 0: pass --mlp"):
        parse_factor("mlp*0.5,2", base)


# --- runs -------------------------------------------------------------------------------------

FAKE_TRAINING = """
import json, sys
from pathlib import Path
flags = dict((arg[2:].split("=") + [1])[:2] for arg in sys.argv[1:])
if flags.get("mlp") == "broken":
    sys.exit("error: mlp is broken")
value = 5 - 0.3 * ("rotary" in flags) + 0.1 * ("norm" in flags) + int(flags["seed"]) % 3 / 100
numbers = {"val_loss": value, "train_loss": value, "tokens_seen": int(flags.get("tokens", 64))}
records = [{"step": 1, **numbers}, {"data_fingerprint": "a", "val_fingerprint": flags.get("val")}]
records += [{"diverged_step": 7} if "gate" in flags and "norm" in flags else {"finished_step": 200}]
folder = Path(flags["out-dir"], flags["run-name"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))
"""


def trained(folder, *texts, **config):
    """The lines of a design with runs of a made-up training."""
    (folder / "train_gpt2.py").write_text(FAKE_TRAINING)
    opened = Trial(TrialConfig(factors=texts, runs=16, jobs=4, **config), folder, {"edits": {}}, [])
    design = design_of(*texts)
    variants = [variant._replace(code=folder, flags=variant.flags) for variant in design.variants]
    base = base_variant()._replace(code=folder)
    opened.run_design(base, design._replace(variants=variants))
    return opened.ledger["designs"]


def test_a_design_is_kept_and_does_not_disturb_another(tmp_path, capsys):
    first = trained(tmp_path, "rotary", "norm")
    shown = capsys.readouterr().out
    assert "design: runs to do: 24, 4 at a time" in shown
    assert "\nrotary, off → on: -0.3 ± " in shown
    starts = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")}
    assert len(starts) == 24
    second = trained(tmp_path, "norm", "mlp=gelu,relu2")
    # The base's runs are there, and those with rotary and norm off that have the same seed.
    assert "runs to do: 12, 4" in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == time for path, time in starts.items())
    assert json.loads(json.dumps({**second, **first})) == json.loads(json.dumps(second))
    assert [*second] == ["rotary norm --runs=16 val_loss", "norm mlp=gelu,relu2 --runs=16 val_loss"]
    trained(tmp_path, "rotary", "norm")
    assert "runs to do: 0" in capsys.readouterr().out
    assert json.loads((tmp_path / NAME).read_text())["designs"] == json.loads(json.dumps(second))


def test_diverged_and_failed_runs_are_named(tmp_path, capsys):
    (lines,) = (each["lines"] for each in trained(tmp_path, "rotary", "norm", "gate").values())
    assert lines[0].startswith("no answer: 4 runs diverged, more than an eighth")
    named = [line for line in lines if "diverged with seed" in line]
    assert len(named) == 4
    assert re.match(r"factors diverged with seed 5\d\d in step 7: --rotary --norm --gate", named[0])
    (tmp_path / "x").mkdir()
    (lines,) = (
        each["lines"] for each in trained(tmp_path / "x", "rotary", "mlp=gelu,broken").values()
    )
    assert re.match(r"no answer: factors-\w+-seed501 failed: mlp is broken; factors-", lines[0])


def test_runs_of_other_data_leave_no_answer_and_other_tokens_are_noted(tmp_path, capsys):
    trained(tmp_path, "rotary", "val=1,2")
    assert capsys.readouterr().out.endswith("\nno answer: the runs read different data\n")
    trained(tmp_path, "rotary", "tokens=64,128")
    assert "\nruns trained on 64 to 128 tokens\n" in capsys.readouterr().out


@pytest.mark.slow
def test_factors_that_cannot_be_used_are_one_line(checkout, tiny_data, tmp_path):
    (tmp_path / "copies").mkdir()
    [base] = build_variants(None, [], [*TINY_RUN, f"--data-dir={tiny_data}"], tmp_path / "copies")
    for factors, message in {
        (*"abcdefghi",): "no design has 9 factors in 16 runs: use --runs and --factors for at most",
        ("optimizer",): "--factors optimizer is not two levels of a setting: use a switch (rotary)",
        ("shuffle", "shuffle=1,2"): "--factors changes shuffle more than once: keep one factor",
        ("max_lr*1,2", "min_lr=0,1e-5"): "--factors changes min_lr more than once: keep one",
        ("rotery",): "--factors: a run is not valid (unknown flag --rotery",
        ("optimizer=adamw,no",): "a run is not valid (--optimizer: 'no' is not adamw or muon",
        ("n_head=1,3",): "--factors: a run is not valid (--n-embd 32",
        ("beta1=.9,.90",): "--factors beta1=.9,.90: both levels are equal: use two others",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            plan_design(factors, 16, base)
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_killed_design_of_a_real_model_continues_and_confirms_the_best(
    checkout, tiny_data, tmp_path, capsys, monkeypatch
):
    factors = ("max_lr*1,30", "optimizer=adamw,muon", "n_layer=1,2", "weight_decay=0.1,0.2")
    flags = [*TINY_RUN, f"--data-dir={tiny_data}", "--max-steps=4", "--val-every=4", "--seeds=2"]
    command = ["bench.trial", *flags, "--factors", *factors, "--runs=16", "--confirm=2"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    arguments = [sys.executable, "-m", *command]
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as first:
        for line in first.stdout:
            if "; 5 of 24" in line:
                os.killpg(first.pid, signal.SIGKILL)
    done = {p: p.read_bytes() for p in (tmp_path / "runs").rglob("metrics.jsonl")}
    done = {p: content for p, content in done.items() if b"finished_step" in content}
    assert len(done) >= 5
    monkeypatch.setattr(sys, "argv", command)
    trial.main()
    shown = capsys.readouterr().out
    assert all(path.read_bytes() == content for path, content in done.items())
    # Runs that were being made when the trial was killed may have ended since.
    assert int(re.search(r"design: runs to do: (\d+),", shown)[1]) <= 24 - len(done)
    assert len([*(tmp_path / "runs").rglob("factors-*/metrics.jsonl")]) == 16
    assert re.search(r"\nmax_lr, 0\.0006 → 0\.018: -\d\S* ± \d\S*\n", shown)
    assert re.search(r"\npredicted best combination: base --max-lr=0\.018 --min-lr=\S+.*: -", shown)
    assert re.search(
        r"\nbest combination: \w.*: val_loss \S+ → \S+, -.*\(95 %, 2 fresh pairs\)\n"
        r"predicted -\S+ ± \S+, measured -\S+ ± \S+: \d+ % of the sum of the gains\n",
        shown,
    )
    listed = "\n".join(list_trials())
    assert f"--factors {' '.join(factors)} --runs=16 val_loss\nmax_lr, " in listed
    assert "% of the sum of the gains\n| edit | lines |" in listed
    assert "| `base --max-lr=0.018 --min-lr=" in listed
    trial.main()
    assert capsys.readouterr().out.count("runs to do: 0, ") == 2
