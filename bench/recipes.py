"""Compare recipes for GPT-2 124M on small models with its proportions: hours on a CPU.

    python -m bench.recipes --source wikipedia_en_sample.parquet    # train the missing runs
    python -m bench.recipes                                         # only the table and the figure

Each run is complete: it trains for all steps of its recipe, to the end of the schedule. Runs with
the same seed have the same initial weights and the same tokens in the same order, so that their
losses can be compared in pairs. Each result is appended to `bench/results/recipes/proxy.jsonl`, so
the same command continues after an interrupt. `--recipe mine.json` adds another recipe for 124M.
After editing the code, use another `--results-dir`: runs are recognized only by their settings.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from bench.measurement import ROOT, device_label, provenance, run_python
from bench.proxy import first_merges, vocab_size
from corpus.shards import open_shards
from corpus.sources import file_source, local_files
from formats.metrics import METRICS_NAME, logged_values, read_metrics
from plot import BLUE, GRAY, RED, new_axes, save_figure
from runtime.cli import PathOrName, as_flags, parse_flags, run_command
from runtime.device import select_device
from training.config import TrainConfig, read_recipe

VAL_TOKENS, VAL_SPLIT = 524_288, 600_000  # per validation; set aside for it
PUBLISHED_STEPS = 19_073  # for 124M with the published recipe, in batches of 524,288 tokens
POINTS = 64  # on a run's curve
MAX_PASSES = 2  # over the text: a second teaches about as much (Muennighoff et al. 2023)


@dataclass(frozen=True)
class Scale:
    """A model with 6 layers and a context of 256, and the published recipe's batch and steps."""

    width: int
    batch: int
    steps: int

    @property
    def factor(self) -> float:
        """Multiplier for learning rates: narrower models need larger ones."""
        return math.sqrt(768 / self.width)


SCALES = {"S29": Scale(64, 8192, 1056), "S117": Scale(64, 16384, 2112)}  # tokens per parameter
SCALES["M29"] = Scale(128, 16384, 2112)

BASE, FAST = "gpt2-124m", "gpt2-124m-fast"  # in recipes/
HALF = {"total_batch_size": 262_144, "max_steps": 38_146, "weight_decay": 0.05}  # same total decay
RECIPES: Mapping[str, tuple[str, dict[str, Any]]] = {  # by label: file, and settings that differ
    "published": (BASE, {}),
    "adamw 0.0018": (BASE, {"max_lr": 0.0018, "min_lr": 0.00018}),
    "adamw 0.0054": (BASE, {"max_lr": 0.0054, "min_lr": 0.00054}),
    "adamw 0.0018, half the batch": (
        BASE,
        {"max_lr": 0.0018, "min_lr": 0.00018, **HALF, "warmup_steps": 1_430},
    ),
    "anchor": (BASE, {"max_lr": 0.0018, "min_lr": 0.0, "lr_schedule": "wsd", "max_steps": 11_444}),
    "fast": (FAST, {"max_steps": 13_352}),  # 0.35 of the published recipe's tokens
    "fast, half the decay": (FAST, {"max_steps": 13_352, "weight_decay": 0.05}),
    "fast, whole batch": (
        FAST,
        {"max_steps": 6_676, "warmup_steps": 100, "total_batch_size": 524_288},
    ),
}
COLORS = {"published": GRAY, "adamw 0.0018, half the batch": RED, "fast": BLUE}  # in the figure


@dataclass(frozen=True)
class RecipesConfig:
    """Train recipes on the same tokens in the same order, and compare their final losses."""

    source: tuple[PathOrName, ...] = ()
    """Training texts, as for fineweb.py --source; they need at least half as many tokens as a run
    uses (5M for S29). Without texts, nothing is trained."""
    scale: str = "S29"
    """Model and tokens per parameter of its blocks: S29 and S117 (small), or M29 (medium)."""
    seeds: int = 2
    """Number of runs per recipe, with the seeds 1, 2, …"""
    recipe: tuple[str, ...] = ()
    """Files of additional recipes for 124M; default: none."""
    jobs: int = 2
    """Number of runs at the same time, with one thread each."""
    out_dir: Path = Path("runs/recipes")
    """Folder for shards and run folders."""
    results_dir: Path = Path("bench/results/recipes")
    """Folder for the results and the figure."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"--scale {self.scale} does not exist: use {' or '.join(SCALES)}")


def main() -> None:
    """Train the missing runs, then print and plot the results."""
    config = parse_flags(RecipesConfig)
    path = config.results_dir / "proxy.jsonl"
    recipes = {
        label: (ROOT / f"recipes/{file}.json", diff) for label, (file, diff) in RECIPES.items()
    }
    added = {Path(file).stem: (Path(file), dict[str, Any]()) for file in config.recipe}
    recipes |= added
    if config.source:
        data_dir = tokenize(config)
        check_data(data_dir, path, config)
        path.parent.mkdir(parents=True, exist_ok=True)
        done = [(run["recipe"], run["settings"]) for run in read_runs(path)]
        wanted = [
            (label, scaled(read_recipe(file), diff, SCALES[config.scale], seed))
            for seed in range(1, config.seeds + 1)
            for label, (file, diff) in recipes.items()
        ]
        missing = [run for run in wanted if run not in done]  # also if its recipe has changed

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
        raise ValueError(f"{path} has no run of --scale {config.scale}: use --source to train")
    print(format_table(runs))
    drawn = [run for run in runs if run["recipe"] in {*COLORS, *added} and run["seed"] == 1]
    print(draw_curves(drawn, config.results_dir / f"{config.scale}.png"))


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return the last result of each scale, recipe and seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    runs = [json.loads(line) for line in lines]
    return [*{(run["scale"], run["recipe"], run["seed"]): run for run in runs}.values()]


def tokenize(config: RecipesConfig) -> Path:
    """Write the texts as shards with the scale's vocabulary, the first tokens for validation."""
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
    """Raise if there are too few tokens, or if earlier runs used another text."""
    shards, scale = open_shards(data_dir, "train"), SCALES[config.scale]
    if MAX_PASSES * shards.total_tokens <= scale.steps * scale.batch:
        raise ValueError(
            f"--scale {config.scale} trains on {scale.steps * scale.batch:,} tokens in at most "
            f"{MAX_PASSES} passes, but --source has only {shards.total_tokens:,}: add more text"
        )
    earlier = {run["data"] for run in read_runs(results) if run["scale"] == config.scale}
    if earlier - {shards.fingerprint}:
        raise ValueError(f"{results} has runs on another text: use another --results-dir")


def scaled(recipe: TrainConfig, diff: Mapping[str, Any], scale: Scale, seed: int) -> dict[str, Any]:
    """Scale a recipe for 124M to a small model; return the settings that are not the defaults.

    The batch keeps its ratio to 524,288 tokens, and the steps keep theirs to `PUBLISHED_STEPS`.
    Learning rates are multiplied by `Scale.factor`. Weight decay is scaled so that learning rate
    times decay times steps stays the same, and AdamW's beta2 so that it averages over the same
    number of tokens as 0.95 with 524,288 tokens per step.
    """
    settings = {**recipe.saved(), **diff}
    batch = scale.batch * settings["total_batch_size"] // 524_288
    steps = scale.steps / PUBLISHED_STEPS
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
        del settings[name]  # `train` turns them off
    defaults = TrainConfig().saved()
    return {name: value for name, value in settings.items() if value != defaults[name]}


def train(
    label: str, settings: dict[str, Any], data_dir: Path, config: RecipesConfig
) -> dict[str, Any]:
    """Train one run in a separate process; return its settings, machine and losses."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    name = re.sub(r"\W+", "-", f"{config.scale} {label} {digest}")
    run_settings: dict[str, Any] = {
        **{"data_dir": data_dir, "out_dir": config.out_dir.absolute(), "resume": "auto"},
        **{"run_name": name, "device": "cpu", "log_every": 100},
        **{"hellaswag_every": 0, "sample_every": 0, "checkpoint_every": 0},
    }
    width = str(SCALES[config.scale].width)
    flags = as_flags(settings | run_settings)
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
        "curve": [round(m, 4) for m in means],  # training loss, averaged over equal parts
    }


def format_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Format a line per recipe: mean final loss, and mean difference to `published` per seed."""
    losses = {(run["recipe"], run["seed"]): run["val_loss"] for run in runs}
    lines = ["recipe | seeds | validation loss | difference to published"]
    for label in dict.fromkeys(run["recipe"] for run in runs):
        by_seed = {seed: loss for (recipe, seed), loss in losses.items() if recipe == label}
        pairs = [by_seed[s] - losses["published", s] for s in by_seed if ("published", s) in losses]
        difference = f"{mean(pairs):+.4f}" if pairs else "-"
        lines.append(f"{label} | {len(by_seed)} | {mean(by_seed.values()):.4f} | {difference}")
    return "\n".join(lines)


def draw_curves(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Plot training losses over tokens, without the first eighth; labels have the final losses."""
    axes = new_axes(f"{path.stem}: complete runs", "training loss (nats per token)")
    for run in runs:
        settings, losses = run["settings"], run["curve"][len(run["curve"]) // 8 :]
        tokens = settings["max_steps"] * settings["total_batch_size"]
        positions = np.linspace(tokens / 8, tokens, len(losses))
        color = COLORS.get(run["recipe"])
        label = f"{run['recipe']}: validation {run['val_loss']:.3f}"
        axes.plot(positions, losses, color=color, label=label)
    return save_figure(axes, path)


if __name__ == "__main__":
    run_command(main)
