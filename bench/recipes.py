"""What a recipe for GPT-2 124M learns, measured on small models of its proportions: hours, no GPU.

    python -m bench.recipes --source wikipedia_en_sample.parquet    # train what is missing
    python -m bench.recipes                                         # only the table and the figure

A run is complete: all of its recipe's steps, to the last of its schedule. Runs of one seed have the
same initial weights and the same tokens in the same order, so that their losses compare in pairs.
Results go to `bench/results/recipes/proxy.jsonl` as they come, one line each, so the same command
goes on after an interrupt. `--recipe mine.json` adds a recipe of one's own, for 124M; after an
edit of the code, give another `--results-dir`, for only settings are compared.
"""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.config import ROOT
from bench.measurement import device_label, provenance, run_python
from bench.proxy import first_merges, vocab_size
from corpus.shards import open_shards
from corpus.sources import file_source, local_files
from formats.metrics import METRICS_NAME, logged_values, read_metrics
from plot import BLUE, GRAY, RED, new_axes, save_figure
from runtime.cli import as_flags, parse_flags, run_command
from runtime.device import select_device
from training.config import TrainConfig, read_recipe

VAL_TOKENS, VAL_SPLIT = 524_288, 600_000  # of a validation, and set aside for it
LONG_STEPS = 19_073  # of the published recipe at 124M, in batches of 524,288 tokens
POINTS = 64  # of a run's curve
MOST_PASSES = 2  # over the text: a second teaches about as much (Muennighoff et al. 2023)


@dataclass(frozen=True)
class Scale:
    """A model of 6 layers and a context of 256; the published recipe's batch and steps for it."""

    width: int
    batch: int
    steps: int

    @property
    def factor(self) -> float:
        """Of rates: a narrower model takes larger ones."""
        return math.sqrt(768 / self.width)


SCALES = {"S29": Scale(64, 8192, 1056), "S117": Scale(64, 16384, 2112)}  # tokens per parameter
SCALES["M29"] = Scale(128, 16384, 2112)

LONG, SHORT = "gpt2-124m", "gpt2-124m-fast"  # in recipes/
HALF = {"total_batch_size": 262_144, "max_steps": 38_146, "weight_decay": 0.05}  # decays as much
RECIPES: Mapping[str, tuple[str, dict[str, Any]]] = {  # by label: the file, and what differs
    "published": (LONG, {}),
    "adamw 0.0018": (LONG, {"max_lr": 0.0018, "min_lr": 0.00018}),
    "adamw 0.0054": (LONG, {"max_lr": 0.0054, "min_lr": 0.00054}),
    "adamw 0.0018, half the batch": (
        LONG,
        {"max_lr": 0.0018, "min_lr": 0.00018, **HALF, "warmup_steps": 1_430},
    ),
    "anchor": (LONG, {"max_lr": 0.0018, "min_lr": 0.0, "lr_schedule": "wsd", "max_steps": 11_444}),
    "fast": (SHORT, {"max_steps": 13_352}),  # 0.35 of the published recipe's tokens
    "fast, half the decay": (SHORT, {"max_steps": 13_352, "weight_decay": 0.05}),
    "fast, whole batch": (
        SHORT,
        {"max_steps": 6_676, "warmup_steps": 100, "total_batch_size": 524_288},
    ),
}
COLOURS = {"published": GRAY, "adamw 0.0018, half the batch": RED, "fast": BLUE}  # of the figure


@dataclass(frozen=True)
class RecipesConfig:
    """Train recipes on the same tokens in the same order, and compare their last losses."""

    source: tuple[str, ...] = ()
    """Texts, as fineweb.py takes them, of half a run's tokens or more: 5M in S29. Without them
    nothing is trained."""
    scale: str = "S29"
    """S29, S117 or M29: a small or a middle model, and tokens per parameter of its blocks."""
    seeds: int = 2
    """Runs of each recipe, with the seeds 1, 2, …"""
    recipe: tuple[str, ...] = ()
    """More recipes, besides those of `RECIPES`: their files."""
    jobs: int = 2
    """Runs at a time, of one thread each."""
    out_dir: Path = Path("runs/recipes")
    """Where shards and run folders go."""
    results_dir: Path = Path("bench/results/recipes")
    """Where the results and the figure go."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"--scale {self.scale} is not {', '.join(SCALES)}")


def main() -> None:
    """Train what is not trained yet, then print and draw the results."""
    config = parse_flags(RecipesConfig)
    path = config.results_dir / "proxy.jsonl"
    recipes = {
        label: (ROOT / f"recipes/{file}.json", own) for label, (file, own) in RECIPES.items()
    }
    own = {Path(file).stem: (Path(file), dict[str, Any]()) for file in config.recipe}
    recipes |= own
    if config.source:
        data_dir = tokenize(config)
        check_data(data_dir, path, config)
        path.parent.mkdir(parents=True, exist_ok=True)
        done = [(run["recipe"], run["settings"]) for run in read_runs(path)]
        wanted = [
            (label, scaled(read_recipe(file), own, SCALES[config.scale], seed))
            for seed in range(1, config.seeds + 1)
            for label, (file, own) in recipes.items()
        ]
        missing = [run for run in wanted if run not in done]  # or its recipe is another now

        def train_one(run: tuple[str, dict[str, Any]]) -> None:
            label, settings = run
            record = {"scale": config.scale, "recipe": label, "seed": settings["seed"]}
            record |= train(label, settings, data_dir, config)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{label}, seed {settings['seed']}: {record['val_loss']:.4f}", flush=True)

        with ThreadPoolExecutor(config.jobs) as pool:
            list(pool.map(train_one, missing))
    runs = [run for run in read_runs(path) if run["scale"] == config.scale]
    if not runs:
        raise ValueError(f"{path} has no run of --scale {config.scale}: give --source")
    print(format_table(runs))
    drawn = [run for run in runs if run["recipe"] in {*COLOURS, *own} and run["seed"] == 1]
    print(draw_curves(drawn, config.results_dir / f"{config.scale}.png"))


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The results so far, of each recipe and seed the last."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    runs = [json.loads(line) for line in lines]
    return [*{(run["scale"], run["recipe"], run["seed"]): run for run in runs}.values()]


def tokenize(config: RecipesConfig) -> Path:
    """The texts' shards with the scale's vocabulary, the first tokens for validation."""
    size = vocab_size(SCALES[config.scale].width)
    source = file_source(local_files(config.source))
    documents = first_merges(size).encode_ordinary_batch([d.text for d in source.documents(None)])
    ids = np.array([id for document in documents for id in (size - 1, *document)], np.uint16)
    folder = config.out_dir.absolute() / f"tokens_{size}"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "val_000000.npy", ids[:VAL_SPLIT])
    np.save(folder / "train_000001.npy", ids[VAL_SPLIT:])
    return folder


def check_data(data_dir: Path, results: Path, config: RecipesConfig) -> None:
    """Refuse too few tokens, and tokens of another text than earlier runs had."""
    shards, scale = open_shards(data_dir, "train"), SCALES[config.scale]
    if MOST_PASSES * shards.total_tokens <= scale.steps * scale.batch:
        raise ValueError(
            f"--source has {shards.total_tokens:,} tokens to train on, and --scale {config.scale} "
            f"takes {scale.steps * scale.batch:,}, in {MOST_PASSES} passes at most: give more text"
        )
    earlier = {run["data"] for run in read_runs(results) if run["scale"] == config.scale}
    if earlier - {shards.fingerprint}:
        raise ValueError(f"{results} is of other text than --source: give another --results-dir")


def scaled(recipe: TrainConfig, own: Mapping[str, Any], scale: Scale, seed: int) -> dict[str, Any]:
    """A recipe's settings for 124M, for a small model: those that are not the defaults.

    The batch keeps its share of 524,288 tokens, steps theirs of `LONG_STEPS`. Rates grow by
    `Scale.factor`, and weight decay so that rate times decay times steps is 124M's. AdamW's beta2
    averages over as many tokens.
    """
    settings = {**recipe.saved(), **own}
    batch = scale.batch * settings["total_batch_size"] // 524_288
    steps = scale.steps / LONG_STEPS
    for name, factor in (
        *((name, steps) for name in ("max_steps", "warmup_steps")),
        *((name, scale.factor) for name in ("max_lr", "min_lr")),
        *((name, 1 / steps / scale.factor) for name in ("weight_decay", "embedding_decay")),
    ):
        if settings[name]:
            kind = round if name.endswith("steps") else float
            settings[name] = kind(settings[name] * factor)
    beta2 = 0.95 ** (batch / 524_288)
    small: dict[str, Any] = {"size": "gpt2", "n_layer": 6, "n_head": scale.width // 64}
    small |= {"block_size": 256, "total_batch_size": batch, "val_tokens": VAL_TOKENS}
    settings |= {**small, "seed": seed, "beta2": beta2, "val_every": settings["max_steps"]}
    for name in ("hellaswag_every", "sample_every", "checkpoint_every"):
        del settings[name]  # never: `train`
    defaults = TrainConfig().saved()
    return {name: value for name, value in settings.items() if value != defaults[name]}


def train(
    label: str, settings: dict[str, Any], data_dir: Path, config: RecipesConfig
) -> dict[str, Any]:
    """Train one run in a process of its own; returns its settings, machine and losses."""
    own = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    name = re.sub(r"\W+", "-", f"{config.scale} {label} {own}")
    places: dict[str, Any] = {
        **{"data_dir": data_dir, "out_dir": config.out_dir.absolute(), "resume": "auto"},
        **{"run_name": name, "device": "cpu", "log_every": 100},
        **{"hellaswag_every": 0, "sample_every": 0, "checkpoint_every": 0},
    }
    width = str(SCALES[config.scale].width)
    flags = as_flags(settings | places)
    run_python("-m", "bench.proxy", width, *flags, OMP_NUM_THREADS="1")
    path = config.out_dir / name / METRICS_NAME
    records = read_metrics(path)
    losses = np.array([r["train_loss"] for r in records if "train_loss" in r])
    means = [float(part.mean()) for part in np.array_split(losses, min(POINTS, len(losses)))]
    return {
        "settings": settings,
        "machine": device_label(select_device("cpu")),
        "environment": logged_values(path, "environment")[-1],
        "data": logged_values(path, "data_fingerprint")[-1],
        **provenance(),
        "val_loss": [r["val_loss"] for r in records if "val_loss" in r][-1],
        "curve": [round(mean, 4) for mean in means],  # training loss, in equal parts of the run
    }


def format_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A line per recipe: the mean of its last losses, and of their differences to `published`."""
    losses = {(run["recipe"], run["seed"]): run["val_loss"] for run in runs}
    lines = ["recipe | seeds | validation loss | to published, in pairs"]
    for label in dict.fromkeys(run["recipe"] for run in runs):
        own = {seed: loss for (recipe, seed), loss in losses.items() if recipe == label}
        pairs = [own[s] - losses["published", s] for s in own if ("published", s) in losses]
        difference = f"{statistics.mean(pairs):+.4f}" if pairs else "-"
        lines.append(f"{label} | {len(own)} | {statistics.mean(own.values()):.4f} | {difference}")
    return "\n".join(lines)


def draw_curves(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw training losses over tokens, without the first eighth; the label has the last loss."""
    axes = new_axes(f"{path.stem}: complete runs", "training loss (nats per token)")
    for run in runs:
        settings, losses = run["settings"], run["curve"][len(run["curve"]) // 8 :]
        tokens = settings["max_steps"] * settings["total_batch_size"]
        places = np.linspace(tokens / 8, tokens, len(losses))
        colour = COLOURS.get(run["recipe"])
        label = f"{run['recipe']}: validation {run['val_loss']:.3f}"
        axes.plot(places, losses, color=colour, label=label)
    return save_figure(axes, path)


if __name__ == "__main__":
    run_command(main)
