"""What a recipe is worth: two recipes trained on the same tokens in the same order, and compared.

    python -m bench.recipes --data-dir data/wikipedia     # train what has no result yet
    python -m bench.recipes                               # only draw the figure

A run is `train_gpt2.py --config recipes/…` with another model, rate and length. Results go to
`bench/results/recipes/runs.json` as they come, so the same command goes on after an interrupt. The
file also has runs of the reference with another beta2.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.config import ROOT
from bench.measurement import device_label, provenance, run_python
from corpus.shards import open_shards
from formats.metrics import METRICS_NAME, read_metrics
from plot import BLUE, GREY, RED, new_axes, save_figure
from runtime.cli import as_flags, parse_flags, run_command
from runtime.device import DeviceName, select_device
from runtime.files import read_json, write_json

RECIPES = {  # a file in recipes/, and the last rate's share of the first
    "reference": ("gpt2-124m", 0.1),
    "fast": ("gpt2-124m-fast", 0.0),
}
SCALES = {  # a model and its batch
    "w64": {"n_layer": 2, "n_embd": 64, "block_size": 128, "total_batch_size": 2048},
    "w128": {"n_layer": 2, "n_embd": 128, "block_size": 128, "total_batch_size": 2048},
    "w256": {"n_layer": 4, "n_embd": 256, "block_size": 128, "total_batch_size": 2048},
    "124m": {"n_layer": 12, "n_embd": 768, "block_size": 1024, "total_batch_size": 131_072},
}
RUNS = (  # by their names: scale, steps, recipe, rate
    *("w64_240_reference_0.004", "w64_240_fast_0.008"),
    *("w64_480_reference_0.004", "w64_480_fast_0.008"),
    *("w64_960_reference_0.002", "w64_960_reference_0.004", "w64_960_reference_0.008"),
    *("w64_960_fast_0.008", "w64_3840_reference_0.004", "w64_3840_fast_0.008"),
    *("w128_240_reference_0.004", "w128_240_fast_0.008"),
    *("w128_960_reference_0.002", "w128_960_reference_0.004", "w128_960_fast_0.008"),
    *("w256_768_reference_0.001", "w256_768_reference_0.002", "w256_768_reference_0.004"),
    "w256_768_fast_0.008",
    # On a GPU: one token per parameter of the blocks.
    *("124m_648_reference_0.0006", "124m_648_reference_0.0018", "124m_648_reference_0.0036"),
    *("124m_648_fast_0.0018", "124m_648_fast_0.0036"),
)
EVALUATIONS = 16  # validations of a run after the first step
Curve = Sequence[tuple[float, float]]  # a run's validations: step, loss


@dataclass(frozen=True)
class RecipesConfig:
    """Train the recipes on the same tokens in the same order, and compare their losses."""

    data_dir: Path | None = None
    """Folder of token shards; English text of 12M tokens or more for the runs on a CPU. Without it
    nothing is trained."""
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
        shards = open_shards(config.data_dir, "train")
        data = {"train_tokens": shards.total_tokens, "fingerprint": shards.fingerprint}
        if results.setdefault("data", data) != data:
            raise ValueError(f"{path} is of other data than {config.data_dir}: use --results-dir")
        is_on_cpu = select_device(config.device).type == "cpu"
        for name in RUNS:
            if name.startswith("124m") != is_on_cpu and name not in results["runs"]:
                results["runs"][name] = run = train(name, config)
                write_json(path, results)
                print(f"{name}: {run['curve'][-1][1]:.4f}", flush=True)
    print(draw_summary(compare(results["runs"]), config.results_dir / "summary.png"))


def train(name: str, config: RecipesConfig) -> dict[str, Any]:
    """Train one run in a process of its own; returns what is to be known of it."""
    scale, count, recipe, rate = name.split("_")
    file_name, last_share = RECIPES[recipe]
    steps, max_lr = int(count), float(rate)
    settings = SCALES[scale] | {
        **{"n_head": SCALES[scale]["n_embd"] // 64, "max_lr": max_lr},
        **{"min_lr": max_lr * last_share, "max_steps": steps, "warmup_steps": steps // 10},
    }
    others = {
        **{"config": ROOT / f"recipes/{file_name}.json", "device": config.device, "resume": "auto"},
        **{"data_dir": Path(config.data_dir or "").absolute(), "run_name": name},
        **{"out_dir": config.out_dir.absolute(), "hellaswag_every": 0, "sample_every": 0},
        **{"val_every": steps // EVALUATIONS, "checkpoint_every": 0},
        **{"val_tokens": 32 * settings["total_batch_size"]},
    }
    run_python("train_gpt2.py", *as_flags(settings | others))
    records = read_metrics(config.out_dir / name / METRICS_NAME)
    times = [record["step_time_ms"] for record in records if "step_time_ms" in record]
    measured = {
        "machine": device_label(select_device(config.device)),
        "step_seconds": float(np.quantile(times, 0.01)) / 1000,  # of steps that nothing disturbed
        "curve": [(r["step"], r["val_loss"]) for r in records if "val_loss" in r],
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
        scale = SCALES[self.scale]
        parameters = 12 * scale["n_layer"] * scale["n_embd"] ** 2
        return self.steps * scale["total_batch_size"] / parameters

    @property
    def share(self) -> float | None:
        """The share of the steps after which the fast recipe stays where the reference ends.

        Between two validations its loss is taken to fall in a straight line. None: never.
        """
        end = self.reference[-1][1]
        last = max(place for place, (_, loss) in enumerate(self.fast) if loss > end)
        if last == len(self.fast) - 1:
            return None
        (step, loss), (next_step, next_loss) = self.fast[last : last + 2]
        return float(np.interp(-end, (-loss, -next_loss), (step, next_step))) / self.steps


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
    if not compared:
        raise ValueError("no model was trained by both recipes: give --data-dir")
    return sorted(compared, key=lambda c: (SCALES[c.scale]["n_embd"], c.steps))


def draw_summary(comparisons: Sequence[Comparison], path: Path) -> Path:
    """Draw the losses where there are most tokens per parameter."""
    longest = max(comparisons, key=lambda each: each.tokens_per_parameter)
    title = f"{longest.scale}, {longest.tokens_per_parameter:.2g} tokens per parameter"
    axes = new_axes(title, "validation loss (nats per token)")
    batch, end = SCALES[longest.scale]["total_batch_size"], longest.reference[-1][1]
    for name, curve, colour in (("reference", longest[2], GREY), ("fast", longest[3], BLUE)):
        steps, values = np.transpose(curve[1:])
        axes.plot(steps * batch, values, color=colour, label=f"{name} {values[-1]:.3f}")
    axes.axhline(end, color=GREY, linewidth=0.8, linestyle=":")
    if longest.share is not None:
        reached = longest.share * longest.steps * batch
        axes.plot(reached, end, "o", color=RED, label=f"after {longest.share:.0%} of the tokens")
    return save_figure(axes, path)


if __name__ == "__main__":
    run_command(main)
