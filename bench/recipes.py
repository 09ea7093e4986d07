"""What a recipe is worth: two recipes trained on the same tokens in the same order, and compared.

    python -m bench.recipes --data-dir data/wikipedia     # train the pair of the figure
    python -m bench.recipes                               # only draw the figure

A run is `train_gpt2.py --config recipes/…` with another model, rate and length. Results go to
`bench/results/recipes/runs.json` as they come, so the same command goes on after an interrupt. The
file also has runs of the reference with another beta2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.config import ROOT
from bench.measurement import provenance, run_python
from corpus.shards import open_shards
from formats.metrics import METRICS_NAME, read_metrics
from plot import BLUE, GREY, RED, new_axes, save_figure
from runtime.cli import as_flags, parse_flags, run_command
from runtime.device import DeviceName
from runtime.files import read_json, write_json

RECIPES = {  # a file in recipes/, and the last rate's share of the first
    "reference": ("gpt2-124m", 0.1),
    "fast": ("gpt2-124m-fast", 0.0),
}
SCALES = {  # a model and its batch
    "w64": {"n_layer": 2, "n_embd": 64, "block_size": 128, "total_batch_size": 2048},
    "w128": {"n_layer": 2, "n_embd": 128, "block_size": 128, "total_batch_size": 2048},
    "w256": {"n_layer": 4, "n_embd": 256, "block_size": 128, "total_batch_size": 2048},
}
RUNS = ("w64_3840_reference_0.004", "w64_3840_fast_0.008")  # by scale, steps, recipe and rate
EVALUATIONS = 16  # validations of a run after the first step
Curve = Sequence[tuple[float, float]]  # a run's validations: step, loss


@dataclass(frozen=True)
class RecipesConfig:
    """Train the recipes on the same tokens in the same order, and compare their losses."""

    data_dir: Path | None = None
    """Folder of token shards; 8M tokens of English text or more. Without it nothing is trained."""
    device: DeviceName = "auto"
    """Device to train on."""
    out_dir: Path = Path("runs/recipes")
    """Where the run folders go."""
    results_dir: Path = Path("bench/results/recipes")
    """Where the results and the figure go."""


def main() -> None:
    """Train what is not trained yet, then draw the figure of both."""
    config = parse_flags(RecipesConfig)
    path = config.results_dir / "runs.json"
    results = read_json(path) if path.exists() else {"runs": {}}
    if config.data_dir is not None:
        shards = open_shards(config.data_dir, "train")
        data = {"train_tokens": shards.total_tokens, "fingerprint": shards.fingerprint}
        if results.setdefault("data", data) != data:
            raise ValueError(f"{path} is of other data than {config.data_dir}: use --results-dir")
        for name in RUNS:
            if name not in results["runs"]:
                results["runs"][name] = run = train(name, config)
                write_json(path, results)
                print(f"{name}: {run['curve'][-1][1]:.4f}", flush=True)
    print(draw_summary(results["runs"], config.results_dir / "summary.png"))


def train(name: str, config: RecipesConfig) -> dict[str, Any]:
    """Train one run in a process of its own; returns its settings, versions and losses."""
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
    curve = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    return settings | provenance() | {"curve": curve}


def reached_after(reference: Curve, fast: Curve) -> float | None:
    """The share of the steps after which the fast recipe stays where the reference ends.

    Between two validations its loss is taken to fall in a straight line. None: never.
    """
    end = reference[-1][1]
    last = max(place for place, (_, loss) in enumerate(fast) if loss > end)
    if last == len(fast) - 1:
        return None
    (step, loss), (next_step, next_loss) = fast[last : last + 2]
    return float(np.interp(-end, (-loss, -next_loss), (step, next_step))) / fast[-1][0]


def draw_summary(runs: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Draw the losses of the two `RUNS`, and where the second reaches the first one's end."""
    if missing := [name for name in RUNS if name not in runs]:
        raise ValueError(f"no result of {' and '.join(missing)}: give --data-dir")
    reference, fast = (runs[name]["curve"] for name in RUNS)
    scale, steps, *_ = RUNS[0].split("_")
    sizes = SCALES[scale]
    batch, end = sizes["total_batch_size"], reference[-1][1]
    parameters = 12 * sizes["n_layer"] * sizes["n_embd"] ** 2  # of the blocks' matrices
    title = f"{scale}, {int(steps) * batch / parameters:.2g} tokens per parameter"
    axes = new_axes(title, "validation loss (nats per token)")
    for name, curve, colour in (("reference", reference, GREY), ("fast", fast, BLUE)):
        at, values = np.transpose(curve[1:])
        axes.plot(at * batch, values, color=colour, label=f"{name} {values[-1]:.3f}")
    axes.axhline(end, color=GREY, linewidth=0.8, linestyle=":")
    if (share := reached_after(reference, fast)) is not None:
        label = f"after {share:.0%} of the tokens"
        axes.plot(share * int(steps) * batch, end, "o", color=RED, label=label)
    return save_figure(axes, path)


if __name__ == "__main__":
    run_command(main)
