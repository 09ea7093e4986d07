from dataclasses import replace

import pytest
from conftest import ROOT
from forked import assert_refused

from bench.recipes import Point, Result, Run, Scale, compare, tables, tokens_per_parameter
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"momentum": 0.9}, "'momentum'"),
        ({"max_lr": "0.001"}, "max_lr is '0.001', expected float"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd', expected Literal['adamw', 'muon']"),
    ],
)
def test_recipe_with_a_setting_that_is_none_is_refused(commands, tmp_path, change, said):
    path = tmp_path / "recipe.json"
    write_json(path, read_json(ROOT / "recipes/gpt2-124m-fast.json") | change)
    done = commands.run("train_gpt2", f"--config={path}", f"--out-dir={tmp_path}/runs")
    assert_refused(done, "recipe.json", said)
    assert not (tmp_path / "runs").exists()


def new_result(recipe, rate, *losses, scale="w64", trial="", machine="ours", seconds=1.0):
    """A run of 40 steps with a validation every 10."""
    curve = [Point(10 * place, loss, loss) for place, loss in enumerate(losses)]
    run = Run(scale, 10 * (len(losses) - 1), recipe, rate, trial)
    return Result(run, curve, {"machine": machine, "step_seconds": seconds})


def test_share_to_reach_a_loss_worked_by_hand():
    result = new_result("fast", 1e-2, 10.0, 6.0, 5.0, 4.0, 3.0)
    assert result.share_to_reach(5.0) == pytest.approx(0.5)
    assert result.share_to_reach(4.25) == pytest.approx((20 + 7.5) / 40)  # between two validations
    assert result.share_to_reach(3.0) == pytest.approx(1.0)
    assert result.share_to_reach(2.9) is None
    bumpy = new_result("fast", 1e-2, 10.0, 4.0, 6.0, 4.0, 3.0)
    assert bumpy.share_to_reach(5.0) == pytest.approx((20 + 5) / 40)  # it must stay there


def test_tables_compare_with_the_reference_at_its_best_rate():
    results = [
        new_result("reference", 1e-3, 10.0, 7.0, 6.0, 5.5, 5.0),
        new_result("reference", 2e-3, 10.0, 7.0, 6.0, 5.0, 4.0),
        new_result("fast", 8e-3, 10.0, 5.0, 4.0, 3.5, 3.0),
    ]
    (comparison,) = compare(results)
    assert [result.run.max_lr for result in comparison.references] == [2e-3, 1e-3]
    assert comparison.share == pytest.approx(0.5)
    lines = tables(results).splitlines()
    assert "| fast | 0.008 | none | 1337 | 3.0000 | 0.50 |" in lines
    assert "| reference | 0.001 | none | 1337 | 5.0000 | not reached |" in lines


def test_compare_takes_the_times_of_one_machine():
    results = [
        new_result("reference", 1e-3, 10.0, 5.0, seconds=3.0),
        new_result("reference", 2e-3, 10.0, 6.0, seconds=2.0),
        new_result("reference", 4e-3, 10.0, 4.0, machine="faster", seconds=0.5),
        new_result("fast", 8e-3, 10.0, 3.0, seconds=2.5),
        new_result("muon", 8e-3, 10.0, 3.0, machine="faster", seconds=0.6),
    ]
    (comparison,) = compare(results)
    assert comparison.references[0].run.max_lr == 4e-3
    assert comparison.step_seconds == (2.0, 2.5)


def test_tokens_per_parameter_counts_the_blocks_matrices():
    # 12 · 2 layers · 64² = 98,304 parameters, and 48 steps of 2,048 tokens
    assert tokens_per_parameter(Run("w64", 48, "fast", 1e-2)) == 1.0
    assert Scale(12, 12, 768, 1024, 1).matrix_parameters == 84_934_656
