r"""Does an edit help? Train with and without it, in pairs with equal seeds, and compare results.

    python -m bench.trial --data-dir data/stdlib --config recipes/demo.json --max-steps 200 \
        --seeds 3 --edit my_loss.patch --edit higher_rate.json

The base is the last commit of this checkout with the flags of `train_gpt2.py` that are passed. The
runs of a pair have the same seed: they start from the same weights and read the same tokens in the
same order. Each variant runs from a separate copy of its code. HellaSwag, samples and checkpoints
before the last step are off unless they are passed as flags.

`runs/trials/NAME` has the runs, the answers (`trial.json`) and a figure for each edit. The same
command continues an interrupted trial, and more `--seeds` or `--edit` only add runs.
"""

import hashlib
import math
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, median, stdev
from threading import Event
from typing import Any, NamedTuple

from runtime.threads import usable_cores

import numpy as np
import torch

from bench.measurement import ROOT, device_label, provenance, run_python, split_flags
from formats.metrics import METRICS_NAME, Series, read_run
from plot import BLUE, GRAY, new_axes, save_figure
from runtime.cli import PathOrName, as_flags, bad_numbers, flag_of, raise_problems, run_command
from runtime.device import select_device
from runtime.errors import UserError
from runtime.files import read_json, write_json
from training.config import TrainConfig
from training.resume import parse_config

# 97.5 % quantiles of Student's t distribution with 1, 2, … degrees of freedom: pairs minus 1.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)
MAX_PAIRS = len(T_QUANTILES) + 1
HIGHER_IS_BETTER = re.compile("acc|tokens_per_second|mfu")
BASE, WORKTREE = "base", "worktree"
TRIALS = Path("runs/trials")
OFF = ("--hellaswag-every=0", "--sample-every=0", "--checkpoint-every=0")
SET_BY_TRIAL = {"seed", "run_name", "out_dir", "resume", "plan", "preflight"}


@dataclass(frozen=True)
class TrialConfig:
    """Compare edits with the last commit. All other flags are passed to train_gpt2.py."""

    edit: tuple[PathOrName, ...] = ()
    """Edits, each compared with the base: a patch, a JSON file of settings, the folder of another
    checkout, or worktree (the uncommitted changes)."""
    base: Path | None = None
    """Patch that the base and the patches and settings of --edit have in common."""
    seeds: int = 2
    """Number of pairs, with the seeds 1, 2, …; a single pair has no interval."""
    jobs: int | None = None
    """Number of runs at the same time; default: one per GPU, else one per core."""
    metric: str = "val_loss"
    """Number to compare, one that the runs log; its last value counts."""
    higher: bool = False
    """Larger values of --metric are better; always on for accuracies and tokens per second."""
    name: str | None = None
    """Name of the folder in runs/trials; default: a hash of the base's code and flags."""

    def __post_init__(self) -> None:
        problems = bad_numbers(self, ("seeds", "jobs"))
        if self.seeds > MAX_PAIRS:
            problems.append(f"--seeds must be at most {MAX_PAIRS}, not {self.seeds}")
        if not self.edit:
            problems.append(f"--edit is missing: use a .patch, a .json, a folder or {WORKTREE}")
        raise_problems(problems)


class Variant(NamedTuple):
    """Code and flags to train with."""

    name: str
    code: Path
    """Folder with a copy of the code."""
    tree: str
    """Hash of the code: a git tree."""
    flags: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Hash of the code and the flags."""
        return hashlib.sha256(repr((self.tree, self.flags)).encode()).hexdigest()[:8]

    def run_name(self, seed: int) -> str:
        """Return the name of a run's folder."""
        return f"{self.name}-{self.digest}-seed{seed}"


class Outcome(NamedTuple):
    """Results of a finished run."""

    series: Series
    """The compared metric."""
    losses: list[tuple[int, float | None, float | None]]
    """Step, training loss and validation loss of each record."""
    step_ms: float
    """Median time of a step."""

    @property
    def value(self) -> float:
        """Last value of the metric."""
        return float(self.series.values[-1])


Pair = tuple[Outcome, Outcome]  # base and edit, with equal seeds


# --- variants ---------------------------------------------------------------------------------


def build_variants(config: TrialConfig, flags: Sequence[str], folder: Path) -> list[Variant]:
    """Copy the code of the base and of each edit into `folder`."""
    shared = [config.base] if config.base else []
    base = Variant(BASE, folder / BASE, copy_code(folder / BASE, shared), tuple(flags))
    variants = {BASE: base}
    for edit in config.edit:
        path = ROOT if edit == WORKTREE else Path(edit).absolute()
        name = re.sub(r"\W+", "-", Path(edit).absolute().stem)
        if not path.exists():
            raise UserError(f"--edit {edit} does not exist")
        if name in variants:
            raise UserError(f"--edit {edit} and another variant are both named {name}: rename it")
        if path.suffix == ".json":
            settings = read_json(path)
            if not isinstance(settings, dict):
                raise UserError(f"--edit {edit} is not a JSON object of settings")
            kept = {key: settings[key] for key in settings if key not in ("about", *SET_BY_TRIAL)}
            changed = (*flags, *as_flags(kept))
            check_flags(changed)
            variants[name] = base._replace(name=name, flags=changed)
        else:
            patches, source = ([], path) if path.is_dir() else ([*shared, path], None)
            tree = copy_code(folder / name, patches, source)
            variants[name] = Variant(name, folder / name, tree, base.flags)
        if variants[name].digest == base.digest:
            raise UserError(f"--edit {edit} does not change the last commit")
    return [*variants.values()]


def copy_code(target: Path, patches: Sequence[Path], source: Path | None = None) -> str:
    """Copy the last commit with `patches`, or the folder `source` without what git ignores.

    Returns:
        The hash of the code, a git tree. The checkout and its index are left unchanged.
    """
    environment = {"GIT_INDEX_FILE": f"{target}.index"}
    git("read-tree", "HEAD", **environment)
    if source is not None:
        git("add", "--all", **environment, GIT_WORK_TREE=str(source))
    for patch in patches:
        try:
            git("apply", "--cached", patch.absolute(), **environment)
        except UserError as error:
            raise UserError(f"{patch} does not apply to the last commit: {error}") from None
    git("checkout-index", "--all", f"--prefix={target}/", **environment)
    return git("write-tree", **environment)


def git(*args: str | Path, **environment: str) -> str:
    """Run git in this checkout; return its output, or raise UserError with its first error."""
    options: Any = {"cwd": ROOT, "encoding": "utf-8", "errors": "replace", "check": False}
    environment = {**os.environ, **environment}
    done = subprocess.run(["git", *args], env=environment, capture_output=True, **options)  # noqa: S607 - git is where PATH says
    if done.returncode:
        raise UserError(done.stderr.partition("\n")[0].removeprefix("error: "))
    return str(done.stdout).strip()


# --- training ---------------------------------------------------------------------------------


def train(
    runs: Mapping[str, tuple[Variant, int]], jobs: int, gpus: Sequence[str], folder: Path
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
        env: Any = {"OMP_NUM_THREADS": "1"}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        place = {"seed": seed, "run_name": name, "out_dir": folder.absolute(), "resume": "auto"}
        flags = (*OFF, *variant.flags, *as_flags(place))
        script = variant.code / "train_gpt2.py"
        try:
            run_python(script, *flags, folder=Path.cwd(), is_done=lambda _: stopped.is_set(), **env)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(train_one, name, *run): name for name, run in runs.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.exception()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)


# --- comparison -------------------------------------------------------------------------------


def read_outcome(run_dir: Path, metric: str) -> Outcome:
    """Read the metric, the losses and the step time of a finished run."""
    records = read_run(run_dir)
    series = Series.of(records, metric)
    if not len(series.values):
        raise UserError(f"--metric {metric} is not in {run_dir}/{METRICS_NAME}: use a name there")
    losses = [(r["step"], r.get("train_loss"), r.get("val_loss")) for r in records]
    return Outcome(series, losses, median(Series.of(records, "step_time_ms").values))


def interval(differences: Sequence[float], n_pairs: int | None = None) -> float:
    """Return half the width of the 95 % confidence interval of the mean of paired differences.

    It is t s / sqrt(n), with Student's t for n - 1 degrees of freedom and the standard deviation s;
    infinity for a single pair. `n_pairs` is another n, with the same standard deviation.
    """
    if len(differences) < 2:
        return math.inf
    n = n_pairs or len(differences)
    return T_QUANTILES[n - 2] * stdev(differences) / math.sqrt(n)


def describe(config: TrialConfig, pairs: Sequence[Pair]) -> str:
    """Return the result of an edit in one line, without its name and its speed."""
    n_pairs = f"{len(pairs)} pair{'s' * (len(pairs) > 1)}"
    if all(base.losses == edit.losses for base, edit in pairs):
        return f"the same, bit for bit ({n_pairs})"
    differences = [edit.value - base.value for base, edit in pairs]
    mean, half = fmean(differences), interval(differences)
    before, after = fmean(base.value for base, _ in pairs), fmean(edit.value for _, edit in pairs)
    values = f"{config.metric} {before:.5g} → {after:.5g}"
    higher = config.higher or bool(HIGHER_IS_BETTER.search(config.metric))
    verdict = f"{'better' if higher == (mean > 0) else 'worse'} by {abs(mean):.2g}"
    if len(pairs) == 1:
        return f"{values}, {verdict} (1 pair: no interval)"
    if half < abs(mean):
        agreeing = sum(difference * mean > 0 for difference in differences)
        of_seeds = f"{agreeing} of {len(pairs)} seeds"
        return f"{values}, {verdict} ± {half:.2g} (95 %, {n_pairs}), {of_seeds}"
    enough = (n for n in range(2, MAX_PAIRS + 1) if interval(differences, n) < abs(mean))
    needed = f"{next(enough, f'more than {MAX_PAIRS}')} pairs would show such a difference"
    return f"{values}, not shown: {mean:+.2g} ± {half:.2g} (95 %, {n_pairs}); {needed}"


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
    """Train what is missing; then print a table and an answer, and draw a figure, for each edit."""
    settings = check_flags(flags)
    device = select_device(settings.device)
    n_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(n_gpus)))
    gpus = visible.split(",")[:n_gpus]
    jobs = config.jobs or len(gpus) or usable_cores()
    if WORKTREE not in config.edit and git("status", "--porcelain"):
        print("note: the base is the last commit, without this checkout's uncommitted changes")
    with tempfile.TemporaryDirectory() as scratch:
        base, *edits = variants = build_variants(config, flags, Path(scratch))
        folder = TRIALS / (config.name or base.digest)
        path = folder / "trial.json"
        trial = read_json(path) if path.exists() else {"finished": [], "edits": {}}
        trial |= {"device": device_label(device), **provenance(), "settings": settings.saved()}
        seeds = range(1, config.seeds + 1)
        runs = {v.run_name(seed): (v, seed) for seed in seeds for v in variants}
        missing = {name: runs[name] for name in runs if name not in trial["finished"]}
        print(f"{folder}: {len(missing)} runs, {jobs} at a time", flush=True)
        for name, error in train(missing, jobs, gpus, folder):
            if error is None:
                trial["finished"].append(name)
                write_json(path, trial)
            print(f"{name}: {f'failed: {error}' if error else 'finished'}", flush=True)
    remarks = " (unreliable: the runs shared its cores)" if jobs > max(1, len(gpus)) else ""
    if gpus and not settings.deterministic:
        remarks += "; a GPU repeats losses bit for bit only with --deterministic"
    answers = []
    for edit in edits:
        outcomes = dict[int, Pair]()
        for seed in seeds:
            before, after = folder / base.run_name(seed), folder / edit.run_name(seed)
            if {before.name, after.name} <= set(trial["finished"]):
                pair = read_outcome(before, config.metric), read_outcome(after, config.metric)
                outcomes[seed] = pair
        if not outcomes:
            answers.append(f"{edit.name}: no answer: no pair of runs is complete")
            continue
        print(format_pairs(edit.name, outcomes))
        pairs = [*outcomes.values()]
        print(draw(edit.name, config.metric, pairs, folder / f"{edit.name}.png"))
        ratio = fmean(after.step_ms / before.step_ms for before, after in pairs)
        answer = f"{describe(config, pairs)}; {ratio:.2f} × the time{remarks}"  # noqa: RUF001
        answers.append(f"{edit.name}: {answer}")
        values = {seed: [o.value for o in pair] for seed, pair in outcomes.items()}
        patch, own_flags = git("diff", base.tree, edit.tree), edit.flags[len(flags) :]
        described = {"answer": answer, "patch": patch, "flags": own_flags}
        trial["edits"][edit.name] = described | {config.metric: values}
    write_json(path, trial)
    print(*answers, sep="\n")


def check_flags(flags: Sequence[str]) -> TrainConfig:
    """Return the settings of `train_gpt2.py`; raise if a flag is invalid or set by the trial."""
    given = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    if taken := sorted(given & {flag_of(name) for name in SET_BY_TRIAL}):
        raise UserError(f"leave out {', '.join(taken)}: set by the trial for each run")
    return parse_config(flags)[0]


if __name__ == "__main__":
    run_command(main)
