from dataclasses import replace

import pytest
from conftest import ROOT
from forked import assert_refused

from runtime.files import read_json, write_json
from training.config import TrainConfig, read_config

RECIPES = sorted((ROOT / "recipes").glob("*.json"))
SIZES = {"124m": "gpt2", "medium": "gpt2-medium", "large": "gpt2-large", "xl": "gpt2-xl"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_a_configuration_with_a_sentence_about_it(path):
    config = read_config(path)
    assert config.size == SIZES.get(path.stem.removesuffix("-fast").removeprefix("gpt2-"), "gpt2")
    about = read_json(path)["about"]
    assert len(about.split()) > 10
    assert about.endswith(".")
    assert config.max_steps * config.total_batch_size == pytest.approx(10e9, rel=1e-3) or (
        path.stem == "demo"
    )


def test_gpt2_124m_is_what_train_gpt2_does_without_flags():
    assert read_config(ROOT / "recipes/gpt2-124m.json").saved() == TrainConfig().saved()


def both_recipes(name):
    return (read_config(ROOT / f"recipes/gpt2-{name}{end}.json") for end in ("", "-fast"))


@pytest.mark.parametrize("name", SIZES)
def test_fast_recipe_changes_how_it_learns_and_nothing_else(name):
    reference, fast = both_recipes(name)
    learning = {"optimizer", "max_lr", "min_lr", "lr_schedule"}
    same = {field: getattr(reference, field) for field in learning}
    assert replace(fast, **same) == reference
    small, small_fast = both_recipes("124m")
    # One rule for all sizes: a multiple of GPT-3's rate for the size.
    assert fast.max_lr / reference.max_lr == pytest.approx(small_fast.max_lr / small.max_lr)
    assert fast.min_lr / fast.max_lr == pytest.approx(small_fast.min_lr / small_fast.max_lr)


def test_recipe_with_a_setting_that_is_none_is_refused(commands, tmp_path):
    path = tmp_path / "recipe.json"
    write_json(path, read_json(ROOT / "recipes/gpt2-124m-fast.json") | {"momentum": 0.9})
    done = commands.run("train_gpt2", f"--config={path}", f"--out-dir={tmp_path}/runs")
    assert_refused(done, "recipe.json", "'momentum'")
    assert not (tmp_path / "runs").exists()
