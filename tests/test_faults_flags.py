"""Every flag meets every kind of value: a configuration, or one line that names the flag."""

import math
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model import GPTConfig
from runtime.cli import parse_flags, usable_settings
from training.config import ABOVE_ZERO, TrainConfig
from training.recipe import config_from_settings

FLAGS = [field.name for field in fields(TrainConfig)]
NUMBERS = [
    field.name
    for field in fields(TrainConfig)
    if type(field.default) in (int, float) or field.name in ("n_layer", "n_head", "n_embd")
]
VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "-1", "0", "1", "1e3", "nan", "inf", "-inf", "auto", "None", "gpt2", "[]"]
    ),
    st.text(max_size=8),
)


def flag(name):
    return f"--{name.replace('_', '-')}"


def parse(args):
    """A configuration, or the one line that is said instead; anything else fails."""
    try:
        return parse_flags(TrainConfig, args)
    except ValueError as error:
        return str(error)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(FLAGS), VALUES, max_size=4))
@example({"run_name": ""})
@example({"max_lr": "nan"})
@example({"n_head": "5", "n_embd": "0"})
def test_train_config_of_any_values_is_valid_or_refused(values):
    config = parse([f"{flag(name)}={value}" for name, value in values.items()])
    if isinstance(config, str):
        return
    for name in NUMBERS:
        value = getattr(config, name)
        assert value is None or (math.isfinite(value) and value >= (name in ABOVE_ZERO and 1e-300))
    assert config.min_lr <= config.max_lr
    assert config.model_config().n_embd % config.model_config().n_head == 0
    # What a run saves is what a resumed one reads.
    saved = config.saved()
    assert config_from_settings(saved, Path("config.json")).saved() == saved


@settings(max_examples=10)
@given(st.dictionaries(st.sampled_from(FLAGS), VALUES | st.none() | st.booleans(), max_size=4))
@example({"min_lr": "1", "max_lr": "0.5", "n_head": "5", "lr_schedule": "none"})
def test_usable_settings_of_any_values_are_a_configuration(values):
    saved = TrainConfig().saved()
    usable = usable_settings(TrainConfig, saved | values)
    assert saved.keys() - usable.keys() <= values.keys()
    config_from_settings(usable, Path("config.json"))


def test_a_mistake_in_the_models_configuration_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(GPTConfig, "__post_init__", Mock(side_effect=ValueError("too many values")))
    with pytest.raises(ValueError, match=r"^too many values$"):  # a UserError names --help
        parse_flags(TrainConfig, [])


def test_all_problems_of_a_configuration_come_together():
    message = parse(
        [
            *("--max-lr=-1", "--micro-batch-size=0", "--n-head=7", "--run-name=../x", "--seed=-1"),
            *("--keep-checkpoints=-2", "--val-tokens=5"),
        ]
    )
    for problem in (
        *("--max-lr must be above 0, not -1", "--micro-batch-size", "of --n-head 7", "'../x'"),
        *("--seed must be at least 0, not -1", "--keep-checkpoints must be at least 0, not -2"),
        "--val-tokens 5 is below",
    ):
        assert problem in message
