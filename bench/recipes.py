"""Scale recipes for GPT-2 124M to small models with its proportions, to compare them in a trial.

    python -m bench.recipes --source wikipedia_en_sample.parquet --scale S29

The command writes the text's tokens, the recipes in `bench/recipes.json` and the files of
`--recipe`, scaled to a small model, to `runs/recipes/SCALE`. It prints the trial (`bench.trial`)
that compares them with the published one, in hours on a CPU. `bench/small_gpt2.patch` gives the
small model 124M's ratio of embeddings to other parameters (32 ids per unit of width) and its
initial values, scaled to the width.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import runtime.threads  # noqa: F401 - must be imported before torch

import numpy as np

from bench.measurement import ROOT
from corpus.sources import file_source, local_files
from runtime.cli import PathOrName, parse_flags, run_command, shell_line
from runtime.errors import UserError
from runtime.files import read_json, write_json
from tokenizer import gpt2_encoding
from training.config import TrainConfig
from training.recipe import read_recipe

RECIPES, SMALL_GPT2 = ROOT / "bench/recipes.json", ROOT / "bench/small_gpt2.patch"
VAL_TOKENS, VAL_SPLIT = 524_288, 600_000  # per validation; set aside for it
PUBLISHED_STEPS = 19_073  # for 124M with the published recipe, in batches of 524,288 tokens
MAX_PASSES = 2  # over the text: a second teaches about as much (Muennighoff et al. 2023)


class Scale(NamedTuple):
    """A model with 6 layers and a context of 256, and the published recipe's batch and steps."""

    width: int
    batch: int
    steps: int


SCALES = {  # named after the size (small, medium, large) and the tokens per parameter of the blocks
    "S29": Scale(64, 8192, 1056),
    "S117": Scale(64, 16384, 2112),
    "M29": Scale(128, 16384, 2112),
    "L29": Scale(256, 32768, 4224),
}


@dataclass(frozen=True)
class RecipesConfig:
    """Prepare a trial of recipes on a small model."""

    source: tuple[PathOrName, ...] = ()
    """Training texts, as for fineweb.py --source; they need at least half as many tokens as a run
    uses (5M for S29)."""
    scale: Literal["S29", "S117", "M29", "L29"] = "S29"
    """Model and tokens per parameter of its blocks: S29, S117 (small), M29 or L29."""
    recipe: tuple[Path, ...] = ()
    """Files of additional recipes for 124M; default: none."""


def main() -> None:
    """Tokenize the texts, scale the recipes, and print the trial that compares them."""
    config = parse_flags(RecipesConfig)
    folder, scale = Path("runs/recipes", config.scale), SCALES[config.scale]
    tokenize(config, folder)
    recipes = {}
    for label, changes in read_json(RECIPES).items():
        recipe = read_recipe(ROOT / f"recipes/{changes.pop('recipe')}.json")
        recipes[label] = replace(recipe, **changes)
    recipes |= {file.stem: read_recipe(file) for file in config.recipe}
    for label, recipe in recipes.items():
        write_json(folder / f"{label}.json", scaled(recipe, scale))
    patch = os.path.relpath(SMALL_GPT2)
    base, *edits = [folder / f"{label}.json" for label in recipes]
    words = ("--data-dir", folder, "--config", base, "--edit", *edits)
    print("next:", shell_line("python", "-m", "bench.trial", "--base", patch, *words))


def tokenize(config: RecipesConfig, folder: Path) -> None:
    """Write the texts as shards with the scale's vocabulary, the first tokens for validation."""
    scale = SCALES[config.scale]
    n_vocab = 32 * scale.width  # GPT-2's bytes and first merges and, last, <|endoftext|>
    texts = [document.text for document in file_source(local_files(config.source)).documents(None)]
    documents = gpt2_encoding(n_vocab).encode_ordinary_batch(texts)
    ids = np.array([id for document in documents for id in (n_vocab - 1, *document)], np.uint16)
    if MAX_PASSES * (len(ids) - VAL_SPLIT) < (needed := scale.steps * scale.batch):
        uses = f"--scale {config.scale} trains on {needed:,} tokens in at most {MAX_PASSES} passes"
        found = f"--source has only {len(ids):,}, {VAL_SPLIT:,} of them for validation"
        raise UserError(f"{uses}, but {found}: add texts")
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "val_000000.npy", ids[:VAL_SPLIT])
    np.save(folder / "train_000001.npy", ids[VAL_SPLIT:])


def scaled(recipe: TrainConfig, scale: Scale) -> dict[str, Any]:
    """Scale a recipe for 124M to a small model; return the settings.

    The batch keeps its ratio to 524,288 tokens, and the steps keep theirs to `PUBLISHED_STEPS`.
    Learning rates are multiplied by the square root of 768 / width. Weight decay is scaled so that
    learning rate times decay times steps stays the same, and AdamW's beta2 so that it averages over
    the same number of tokens as 0.95 with 524,288 tokens per step.
    """
    settings = recipe.saved() | {"warmup_steps": recipe.warmup}
    batch = scale.batch * recipe.total_batch_size // 524_288
    steps, rate = scale.steps / PUBLISHED_STEPS, math.sqrt(768 / scale.width)
    factors = dict.fromkeys(("max_steps", "warmup_steps"), steps)
    factors |= dict.fromkeys(("max_lr", "min_lr"), rate)
    factors |= dict.fromkeys(("weight_decay", "embedding_decay"), 1 / steps / rate)
    for name, factor in factors.items():
        if settings[name]:
            kind = round if name.endswith("steps") else float
            settings[name] = kind(settings[name] * factor)
    small = {"n_layer": 6, "n_head": scale.width // 64, "n_embd": scale.width, "block_size": 256}
    batches = {"total_batch_size": batch, "beta2": 0.95 ** (batch / 524_288)}
    validation = {"val_tokens": VAL_TOKENS, "val_every": settings["max_steps"] // 8}
    return settings | small | batches | validation


if __name__ == "__main__":
    run_command(main)
