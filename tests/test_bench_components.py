from dataclasses import replace

import pytest
import torch
from conftest import HELLASWAG, TINY_MODEL

from bench import components
from bench.components import COMPONENTS
from bench.config import BenchConfig
from hellaswag import load_examples
from runtime.cli import parse_flags


@pytest.fixture
def config(tiny_data):
    flags = [*TINY_MODEL, "--block-size=64", "--device=cpu", "--micro-batch-size=2", "--steps=1"]
    return parse_flags(BenchConfig, [*flags, f"--data-dir={tiny_data}"])


def test_hellaswag_compares_rates_and_predictions(config, monkeypatch):
    # In bfloat16 it depends on the CPU's kernels whether close endings change places.
    monkeypatch.setattr(components, "select_dtype", lambda *_: torch.float32)
    shorter = replace(config, block_size=32)  # some examples do not fit
    assert {example.fits(32) for example in load_examples(HELLASWAG)} == {True, False}
    measures = COMPONENTS["hellaswag"](shorter)
    for measure in measures.values():
        values = measure()
        assert values["share of equal predictions"] == 1.0
        assert values["examples/s"] > 0


def test_sample_compares_with_and_without_the_cache(config):
    plain, cached = COMPONENTS["sample"](config).values()
    assert plain().keys() == cached().keys() == {"tokens/s"}
