import re
from dataclasses import replace

import pytest
from conftest import ROOT

from runtime.files import read_json
from training.config import TrainConfig
from training.recipe import read_recipe

RECIPES = sorted((ROOT / "recipes").glob("*.json"))
LADDER = [path for path in RECIPES if re.fullmatch(r"gpt2-\d\d?m", path.stem)]
SIZES = {"124m": "gpt2", "medium": "gpt2-medium", "large": "gpt2-large", "xl": "gpt2-xl"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_a_configuration_of_its_size_and_tokens(path):
    config = read_recipe(path)
    assert config.size == SIZES.get(path.stem.removesuffix("-fast").removeprefix("gpt2-"), "gpt2")
    tokens = config.max_steps * config.total_batch_size
    assert tokens == pytest.approx(10e9, rel=1e-3) or path in (*LADDER, ROOT / "recipes/demo.json")


@pytest.mark.gpt2
@pytest.mark.parametrize("path", LADDER, ids=lambda path: path.stem)
def test_small_recipe_follows_the_rules_of_the_ladder(path):
    config = read_recipe(path)
    model, batch = config.model_config(), config.total_batch_size
    assert path.stem == f"gpt2-{model.n_params / 1e6:.0f}m"
    assert model.n_embd // model.n_head == 64
    least_layers = 8 if model.n_embd == 64 else 4  # where they take little time
    assert model.n_layer == max(least_layers, model.n_embd // 64)
    assert config.max_steps == 10 * model.n_params // batch
    assert batch.bit_count() == 1
    assert 0.68 < batch / (0.58 * (10 * model.n_params) ** 0.571) < 1.4
    assert config.max_lr == round(0.008 * (64 / model.n_embd) ** 0.5, 4)
    assert config.warmup == min(715, config.max_steps // 10)
    assert replace(config, max_steps=3).warmup == 0
    assert config.max_steps // config.val_every >= 5
    assert config.sample_every == config.val_every


def test_gpt2_124m_is_what_train_gpt2_does_without_flags():
    recipe = read_recipe(ROOT / "recipes/gpt2-124m.json")
    assert recipe == replace(TrainConfig(), warmup_steps=TrainConfig().warmup)


@pytest.mark.parametrize("name", SIZES)
def test_fast_recipe_changes_how_it_learns_and_nothing_else(name):
    reference = read_recipe(ROOT / f"recipes/gpt2-{name}.json")
    fast = read_recipe(ROOT / f"recipes/gpt2-{name}-fast.json")
    learning = ("optimizer", "max_lr", "min_lr", "warmup_steps", "lr_schedule", "total_batch_size")
    evaluation = ("val_every", "hellaswag_every", "sample_every", "checkpoint_every")
    same = {field: getattr(reference, field) for field in (*learning, "max_steps", *evaluation)}
    assert replace(fast, **same) == reference
    assert (fast.max_lr / reference.max_lr, fast.min_lr) == (pytest.approx(6), 0)
    # Half the batch: twice the steps, and evaluations as many tokens apart.
    assert fast.total_batch_size * 2 == reference.total_batch_size
    for field in ("max_steps", *evaluation):
        assert getattr(fast, field) == 2 * getattr(reference, field)


def test_tuned_recipe_is_the_adamw_that_was_measured():
    reference = read_recipe(ROOT / "recipes/gpt2-124m.json")
    tuned = read_recipe(ROOT / "recipes/gpt2-124m-tuned.json")
    measured = read_json(ROOT / "bench/recipes.json")["adamw_0.0018_half_batch"]
    assert measured.pop("recipe") == "gpt2-124m"
    names = ("val_every", "hellaswag_every", "sample_every", "checkpoint_every")
    evaluations = {name: 2 * getattr(reference, name) for name in names}  # as many tokens apart
    assert tuned == replace(reference, **measured, **evaluations)
