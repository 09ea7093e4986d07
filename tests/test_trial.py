import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import TINY_RUN

from bench import trial
from bench.trial import (
    MAX_PAIRS,
    T_QUANTILES,
    Outcome,
    TrialConfig,
    build_variants,
    describe,
    interval,
)
from formats.metrics import Series


def outcome(value, losses=()):
    """The outcome of a run whose last value is `value`."""
    return Outcome(Series(np.array([100.0]), np.array([value])), list(losses or [value]), 10.0)


def pairs_of(*values):
    return [(outcome(base), outcome(edit)) for base, edit in values]


# --- the interval -----------------------------------------------------------------------------


def test_quantiles_are_students():
    """The distribution function of t with n degrees of freedom is 0.975 at each quantile."""
    for n, quantile in enumerate(T_QUANTILES, start=1):
        x = np.linspace(0, quantile, 20_001)
        density = np.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi)
        density = density * (1 + x**2 / n) ** (-(n + 1) / 2)
        assert np.trapezoid(density, x) == pytest.approx(0.475, abs=5e-5)
    assert MAX_PAIRS == 30


def test_interval_is_the_paired_one_of_a_textbook():
    differences = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]  # Student 1908, drug 1
    assert np.mean(differences) == pytest.approx(0.75)
    assert interval(differences) == pytest.approx(1.28, abs=0.005)  # -0.53 to 2.03
    assert interval([0.5]) == math.inf
    assert interval(differences, 30) < interval(differences, 11) < interval(differences)


@pytest.mark.parametrize(
    ("config", "values", "line"),
    [
        (
            {},
            [(2.60, 2.58), (2.62, 2.61), (2.61, 2.59)],
            "val_loss 2.61 → 2.5933, better by 0.017 ± 0.014 (95 %, 3 pairs), 3 of 3 seeds",
        ),
        (
            {"metric": "hellaswag_acc"},
            [(0.25, 0.20), (0.25, 0.21)],
            "hellaswag_acc 0.25 → 0.205, not shown: -0.045 ± 0.064 (95 %, 2 pairs); 3 pairs would "
            "show such a difference",
        ),
        (
            {"metric": "score", "higher": True},
            [(1.0, 2.0), (1.0, 2.1)],
            "score 1 → 2.05, better by 1.1 ± 0.64 (95 %, 2 pairs), 2 of 2 seeds",
        ),
        ({"metric": "score"}, [(1.0, 2.0)], "score 1 → 2, worse by 1 (1 pair: no interval)"),
        (
            {},
            [(1.0, 1.5), (1.0, 0.5)],
            "val_loss 1 → 1, not shown: +0 ± 6.4 (95 %, 2 pairs); more than 30 pairs would show "
            "such a difference",
        ),
    ],
)
def test_answer_says_what_was_shown(config, values, line):
    assert describe(TrialConfig(edit=("x",), **config), pairs_of(*values)) == line


def test_only_equal_losses_are_the_same_bit_for_bit():
    base, same = outcome(2.0, [(1, 3.0, None), (2, None, 2.0)]), outcome(2.0, [(1, 3.0, None)])
    config = TrialConfig(edit=("x",))
    assert describe(config, [(base, base)]) == "the same, bit for bit (1 pair)"
    assert "bit for bit" not in describe(config, [(base, base), (base, same)])


# --- the command ------------------------------------------------------------------------------


def write_patch(checkout, name, path, old, new):
    """Write a patch that replaces a text in a file of the checkout."""
    text = (checkout / path).read_text()
    assert old in text
    (checkout / path).write_text(text.replace(old, new, 1))
    diff = subprocess.check_output(["git", "diff"], cwd=checkout)
    (checkout / path).write_text(text)
    (checkout.parent / name).write_bytes(diff)
    return name


@pytest.fixture
def flags(tiny_data):
    """Flags of a trial of tiny runs, named t."""
    return [
        *(*TINY_RUN, f"--data-dir={tiny_data}", "--max-steps=4", "--val-every=2"),
        *("--name=t", "--jobs=1"),
    ]


@pytest.mark.slow
def test_interrupted_trial_continues_and_compares_each_edit(
    flags, checkout, tmp_path, monkeypatch, capsys
):
    loss = "return cross_entropy(logits, targets, config.vocab_size)"
    edits = [
        write_patch(checkout, "comment.patch", "model.py", "import math", "import math  # why"),
        write_patch(checkout, "nan.patch", "ops.py", loss, f"{loss} * math.nan"),
        write_patch(checkout, "broken.patch", "lr_schedule.py", "import", "import +"),
        "rate.json",
    ]
    (tmp_path / "rate.json").write_text('{"about": "higher", "max_lr": 0.01, "seed": 5}')
    flags += [f"--edit={edit}" for edit in edits]

    def call(*more):
        monkeypatch.setattr(sys, "argv", ["trial", *flags, *more])
        trial.main()
        return capsys.readouterr().out

    command = [sys.executable, "-m", "bench.trial", *flags, "--seeds=1"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as first:
        for line in first.stdout:
            if line.endswith(": finished\n"):
                first.terminate()
    assert first.returncode == 130
    (done,) = (tmp_path / "runs/trials/t").glob("base-*/metrics.jsonl")
    before = done.read_bytes()
    shown = call("--seeds=1")
    assert "runs/trials/t: 4 runs, 1 at a time\n" in shown
    assert "failed: stopped: " in shown  # the loss is not finite
    assert "failed: SyntaxError: invalid syntax" in shown
    *_, comment, nan, broken, rate = shown.splitlines()
    assert comment.startswith("comment: the same, bit for bit (1 pair); ")
    assert nan == "nan: no answer: no pair of runs is complete"
    assert broken == "broken: no answer: no pair of runs is complete"
    assert re.match(r"rate: val_loss \S+ → \S+, \w+ by \S+ \(1 pair: no interval\); ", rate)
    file = json.loads((tmp_path / "runs/trials/t/trial.json").read_text())
    assert "+import math  # why" in file["edits"]["comment"]["patch"]
    assert file["edits"]["rate"]["flags"] == ["--max-lr=0.01"]
    flags[-4:] = ["--edit=rate.json"]
    assert "t: 2 runs, 1 at a time\n" in call("--seeds=2")
    assert (tmp_path / "runs/trials/t/rate.png").stat().st_size > 10_000
    assert done.read_bytes() == before  # no run was done twice
    assert "t: 0 runs" in call("--seeds=2", "--metric=grad_norm")
    with pytest.raises(ValueError, match=r"--metric nothing is not in .*: use a name there"):
        call("--seeds=2", "--metric=nothing")


def test_worktree_and_a_folder_are_edits(flags, checkout, tmp_path, monkeypatch, capsys):
    """The base has neither changed, new nor deleted files; the index stays as it was."""
    (checkout / "new.py").write_text("x = 1\n")
    (checkout / "demo.py").unlink()
    shutil.copytree(checkout, tmp_path / "other", ignore=shutil.ignore_patterns(".git"))
    (tmp_path / "variants").mkdir()
    config = TrialConfig(edit=("worktree", "other"))
    base, worktree, other = build_variants(config, flags, tmp_path / "variants")
    assert base.tree != worktree.tree == other.tree
    assert [(base.code / name).exists() for name in ("demo.py", "new.py")] == [True, False]
    assert [(other.code / name).exists() for name in ("demo.py", "new.py")] == [False, True]
    status = subprocess.check_output(["git", "status", "--porcelain"], cwd=checkout, text=True)
    assert status == " D demo.py\n?? new.py\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--edit is missing: use a .patch, a .json, a folder or worktree"),
        (["--edit=nothing.patch"], "--edit nothing.patch does not exist"),
        (["--edit=no.patch"], "no.patch does not apply to the last commit: patch failed: model.py"),
        (["--edit=worktree"], "--edit worktree does not change the last commit"),
        (["--edit=one.json", "--edit=./one.json"], "both named one: rename it"),
        (["--edit=list.json"], "--edit list.json is not a JSON object of settings"),
        (["--edit=bad.json"], "unknown flag --n-heads: did you mean --n-head?"),
        (["--edit=worktree", "--seed=3"], "leave out --seed: set by the trial for each run"),
        (["--edit=worktree", "--max-step=3"], "unknown flag --max-step: did you mean --max-steps"),
        (["--edit=worktree", "--seeds=31"], "--seeds must be at most 30, not 31"),
    ],
)
def test_flags_and_edits_that_cannot_be_used_are_one_line(
    flags, message, checkout, tmp_path, monkeypatch
):
    write_patch(checkout, "no.patch", "model.py", "import math", "import cmath")
    (tmp_path / "no.patch").write_text((tmp_path / "no.patch").read_text().replace("math", "moth"))
    (tmp_path / "one.json").write_text('{"max_lr": 0.001}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bad.json").write_text('{"n_heads": 1}')
    monkeypatch.setattr(sys, "argv", ["trial", *flags])
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        trial.main()
