"""What a recipe is worth: recipes trained on the same tokens in the same order, and compared.

    python -m bench.recipes --data-dir data/wikipedia              # every run of `RUNS`
    python -m bench.recipes --data-dir data/wikipedia --only w64   # those whose name has it

On a CPU as many runs train at once as there are cores. It writes `runs.json` (settings and
thinned metrics of every run), `runs.md` (tables) and two figures into bench/results/recipes. A
run that is in `runs.json` is not trained again, so the same command goes on after an interrupt or
on another machine; `--results-dir` of another folder trains them all again.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench.config import ROOT
from bench.measurement import error_line
from bench.report import device_label, provenance, round_floats
from bench.trials import TRIALS
from corpus.shards import open_shards
from plot import BLUE, GREY, INK, PALE, RED
from runtime.cli import parse_flags, run_command
from runtime.device import DeviceName, select_device
from runtime.files import atomic_write, read_json, write_json
from runtime.metrics import format_count, read_metrics
from runtime.startup import usable_cores

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {  # a file in recipes/, and changes to it
    "reference": ("gpt2-124m", {}),
    "muon": ("gpt2-124m", {"optimizer": "muon"}),
    "fast": ("gpt2-124m-fast", {}),
}
OWN_SETTINGS = ("size", "total_batch_size", "max_steps", "max_lr", "min_lr", "warmup_steps")
EVALUATIONS = 16  # validations of a run after the first step
SEEDS = (1337, 1338)
Group = tuple[str, int]  # runs of one model and as many steps, which are compared


class Scale(NamedTuple):
    """A model and its batch."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    total_batch_size: int  # tokens

    @property
    def matrix_parameters(self) -> int:
        """Parameters that are no embeddings, of the blocks' matrices."""
        return 12 * self.n_layer * self.n_embd**2


SCALES = {
    "w64": Scale(2, 1, 64, 128, 2048),
    "w128": Scale(2, 2, 128, 128, 2048),
    "w256": Scale(4, 4, 256, 128, 2048),
    "124m": Scale(12, 12, 768, 1024, 131_072),
}


class Run(NamedTuple):
    """One training run of the experiment."""

    scale: str
    steps: int
    recipe: str
    max_lr: float
    trial: str = ""
    seed: int = SEEDS[0]

    @property
    def name(self) -> str:
        """The run's folder."""
        parts = [self.scale, str(self.steps), self.recipe, f"{self.max_lr:g}"]
        parts += [self.trial.replace(" ", "-").replace("/", "-of-").replace("%", "pc")]
        parts += [str(self.seed)] if self.seed != SEEDS[0] else []
        return "_".join(filter(None, parts)).replace(",", "")

    def settings(self) -> dict[str, Any]:
        """The flags of train_gpt2.py that say what is learnt, from the recipe's file."""
        file, changes = RECIPES[self.recipe]
        recipe = read_json(ROOT / "recipes" / f"{file}.json")
        assert isinstance(recipe, dict)
        kept = {k: v for k, v in recipe.items() if k not in (*OWN_SETTINGS, "about")} | changes
        share = recipe["min_lr"] / recipe["max_lr"]
        own = {"max_steps": self.steps, "max_lr": self.max_lr, "min_lr": self.max_lr * share}
        return SCALES[self.scale]._asdict() | kept | own | {"seed": self.seed}


TRIED = ("w64", 480, "muon", 8e-3)  # 10 tokens per parameter of the blocks
RUNS: tuple[Run, ...] = (
    *(Run("w64", 960, "reference", rate) for rate in (2e-3, 4e-3, 8e-3)),
    *(Run("w64", steps, "reference", 4e-3) for steps in (240, 480)),
    Run("w64", 3840, "reference", 4e-3),
    *(Run("w64", steps, "fast", 8e-3) for steps in (240, 480, 960, 3840)),
    *(Run("w128", 960, "reference", rate) for rate in (2e-3, 4e-3)),
    Run("w128", 240, "reference", 4e-3),
    *(Run("w128", steps, "fast", 8e-3) for steps in (240, 960)),
    *(Run("w256", 768, "reference", rate) for rate in (1e-3, 2e-3, 4e-3)),
    Run("w256", 768, "fast", 8e-3),
    # What the fast recipe was chosen from.
    *(Run(*TRIED, trial, seed) for trial in TRIALS for seed in SEEDS),
    *(Run("w64", 480, "muon", 16e-3, "", seed) for seed in SEEDS),
    Run("w64", 480, "fast", 16e-3),
    *(Run("w64", 960, "muon", rate, "beta2 0.95") for rate in (8e-3, 16e-3)),
    *(Run("w64", 480, "reference", 4e-3, trial) for trial in ("beta2 0.99", "beta2 0.999")),
    Run("w64", 480, "reference", 2e-3, "beta2 0.999"),
    Run("w64", 960, "reference", 4e-3, "beta2 0.999"),
    # On a GPU: 124M, one token per parameter of the blocks.
    *(Run("124m", 648, "reference", rate) for rate in (6e-4, 1.8e-3, 3.6e-3)),
    *(Run("124m", 648, "fast", rate) for rate in (1.8e-3, 3.6e-3)),
)


@dataclass(frozen=True)
class RecipesConfig:
    """Train the recipes on the same tokens in the same order, and compare their losses."""

    data_dir: Path
    """Folder of token shards; English text of 12M tokens or more for the runs on a CPU."""
    only: str = ""
    """Train only the runs whose name has this."""
    device: DeviceName = "auto"
    """Device to train on."""
    out_dir: Path = Path("runs/recipes")
    """Where the run folders go."""
    results_dir: Path = Path("bench/results/recipes")
    """Where tables and figures go."""


def main() -> None:
    """Train what is not trained yet, then write tables and figures of all that is."""
    config = parse_flags(RecipesConfig)
    on_cpu = select_device(config.device).type == "cpu"
    runs = [run for run in RUNS if config.only in run.name and (run.scale == "124m") != on_cpu]
    if not runs:
        raise ValueError(f"--only {config.only!r} is in no run's name, such as {RUNS[0].name}")
    done = {result.run for result in read_results(config)}
    print(f"{len(done.intersection(runs))} of {len(runs)} runs were trained before", flush=True)
    with ThreadPoolExecutor(usable_cores() if on_cpu else 1) as pool:
        missing = [run for run in runs if run not in done]
        for line in pool.map(lambda run: train(run, config, on_cpu), missing):
            print(line, flush=True)
    for path in report(read_results(config), config):
        print(path)


def train(run: Run, config: RecipesConfig, on_cpu: bool) -> str:
    """Train one run in a process of its own; returns in one line what came of it."""
    folder = config.out_dir / run.name
    tokens = SCALES[run.scale].total_batch_size
    settings = run.settings() | TRIALS[run.trial].flags
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    flags += [f"--data-dir={config.data_dir}", f"--device={config.device}"]
    flags += [f"--out-dir={config.out_dir}", f"--run-name={run.name}", "--resume=auto"]
    evaluations = 2 if run.trial else EVALUATIONS  # only the end of a trial counts
    flags += [f"--val-every={max(1, run.steps // evaluations)}", f"--val-tokens={32 * tokens}"]
    flags += ["--hellaswag-every=0", "--sample-every=0", "--checkpoint-every=0"]
    if on_cpu:  # one micro-batch, so that a trial may split it
        flags.append(f"--micro-batch-size={tokens // SCALES[run.scale].block_size}")
    threads = {"OMP_NUM_THREADS": "1"} if on_cpu else {}
    child = subprocess.run(
        [sys.executable, "-m", "bench.trials", run.trial, *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), **threads},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        return f"{run.name}: failed: {error_line(child.stderr)}"
    return f"{run.name}: {curve(folder)[-1].val_loss:.4f}"


def is_complete(run: Run, folder: Path) -> bool:
    """Whether a run has been trained to its end."""
    path = folder / "metrics.jsonl"
    return path.is_file() and curve(folder)[-1:] != [] and curve(folder)[-1].step == run.steps


# --- results ----------------------------------------------------------------------------------


class Point(NamedTuple):
    """One validation of a run."""

    step: int
    val_loss: float
    train_loss: float | None  # the mean since the validation before


def curve(folder: Path) -> list[Point]:
    """A run's validations, from its metrics."""
    points, losses = list[Point](), list[float]()
    for record in read_metrics(folder / "metrics.jsonl"):
        if "train_loss" in record:
            losses.append(record["train_loss"])
        elif "val_loss" in record:
            mean = float(np.mean(losses)) if losses else None
            points.append(Point(record["step"], record["val_loss"], mean))
            losses.clear()
    return points


def step_seconds(folder: Path) -> float:
    """The time of a step that nothing disturbed: one in a hundred of the run's took less."""
    records = read_metrics(folder / "metrics.jsonl")
    times = [record["step_time_ms"] for record in records if "step_time_ms" in record]
    return float(np.quantile(times, 0.01)) / 1000


class Result(NamedTuple):
    """A complete run."""

    run: Run
    curve: list[Point]
    record: dict[str, Any]  # settings, machine and time per step

    @property
    def step_seconds(self) -> float:
        """The time of a step that nothing disturbed."""
        return float(self.record["step_seconds"])

    @property
    def label(self) -> str:
        """The recipe, its rate, its change, if any, and the loss at the end."""
        parts = (self.run.recipe, f"rate {self.run.max_lr:g}", self.run.trial)
        return f"{', '.join(filter(None, parts))}: {self.loss:.3f}"

    @property
    def loss(self) -> float:
        """The validation loss at the end."""
        return self.curve[-1].val_loss

    def share_to_reach(self, loss: float) -> float | None:
        """The share of the run after which its validation loss stays at `loss` or below.

        Between two validations it is taken to fall in a straight line.
        """
        above = [place for place, point in enumerate(self.curve) if point.val_loss > loss]
        if not above:
            return 0.0
        if above[-1] == len(self.curve) - 1:
            return None
        before, after = self.curve[above[-1] : above[-1] + 2]
        part = (before.val_loss - loss) / (before.val_loss - after.val_loss)
        return (before.step + part * (after.step - before.step)) / self.run.steps


def tokens_per_parameter(run: Run) -> float:
    """Training tokens per parameter of the blocks' matrices."""
    scale = SCALES[run.scale]
    return run.steps * scale.total_batch_size / scale.matrix_parameters


def read_results(config: RecipesConfig) -> list[Result]:
    """All complete runs: those of `runs.json`, and those whose folder is complete.

    Raises:
        ValueError: `runs.json` is of other data.
    """
    path = config.results_dir / "runs.json"
    before = read_json(path) if path.is_file() else {"data": describe_data(config), "runs": {}}
    if not isinstance(before, dict) or before["data"] != describe_data(config):
        raise ValueError(f"{path} is of other data than {config.data_dir}: give a --results-dir")
    results = []
    for run in RUNS:
        folder = config.out_dir / run.name
        if run.name in before["runs"]:
            record = before["runs"][run.name]
            points = [Point(*point) for point in record.pop("curve")]
            results.append(Result(run, points, record))
        elif is_complete(run, folder):
            record = run.settings() | TRIALS[run.trial].flags | {"trial": run.trial}
            record |= {"machine": device_label(select_device(config.device))}
            record |= {"step_seconds": step_seconds(folder)}
            results.append(Result(run, curve(folder), record))
    return results


def describe_data(config: RecipesConfig) -> dict[str, Any]:
    """What `runs.json` says of the training tokens."""
    data = open_shards(config.data_dir, "train")
    return {"train_tokens": data.total_tokens, "fingerprint": data.fingerprint}


def report(results: list[Result], config: RecipesConfig) -> list[Path]:
    """Write what all complete runs came to: a JSON file, the tables, and the figures."""
    if not results:
        raise ValueError("no run is complete yet: see the lines above")
    names = ("runs.json", "runs.md", "comparisons.png", "summary.png")
    paths = [config.results_dir / name for name in names]
    content = {
        "data": describe_data(config),
        "runs": {r.run.name: r.record | {"curve": r.curve} for r in results},
    }
    write_json(paths[0], round_floats(provenance() | content))
    with atomic_write(paths[1]) as file:
        file.write(tables(results).encode())
    comparisons = compare(results)
    if not comparisons:
        return paths[:2]
    draw_all(comparisons, paths[2])
    draw_summary(comparisons, paths[3])
    return paths


class Comparison(NamedTuple):
    """The runs of one model and number of tokens."""

    references: list[Result]  # the lowest loss first
    fast: Result
    step_seconds: tuple[float, float]  # of the reference and of the fast recipe

    @property
    def share(self) -> float | None:
        """The share of its tokens after which the fast recipe is where the reference ends."""
        return self.fast.share_to_reach(self.references[0].loss)

    @property
    def title(self) -> str:
        """The model and its tokens."""
        run = self.fast.run
        return f"{run.scale}, {tokens_per_parameter(run):.2g} tokens per parameter"


def group(results: Iterable[Result]) -> dict[Group, list[Result]]:
    """Results by model and number of steps, the lowest loss first."""
    groups = defaultdict(list)
    for result in sorted(results, key=lambda result: result.loss):
        groups[result.run.scale, result.run.steps].append(result)
    by_size = sorted(groups, key=lambda key: (SCALES[key[0]].matrix_parameters, key[1]))
    return {key: groups[key] for key in by_size}


def compare(results: Sequence[Result]) -> list[Comparison]:
    """The fast recipe and the reference, each at its best, where both were trained."""
    references = group(result for result in results if result.run.recipe == "reference")
    fast = group(result for result in results if result.run.recipe == "fast")
    return [
        Comparison(members, fast[key][0], fastest_steps(results, fast[key][0]))
        for key, members in references.items()
        if key in fast
    ]


def fastest_steps(results: Iterable[Result], fast: Result) -> tuple[float, float]:
    """Seconds of a step by AdamW and by Muon, of the run that other programs disturbed least.

    Both of the model and the machine of `fast`, without trials, most of which are Muon's; 0 where
    AdamW did not run there.
    """
    steps = defaultdict[bool, list[float]](list)
    for result in results:
        if result.run.trial:
            continue
        if (result.run.scale, result.record["machine"]) == (fast.run.scale, fast.record["machine"]):
            steps[result.run.recipe == "reference"].append(result.step_seconds)
    return min(steps[True], default=0.0), min(steps[False])


def tables(results: Sequence[Result]) -> str:
    """Every run in Markdown, by model and tokens."""
    lines = []
    for (scale, steps), members in group(results).items():
        tokens = format_count(steps * SCALES[scale].total_batch_size)
        ratio = tokens_per_parameter(members[0].run)
        lines += [f"### {scale}, {tokens} tokens, {ratio:.3g} per parameter", ""]
        lines += ["| recipe | rate | change | seed | validation loss | tokens to reference's end |"]
        lines += ["|---|---|---|---|---|---|"]
        references = [result.loss for result in members if result.run.recipe == "reference"]
        for result in members:
            share = result.share_to_reach(references[0]) if references else None
            cells = [result.run.recipe, f"{result.run.max_lr:g}", result.run.trial or "none"]
            cells += [str(result.run.seed), f"{result.loss:.4f}"]
            cells += ["not reached" if share is None else f"{share:.2f}"]
            if len(result.curve) <= 3:  # too few points to say
                cells[-1] = ""
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


# --- figures ----------------------------------------------------------------------------------


def draw_all(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw validation losses over tokens and over time, a row for each model and tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6 * len(comparisons)), dpi=100, layout="constrained")
    rows = figure.subplots(len(comparisons), 2, squeeze=False, sharey="row")
    for comparison, (over_tokens, over_time) in zip(comparisons, rows, strict=True):
        plot_losses(over_tokens, comparison, over_time=False)
        plot_losses(over_time, comparison, over_time=True)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def draw_summary(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw the losses where there are most tokens per parameter, and the shares of all."""
    from matplotlib.figure import Figure

    longest = max(comparisons, key=lambda comparison: tokens_per_parameter(comparison.fast.run))
    figure = Figure(figsize=(11, 3.4), dpi=110, layout="constrained")
    over_tokens, over_time, shares = figure.subplots(1, 3)
    plot_losses(over_tokens, longest, over_time=False)
    plot_losses(over_time, longest, over_time=True)
    plot_shares(shares, comparisons)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def plot_losses(axes: "Axes", comparison: Comparison, over_time: bool) -> None:
    """Draw the fast recipe, the reference at its best and, pale, its other runs."""
    best, *others = comparison.references
    tokens = SCALES[best.run.scale].total_batch_size
    shown: list[tuple[Result, str, str | None]] = [(result, PALE, None) for result in others]
    shown += [(best, GREY, best.label), (comparison.fast, BLUE, comparison.fast.label)]
    for result, colour, label in shown:
        points = result.curve[1:]
        pace = comparison.step_seconds[result.run.recipe == "fast"] if over_time else tokens
        x, losses = [p.step * pace for p in points], [p.val_loss for p in points]
        axes.plot(x, losses, color=colour, label=label, marker="o", markersize=2.5, linewidth=1.6)
    if comparison.share is not None and not over_time:
        reached = comparison.share * best.run.steps * tokens
        axes.plot([reached], [best.loss], color=RED, marker="o", markersize=6, zorder=3)
        note = f"after {comparison.share:.0%}\nof the tokens"
        axes.annotate(note, (reached, best.loss), (-4, -26), textcoords="offset points",
                      color=RED, fontsize=8, ha="right")  # fmt: skip
    axes.axhline(best.loss, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_ylabel("validation loss (nats per token)", color=GREY, fontsize=8)
    axes.set_xlabel(
        "seconds, at the fastest steps' pace" if over_time else "training tokens",
        color=GREY,
        fontsize=8,
    )
    if not over_time:
        axes.xaxis.set_major_formatter(lambda value, _: format_count(value))
        axes.legend(fontsize=8, edgecolor="none")
    axes.set_title(comparison.title, loc="left", fontsize=9, color=INK)
    style(axes)


def plot_shares(axes: "Axes", comparisons: Sequence[Comparison]) -> None:
    """Draw the share of the tokens that the fast recipe needs, over tokens per parameter."""
    by_scale = defaultdict(list)
    for comparison in comparisons:
        run, share = comparison.fast.run, comparison.share
        if share is not None:
            by_scale[run.scale].append((tokens_per_parameter(run), share))
    for scale, points in by_scale.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"width {scale[1:]}")
    axes.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1)
    axes.set_xlabel("training tokens per parameter of the blocks", color=GREY, fontsize=8)
    axes.set_title("share of the reference's tokens to its end loss", loc="left", fontsize=9)
    axes.legend(fontsize=8, edgecolor="none")
    style(axes)


def style(axes: "Axes") -> None:
    """This project's grid and colours."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.tick_params(colors=GREY, length=0, labelsize=8)


if __name__ == "__main__":
    run_command(main)
