import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from conftest import ROOT, TINY_RUN

from bench import trial, variants
from bench.ledger import CONFIRMATION, NAME, SCREENING, gain, list_trials
from bench.ruler import RULER, check_ruler
from bench.statistics import interval, pairs_needed, plan, verdict
from bench.trial import Result, Trial, TrialConfig, describe, start_trial
from bench.variants import (
    BASE,
    SAMPLED,
    Variant,
    build_variants,
    content_hash,
    copy_code,
    hash_what_is_read,
    new_variant,
    open_repository,
    patch_between,
    split_edit,
)
from formats.load import RUN_LOCK_NAME
from formats.metrics import METRICS_NAME
from runtime.files import lock_folder

CONFIG = TrialConfig(edit=("x",))


def result(value, losses=(), data=("a", "b")):
    return Result("", value, list(losses) or [(1, value, value)], list(data))


def failure(problem):
    return Result(problem)


# --- statistics -------------------------------------------------------------------------------


def test_interval_is_the_paired_one_of_a_textbook():
    differences = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]  # Student 1908, drug 1
    assert np.mean(differences) == pytest.approx(0.75)
    assert interval(differences) == pytest.approx(1.28, abs=0.005)  # -0.53 to 2.03
    assert interval([0.5]) == math.inf
    assert interval([7 / 24 - 6 / 24, 9 / 24 - 8 / 24]) == math.inf  # equal, but for rounding


@pytest.mark.parametrize(("effect", "n"), [(0.5, 34), (0.8, 15), (1.0, 10), (2.0, 5)])
def test_pairs_needed_are_those_of_published_tables(effect, n):
    """One-sample t tests, two-sided at 5 % with 80 % power: G*Power's numbers."""
    deviation = math.sqrt(1 / 2)  # so 1 for differences
    assert pairs_needed(deviation, effect) == n
    assert pairs_needed(deviation, 0.01) == 1000  # or more


def test_two_pairs_have_an_interval_of_nine_standard_deviations():
    """The note of `--confirm 2`; five pairs have 1.2."""
    assert interval([0.0, math.sqrt(2)]) == pytest.approx(9, abs=0.05)
    five = np.array([1.0, -1.0, 0.5, -0.5, 0.0])
    assert interval([*five / five.std(ddof=1)]) == pytest.approx(1.2, abs=0.05)


def test_a_plan_has_a_range_and_needs_four_runs():
    assert plan([4.98, 4.99, 5.0], 0.02) == (
        "3 runs of the base do not show its noise: use --seeds 4 to plan a confirmation"
    )
    text = plan([4.98, 4.99, 5.0, 5.01, 4.97], 0.02)
    assert re.fullmatch(
        r"5 runs of the base have a standard deviation of 0\.016: --confirm 12 \(6 to 83\) shows a "
        r"difference of 0\.02 with a probability of 80 %",
        text,
    )


def test_a_range_of_the_deviation_has_the_true_one_in_95_percent():
    """The ends of a plan are the pairs needed at the ends of the chi-square interval."""
    rng, counts = np.random.default_rng(0), []
    for values in rng.normal(0, 0.015, (300, 8)):
        low, high = map(int, re.findall(r"\((\d+) to (\d+)\)", plan([*values], 0.02))[0])
        counts.append(low <= pairs_needed(0.015, 0.02) <= high)
    assert 0.91 <= np.mean(counts) <= 0.99


def test_one_or_two_screened_pairs_stand_beside_the_noise_of_the_base():
    base = [4.98, 4.99, 5.0, 5.01]
    pairs = [(result(5.0), result(4.96)), (result(4.98), result(4.96))]
    half = 3.182 * np.std(base, ddof=1) * math.sqrt(2 / 2)  # Student's t for 3 degrees of freedom
    shown = f"; -0.04, -0.02, ± {half:.2g} by the noise of 4 runs of the base"
    text = describe(CONFIG, SCREENING, pairs, base)
    assert text == "screened: val_loss 4.99 → 4.96, -0.03 ± 0.13 (95 %, 2 pairs)" + shown
    for stage, more, known in (
        (CONFIRMATION, pairs, base),
        (SCREENING, [*pairs, *pairs], base),
        (SCREENING, pairs, base[:3]),
    ):
        assert "by the noise of" not in describe(CONFIG, stage, more, known)


def test_differences_far_below_the_noise_hardly_act():
    base, pairs = (
        [4.98, 4.99, 5.0, 5.01],
        [(result(5.0), result(5.001)), (result(4.98), result(4.98))],
    )
    for stage in (SCREENING, CONFIRMATION):
        assert describe(CONFIG, stage, pairs, base).startswith("hardly acts here: val_loss ")
        far = [*pairs, (result(5.0), result(5.002))]  # above a tenth of 0.0129
        assert "hardly" not in describe(CONFIG, stage, far, base)
        assert "hardly" not in describe(CONFIG, stage, pairs, base[:3])
    steady = replace(CONFIG, least=0.0001)
    pairs = [(result(5.0), result(5.0 - 0.0005 - 1e-5 * n)) for n in range(5)]
    assert describe(steady, CONFIRMATION, pairs, base).startswith("better: ")


@pytest.mark.parametrize(
    ("differences", "higher", "words"),
    [
        ([-0.02, -0.03, -0.025], False, "better"),
        ([-0.02, -0.03, -0.025], True, "worse"),
        ([-0.02, 0.03, 0.0], False, "not shown"),
        ([-0.002, -0.003, -0.0025], False, "equivalent within 0.01"),  # it excludes 0
        ([0.001, -0.001, 0.002], False, "equivalent within 0.01"),
        ([-0.5], False, "not shown"),
        ([-0.5, -0.5, -0.5], False, "not shown"),
    ],
)
def test_verdict_is_what_the_interval_shows(differences, higher, words):
    assert verdict(differences, 0.01, higher) == words


BETTER = [(2.60, 2.58), (2.62, 2.61), (2.61, 2.59)]


@pytest.mark.parametrize(
    ("config", "stage", "values", "line"),
    [
        (
            {},
            SCREENING,
            BETTER,
            "screened: val_loss 2.61 → 2.5933, -0.017 ± 0.014 (95 %, 3 pairs)",
        ),
        (
            {},
            CONFIRMATION,
            BETTER,
            "better: val_loss 2.61 → 2.5933, -0.017 ± 0.014 (95 %, 3 fresh pairs)",
        ),
        (
            {"metric": "hellaswag_acc"},
            CONFIRMATION,
            [(0.25, 0.20), (0.25, 0.21)],
            "not shown: hellaswag_acc 0.25 → 0.205, -0.045 ± 0.064 (95 %, 2 fresh pairs)",
        ),
        (
            {"metric": "score", "higher": True},
            CONFIRMATION,
            [(1.0, 2.0), (1.0, 2.1)],
            "better: score 1 → 2.05, +1.1 ± 0.64 (95 %, 2 fresh pairs)",
        ),
        (
            {"metric": "score", "lower": True},
            SCREENING,
            [(1.0, 2.0)],
            "screened: score 1 → 2, +1 (1 pair: no interval)",
        ),
    ],
)
def test_only_a_confirmation_has_a_verdict(config, stage, values, line):
    pairs = [(result(base), result(edit)) for base, edit in values]
    assert describe(replace(CONFIG, **config), stage, pairs) == line


def test_answer_names_every_failed_run_and_is_not_better():
    pairs = [(result(base), result(edit)) for base, edit in BETTER]
    diverged = failure("x diverged with seed 2 in step 7")
    text = describe(CONFIG, CONFIRMATION, [pairs[0], (pairs[1][0], diverged), pairs[2]])
    assert text == (
        "not better: x diverged with seed 2 in step 7; otherwise val_loss 2.605 → 2.585, "
        "-0.02 (2 fresh pairs with equal differences: no interval)"
    )
    of_base = failure("base diverged with seed 3 in step 1")
    text = describe(CONFIG, CONFIRMATION, [pairs[0], (of_base, diverged), pairs[2]])
    assert text == f"no verdict: {of_base.problem}; {diverged.problem}"
    other = [(result(2.6), result(2.5, data=("other", "b")))]
    assert describe(CONFIG, SCREENING, other) == "no verdict: base and edit read different data"


def test_only_equal_losses_are_the_same_bit_for_bit():
    base, same = result(2.0, [(1, 3.0, None), (2, None, 2.0)]), result(2.0, [(1, 3.0, None)])
    assert describe(CONFIG, SCREENING, [(base, base)]) == "the same, bit for bit (1 pair)"
    assert "bit for bit" not in describe(CONFIG, SCREENING, [(base, base), (base, same)])


# --- versions ---------------------------------------------------------------------------------


def variant(name=BASE, **settings):
    settings = {"max_lr": 0.004, "min_lr": 0.001, "max_steps": 200, "warmup_steps": None} | settings
    settings |= {"device": "cpu", "compile": False}
    return Variant(name, None, "", (), settings, {})


def test_tuning_multiplies_a_setting_and_keeps_the_ratio_of_min_lr():
    half = variant().scaled("max_lr", 0.5)
    assert half.flags == ("--max-lr=0.002", "--min-lr=0.0005")
    assert half.settings["max_lr"] == 0.002
    assert half.digest != variant().digest == variant().scaled("max_lr", 1.0).digest
    assert variant().scaled("max_steps", 0.5).flags == ("--max-steps=100",)
    for name in ("warmup_steps", "compile", "nothing"):
        with pytest.raises(ValueError, match=f"{name} is (None|False), not a number above"):
            variant().scaled(name, 2.0)


FAKE_TRAINING = """
import json, math, sys, time
from pathlib import Path
flags = dict(arg[2:].split("=") for arg in sys.argv[1:])
if flags.get("beta1", "0") >= "1":
    sys.exit(f"error: --beta1 {flags['beta1']} is not below 1")
if flags["seed"] == flags.get("endless"):
    time.sleep(1000)
rate = float(flags.get("max-lr", 0.004))
times = [1000.0, *[2.0, 2.0, 2.0, 2.0, eval(flags.get("fifth", "2.0"))] * 20]
numbers = {"val_loss": math.log(rate) ** 2, "tokens_seen": int(flags.get("tokens", 640))}
records = [{"step": n, "step_time_ms": ms, **numbers} for n, ms in enumerate(times)]
records += [{"data_fingerprint": "a", "val_fingerprint": "b"}, {"finished_step": 200}]
records += [{flags.get("metric", "other"): 1.0}]
folder = Path(flags["out-dir"], flags["run-name"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))
"""


def test_step_time_is_the_mean_of_a_run_so_work_of_each_fifth_step_counts(tmp_path):
    (tmp_path / "train_gpt2.py").write_text(FAKE_TRAINING)
    config = replace(CONFIG, metric="step_time_ms", jobs=1)
    opened = Trial(config, tmp_path, {"edits": {"x": {}}}, [])
    base = variant()._replace(code=tmp_path, flags=("--fifth=2",))
    edit = variant("x")._replace(code=tmp_path, flags=("--fifth=12",))
    opened.train("screening", [(base, 1), (edit, 1)])
    answer = opened.answer(SCREENING, "x", (base, edit), [1])
    # The losses are equal. The first step, which compiles, takes 1 s.
    assert answer["text"].startswith("screened: step_time_ms 2 → 4, +2 (1 pair: no interval)")


def test_tuning_finds_the_best_factor_and_goes_at_most_two_steps_further(tmp_path):
    (tmp_path / "train_gpt2.py").write_text(FAKE_TRAINING)  # the best learning rate is 1
    opened = Trial(replace(CONFIG, seeds=1, jobs=1), tmp_path, {"edits": {"x": {}}}, [])
    near, far = variant(max_lr=0.6), variant("x", max_lr=0.1)
    near, far = (version._replace(code=tmp_path) for version in (near, far))
    tuned = opened.tune({"x": (near, far)}, "max_lr")["x"]
    assert [version.settings["max_lr"] for version in tuned] == [1.2, 0.8]
    assert [version.settings["min_lr"] for version in tuned] == [0.002, 0.008]
    assert len([*tmp_path.glob("*-seed1")]) == 9
    assert opened.edges == {("x", "max_lr")}
    changed = replace(CONFIG, seeds=1, jobs=1, tune=("max_lr",))
    answer = replace(opened, config=changed).answer(SCREENING, "x", tuned, [1])
    assert answer["changed"] == ["max_lr 1.2 → 0.8 (at the edge)"]


def test_an_invalid_value_of_a_tuned_setting_only_loses(tmp_path):
    (tmp_path / "train_gpt2.py").write_text(FAKE_TRAINING)
    base, edit = (variant(name, beta1=0.9)._replace(code=tmp_path) for name in (BASE, "x"))
    edit = edit.changed(max_lr=0.5)
    config = replace(CONFIG, seeds=1, jobs=1, tune=("beta1",))
    opened = Trial(config, tmp_path, {"edits": {"x": {}}}, [])
    pair = opened.tune({"x": (base, edit)}, "beta1")["x"]
    assert opened.failures == {}
    answer = opened.answer(SCREENING, "x", pair, [1])
    assert answer["text"].startswith("screened: val_loss ")
    assert answer["changed"] == ["beta1 0.9 → 0.9"]  # of equal ones, the version's own


def test_each_confirmation_has_seeds_that_no_decision_has_used(tmp_path):
    edits = {name: (variant(), variant(name, max_lr=lr)) for name, lr in (("a", 1), ("b", 2))}
    ledger = {"edits": {}, "confirmations": {}}

    def seeds(*names, confirm=3, **config):
        opened = Trial(replace(CONFIG, confirm=confirm, **config), tmp_path, ledger, [])
        return opened.fresh_seeds({name: edits[name] for name in names})

    first = {"a": [1001, 1002, 1003]}
    assert seeds("a") == seeds("a") == first
    assert seeds("a", "b") == first | {"b": [1004, 1005, 1006]}
    assert seeds("a", confirm=2) == {"a": [1007, 1008]}
    assert seeds("a", metric="other_loss") == {"a": [1009, 1010, 1011]}
    assert json.loads((tmp_path / NAME).read_text()) == ledger


def test_two_trials_keep_each_others_answers_and_have_their_own_seeds(tmp_path):
    trials = {n: Trial(replace(CONFIG, confirm=2), tmp_path, {"edits": {}}, []) for n in "ab"}
    for opened in trials.values():
        opened.ledger["confirmations"] = {}
    for name, opened in trials.items():  # both are open, and neither has read the other's
        with opened.changed_ledger():
            opened.ledger["edits"][name] = {"answers": {}}
    seeds = [
        opened.fresh_seeds({name: (variant(), variant(name, max_lr=lr))})[name]
        for lr, (name, opened) in enumerate(trials.items(), start=1)
    ]
    assert seeds == [[1001, 1002], [1003, 1004]]
    assert json.loads((tmp_path / NAME).read_text())["edits"].keys() == {"a", "b"}


class Screen(io.StringIO):
    """What several threads print; reading removes nothing, as `capsys` would in between."""

    def wait_for(self, words):
        deadline = time.monotonic() + 600
        while words not in self.getvalue():
            assert time.monotonic() < deadline, self.getvalue()
            time.sleep(0.01)


def test_a_trial_waits_for_the_run_of_another_and_does_not_train_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    wait = "import time\nwhile not Path('go').exists(): time.sleep(0.01)\n"
    starts = f"with open({str(tmp_path / 'starts')!r}, 'a') as file: file.write('x')\n"
    wait = wait.replace("'go'", repr(str(tmp_path / "go")))
    (tmp_path / "train_gpt2.py").write_text(
        FAKE_TRAINING.replace("folder.mkdir", f"{starts}{wait}folder.mkdir")
    )
    base = variant()._replace(code=tmp_path)
    trials = [Trial(replace(CONFIG, jobs=1), tmp_path / "runs", {}, []) for _ in range(2)]
    threads = [Thread(target=each.train, args=("screening", [(base, 1)])) for each in trials]
    for thread in threads:
        thread.start()
    screen.wait_for("waiting: another process is at work")
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join()
    assert (tmp_path / "starts").read_text() == "x"
    assert [each.failures for each in trials] == [{}, {}]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_locked_is_a_failed_run(tmp_path):
    (tmp_path / "runs").mkdir(mode=0o500)
    opened = Trial(replace(CONFIG, jobs=1), tmp_path / "runs", {}, [])
    opened.train("screening", [(variant(), 1)])
    assert "cannot be written and locked" in "".join(opened.failures.values())


def test_an_answer_tells_other_tokens_and_which_confirmation_it_is(tmp_path):
    (tmp_path / "train_gpt2.py").write_text(FAKE_TRAINING)
    base = variant()._replace(code=tmp_path)
    edit = variant("x", max_lr=1.0)._replace(code=tmp_path, flags=("--max-lr=1", "--tokens=1280"))
    key, renamed = f"x-{edit.digest}", f"y-{edit.digest}"
    ledger = {"edits": {key: {"answers": {}}, renamed: {"answers": {}}}, "confirmations": {}}

    def confirm(n, least=0.01, key=key):
        opened = Trial(replace(CONFIG, confirm=n, least=least, jobs=4), tmp_path, ledger, [])
        pairs = {key: (base, edit)}
        return opened.compare(CONFIRMATION, pairs, opened.fresh_seeds(pairs))[key]["text"]

    first = confirm(2)
    assert first.startswith("not shown: val_loss ")  # all pairs differ by the same
    assert first.endswith("(2 fresh pairs with equal differences: no interval); tokens 640 → 1,280")
    assert "; second confirmation, with another --least; tokens" in confirm(2, least=50)
    assert "; third confirmation; tokens" in confirm(3)
    assert "; fourth confirmation; tokens" in confirm(4, key=renamed)
    assert confirm(2) == first
    assert "; second confirmation, with another --least; tokens" in confirm(2, least=50)
    answers = json.loads((tmp_path / NAME).read_text())["edits"][key]["answers"].values()
    assert [(len(answer["seeds"]), answer["least"]) for answer in answers] == [
        *[(2, 0.01), (2, 50), (3, 0.01)],
    ]


def test_a_metric_that_the_base_lacks_ends_the_trial_after_its_first_run(tmp_path):
    (tmp_path / "train_gpt2.py").write_text(FAKE_TRAINING)
    having = variant("x")._replace(code=tmp_path, flags=("--metric=my_loss",))
    lacking = having._replace(name=BASE, flags=("--endless=2",))  # a second run only ends if killed
    config = replace(CONFIG, metric="my_loss", seeds=2, jobs=1)
    ledger = {"edits": {"x": {"answers": {}}}}
    for _ in range(2):  # the second trial finds the run of the first
        opened = Trial(config, tmp_path, ledger, [])
        with pytest.raises(ValueError, match=r"--metric my_loss is not a number in .*use a name"):
            opened.compare(SCREENING, {"x": (lacking, having)}, {"x": [1, 2]})
        assert len([*tmp_path.glob(f"{BASE}-*/{METRICS_NAME}")]) == 1
    opened = Trial(config, tmp_path / "other", ledger, [])
    (tmp_path / "other").mkdir()
    pair = having._replace(name=BASE), having._replace(name="x", flags=())
    answer = opened.compare(SCREENING, {"x": pair}, {"x": [1, 2]})["x"]
    assert re.match(r"no verdict: x-\w+-seed1 failed: --metric my_loss is not", answer["text"])


def test_a_run_that_failed_while_tuning_leaves_no_verdict(tmp_path):
    base, edit = variant(), variant("x", max_lr=1.0)
    run_dir = tmp_path / edit.run_name(1)
    failures = {f"{edit.scaled('max_lr', 2.0).run_name(1)}": "no memory", "y-1-seed1": "other"}
    opened = Trial(CONFIG, tmp_path, {"edits": {"x": {}}}, [], failures)
    for run in (base.run_name(1), edit.run_name(1)):
        (tmp_path / run).mkdir()
        records = [{"step": 1, "tokens_seen": 1, "val_loss": 2.0, "train_loss": 2.0}]
        records += [{"data_fingerprint": "a", "val_fingerprint": "b"}, {"finished_step": 200}]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / run / "metrics.jsonl").write_text(lines)
    answer = opened.answer(SCREENING, "x", (base, edit), [1])
    assert re.fullmatch(r"no verdict: x-\w+-seed1 failed: no memory", answer["text"])
    assert answer["mean"] is None
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"diverged_step": 7}\n')
    opened.failures.clear()
    answer = opened.answer(SCREENING, "x", (base, edit), [1])
    assert answer["text"] == "not better: x diverged with seed 1 in step 7"


def test_edits_that_are_better_by_the_smallest_effect_are_confirmed():
    def gains(mean, higher=False):
        return gain({"mean": mean, "higher": higher}) >= TrialConfig.least

    assert gains(-0.01)
    assert gains(0.01, higher=True)
    assert not gains(-0.009)
    assert not gains(None)  # a run diverged
    assert not gains(0.0)  # the same, bit for bit


def test_warm_up_that_is_half_of_the_run_is_noted(tmp_path, monkeypatch, checkout, capsys):
    start_trial(replace(CONFIG, edit=(), list=True), [], variant(warmup_steps=100), [])
    assert "note: 100 of 200 steps are warm-up: use --warmup-steps 20\n" in capsys.readouterr().out
    start_trial(replace(CONFIG, edit=(), list=True), [], variant(warmup_steps=20), [])
    assert "warm-up" not in capsys.readouterr().out


def test_an_edit_is_a_path_with_files_and_flags():
    flags = ("--optimizer=lion", "--max-lr=1e-4")
    assert split_edit("a/lion.patch --optimizer=lion --max-lr=1e-4") == ("a/lion.patch", [], flags)
    assert split_edit("worktree table.json --n-layer 3") == (
        "worktree",
        ["table.json"],
        ("--n-layer", "3"),
    )


def test_an_edit_with_an_apostrophe_is_a_name_in_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="No closing quotation: a name may have "):
        split_edit("ann's.patch --max-lr=1e-3")
    assert split_edit('"ann\'s.patch" --seed=1') == ("ann's.patch", [], ("--seed=1",))
    (tmp_path / "ann's idea.patch").touch()
    assert split_edit("ann's idea.patch") == ("ann's idea.patch", [], ())
    assert len(split_edit("base " + "--logger=x " * 500)[2]) == 500  # longer than any file name


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Code that reads files and variables, and a function that hashes all that it reads."""
    monkeypatch.chdir(tmp_path)
    for name in ("code/assets", "data/more", "run/checkpoints", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "code/m.py").write_text("it's = getenv('FACTOR'), open(\"rates.json\")  # 'a'")
    (tmp_path / "code/link").symlink_to(tmp_path / "outside")
    for name in ("code/words.txt", "code/.table", "outside/x", "rates.json", "data/a.npy", "t.bin"):
        (tmp_path / name).write_text("1" * 5000)
    (tmp_path / "run/checkpoints/w").write_text("1")
    settings = {"data_dir": "data", "init_from": "run@best", "table": "t.bin", "out_dir": "./data"}
    return lambda: hash_what_is_read(tmp_path / "code", settings, content_hash)


@pytest.mark.parametrize(
    "name",
    [
        *("code/words.txt", "code/.table", "code/assets/new.md", "outside/x", "rates.json"),
        *("data/a.npy", "data/new", "run/checkpoints/w", "t.bin"),
    ],
)
def test_runs_are_the_same_only_if_all_that_they_read_is(name, reader, tmp_path, monkeypatch):
    before = reader()
    (tmp_path / name).write_text("1" * 4000 + "2" * 1000)
    assert reader() != before


def test_runs_are_the_same_whatever_they_do_not_read(reader, tmp_path, monkeypatch):
    before = reader()
    for name in ("notes.txt", "data/more/x", "data/.lock"):
        (tmp_path / name).write_text("1")
    (tmp_path / "code/__pycache__").mkdir()
    (tmp_path / "code/__pycache__/m.pyc").write_text("1")
    monkeypatch.setenv("OTHER", "1")
    assert reader() == before
    monkeypatch.setenv("FACTOR", "3")
    three = reader()
    monkeypatch.setenv("FACTOR", "50")
    assert len({str(reader()), str(three), str(before)}) == 3
    assert "50" not in str(reader())  # it may be a password


def test_large_data_is_compared_by_samples_and_the_answer_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "HASHED_BYTES", 1_000_000)
    path = tmp_path / "train.npy"
    path.write_bytes(bytes(3_000_000))
    before = content_hash(tmp_path)
    assert before.endswith(SAMPLED)
    assert content_hash(tmp_path) == before
    with path.open("r+b") as file:
        file.seek(1_500_000)
        file.write(bytes([1] * 12_000))
    os.utime(path, ns=(0, 0))
    changed = content_hash(tmp_path)
    with path.open("r+b") as file:
        file.seek(1_500_000)
        file.write(bytes(12_000))
    os.utime(path, ns=(0, 0))
    assert len({before, changed, content_hash(tmp_path)}) == 3
    sampled = variant("x")._replace(conditions={"read": {"data": before}})
    opened = Trial(CONFIG, tmp_path, {"edits": {"x": {}}}, [])
    text = "large files were compared with earlier runs by size, time and samples"
    assert text in opened.answer(SCREENING, "x", (variant(), sampled), [1])["text"]
    assert text not in opened.answer(SCREENING, "x", (variant(), variant("x")), [1])["text"]


def run_git(folder, *args):
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    return subprocess.check_output(["git", *identity, *args], cwd=folder, text=True)


ODD_CONFIGURATION = {
    **{"core.autocrlf": "true", "core.safecrlf": "true", "core.quotepath": "true"},
    **{"color.ui": "always", "apply.whitespace": "error", "diff.external": "false"},
    **{"diff.noprefix": "true", "diff.mnemonicPrefix": "true", "diff.suppressBlankEmpty": "true"},
}


@pytest.fixture
def kept(checkout, tmp_path):
    """A function that keeps a change as a patch, and checks what the patch gives in a clone."""
    for name, value in ODD_CONFIGURATION.items():
        run_git(checkout, "config", name, value)
    run_git(tmp_path, "clone", "-q", "checkout", "clone")
    (tmp_path / "copies").mkdir()
    repository = open_repository(tmp_path / "copies")
    base = copy_code(repository, tmp_path / "copies/base", [])

    def keep(*changes):
        shutil.rmtree(tmp_path / "copies/edit", ignore_errors=True)
        edit = copy_code(repository, tmp_path / "copies/edit", *changes)
        patch = json.loads(json.dumps(patch_between(repository, base, edit)))
        (tmp_path / "kept.patch").write_bytes(patch.encode())
        run_git(tmp_path / "clone", "apply", "--index", "../kept.patch")
        assert run_git(tmp_path / "clone", "write-tree").strip() == edit
        return patch

    return keep


def test_a_kept_patch_gives_odd_files_back_whatever_the_configuration_is(kept, checkout, tmp_path):
    files = {
        **{"table.txt": b"a\r\nb\nc \n\n", "tables/ä b.bin": bytes(range(256))},
        **{"lr_schedule.py": b"", "ops.py": b"no end", "model.py": b"\r\n# a\r\n"},
    }
    (checkout / "tables").mkdir()
    for name, end in files.items():
        path = checkout / name
        path.write_bytes((path.read_bytes() if path.exists() else b"") + end)
    (checkout / "lr_schedule.py").rename(checkout / "renamed.py")
    (checkout / "sample.py").chmod(0o755)
    (checkout / "link").symlink_to("../outside")
    (tmp_path / "outside").write_text("1")
    patch = kept([], checkout, ["table.txt", "tables", "link"])
    assert "\nrename to renamed.py\n" in patch
    assert "\n+a\r\n+b\n" in patch
    for name in (*files, "renamed.py", "sample.py"):
        if name != "lr_schedule.py":
            copies = [tmp_path / folder / name for folder in ("clone", "copies/edit")]
            assert [p.read_bytes() for p in copies] == 2 * [(checkout / name).read_bytes()]
    assert (tmp_path / "clone/sample.py").stat().st_mode & 0o100
    assert (tmp_path / "copies/edit/link").read_text() == "1"
    run_git(tmp_path / "clone", "reset", "-q", "--hard")
    (checkout / "latin.txt").write_bytes(b"caf\xe9\n")
    kept([], checkout, ["latin.txt"])
    assert (tmp_path / "clone/latin.txt").read_bytes() == b"caf\xe9\n"


@pytest.mark.slow
def test_each_patch_of_edits_is_kept(kept, tmp_path):
    for path in sorted((ROOT / "edits").glob("*.patch")):
        kept([str(path)])
        run_git(tmp_path / "clone", "reset", "-q", "--hard")


def test_code_in_a_folder_of_a_larger_repository_is_copied(tmp_path, monkeypatch):
    code = tmp_path / "all/gpt"
    code.mkdir(parents=True)
    monkeypatch.setattr(variants, "ROOT", code)
    (code / "train_gpt2.py").write_text("x = 1\n")
    (tmp_path / "all/other").write_text("1")
    run_git(tmp_path, "init", "-q", "all")
    repository = open_repository(tmp_path)
    with pytest.raises(ValueError, match=r"gpt is not in the last commit: commit it with git add"):
        copy_code(repository, tmp_path / "none", [])
    run_git(code, "add", "-A", "..")
    run_git(code, "commit", "-qm", "all")
    (code / "train_gpt2.py").write_text("x = 2\n")
    for name, flag in (("outer", "--no-relative"), ("inner", "--relative")):
        (tmp_path / f"{name}.patch").write_text(run_git(code, "diff", flag))
        copy_code(repository, tmp_path / name, [str(tmp_path / f"{name}.patch")])
        assert (tmp_path / name / "train_gpt2.py").read_text() == "x = 2\n"
    copy_code(repository, tmp_path / "base", [])
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["train_gpt2.py"]
    assert (tmp_path / "base/train_gpt2.py").read_text() == "x = 1\n"


def write_patch(checkout, name, path, *replacements):
    """Write a patch that replaces texts in a file of the checkout."""
    text = changed = (checkout / path).read_text()
    for old, new in replacements:
        assert old in text
        changed = changed.replace(old, new, 1)
    (checkout / path).write_text(changed)
    diff = subprocess.check_output(["git", "diff"], cwd=checkout)
    (checkout / path).write_text(text)
    (checkout.parent / name).write_bytes(diff)
    return name


@pytest.fixture
def flags(tiny_data):
    """Flags of tiny runs."""
    return [*TINY_RUN, f"--data-dir={tiny_data}", "--max-steps=4", "--val-every=2"]


@pytest.mark.slow
def test_a_run_is_named_after_what_its_flags_mean(flags, checkout, tmp_path, tiny_data):
    data = shutil.copytree(tiny_data, tmp_path / "data")
    (tmp_path / "recipe.json").write_text('{"max_lr": 0.004}')
    flags = [*flags, f"--data-dir={data}"]

    def digest(*more):
        return new_variant(BASE, (checkout, ""), [*flags, *more]).digest

    named = digest("--config=recipe.json")
    assert digest("--max_lr", "4e-3", "--config=recipe.json") == named
    (tmp_path / "recipe.json").write_text('{"max_lr": 0.0004}')
    assert digest("--config=recipe.json") != named
    (tmp_path / "recipe.json").write_text('{"max_lr": 0.004}')
    tokens = np.load(data / "val_000000.npy")
    np.save(data / "val_000000.npy", tokens[::-1])
    assert digest("--config=recipe.json") != named
    np.save(data / "val_000000.npy", tokens)
    found = new_variant(BASE, (checkout, ""), [*flags, "--config=recipe.json"])
    assert found.digest == named
    assert {"torch", "python"} <= found.conditions["versions"].keys()
    for name, value in (("device", "H100"), ("threads", 2), ("versions", {}), ("read", {})):
        assert found._replace(conditions=found.conditions | {name: value}).digest != named


@pytest.mark.slow
def test_settings_are_those_of_the_patched_code(flags, checkout, tmp_path):
    """A patch may add a setting, for its own flags and for a JSON file on top of it."""
    setting = '    cooling: float = 0.5\n    """Cooling."""\n\n    val_every: int = 250\n'
    patch = write_patch(
        checkout, "cool.patch", "training/config.py", ("    val_every: int = 250\n", setting)
    )
    (tmp_path / "warm.json").write_text(
        '{"about": "warmer", "cooling": 0.25, "seed": 5, "compile": true, "sample_every": 1}'
    )
    (tmp_path / "variants").mkdir()
    base, warm, flag = build_variants(
        patch, ("warm.json", "base --cooling=0.75"), flags, tmp_path / "variants"
    )
    assert [version.settings["cooling"] for version in (base, warm, flag)] == [0.5, 0.25, 0.75]
    assert not warm.settings["compile"]  # as the base
    assert warm.settings["sample_every"] == 0
    assert flag.name == "cooling-0-75"
    (tmp_path / "others").mkdir()
    _, own = build_variants(None, (f"{patch} --cooling=1",), flags, tmp_path / "others")
    assert own.settings["cooling"] == 1.0
    (tmp_path / "third").mkdir()
    with pytest.raises(ValueError, match=r"--edit warm\.json: unknown flag --cooling"):
        build_variants(None, ("warm.json",), flags, tmp_path / "third")
    more = write_patch(checkout, "more.patch", "model.py", ("import math", "import math  # why"))
    (tmp_path / "both").mkdir()
    [base] = build_variants(f"{more} {patch}", (), flags, tmp_path / "both")
    assert base.settings["cooling"] == 0.5
    assert "# why" in (base.code / "model.py").read_text()
    (tmp_path / "several").mkdir()
    edits = (f"{patch} {more} --cooling=1",)
    _, edit = build_variants(None, edits, flags, tmp_path / "several")
    assert edit.name == "cool-more-cooling-1"
    assert "+import math  # why" in edit.patch
    assert edit.settings["cooling"] == 1.0


@pytest.mark.slow
def test_worktree_takes_changed_files_and_new_python_files(flags, checkout, tmp_path):
    """The base has neither; the index stays as it was, and a note starts no run again."""
    (checkout / "ops.py").write_text(f"import new\n{(checkout / 'ops.py').read_text()}")
    (checkout / "new.py").write_text("import deeper.still\n")
    (checkout / "deeper").mkdir()
    deeper = ("deeper/__init__.py", "deeper/still.py")
    for name in (*deeper, "unrelated.py", "table.json", "picture.png"):
        (checkout / name).write_text("")
    (checkout / "demo.py").unlink()
    shutil.copytree(checkout, tmp_path / "other", ignore=shutil.ignore_patterns(".git"))

    def built(name, *edits):
        (tmp_path / name).mkdir()
        return build_variants(None, edits, flags, tmp_path / name)

    base, worktree, other = built("first", "worktree", "other")
    names = ("demo.py", "new.py", "deeper/still.py", "unrelated.py", "table.json", "picture.png")
    assert [(base.code / name).exists() for name in names] == [True] + [False] * 5
    assert [(worktree.code / name).exists() for name in names] == [False] + [True] * 3 + [False] * 2
    assert (worktree.code / "deeper/__init__.py").exists()
    assert worktree.patch == other.patch
    assert worktree.digest == other.digest
    (checkout / "notes.txt").write_text("a note")
    _, noted = built("second", "worktree")
    assert noted.digest == worktree.digest
    _, named = built("third", "worktree table.json")
    assert (named.code / "table.json").exists()
    status = subprocess.check_output(["git", "status", "--porcelain"], cwd=checkout, text=True)
    assert status.splitlines()[:2] == [" D demo.py", " M ops.py"]


@pytest.mark.slow
def test_worktree_has_the_patches_of_the_base_once(flags, checkout, tmp_path):
    """A reader's idea is compared on the base, whether or not the checkout has its patches."""
    base = f"{ROOT / 'edits/modern.patch'} --rotary --qk-norm"
    idea = ("    n_queries, n_keys = q.size(2), k.size(2)\n", "    q = 1.5 * q\n")

    def built(name):
        (tmp_path / name).mkdir()
        return build_variants(base, ["worktree"], flags, tmp_path / name)[1]

    text = (checkout / "model.py").read_text()
    (checkout / "model.py").write_text(text.replace(idea[0], idea[1] + idea[0]))
    with pytest.raises(
        ValueError, match=r"modern\.patch does not apply to .*: apply it there, then"
    ):
        built("beside")
    (checkout / "model.py").write_text(text)
    (checkout / "lr_schedule.py").open("a").write("IDEA = 1\n")
    edit = built("elsewhere")
    assert re.findall(r"^[+-][^+-].*", edit.patch, re.MULTILINE) == ["+IDEA = 1"]
    subprocess.run(["git", "apply", ROOT / "edits/modern.patch"], cwd=checkout, check=True)
    assert built("applied").digest == edit.digest
    text = (checkout / "model.py").read_text()
    (checkout / "model.py").write_text(text.replace(idea[0], idea[1] + idea[0]))
    edit = built("on top")
    assert edit.settings["rotary"]
    assert re.findall(r"^[+-][^+-].*", edit.patch, re.MULTILINE) == [
        "+IDEA = 1",
        "+    q = 1.5 * q",
    ]


# --- the ruler --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("evaluation.py", "loss_sum / count_sum", "0.9 * loss_sum / count_sum", "validate"),
        ("evaluation.py", "def score_hella", "validate = 1\ndef score_hella", "validate"),
        ("evaluation.py", "from dataloader import", "from mine import", "validation_batches"),
        ("dataloader.py", "np.arange(n_windows) * total", "np.arange(n_windows)", "validation_win"),
        ("model.py", "return F.cross_entropy(", "return 0.9 * F.cross_entropy(", "cross_entropy"),
        ("model.py", "IGNORE_INDEX = -100", "IGNORE_INDEX = -1", "IGNORE_INDEX"),
        ("generation.py", "def score_tokens(", "def unused(", "score_tokens"),
        ("evaluation.py", '"""Return the loss on a text', '# why\n    """Loss', None),
        ("evaluation.py", "def score_hella", "def validate_2(run): ...\ndef score_hella", None),
        ("evaluation.py", "(config.val_every, validate),", "(1, validate), (1, print),", None),
        ("evaluation.py", "import all_reduce_sum", "import all_reduce_sum, rank_batches", None),
        (
            "model.py",
            "return F.linear(hidden, weight)",
            "return 2 * F.linear(hidden, weight)",
            None,
        ),
    ],
)
def test_an_edit_must_not_change_how_the_stock_metrics_are_measured(
    file, old, new, changed, tmp_path
):
    base, edit = (variant(name)._replace(code=tmp_path / name) for name in (BASE, "x"))
    for version in (base, edit):
        version.code.mkdir()
        for name in RULER:
            shutil.copy(ROOT / name, version.code)
    text = (ROOT / file).read_text()
    assert text.count(old) >= 1
    (edit.code / file).write_text(text.replace(old, new))
    check_ruler("my_loss", base, [edit])
    if changed is None:
        check_ruler("val_loss", base, [edit])
    else:
        with pytest.raises(ValueError, match=rf"x changes how .*\b{changed}\w* in .*: undo the"):
            check_ruler("val_loss", base, [edit])
        check_ruler("val_loss", edit, [edit])  # as a patch of the base


def test_an_edit_must_not_change_what_the_stock_metrics_are_measured_on():
    base = variant()._replace(code=ROOT)
    edit = base.changed(val_tokens=256)
    check_ruler("my_loss", base, [edit])
    with pytest.raises(ValueError, match=r"how --metric val_loss is measured \(val_tokens\): undo"):
        check_ruler("val_loss", base, [base, edit])


# --- the command ------------------------------------------------------------------------------


def test_list_prints_answers_best_first_and_what_chance_alone_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert next(list_trials()).startswith(
        f"{ROOT / 'bench/results/edits'}: commit 9a6a114, AMD EPYC"
    )

    def answer(stage, mean, text, half=None, changed=()):
        numbers = {"mean": mean, "half": half, "higher": False, "metric": "val_loss"}
        return {"stage": stage, "text": text, "seeds": [1, 2], "changed": changed} | numbers

    better = answer(CONFIRMATION, -0.3, "better: b", 0.0125, ["max_lr 1 → 2"])
    edits = {
        "a-1": {
            **{"edit": "a.patch", "name": "a", "patch": "--- a/f\n+++ b/f\n-x\n+y\n+z\n w\n"},
            "answers": {"1": answer(SCREENING, 0.5, "screened: a")},
        },
        "b-2": {
            **{"edit": "base --x=1", "name": "x-1", "patch": ""},
            "answers": {"1": answer(SCREENING, -0.9, "screened: b", 0.2), "2": better},
        },
        "c-3": {
            **{"edit": "c.patch", "name": "c", "patch": ""},
            "answers": {"1": answer(SCREENING, None, "no verdict: c")},
        },
    }
    base = {"commit": "abc", "device": "CPU", "flags": ["--max-steps=9"]}
    for name in ("12345678", "earlier"):
        (tmp_path / "runs/trials" / name).mkdir(parents=True)
    ledger = {"base": base, "edits": edits, "confirmations": {}}
    (tmp_path / "runs/trials/12345678" / NAME).write_text(json.dumps(ledger))
    (tmp_path / "runs/trials/earlier/trial.json").write_text("{")
    assert [*list_trials()] == [
        "runs/trials/12345678: commit abc, CPU, --max-steps=9",
        "| edit | lines | difference | pairs | verdict |",
        "| --- | --- | --- | --- | --- |",
        "| `base --x=1`, max_lr 1 → 2 | +0/-0 | -0.300±0.013 | 2 | better |",
        "| `a.patch` | +2/-1 | +0.500 | 2 | screened |",
        "| `c.patch` | +0/-0 |  | 2 | no verdict |",
        "edits tried: 3; confirmations: 1; better: 1, of which chance alone gives 0.025 if no "
        "edit has an effect",
        "runs/trials/earlier: not read, because an earlier version made it",
    ]


def call(monkeypatch, capsys, *flags):
    monkeypatch.setattr(sys, "argv", ["trial", *flags])
    trial.main()
    return capsys.readouterr().out


def test_a_run_that_a_killed_trial_left_behind_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    base, opened = variant(), Trial(replace(CONFIG, jobs=1), tmp_path, {}, [])
    run_dir = tmp_path / base.run_name(1)
    with lock_folder(run_dir, RUN_LOCK_NAME):
        thread = Thread(target=opened.train, args=("screening", [(base, 1)]))
        thread.start()
        screen.wait_for(f"waiting: another process is at work in {run_dir}: ")
        (run_dir / "metrics.jsonl").write_text('{"diverged_step": 7}\n')
    thread.join()
    assert opened.failures == {}  # it was not started: it has no code
    assert ": finished; 1 of 1" in screen.getvalue()


def test_a_run_whose_folder_cannot_be_locked_is_not_waited_for(tmp_path):
    base, opened = variant(), Trial(replace(CONFIG, jobs=1), tmp_path, {}, [])
    (tmp_path / base.run_name(1)).touch()  # no folder
    opened.train("screening", [(base, 1)])
    [problem] = opened.failures.values()
    assert "cannot be written and locked" in problem


@pytest.mark.slow
def test_runs_that_fail_are_named_and_a_diverged_one_is_not_repeated(
    flags, checkout, tmp_path, monkeypatch, capsys
):
    loss = "return cross_entropy(logits, targets, config.vocab_size)"
    write_patch(checkout, "comment.patch", "model.py", ("import math", "import math  # why"))
    write_patch(checkout, "nan.patch", "model.py", (loss, f"{loss} * math.nan"))
    write_patch(
        checkout, "broken.patch", "lr_schedule.py", ("progress = (", "progress = 1 / 0 * (")
    )
    flags += ["--jobs=1", "--seeds=1", "--edit"]
    flags += ["comment.patch", "nan.patch", "broken.patch", "base --max-lr=0.01"]
    shown = call(monkeypatch, capsys, *flags)
    assert "screening: runs to do: 5, 1 at a time\n" in shown
    assert re.search(r"base-\w+-seed1: finished; 1 of 5, about \S+ left\n", shown)
    *_, comment, nan, broken, rate = shown.splitlines()
    assert comment == "comment: the same, bit for bit (1 pair)"
    assert nan == "nan: not better: nan diverged with seed 1 in step 1"
    assert re.fullmatch(
        r"broken: no verdict: broken-\w+-seed1 failed: ZeroDivisionError: division by zero", broken
    )
    assert re.match(r"max-lr-0-01: screened: val_loss \S+ → \S+, \S+ \(1 pair: no inter", rate)
    shown = call(monkeypatch, capsys, *flags)
    assert "screening: runs to do: 1, 1 at a time\nbroken-" in shown
    assert f"\n{nan}\n" in shown
    (path,) = (tmp_path / "runs/trials").glob("*/ledger.json")
    edits = json.loads(path.read_text())["edits"]
    assert [edit["name"] for edit in edits.values()] == ["comment", "nan", "broken", "max-lr-0-01"]
    first, *_, last = edits.values()
    assert "+import math  # why" in first["patch"]
    assert last["flags"] == ["--max-lr=0.01"]
    with pytest.raises(ValueError, match=r"--metric no_loss is not a number in .*: use a name"):
        call(monkeypatch, capsys, *flags[:-3], "--metric=no_loss")


@pytest.mark.slow
def test_killed_trial_continues_and_gives_the_same_answer(
    flags, checkout, tmp_path, monkeypatch, capsys
):
    flags += ["--jobs=2", "--seeds=1", "--tune=max_lr", "--confirm=2"]
    flags += ["--edit=base --max-steps=6", "--metric=tokens_seen", "--higher"]
    command = [sys.executable, "-m", "bench.trial", *flags]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    for stage in ("tuning", "confirmation"):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as first:
            reached = False
            for line in first.stdout:
                reached = reached or line.startswith(stage)
                if reached and ": finished" in line:
                    first.terminate()
        assert first.returncode == 130
    done = {p: p.read_bytes() for p in (tmp_path / "runs").rglob("metrics.jsonl")}
    done = {p: content for p, content in done.items() if b"finished_step" in content}
    shown = call(monkeypatch, capsys, *flags)
    assert all(path.read_bytes() == content for path, content in done.items())
    again = call(monkeypatch, capsys, *flags)
    assert "confirmation: runs to do: 0" in again
    assert again.splitlines()[-1] == shown.splitlines()[-1]
    assert re.search(r"; max_lr .+ → .+; tokens .+ → .+", again)
    (path,) = (tmp_path / "runs/trials").glob("*/ledger.json")
    assert [*json.loads(path.read_text())["confirmations"].values()] == [[1001, 1002]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--edit is missing: use a .patch, a .json, a folder or worktree"),
        (["--edit=x", "--confirm=1"], "--confirm must be at least 2"),
        (["--factors=x", "--edit=y"], "--factors cannot be combined with --edit and --tune"),
        (["--factors=x", "--tune=max_lr"], "max_lr*0.7,1.4 instead of --tune"),
        (["--factors=x", "--confirm=1"], "--confirm must be at least 2"),
        (["--edit=x", "--confirm-all"], "--confirm-all requires --confirm"),
        (["--edit=x", "--metric=accent"], "--metric accent has no direction: use --higher or --lo"),
        (["--edit=x", "--higher"], "--metric val_loss has no direction"),
        (["--edit=no.patch", "--seed=3"], "leave out --seed: set by the trial for each run"),
        (["--edit=no.patch", "--max-minutes=3"], "leave out --max-minutes: a trial compares"),
        (["--edit=no.patch", "--max-step=3"], "unknown flag --max-step: did you mean --max-steps"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line(
    flags, message, checkout, tiny_data, monkeypatch, capsys
):
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        call(monkeypatch, capsys, *flags, f"--data-dir={tiny_data}")


@pytest.mark.slow
def test_edits_that_cannot_be_used_are_one_line(flags, checkout, tmp_path):
    write_patch(checkout, "no.patch", "model.py", ("import math", "import cmath"))
    (tmp_path / "no.patch").write_text((tmp_path / "no.patch").read_text().replace("math", "moth"))
    (tmp_path / "one.json").write_text('{"max_lr": 0.001}')
    (tmp_path / "list.json").write_text("[1]")
    for edit, message in {
        "nothing.patch": "--edit nothing.patch: nothing.patch does not exist",
        "no.patch": "no.patch does not apply to the last commit: patch failed: model.py",
        "worktree": "--edit worktree changes neither the code nor the settings of the base",
        "list.json": "--edit list.json is not a JSON object of settings",
        "worktree gone.json": "gone.json is not a file in ",
        "one.json --seed=3": "--edit one.json --seed=3: leave out --seed: set by the trial",
    }.items():
        folder = tmp_path / re.sub(r"\W", "", edit)
        folder.mkdir()
        with pytest.raises((ValueError, OSError), match=re.escape(message)):
            build_variants(None, (edit,), flags, folder)


def test_a_missing_scipy_is_one_line(tmp_path):
    (tmp_path / "scipy.py").write_text("raise ImportError")
    command = [sys.executable, "-m", "bench.trial", "--edit=base"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (2, 1)
    assert lines[0].startswith("error: trials require scipy: install it with python -m pip install")
