r"""Does an edit help? Train with and without it, in pairs with equal seeds, and compare results.

    python -m bench.trial --data-dir data/stdlib --config recipes/demo.json --max-steps 200 \
        --warmup-steps 20 --seeds 3 --confirm 5 --edit my_loss.patch --edit "base --max-lr=0.008"
    python -m bench.trial --list

The base is the last commit of this checkout with the flags of `train_gpt2.py` that are passed. The
runs of a pair have the same seed: they start from the same weights and read the same tokens in the
same order. Each variant runs from a separate copy of its code. HellaSwag, samples and checkpoints
before the last step are off unless they are passed as flags. So is compiling on a CPU: for the
demo's model it takes 25 s for each new code and then saves 10 % of a step.

1. Screening: the base and all edits, with the seeds 1, 2, … With `--tune`, several values of a
   setting for each of them, of which the best counts.
2. Confirmation, with `--confirm`: the base and the edits that were better by at least `--least`,
   with seeds from 1001 on that no confirmation has used. Only this gives a verdict.

`runs/trials/HASH` has the runs, a figure for each edit and the ledger of all edits of this base.
The same command continues an interrupted trial.
"""

import math
import os
import re
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, median, stdev
from threading import Event
from time import monotonic
from typing import Any, NamedTuple

from runtime.threads import usable_cores

import numpy as np
import torch

from bench.ledger import TRIALS, Ledger, list_trials
from bench.measurement import measure_in_turn, provenance, run_python, split_flags
from bench.statistics import MAX_PAIRS, interval, pairs_needed, verdict
from bench.variants import BASE, THREADS, WORKTREE, Variant, build_variants, git, split_edit
from formats.metrics import METRICS_NAME, Series, logged_values, read_run
from lr_schedule import default_warmup_steps
from plot import BLUE, GRAY, new_axes, save_figure
from runtime.cli import (
    PathOrName,
    as_flags,
    bad_numbers,
    flag_of,
    format_duration,
    raise_problems,
    run_command,
)
from runtime.device import select_device
from runtime.errors import UserError

HIGHER_IS_BETTER = re.compile("acc|tokens_per_second|mfu")
OFF = ("--hellaswag-every=0", "--sample-every=0", "--checkpoint-every=0")
TIMED_STEPS, ROUNDS = 10, 3  # of the measurement of speed; a run's first step does not count
SCREENING, CONFIRMATION = "screening", "confirmation"
FACTORS, MORE_FACTORS = (0.5, 1.0, 2.0), 2  # of `--tune`


@dataclass(frozen=True)
class TrialConfig:
    """Compare edits with the last commit. All other flags are passed to train_gpt2.py."""

    edit: tuple[PathOrName, ...] = ()
    """Edits, each compared with the base: a patch, a JSON file of settings, the folder of another
    checkout, worktree (the uncommitted changes) or base. Flags may follow in the same text:
    "lion.patch --max-lr=1e-4". worktree takes changed files and new ones that the code imports or
    that are named: "worktree table.json"."""
    base: str | None = None
    """Patch that the base and the patches and settings of --edit have in common; flags may follow
    in the same text."""
    seeds: int = 3
    """Number of pairs to screen each edit with, with the seeds 1, 2, …"""
    confirm: int = 0
    """Number of pairs to confirm edits with that are better by at least --least, with fresh seeds;
    0 = only screen."""
    confirm_all: bool = False
    """Confirm all edits."""
    least: float = 0.01
    """Smallest difference of interest, in the unit of --metric."""
    tune: tuple[str, ...] = ()
    """Settings to tune, such as max_lr: the base and each edit take the best of 0.5, 1 and 2 times
    the value, and at most two steps further. Several are tuned one after the other."""
    equal_time: bool = False
    """Give the slower version of each pair fewer steps, so that both take the same time."""
    cost: bool = False
    """Measure the time of a step with each edit, in turn with the base and alone."""
    metric: str = "val_loss"
    """Number to compare, one that the runs log; its last value counts."""
    higher: bool = False
    """Larger values of --metric are better; always on for accuracies and tokens per second."""
    jobs: int | None = None
    """Number of runs at the same time; default: one per GPU, else one per core."""
    list: bool = False
    """Print the ledger of all trials, best first, and draw their differences; train nothing."""

    def __post_init__(self) -> None:
        problems = bad_numbers(self, ("seeds", "jobs", "least"))
        if self.confirm == 1:
            problems.append("--confirm must be at least 2: a single pair has no interval")
        if self.confirm_all and not self.confirm:
            problems.append("--confirm-all requires --confirm")
        if not self.edit and not self.list:
            problems.append(f"--edit is missing: use a .patch, a .json, a folder or {WORKTREE}")
        raise_problems(problems)

    @property
    def is_higher_better(self) -> bool:
        """Whether larger values of the metric are better."""
        return self.higher or bool(HIGHER_IS_BETTER.search(self.metric))


class Outcome(NamedTuple):
    """Results of a finished run."""

    series: Series
    """The compared metric."""
    losses: list[tuple[int, float | None, float | None]]
    """Step, training loss and validation loss of each record."""
    data: list[str]
    """Fingerprints of the data that the run read."""

    @property
    def value(self) -> float:
        """Last value of the metric."""
        return float(self.series.values[-1])


Pair = tuple[Outcome, Outcome]  # base and edit, with equal seeds


@dataclass
class Trial:
    """A trial in progress."""

    config: TrialConfig
    ledger: Ledger
    gpus: Sequence[str]
    failures: dict[str, str] = field(default_factory=dict)
    """Why each failed run of this trial failed, by its name."""
    costs: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    """Measured cost of a step of each edit, by its name: see `cost`."""

    @property
    def jobs(self) -> int:
        """Number of runs at the same time."""
        return self.config.jobs or len(self.gpus) or usable_cores()

    # --- training -----------------------------------------------------------------------------

    def train(self, what: str, versions: Iterable[tuple[Variant, int]]) -> None:
        """Train each version with its seed, unless the run is finished or has diverged."""
        runs = {variant.run_name(seed): (variant, seed) for variant, seed in versions}
        missing = {name: runs[name] for name in runs if not self.is_over(*runs[name])}
        print(
            f"{what}: {len(missing)} of {len(runs)} runs to do, {self.jobs} at a time", flush=True
        )
        start = monotonic()
        for n, (name, error) in enumerate(self.train_in_parallel(missing), start=1):
            if error and not self.is_over(*missing[name]):
                self.failures[name] = str(error)
            left = format_duration((monotonic() - start) / n * (len(missing) - n))
            ended = f"failed: {error}" if error else "finished"
            print(f"{name}: {ended}; {n} of {len(missing)}, about {left} left", flush=True)

    def train_in_parallel(
        self, runs: Mapping[str, tuple[Variant, int]]
    ) -> Iterator[tuple[str, BaseException | None]]:
        """Train each variant with its seed; yield the name of each run that ends, and its error.

        Runs start in their order, `jobs` of them at the same time: each on one GPU, or with one CPU
        thread. They end with this generator.
        """
        stopped, slots = Event(), SimpleQueue[int]()
        for slot in range(self.jobs):
            slots.put(slot)

        def train_one(name: str, variant: Variant, seed: int) -> None:
            slot = slots.get()
            place = {"run_name": name, "out_dir": self.ledger.folder.absolute(), "resume": "auto"}
            flags = as_flags({"seed": seed, **place})
            try:
                self.run(variant, flags, lambda _: stopped.is_set(), slot)
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(self.jobs) as pool:
            futures = {pool.submit(train_one, name, *run): name for name, run in runs.items()}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.exception()
            finally:
                stopped.set()
                pool.shutdown(cancel_futures=True)

    def run(self, variant: Variant, flags: Sequence[str], is_done: Any, slot: int = 0) -> None:  # noqa: ANN401
        """Run a variant's `train_gpt2.py` until it ends or is done."""
        env: dict[str, Any] = {"OMP_NUM_THREADS": str(THREADS)}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        words: list[Any] = [variant.code / "train_gpt2.py", *variant.flags, *flags]
        run_python(*words, folder=Path.cwd(), is_done=is_done, **env)

    def is_over(self, variant: Variant, seed: int) -> bool:
        """Return whether a run is finished or has diverged."""
        path = self.ledger.folder / variant.run_name(seed) / METRICS_NAME
        is_finished = variant.settings["max_steps"] in logged_values(path, "finished_step")
        return is_finished or bool(logged_values(path, "diverged_step"))

    def problem(self, variant: Variant, seed: int) -> str:
        """Return how a run failed, or nothing."""
        name = variant.run_name(seed)
        steps = logged_values(self.ledger.folder / name / METRICS_NAME, "diverged_step")
        if steps:
            return f"{variant.name} diverged with seed {seed} in step {steps[-1]}"
        if name in self.failures:
            return f"{variant.name} failed with seed {seed}: {self.failures[name]}"
        return ""

    def outcomes(self, variant: Variant, seeds: Iterable[int]) -> dict[int, Outcome]:
        """Return the results of the finished runs, by seed."""
        folder, metric = self.ledger.folder, self.config.metric
        done = [s for s in seeds if not self.problem(variant, s) and self.is_over(variant, s)]
        return {seed: read_outcome(folder / variant.run_name(seed), metric) for seed in done}

    # --- the same chance for both -------------------------------------------------------------

    def measure_costs(self, base: Variant, edits: Sequence[Variant]) -> None:
        """Measure the time of a step of versions that the ledger does not have, in turn and alone.

        The ledger gets the times of the base and of the edit, by the edit's hash.
        """
        new = [edit for edit in edits if edit.digest not in self.ledger.values["costs"]]
        if not new:
            return
        print(f"speed: {TIMED_STEPS} steps of each version, {ROUNDS} times", flush=True)

        def measure(variant: Variant) -> Any:  # noqa: ANN401
            return lambda _: {"ms per step": self.step_ms(variant)}

        times = {}
        for results, _ in measure_in_turn({v.name: measure(v) for v in (base, *new)}, ROUNDS):
            times = {name: units["ms per step"] for name, units in results.items()}
        for edit in new:
            if len(times.get(edit.name, ())) == len(times.get(BASE, ())) == ROUNDS:
                self.ledger.keep("costs", edit.digest, [times[BASE], times[edit.name]])

    def step_ms(self, variant: Variant) -> float:
        """Return the median time of the first steps of a run, without the very first."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "speed", METRICS_NAME)

            def times() -> list[float]:
                return logged_values(path, "step_time_ms")[1:]

            flags = (f"--out-dir={folder}", "--run-name=speed", "--val-every=0")
            self.run(variant, flags, lambda _: len(times()) >= TIMED_STEPS)
            if not (timed := times()[:TIMED_STEPS]):
                raise UserError("no step was timed: use a larger --max-steps")
            return median(timed)

    def cost(self, edit: Variant) -> tuple[float, float] | None:
        """Return the measured ratio of the edit's time per step to the base's, and its error."""
        if not (times := self.ledger.values["costs"].get(edit.digest)):
            return None
        logs = [math.log(after / before) for before, after in zip(*times, strict=True)]
        return math.exp(fmean(logs)), math.exp(fmean(logs)) * interval(logs)

    def with_equal_time(self, base: Variant, edit: Variant) -> tuple[Variant, Variant]:
        """Return base and edit, the slower one with fewer steps, if a difference was measured."""
        if (cost := self.costs[edit.name]) is None:
            raise UserError(f"the speed of {edit.name} was not measured: fix it or leave it out")
        ratio, error = cost
        if abs(ratio - 1) < error:
            return base, edit
        slower = edit if ratio > 1 else base
        fewer = slower.changed(
            max_steps=round(slower.settings["max_steps"] * min(ratio, 1 / ratio))
        )
        return (base, fewer) if slower is edit else (fewer, edit)

    def tune(self, variants: Iterable[Variant], setting: str) -> dict[str, Variant]:
        """Return each variant, by its hash, with the best value of a setting.

        The best has the best mean of the metric with the screening seeds, all of them finished.
        """
        seeds = range(1, self.config.seeds + 1)
        tried = {
            v.digest: {factor: scaled(v, setting, factor) for factor in FACTORS} for v in variants
        }
        best = dict[str, float]()
        for more in range(MORE_FACTORS + 1):
            versions = [v for scales in tried.values() for v in scales.values()]
            self.train(f"tuning {setting}", [(v, seed) for seed in seeds for v in versions])
            for digest, scales in tried.items():
                losses = {factor: self.mean_loss(v, seeds) for factor, v in scales.items()}
                best[digest] = found = min(losses, key=lambda factor: losses[factor])
                edges = {min(scales): found / 2, max(scales): found * 2}
                if found in edges and more < MORE_FACTORS:
                    scales[edges[found]] = scaled(scales[1.0], setting, edges[found])
        return {digest: tried[digest][factor] for digest, factor in best.items()}

    def mean_loss(self, variant: Variant, seeds: Sequence[int]) -> float:
        """Return the mean of the metric, negative if higher is better; infinity if a run failed."""
        values = [outcome.value for outcome in self.outcomes(variant, seeds).values()]
        if len(values) < len(seeds):
            return math.inf
        return -fmean(values) if self.config.is_higher_better else fmean(values)

    # --- comparison ---------------------------------------------------------------------------

    def compare(
        self,
        stage: str,
        pairs: Mapping[str, tuple[Variant, Variant]],
        seeds: Mapping[str, list[int]],
    ) -> dict[str, dict[str, Any]]:
        """Train the pairs of base and edit with their seeds; return the answers, by edit."""
        everything = sorted({seed for name in pairs for seed in seeds[name]})
        due = [(seed, pairs[name]) for seed in everything for name in pairs if seed in seeds[name]]
        self.train(stage, [(version, seed) for seed, pair in due for version in pair])
        answers = {name: self.answer(stage, *pairs[name], seeds[name]) for name in pairs}
        for name, answer in answers.items():
            key = " ".join((stage, *(v.digest for v in pairs[name]), self.config.metric))
            self.ledger.add_answer(name, key, answer)
        return answers

    def pairs_to_confirm(self, base: Variant, seeds: Sequence[int]) -> str:
        """Return how many pairs show the smallest difference of interest, or nothing yet."""
        values = [outcome.value for outcome in self.outcomes(base, seeds).values()]
        if len(values) < 2:
            return ""
        n = pairs_needed(values, self.config.least)
        number = f"{n} pairs" if n < MAX_PAIRS else f"{MAX_PAIRS} pairs or more"
        spread = f"the base's {len(values)} runs have a standard deviation of {stdev(values):.2g}"
        least = f"a difference of {self.config.least:g}"
        return f"{spread}: a confirmation with {number} shows {least} in 80 % of trials"

    def may_be_confirmed(self, answer: Mapping[str, Any]) -> bool:
        """Return whether to confirm a screened edit."""
        if answer["gain"] is None or answer["mean"] == answer["half"] == 0:
            return False
        return self.config.confirm_all or answer["gain"] >= self.config.least

    def answer(
        self, stage: str, base: Variant, edit: Variant, seeds: Sequence[int]
    ) -> dict[str, Any]:
        """Compare two versions with these seeds; return the answer with its numbers."""
        is_confirmed = stage == CONFIRMATION
        befores, afters = self.outcomes(base, seeds), self.outcomes(edit, seeds)
        pairs = {seed: (befores[seed], afters[seed]) for seed in befores if seed in afters}
        failed = [*filter(None, (self.problem(v, seed) for v in (base, edit) for seed in seeds))]
        text = describe(self.config, pairs, failed, is_confirmed)
        for setting in (*self.config.tune, *["max_steps"] * self.config.equal_time):
            text += f"; {setting} {base.settings[setting]:g} → {edit.settings[setting]:g}"
        if cost := self.costs.get(edit.name):
            text += f"; a step takes {cost[0]:.2f} ± {cost[1]:.1g} times as long"
        if pairs:
            path = self.ledger.folder / f"{edit.name}{'-confirmed' * is_confirmed}.png"
            print(format_pairs(edit.name, pairs))
            print(draw(edit.name, self.config.metric, [*pairs.values()], path), flush=True)
        differences = [after.value - before.value for before, after in pairs.values()]
        has_mean = bool(pairs) and not failed and "no verdict" not in text
        mean = fmean(differences) if has_mean else None
        return {
            "text": text,
            "is_confirmed": is_confirmed,
            "metric": self.config.metric,
            "mean": mean,
            "half": interval(differences) if has_mean and len(pairs) > 1 else None,
            "gain": mean if mean is None or self.config.is_higher_better else -mean,
            "values": {seed: [outcome.value for outcome in pair] for seed, pair in pairs.items()},
            "base_settings": base.settings,
            "settings": edit.settings,
            **provenance(),
        }


def read_outcome(run_dir: Path, metric: str) -> Outcome:
    """Read the metric, the losses and the data's fingerprints of a finished run."""
    records = read_run(run_dir)
    series = Series.of(records, metric)
    if not len(series.values):
        raise UserError(f"--metric {metric} is not in {run_dir}/{METRICS_NAME}: use a name there")
    losses = [(r["step"], r.get("train_loss"), r.get("val_loss")) for r in records]
    names = ("data_fingerprint", "val_fingerprint")
    return Outcome(series, losses, [logged_values(run_dir / METRICS_NAME, n)[-1] for n in names])


def scaled(variant: Variant, setting: str, factor: float) -> Variant:
    """Return a variant with a setting times a factor; min_lr keeps its ratio to max_lr."""
    value = variant.settings.get(setting)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(
            f"--tune {setting} is {value}, not a number above 0: pass {flag_of(setting)}"
        )
    if factor == 1:
        return variant
    names = (setting, "min_lr") if setting == "max_lr" else (setting,)
    kind = round if isinstance(value, int) else float
    return variant.changed(**{name: kind(variant.settings[name] * factor) for name in names})


def describe(
    config: TrialConfig, pairs: Mapping[int, Pair], failed: Sequence[str], is_confirmed: bool
) -> str:
    """Return what the pairs of an edit show, in one line without its name."""
    n_pairs = f"{len(pairs)} {'fresh ' * is_confirmed}pair{'s' * (len(pairs) > 1)}"
    names = "; ".join(failed)
    if any(line.startswith(f"{BASE} ") or " failed " in line for line in failed) or not pairs:
        return f"no verdict: {names or 'no pair of runs is complete'}"
    if others := [seed for seed, (base, edit) in pairs.items() if base.data != edit.data]:
        return f"no verdict: the runs of seed {others[0]} read different data"
    if not failed and all(base.losses == edit.losses for base, edit in pairs.values()):
        return f"the same, bit for bit ({n_pairs})"
    differences = [edit.value - base.value for base, edit in pairs.values()]
    before = fmean(base.value for base, _ in pairs.values())
    after = fmean(edit.value for _, edit in pairs.values())
    shown = f"{fmean(differences):+.2g} ± {interval(differences):.2g}"
    if len(pairs) == 1:
        shown, n_pairs = f"{differences[0]:+.2g}", "1 pair: no interval"
    else:
        n_pairs = f"95 %, {n_pairs}"
    if failed:
        result = f"not better: {names}; otherwise {shown}"
    elif is_confirmed:
        result = verdict(differences, config.least, config.is_higher_better)
    else:
        result = f"screened: {shown}"
    return f"{config.metric} {before:.5g} → {after:.5g}, {result} ({n_pairs})"


def format_pairs(name: str, pairs: Mapping[int, Pair]) -> str:
    """Return a table with a line per seed."""
    lines = [f"seed | {BASE:>10} | {name:>10} | difference"]
    for seed, (base, edit) in pairs.items():
        values = f"{base.value:>10.5g} | {edit.value:>{max(10, len(name))}.5g}"
        lines.append(f"{seed:>4} | {values} | {edit.value - base.value:+.2g}")
    return "\n".join(lines)


def draw(name: str, metric: str, pairs: Sequence[Pair], path: Path) -> Path:
    """Plot the curves of all runs and, below, the mean paired difference with its interval."""
    curves, below = new_axes(f"{name} and {BASE}: {len(pairs)} seeds", metric, "difference")
    tokens = min((outcome.series.tokens for pair in pairs for outcome in pair), key=max)
    columns = []
    for base, edit in pairs:
        curves.plot(*base.series, color=GRAY, linewidth=1.2)
        curves.plot(*edit.series, color=BLUE, linewidth=1.2)
        columns.append(np.interp(tokens, *edit.series) - np.interp(tokens, *base.series))
    curves.lines[0].set_label(BASE)
    curves.lines[1].set_label(name)
    mean = np.mean(columns, axis=0)
    below.axhline(0, color=GRAY, linewidth=1)
    below.plot(tokens, mean, color=BLUE, linewidth=1.8)
    if len(pairs) > 1:
        half = [interval(differences) for differences in zip(*columns, strict=True)]
        below.fill_between(tokens, mean - half, mean + half, color=BLUE, alpha=0.15, linewidth=0)
    return save_figure(curves, path)


# --- command line -----------------------------------------------------------------------------


def main() -> None:
    """Compare the edits; flags that `TrialConfig` does not have are passed to `train_gpt2.py`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also end the runs
    compare(*split_flags(TrialConfig))


def compare(config: TrialConfig, flags: Sequence[str]) -> None:
    """Measure, tune, screen and confirm as the flags say; then print an answer for each edit."""
    if find_spec("scipy") is None:
        raise UserError("trials require scipy: install it with python -m pip install scipy")
    if config.list:
        print(*list_trials(), sep="\n")
        return
    if all(split_edit(edit)[0] != WORKTREE for edit in config.edit) and git(
        "status", "--porcelain"
    ):
        print("note: the base is the last commit, without this checkout's uncommitted changes")
    seeds = [*range(1, config.seeds + 1)]
    with tempfile.TemporaryDirectory() as scratch:
        base, *edits = build_variants(config.base, config.edit, (*OFF, *flags), Path(scratch))
        for setting in config.tune:
            scaled(base, setting, 1)  # raise before the first run
        trial = start_trial(config, flags, base)
        for edit in edits:
            trial.ledger.add_edit(edit, git("diff", base.tree, edit.tree), len(base.flags))
        if config.cost or config.equal_time:
            trial.measure_costs(base, edits)
        trial.costs = {edit.name: trial.cost(edit) for edit in edits}
        pairs = {edit.name: (base, edit) for edit in edits}
        if config.equal_time:
            pairs = {name: trial.with_equal_time(*pair) for name, pair in pairs.items()}
        for setting in config.tune:
            tuned = trial.tune([version for pair in pairs.values() for version in pair], setting)
            pairs = {name: (tuned[a.digest], tuned[b.digest]) for name, (a, b) in pairs.items()}
        answers = trial.compare(SCREENING, pairs, dict.fromkeys(pairs, seeds))
        print(trial.pairs_to_confirm(next(iter(pairs.values()))[0], seeds), flush=True)
        if config.confirm:
            chosen = {
                n: pairs[n] for n, answer in answers.items() if trial.may_be_confirmed(answer)
            }
            fresh = trial.ledger.fresh_seeds(chosen, config.metric, config.confirm)
            answers |= trial.compare(CONFIRMATION, chosen, fresh)
    for name, answer in answers.items():
        print(f"{name}: {answer['text']}")


def start_trial(config: TrialConfig, flags: Sequence[str], base: Variant) -> Trial:
    """Open the ledger of the base; print what is unusual about its runs."""
    steps, warmup = base.settings["max_steps"], base.settings["warmup_steps"] or 0
    if warmup > steps / 4:
        fix = f"use --warmup-steps {default_warmup_steps(steps)}"
        print(f"note: {warmup} of {steps} steps are warm-up: {fix}")
    is_gpu = select_device(base.settings["device"]).type == "cuda"
    n_gpus = torch.cuda.device_count() if is_gpu else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(n_gpus)))
    if is_gpu and not base.settings["deterministic"]:
        print("note: a GPU repeats losses bit for bit only with --deterministic")
    if base.settings["compile"]:
        print("note: compiling takes about a minute for each version, without a line of output")
    about = {"flags": flags, "patch": config.base, "settings": base.settings, **base.conditions}
    ledger = Ledger(TRIALS / base.digest, about | provenance())
    return Trial(config, ledger, visible.split(",")[:n_gpus])


if __name__ == "__main__":
    run_command(main)
