r"""Does an edit help? Train with and without it, in pairs with equal seeds, and compare results.

    python -m bench.trial --data-dir data/stdlib --config recipes/demo.json --max-steps 200 \
        --warmup-steps 20 --seeds 3 --confirm 5 --edit my_loss.patch --edit "base --max-lr=0.008"
    python -m bench.trial --base edits/modern.patch --factors rotary mlp=gelu,relu2 "max_lr*0.7,1.4"
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

With `--factors`, all settings are measured by the same runs (`bench.design`): each run has about
half of them at their second level, and a separate seed. At least eight runs of the base show the
noise. The answer is each factor's effect with its interval, and the best combination that the
effects predict, which `--confirm` compares with the base on fresh seeds.

`runs/trials/HASH` has the runs and the ledger of all edits of this base, which `--list` prints.
The same command continues an interrupted trial.
"""

import math
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from threading import Event
from time import monotonic
from typing import Any, NamedTuple

from runtime.threads import usable_cores

import numpy as np
import torch

from bench import ledger, statistics
from bench.factors import Design, describe_effects, plan_design
from bench.ledger import CONFIRMATION, SCREENING, gain
from bench.measurement import provenance, run_python, split_flags
from bench.ruler import check_ruler
from bench.statistics import interval, verdict
from bench.variants import (
    BASE,
    SAMPLED,
    THREADS,
    WORKTREE,
    Variant,
    build_variants,
    git,
    read_variants,
    split_edit,
)
from formats.load import RUN_LOCK_NAME
from formats.metrics import METRICS_NAME, logged_values, read_metrics
from lr_schedule import default_warmup_steps
from runtime.cli import (
    PathOrName,
    as_flags,
    check_settings,
    flag_of,
    format_duration,
    run_command,
)
from runtime.device import select_device
from runtime.errors import FolderInUseError, UserError
from runtime.files import lock_folder, write_json

# Ends of the names of metrics whose larger or smaller values are better.
HIGHER = ("_acc", "_acc_norm", "_accuracy", "_tokens_per_second", "_mfu")
LOWER = ("_loss", "_bpb", "_step_time_ms", "_evaluation_seconds", "_peak_memory_gib")
FACTORS, MORE_FACTORS = (0.5, 1.0, 2.0), 2  # of `--tune`
MIN_BASE_RUNS = 8  # runs of the base that show the noise of a design
FIRST_SEED = 501  # for a design; the base's seeds start at 1, a confirmation's at 1001
NTH = ("first", "second", "third", "fourth", "fifth", "another")


@dataclass(frozen=True)
class TrialConfig:
    """Compare edits with the last commit. All other flags are passed to train_gpt2.py."""

    edit: tuple[PathOrName, ...] = ()
    """Edits, each compared with the base: patches, a JSON file of settings, the folder of another
    checkout, worktree (the uncommitted changes) or base, with flags in the same text, as in
    "lion.patch --max-lr=1e-4". worktree takes changed files, new Python files, and files that the
    text names, as in "worktree table.json"."""
    base: str | None = None
    """Patches that the base and all edits have in common, with flags in the same text, as in
    "edits/modern.patch --rotary"."""
    seeds: int = 3
    """Number of pairs to screen each edit with, with the seeds 1, 2, …"""
    confirm: int = 0
    """Number of pairs to confirm edits with that are better by at least --least, with fresh seeds;
    0 = only screen."""
    confirm_all: bool = False
    """Confirm all edits that make a difference and whose runs have not failed."""
    least: float = 0.01
    """Smallest difference of interest, in the unit of --metric."""
    factors: tuple[str, ...] = ()
    """Instead of --edit, settings to vary in one design: switches (rotary), two values
    (mlp=gelu,relu2) or two multiples of the base's value (max_lr*0.7,1.4). All runs serve every
    effect. --confirm compares the predicted best combination with the base."""
    runs: int = 32
    """Runs of --factors: 16 for at most 8 factors, 24 or 32 for at most 12. At least eight runs of
    the base are added, which show the noise."""
    tune: tuple[str, ...] = ()
    """Settings to tune, such as max_lr: the base and each edit take the best of 0.5, 1 and 2 times
    the value, and at most two steps further. Several are tuned one after the other."""
    metric: str = "val_loss"
    """Number to compare, one that the runs log. Its last value counts, of step_time_ms the mean of
    all steps but the first: use it with --jobs 1, --confirm, whose runs are new, and --confirm-all,
    because a slower edit is not confirmed otherwise."""
    higher: bool = False
    """Larger values of --metric are better, as is known of accuracies, speeds and MFU."""
    lower: bool = False
    """Smaller values of --metric are better, as is known of losses, times and memory."""
    jobs: int | None = None
    """Number of runs at the same time; default: one per GPU, else one per core."""
    list: bool = False
    """Print the ledger of all trials, best first, or the committed one if there are none; train
    nothing."""

    def __post_init__(self) -> None:
        problems = list[str]()
        if self.confirm == 1:
            problems.append("--confirm must be at least 2: a single pair has no interval")
        if self.confirm_all and not self.confirm:
            problems.append("--confirm-all requires --confirm")
        if not (self.edit or self.factors or self.list):
            problems.append(f"--edit is missing: use a .patch, a .json, a folder or {WORKTREE}")
        if self.factors and (self.edit or self.tune):
            fix = "pass what all runs share to --base, and max_lr*0.7,1.4 instead of --tune"
            problems.append(f"--factors cannot be combined with --edit and --tune: {fix}")
        if self.is_higher_better == (self.lower or f"_{self.metric}".endswith(LOWER)):
            problems.append(f"--metric {self.metric} has no direction: use --higher or --lower")
        check_settings(self, ("seeds", "jobs", "least", "runs"), *problems)

    @property
    def is_higher_better(self) -> bool:
        """Whether larger values of the metric are better."""
        return self.higher or f"_{self.metric}".endswith(HIGHER)


class Result(NamedTuple):
    """Result of a run."""

    problem: str
    """Description of the failure; empty if the run finished."""
    value: float = math.nan
    """Last value of the metric."""
    losses: Sequence[tuple[int, float | None, float | None]] = ()
    """Step, training loss and validation loss of each record."""
    data: Sequence[str] = ()
    """Fingerprints of the data that the run read."""
    tokens: int = 0
    """Number of tokens that the run trained on."""


Pair = tuple[Variant, Variant]  # base and edit


@dataclass
class Trial:
    """A trial in progress."""

    config: TrialConfig
    folder: Path
    ledger: dict[str, Any]
    gpus: Sequence[str]
    failures: dict[str, str] = field(default_factory=dict)
    """Error of each run that failed without diverging, by the run's name."""
    edges: set[tuple[str, str]] = field(default_factory=set)
    """Each name of a variant and setting whose best value is the last one that was tried."""

    # --- training -----------------------------------------------------------------------------

    def train(self, stage: str, runs: Sequence[tuple[Variant, int]]) -> None:
        """Train each variant with its seed, unless the run is finished or has diverged."""
        missing = {v.run_name(seed): (v, seed) for v, seed in runs if not self.is_over(v, seed)}
        for v, seed in runs:
            self.result(v, seed)  # raise before the first run if the base lacks the metric
        jobs = self.config.jobs or len(self.gpus) or usable_cores()
        print(f"{stage}: runs to do: {len(missing)}, {jobs} at a time", flush=True)
        start = monotonic()
        for n, (name, error) in enumerate(self.train_in_parallel(missing, jobs), start=1):
            if error and not self.is_over(*missing[name]):
                self.failures[name] = str(error)
            left = format_duration((monotonic() - start) / n * (len(missing) - n))
            ended = f"failed: {error}" if error else "finished"
            print(f"{name}: {ended}; {n} of {len(missing)}, about {left} left", flush=True)

    def train_in_parallel(
        self, runs: Mapping[str, tuple[Variant, int]], jobs: int
    ) -> Iterator[tuple[str, BaseException | None]]:
        """Train each variant with its seed; yield the name of each run that ends, and its error.

        Runs start in their order, `jobs` of them at the same time: each on one GPU, or with one CPU
        thread. They end with this generator.
        """
        stopped, slots = Event(), SimpleQueue[int]()
        for slot in range(jobs):
            slots.put(slot)

        def train_one(name: str, variant: Variant, seed: int) -> None:
            slot = slots.get()
            own = {"run_name": name, "out_dir": self.folder.absolute(), "resume": "auto"}
            try:
                with wait_for_lock(self.folder, f".{name}.lock", stopped):  # against other trials
                    with wait_for_lock(self.folder / name, RUN_LOCK_NAME, stopped):
                        pass  # a killed trial has left no process behind
                    if not self.is_over(variant, seed):
                        place = {"OMP_NUM_THREADS": str(THREADS)}
                        if self.gpus:
                            place["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
                        run_python(
                            variant.code / "train_gpt2.py",
                            *variant.changed(seed=seed, **own).flags,
                            is_done=lambda _: stopped.is_set(),
                            environment=place,
                        )
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(train_one, name, *run): name for name, run in runs.items()}
            try:
                for future in as_completed(futures):
                    self.result(*runs[futures[future]])  # raise if the base lacks the metric
                    yield futures[future], future.exception()
            finally:
                stopped.set()
                pool.shutdown(cancel_futures=True)

    def is_over(self, variant: Variant, seed: int) -> bool:
        """Return whether a run is finished or has diverged."""
        path = self.folder / variant.run_name(seed) / METRICS_NAME
        is_finished = variant.settings["max_steps"] in logged_values(path, "finished_step")
        return is_finished or bool(logged_values(path, "diverged_step"))

    def result(self, variant: Variant, seed: int) -> Result:
        """Read the result of a run."""
        path, metric = self.folder / variant.run_name(seed) / METRICS_NAME, self.config.metric
        if steps := logged_values(path, "diverged_step"):
            return Result(f"{variant.name} diverged with seed {seed} in step {steps[-1]}")
        if not self.is_over(variant, seed):
            return Result(f"{variant.name} failed with seed {seed}")
        values = logged_values(path, metric)
        if not values or isinstance(values[-1], str):
            problem = f"--metric {metric} is not a number in {path}: use a name there"
            if variant.name == BASE:
                raise UserError(problem)
            self.failures[variant.run_name(seed)] = problem
            return Result(problem)
        if values[-1] is None:
            return Result(f"{variant.name} diverged with seed {seed}: {metric} is not finite")
        records, names = read_metrics(path), ("data_fingerprint", "val_fingerprint")
        losses = [(r["step"], r.get("train_loss"), r.get("val_loss")) for r in records]
        data, tokens = [logged_values(path, name)[-1] for name in names], records[-1]["tokens_seen"]
        value = fmean(values[1:] or values) if metric == "step_time_ms" else values[-1]
        return Result("", value, losses, data, tokens)

    # --- tuning -------------------------------------------------------------------------------

    def tune(self, pairs: Mapping[str, Pair], setting: str) -> dict[str, Pair]:
        """Return the pairs, each version with its best value of a setting.

        The best has the best mean of the metric over the screening seeds, without a failed run. A
        value that is not valid only loses.
        """
        seeds = range(1, self.config.seeds + 1)
        versions = [version for pair in pairs.values() for version in pair]
        tried = {v.digest: {f: v.scaled(setting, f) for f in FACTORS} for v in versions}
        best = dict[str, Variant]()
        due = [v for scales in tried.values() for v in scales.values()]
        for more in range(MORE_FACTORS + 1):
            self.train(f"tuning {setting}", [(v, seed) for seed in seeds for v in due])
            flag, due = flag_of(setting), []  # an error that names the flag is about the value
            self.failures = {name: e for name, e in self.failures.items() if flag not in e}
            for digest, scales in tried.items():
                # If several are equally good, take the one that is closest to the version's value.
                ranks = {f: (self.mean_loss(v, seeds), abs(math.log(f))) for f, v in scales.items()}
                found = min(ranks, key=ranks.__getitem__)
                best[digest] = scales[found]
                further = found * 2 if found > 1 else found / 2
                if further not in scales and more < MORE_FACTORS:
                    scales[further] = scales[1.0].scaled(setting, further)
                    due.append(scales[further])
                elif further not in scales:
                    self.edges.add((scales[found].name, setting))
        return {key: (best[base.digest], best[edit.digest]) for key, (base, edit) in pairs.items()}

    def mean_loss(self, variant: Variant, seeds: Iterable[int]) -> float:
        """Return the mean of the metric, negative if higher is better; infinity if a run failed."""
        mean = fmean(self.result(variant, seed).value for seed in seeds)
        return math.inf if math.isnan(mean) else -mean if self.config.is_higher_better else mean

    # --- comparison ---------------------------------------------------------------------------

    def compare(
        self, stage: str, pairs: Mapping[str, Pair], seeds: Mapping[str, Sequence[int]]
    ) -> dict[str, dict[str, Any]]:
        """Train the pairs, seed by seed, so base and edits in turn; return and keep the answers."""
        runs = [(v, seed) for key, pair in pairs.items() for v in pair for seed in seeds[key]]
        self.train(stage, sorted(runs, key=lambda run: run[1]))
        answers = {key: self.answer(stage, key, pair, seeds[key]) for key, pair in pairs.items()}
        with self.changed_ledger():
            for key, answer in answers.items():
                self.ledger["edits"][key]["answers"][answer.pop("about")] = answer
        return answers

    def base_values(self, base: Variant) -> list[float]:
        """Return the results of all finished runs of a base, also of earlier trials."""
        paths = self.folder.glob(f"{base.name}-{base.digest}-seed*[0-9]")
        seeds = sorted(int(path.name.rpartition("seed")[2]) for path in paths)
        return [r.value for seed in seeds if not (r := self.result(base, seed)).problem]

    def fresh_seeds(self, pairs: Mapping[str, Pair]) -> dict[str, list[int]]:
        """Return the seeds of the confirmation of each pair, and keep them.

        A new confirmation gets seeds that no other confirmation with this base has used. Edits that
        are confirmed together share them, and with them the runs of the base.
        """
        found, n = dict[str, list[int]](), self.config.confirm
        with self.changed_ledger():
            known = self.ledger["confirmations"]
            first = 1 + max((max(seeds) for seeds in known.values()), default=1000)
            for name, (base, edit) in pairs.items():
                key = f"{base.digest} {edit.digest} {self.config.metric} {n}"
                found[name] = known.setdefault(key, [*range(first, first + n)])
        return found

    @contextmanager
    def changed_ledger(self) -> Iterator[None]:
        """Read what other trials have added to the ledger; write it when the body has changed it.

        The ledger is locked while the body runs.
        """
        with wait_for_lock(self.folder, ".ledger.lock", Event()):
            self.ledger |= ledger.read(self.folder)
            yield
            write_json(self.folder / ledger.NAME, self.ledger)

    def about(self, stage: str, key: str, pair: Pair, seed: int) -> tuple[str, list[str]]:
        """Return the name of an answer in the ledger, and whether it repeats a confirmation.

        The same answer has the same name. With another `--least`, a confirmation is a further one.
        """
        digests = [version.digest for version in pair]
        about = " ".join((stage, *digests, self.config.metric, f"from seed {seed}"))
        if stage != CONFIRMATION:
            return about, []
        edits, least = self.ledger["edits"], self.config.least
        is_other = edits[key]["answers"].get(about, {}).get("least", least) != least
        about += f" least {least:g}" * is_other
        same = [edit for name, edit in edits.items() if name.endswith(key.rpartition("-")[2])]
        known = [name for edit in same for name in edit["answers"] if name.startswith(stage)]
        n = min([*known, about].index(about), len(NTH) - 1)
        words = f"{NTH[n]} confirmation{', with another --least' * is_other}"
        return about, [words] * (n > 0)

    def answer(self, stage: str, key: str, pair: Pair, seeds: Sequence[int]) -> dict[str, Any]:
        """Compare two versions with these seeds; return the answer with its numbers."""
        results = [(self.result(pair[0], seed), self.result(pair[1], seed)) for seed in seeds]
        done = [(base, edit) for base, edit in results if not base.problem + edit.problem]
        known = self.base_values(pair[0])
        text, names = describe(self.config, stage, results, known), (BASE, pair[1].name)
        failures = self.failures.items()  # also of runs that tuned a setting
        if crashed := [f"{n} failed: {e}" for n, e in failures if n.rsplit("-", 2)[0] in names]:
            text = f"no verdict: {'; '.join(crashed)}"
        about, changed = self.about(stage, key, pair, seeds[0])
        for name in self.config.tune:
            marks = [" (at the edge)" * ((version.name, name) in self.edges) for version in pair]
            best = [f"{v.settings[name]:g}{mark}" for v, mark in zip(pair, marks, strict=True)]
            changed.append(f"{name} {' → '.join(best)}")
        tokens = {(base.tokens, edit.tokens) for base, edit in done if base.tokens != edit.tokens}
        changed += [f"tokens {before:,} → {after:,}" for before, after in tokens]
        text = "; ".join((text, *changed))
        if SAMPLED in str(pair[1].conditions):
            text += "; large files were compared with earlier runs by size, time and samples"
        has_mean = len(done) == len(seeds) and "no verdict" not in text
        values = [(base.value, edit.value) for base, edit in done]
        differences = [edit - base for base, edit in values]
        return {
            **{"about": about, "text": text, "changed": changed, "stage": stage},
            **{"metric": self.config.metric, "least": self.config.least},
            **{"seeds": [*seeds], "values": values, "settings": [v.settings for v in pair]},
            "mean": fmean(differences) if has_mean else None,
            "half": half if has_mean and (half := interval(differences)) < math.inf else None,
            "higher": self.config.is_higher_better,
        }

    # --- designs ------------------------------------------------------------------------------

    def run_design(self, base: Variant, design: Design) -> None:
        """Print the effects of a design; with `--confirm`, also try the predicted best combination.

        Both are kept in the ledger.
        """
        key = " ".join((*self.config.factors, f"--runs={len(design.variants)}", self.config.metric))
        answer = self.effects(base, design)
        print(*answer["lines"], sep="\n", flush=True)
        with self.changed_ledger():
            known = self.ledger.setdefault("designs", {}).get(key, answer)
            is_same = known["lines"][: len(answer["lines"])] == answer["lines"]
            self.ledger["designs"][key] = known if is_same else answer  # it may be confirmed
        if not self.config.confirm or not answer.get("best"):
            return
        [best] = read_variants([base.changed(**answer["best"])._replace(name="best")])
        pair = {f"best-{best.digest}": (base, best)}
        self.keep_edits(base, [" ".join((BASE, *as_flags(answer["best"])))], [best])
        [found] = self.compare(CONFIRMATION, pair, self.fresh_seeds(pair)).values()
        lines = [f"best combination: {found['text']}"]
        if found["half"] is not None:
            predicted, half = answer["predicted"]
            measured = f"measured {found['mean']:+.2g} ± {found['half']:.2g}"
            part = f"{100 * found['mean'] / predicted:.0f} % of the sum of the gains"
            lines.append(f"predicted {predicted:+.2g} ± {half:.2g}, {measured}: {part}")
        with self.changed_ledger():
            self.ledger["designs"][key] = answer | {"lines": answer["lines"] + lines}
        print(*lines, sep="\n")

    def effects(self, base: Variant, design: Design) -> dict[str, Any]:
        """Train the runs of a design and of its base; return the answer."""
        n_base = max(self.config.seeds, MIN_BASE_RUNS)
        runs = [(base, seed) for seed in range(1, n_base + 1)]
        runs += [(v, seed) for seed, v in enumerate(design.variants, start=FIRST_SEED)]
        self.train("design", runs)
        results = [self.result(*run) for run in runs]
        done = [result for result in results if not result.problem]
        failed = [f"{name} failed: {error}" for name, error in sorted(self.failures.items())]
        failed += [result.problem for result in results[:n_base] if result.problem]
        if len({tuple(result.data) for result in done}) > 1:
            failed.append("the runs read different data")
        if failed:
            return {"lines": [f"no answer: {'; '.join(failed)}"]}
        values, higher = [result.value for result in results], self.config.is_higher_better
        answer = describe_effects(design, base, np.array(values[n_base:]), values[:n_base], higher)
        if len(tokens := {result.tokens for result in done}) > 1:
            answer["lines"].append(f"runs trained on {min(tokens):,} to {max(tokens):,} tokens")
        for result, (variant, _) in zip(results, runs, strict=True):
            if result.problem:
                levels = " ".join(variant.flags[len(base.flags) :])
                answer["lines"].append(f"{result.problem}: {levels}")
        return answer

    def keep_edits(self, base: Variant, texts: Sequence[str], edits: Sequence[Variant]) -> None:
        """Add edits to the ledger, with the texts that mean them."""
        with self.changed_ledger():
            for text, edit in zip(texts, edits, strict=True):
                key = f"{edit.name}-{edit.digest}"
                known = self.ledger["edits"].setdefault(key, {"answers": {}})
                known |= {"edit": text, "name": edit.name, "patch": edit.patch}
                known |= {**edit.conditions, "flags": edit.flags[len(base.flags) :]}


@contextmanager
def wait_for_lock(folder: Path, name: str, stopped: Event) -> Iterator[None]:
    """Lock a folder while the body runs; print a line and wait if it is locked."""
    with ExitStack() as stack:
        for n in count():
            try:
                stack.enter_context(lock_folder(folder, name, "stop it"))
                break
            except FolderInUseError as error:
                if stopped.wait(0.2):
                    raise
                print(f"waiting: {error}\n" * (n == 0), end="", flush=True)
        yield


def describe(
    config: TrialConfig,
    stage: str,
    pairs: Sequence[tuple[Result, Result]],
    base_values: Sequence[float] = (),
) -> str:
    """Return what the runs of base and edit show, in one line without the edit's name.

    All runs of the base, `base_values`, show the noise beside one or two screened differences. An
    optimizer of the edit may have another noise, so verdicts use only the edit's own pairs.
    """
    names = "; ".join(result.problem for pair in pairs for result in pair if result.problem)
    done = [(base, edit) for base, edit in pairs if not base.problem + edit.problem]
    if any(base.problem for base, _ in pairs):
        return f"no verdict: {names}"
    if not done:
        return f"not better: {names}"
    if any(base.data != edit.data for base, edit in done):
        return "no verdict: base and edit read different data"
    differences = [edit.value - base.value for base, edit in done]
    fresh = "fresh " * (stage == CONFIRMATION)
    n_pairs = f"{len(done)} {fresh}pair{'s' * (len(done) > 1)}"
    if not names and all((b.losses, b.value) == (e.losses, e.value) for b, e in done):
        return f"the same, bit for bit ({n_pairs})"
    before, after = fmean(base.value for base, _ in done), fmean(edit.value for _, edit in done)
    equal = " with equal differences" * (len(done) > 1)
    width = f"({n_pairs}{equal}: no interval)"
    if (half := interval(differences)) < math.inf:
        width = f"± {half:.2g} (95 %, {n_pairs})"
    words = "screened"
    if stage == CONFIRMATION:
        words = verdict(differences, config.least, config.is_higher_better)
    elif len(done) <= 2 and (noise := statistics.noise_interval(base_values, len(done))) < math.inf:
        numbers = ", ".join(f"{difference:+.2g}" for difference in differences)
        width += f"; {numbers}, ± {noise:.2g} by the noise of {len(base_values)} runs of the base"
    if statistics.hardly_acts(differences, base_values) and words not in ("better", "worse"):
        words = "hardly acts here"
    words = f"not better: {names}; otherwise" if names else f"{words}:"
    return f"{words} {config.metric} {before:.5g} → {after:.5g}, {fmean(differences):+.2g} {width}"


# --- command line -----------------------------------------------------------------------------


def main() -> None:
    """Measure, tune, screen and confirm as the flags say; then print an answer for each edit.

    Flags that `TrialConfig` does not have are passed to `train_gpt2.py`.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also end the runs
    config, flags = split_flags(TrialConfig)
    if config.list:
        print("\n".join(ledger.list_trials()))
        return
    statistics.load_stats()  # raise before the first run if scipy is missing
    sources = [split_edit(edit)[0] for edit in config.edit]
    print("checking the flags", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        base, *edits = build_variants(config.base, config.edit, flags, Path(scratch))
        check_ruler(config.metric, base, edits)
        if WORKTREE not in sources and git("status", "--porcelain", "--", "."):
            print("note: the base is the last commit, without this checkout's uncommitted changes")
        for setting in config.tune:
            for version in (base, *edits):
                version.scaled(setting, 1)  # raise before the first run
        if config.confirm == 2:
            width = "± nine standard deviations of a difference (--confirm 5: ± 1.2)"
            print(f"note: the interval of --confirm 2 is {width}")
        if config.factors:
            design = plan_design(config.factors, config.runs, base)
            check_ruler(config.metric, base, design.variants[:: config.runs // 2])  # and its mirror
            start_trial(config, flags, base, edits).run_design(base, design)
            return
        trial = start_trial(config, flags, base, edits)
        pairs = {f"{edit.name}-{edit.digest}": (base, edit) for edit in edits}
        for setting in config.tune:
            pairs = trial.tune(pairs, setting)
        seeds = range(1, config.seeds + 1)
        before = next(iter(pairs.values()))[0]
        answers = trial.compare(SCREENING, pairs, dict.fromkeys(pairs, seeds))
        print(statistics.plan(trial.base_values(before), config.least), flush=True)
        if config.confirm:
            chosen = {
                key: pairs[key]
                for key, answer in answers.items()
                if gain(answer) >= config.least or (config.confirm_all and answer["mean"])
            }
            answers |= trial.compare(CONFIRMATION, chosen, trial.fresh_seeds(chosen))
    print(*(f"{edit.name}: {answers[key]['text']}" for key, (_, edit) in pairs.items()), sep="\n")


def start_trial(
    config: TrialConfig, flags: Sequence[str], base: Variant, edits: Sequence[Variant]
) -> Trial:
    """Open the ledger of the base, and add the edits; print what is unusual about the runs."""
    steps, warmup = base.settings["max_steps"], base.settings["warmup_steps"] or 0
    if warmup > steps / 4:
        fix = f"use --warmup-steps {default_warmup_steps(steps)}"
        print(f"note: {warmup} of {steps} steps are warm-up: {fix}")
    gpus = list[str]()
    if select_device(base.settings["device"]).type == "cuda":
        every = map(str, range(torch.cuda.device_count()))
        gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(every)).split(",")
        if not base.settings["deterministic"]:
            print("note: a GPU repeats losses bit for bit only with --deterministic")
    if base.settings["compile"]:
        print("note: compiling takes about a minute for each version, without a line of output")
    folder = ledger.TRIALS / base.digest
    trial = Trial(config, folder, {"edits": {}, "confirmations": {}}, gpus)
    commit = {**provenance(), "commit": git("rev-parse", "--short", "HEAD").strip()}
    with trial.changed_ledger():
        about = {**commit, **base.conditions, "flags": flags, "patch": config.base}
        trial.ledger["base"] = about
    trial.keep_edits(base, config.edit, edits)
    return trial


if __name__ == "__main__":
    run_command(main)
