"""What a recipe is worth: two recipes trained on the same tokens in the same order, and compared.

    python -m bench.recipes --data-dir data/wikipedia              # train what has no result yet
    python -m bench.recipes --data-dir data/wikipedia --only w64   # of it, the names with "w64"
    python -m bench.recipes                                        # only draw the figure

A run is `train_gpt2.py --config recipes/…` with another model, rate and length. Results go to
`bench/results/recipes/runs.json` as they come, so the same command goes on after an interrupt. On
a CPU as many runs train at once as there are cores. The file also has the runs of the changes that
docs/recipes.md lists, whose code is gone; the figure takes those of AdamW as runs of the reference.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.config import ROOT
from bench.measurement import run_python
from bench.report import device_label, provenance
from corpus.shards import open_shards
from plot import BLUE, GREY, PALE, RED
from runtime.cli import as_flags, parse_flags, run_command
from runtime.device import DeviceName, select_device
from runtime.files import atomic_write, read_json, write_json
from runtime.metrics import METRICS_NAME, format_count, read_metrics
from runtime.startup import usable_cores

RECIPES = {  # a file in recipes/, and the last rate's share of the first
    "reference": ("gpt2-124m", 0.1),
    "fast": ("gpt2-124m-fast", 0.0),
}
SCALES = {  # a model and its batch
    "w64": {"n_layer": 2, "n_head": 1, "n_embd": 64, "block_size": 128},
    "w128": {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 128},
    "w256": {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 128},
    "124m": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024},
}
BATCHES = {"w64": 2048, "w128": 2048, "w256": 2048, "124m": 131_072}  # tokens
EVALUATIONS = 16  # validations of a run after the first step
Curve = Sequence[Sequence[float]]  # a run's validations: step, loss; in old results a third value


class Run(NamedTuple):
    """One training run."""

    scale: str
    steps: int
    recipe: str
    max_lr: float

    @property
    def name(self) -> str:
        """The run's folder, and its name in the results."""
        return f"{self.scale}_{self.steps}_{self.recipe}_{self.max_lr:g}"

    def settings(self) -> dict[str, Any]:
        """The flags of train_gpt2.py that differ from the recipe's."""
        rates = {"max_lr": self.max_lr, "min_lr": self.max_lr * RECIPES[self.recipe][1]}
        length = {"max_steps": self.steps, "warmup_steps": self.steps // 10}
        return SCALES[self.scale] | {"total_batch_size": BATCHES[self.scale]} | length | rates


RUNS = (
    *(Run("w64", 960, "reference", rate) for rate in (2e-3, 4e-3, 8e-3)),
    *(Run("w64", steps, "reference", 4e-3) for steps in (240, 480, 3840)),
    *(Run("w64", steps, "fast", 8e-3) for steps in (240, 480, 960, 3840)),
    *(Run("w128", 960, "reference", rate) for rate in (2e-3, 4e-3)),
    Run("w128", 240, "reference", 4e-3),
    *(Run("w128", steps, "fast", 8e-3) for steps in (240, 960)),
    *(Run("w256", 768, "reference", rate) for rate in (1e-3, 2e-3, 4e-3)),
    Run("w256", 768, "fast", 8e-3),
    # On a GPU: one token per parameter of the blocks.
    *(Run("124m", 648, "reference", rate) for rate in (6e-4, 1.8e-3, 3.6e-3)),
    *(Run("124m", 648, "fast", rate) for rate in (1.8e-3, 3.6e-3)),
)


@dataclass(frozen=True)
class RecipesConfig:
    """Train the recipes on the same tokens in the same order, and compare their losses."""

    data_dir: Path | None = None
    """Folder of token shards; English text of 12M tokens or more for the runs on a CPU. Without it
    nothing is trained."""
    only: str = ""
    """Train only the runs whose name has this."""
    device: DeviceName = "auto"
    """Device to train on."""
    out_dir: Path = Path("runs/recipes")
    """Where the run folders go."""
    results_dir: Path = Path("bench/results/recipes")
    """Where the results and the figure go."""


def main() -> None:
    """Train what is not trained yet, then draw the figure of all that is."""
    config = parse_flags(RecipesConfig)
    path = config.results_dir / "runs.json"
    results = read_json(path) if path.exists() else {"runs": {}}
    if config.data_dir is not None:
        train_missing(config, config.data_dir.absolute(), results)
    comparisons = compare(results["runs"])
    if not comparisons:
        raise ValueError(f"{path} has no model that both recipes trained: give --data-dir")
    print(draw_summary(comparisons, config.results_dir / "summary.png"))


def train_missing(config: RecipesConfig, data_dir: Path, results: dict[str, Any]) -> None:
    """Train the runs that have no result, and save each result as it comes.

    Raises:
        ValueError: the results are of other data, or no run has such a name.
    """
    shards, path = open_shards(data_dir, "train"), config.results_dir / "runs.json"
    data = {"train_tokens": shards.total_tokens, "fingerprint": shards.fingerprint}
    if results.setdefault("data", data) != data:
        raise ValueError(f"{path} is of other data than {data_dir}: give a --results-dir")
    on_cpu = select_device(config.device).type == "cpu"
    runs = [run for run in RUNS if config.only in run.name and (run.scale == "124m") != on_cpu]
    if not runs:
        raise ValueError(f"--only {config.only!r} is in no run's name, such as {RUNS[0].name}")
    missing = [run for run in runs if run.name not in results["runs"]]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs were trained before", flush=True)
    with ThreadPoolExecutor(usable_cores() if on_cpu else 1) as pool:
        futures = {pool.submit(train, run, config, data_dir): run.name for run in missing}
        for future in as_completed(futures):
            name = futures[future]
            try:
                results["runs"][name] = future.result()
            except ValueError as error:
                print(f"{name}: failed: {error}", flush=True)
                continue
            write_json(path, results)
            print(f"{name}: {results['runs'][name]['curve'][-1][1]:.4f}", flush=True)


def train(run: Run, config: RecipesConfig, data_dir: Path) -> dict[str, Any]:
    """Train one run in a process of its own; returns what is to be known of it.

    Raises:
        ValueError: it failed, in one line.
    """
    device, out_dir, settings = select_device(config.device), config.out_dir, run.settings()
    places = {"data_dir": data_dir, "device": config.device, "out_dir": out_dir.absolute()}
    evaluations = {"val_every": max(1, run.steps // EVALUATIONS), "hellaswag_every": 0}
    evaluations |= {"val_tokens": 32 * BATCHES[run.scale], "sample_every": 0}
    flags = as_flags(settings | places | evaluations | {"checkpoint_every": 0})
    recipe = f"--config={ROOT}/recipes/{RECIPES[run.recipe][0]}.json"
    threads = {"OMP_NUM_THREADS": "1"} if device.type == "cpu" else {}
    run_python(
        *("train_gpt2.py", recipe, *flags, f"--run-name={run.name}", "--resume=auto"), **threads
    )
    records = read_metrics(out_dir / run.name / METRICS_NAME)
    times = [record["step_time_ms"] for record in records if "step_time_ms" in record]
    curve = {record["step"]: record["val_loss"] for record in records if "val_loss" in record}
    measured = {
        "machine": device_label(device),
        "step_seconds": float(np.quantile(times, 0.01)) / 1000,  # of steps that nothing disturbed
        "curve": list(curve.items()),
    }
    return settings | provenance() | measured


# --- comparing --------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Both recipes at their best, on one model and as many steps."""

    scale: str
    steps: int
    reference: Curve
    fast: Curve

    @property
    def tokens_per_parameter(self) -> float:
        """Training tokens per parameter of the blocks' matrices."""
        parameters = 12 * SCALES[self.scale]["n_layer"] * SCALES[self.scale]["n_embd"] ** 2
        return self.steps * BATCHES[self.scale] / parameters

    @property
    def share(self) -> float | None:
        """The share of the steps after which the fast recipe stays where the reference ends.

        Between two validations its loss is taken to fall in a straight line. None: never.
        """
        end = self.reference[-1][1]
        last = max(place for place, (_, loss, *_) in enumerate(self.fast) if loss > end)
        if last == len(self.fast) - 1:
            return None
        (step, loss, *_), (next_step, next_loss, *_) = self.fast[last : last + 2]
        part = (loss - end) / (loss - next_loss)
        return (step + part * (next_step - step)) / self.steps


def compare(runs: Mapping[str, Mapping[str, Any]]) -> list[Comparison]:
    """The results by model and steps, where both recipes were trained; the smallest first."""
    curves = defaultdict[tuple[str, int], dict[str, list[Curve]]](lambda: defaultdict(list))
    for name, record in runs.items():
        scale, steps, recipe, *_ = name.split("_")
        curves[scale, int(steps)][recipe].append(record["curve"])
    compared = [
        Comparison(*key, *(min(of[r], key=lambda curve: curve[-1][1]) for r in RECIPES))
        for key, of in curves.items()
        if of.keys() >= RECIPES.keys()
    ]
    return sorted(compared, key=lambda c: (SCALES[c.scale]["n_embd"], c.steps))


def draw_summary(comparisons: Sequence[Comparison], path: Path) -> Path:
    """Draw the losses where there are most tokens per parameter, and the shares of all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained")
    losses, shares = figure.subplots(1, 2)
    longest = max(comparisons, key=lambda each: each.tokens_per_parameter)
    for name, colour in (("reference", GREY), ("fast", BLUE)):
        steps, values, *_ = zip(*getattr(longest, name)[1:], strict=True)
        tokens = [step * BATCHES[longest.scale] for step in steps]
        losses.plot(tokens, values, color=colour, label=f"{name}: {values[-1]:.3f}")
    end = longest.reference[-1][1]
    losses.axhline(end, color=GREY, linewidth=0.8, linestyle=":")
    if longest.share is not None:
        reached = longest.share * longest.steps * BATCHES[longest.scale]
        losses.plot([reached], [end], color=RED, marker="o")
        note = f"after {longest.share:.0%}\nof the tokens"
        losses.annotate(note, (0.95 * reached, end), color=RED, ha="right", va="top")
    losses.set(xlabel="training tokens", ylabel="validation loss (nats per token)")
    losses.xaxis.set_major_formatter(lambda value, _: format_count(value))
    losses.set_title(f"{longest.scale}, {longest.tokens_per_parameter:.2g} tokens per parameter")
    for scale in dict.fromkeys(each.scale for each in comparisons):
        points = [(c.tokens_per_parameter, c.share) for c in comparisons if c.scale == scale]
        label = f"width {SCALES[scale]['n_embd']}"
        shares.plot(*zip(*points, strict=True), marker="o", label=label)
    shares.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
    shares.set(xscale="log", ylim=(0, 1), xlabel="training tokens per parameter of the blocks")
    shares.xaxis.set_major_formatter("{x:g}")
    shares.set_title("share of the reference's tokens to its end loss")
    for axes in (losses, shares):
        axes.legend(edgecolor="none")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="y", color=PALE)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return path


if __name__ == "__main__":
    run_command(main)
