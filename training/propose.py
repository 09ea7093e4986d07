"""Propose a training command for a dataset, as fineweb.py prints it."""

import math
from pathlib import Path

import torch

from corpus.shards import Manifest
from runtime.errors import UserError
from training.checks import check_lengths
from training.config import ROOT, TrainConfig
from training.recipe import read_recipe
from training.resume import parse_config

LR_DECAY_STEPS = 6  # learning rate x embedding decay x steps: embeddings are the first to overfit
MIN_MICRO_BATCH_TOKENS = 32_768  # a smaller micro-batch does not keep a GPU busy
MAX_PASSES = 5  # a proposed run makes at most 5 over the training split; 10 overfit some texts
# Printed after a command with gpt2-124m; see the measurements in docs/recipes.md.
OTHER_RECIPE = (
    "or, on 35 % of the tokens: --config recipes/gpt2-124m-fast.json --max-steps 13352 (measured "
    "on small models only: a lower loss than gpt2-124m at two of four scales; see docs/recipes.md)"
)


def propose_training(folder: Path, manifest: Manifest) -> list[str]:
    """Return a training command that suits a dataset and this machine's number of GPUs, in words.

    The command uses the largest recipe that makes at most `MAX_PASSES` passes over the text. For a
    small text, it shortens the smallest recipe and sets a batch of 0.29 D^0.571 tokens for a run of
    D tokens: half the batch that suits a single pass (Li et al. 2025).

    Raises:
        UserError: the text is too short for any model.
    """
    train, val = (sum(s.tokens for s in manifest.shards if s.split == k) for k in ("train", "val"))
    max_tokens = MAX_PASSES * train
    recipes = dict[int, tuple[Path, TrainConfig]]()  # keyed by the number of tokens of a run
    for path in sorted(ROOT.glob("recipes/gpt2-[0-9]*.json")):  # gpt2-124m is last, not -fast
        recipe = read_recipe(path)
        recipes[recipe.max_steps * recipe.total_batch_size] = path, recipe
    path, recipe = recipes[max((n for n in recipes if n <= max_tokens), default=min(recipes))]
    batch, overrides = recipe.total_batch_size, list[str]()
    if val <= recipe.block_size:  # too short for one window
        overrides = ["--val-every", "0"]
    if max_tokens < min(recipes):
        batch = max(256, 2 ** round(math.log2(0.29 * max_tokens**0.571)))  # at least one sequence
        steps = max(1, max_tokens // batch)
        overrides += ["--total-batch-size", str(batch), "--max-steps", str(steps)]
        overrides += ["--embedding-decay", f"{LR_DECAY_STEPS / (recipe.max_lr * steps):.2g}"]
        overrides += ["--spelling-share", "0.3"]  # rare tokens get few gradients in a small text
        if (every := max(1, steps // 5)) < recipe.val_every:
            for name in ("--val-every", "--sample-every", "--checkpoint-every"):
                overrides += [name, str(every)] if name not in overrides else []

    launcher, n_gpus = ["python"], torch.cuda.device_count()
    if n_gpus > 1 and batch % (n_gpus * MIN_MICRO_BATCH_TOKENS) == 0:
        launcher = ["torchrun", "--standalone", f"--nproc_per_node={n_gpus}"]
    root = Path() if ROOT.samefile(Path()) else ROOT
    if not (recipe.out_dir / (name := folder.resolve().name)).exists():
        overrides = ["--run-name", name, *overrides]
    flags = ["--config", root / "recipes" / path.name, "--data-dir", folder, *overrides]
    words = [*map(str, flags)]
    try:
        check_lengths(parse_config(words)[0], train, val)
    except UserError as error:
        raise UserError(f"no training is proposed: {error}") from None
    return [*launcher, str(root / "train_gpt2.py"), *words]
