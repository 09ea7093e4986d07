import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TINY_MODEL, randomize_weights
from forked import fork_trainers

from bench import components, ladder
from bench.components import COMPONENTS, score_one_at_a_time
from bench.config import BenchConfig
from hellaswag import evaluate_hellaswag, load_examples
from model import GPT, GPTConfig
from runtime.cli import parse_flags

EXAMPLES = ROOT / "assets" / "hellaswag_sample.jsonl"


@pytest.fixture
def config(tiny_data):
    flags = [*TINY_MODEL, "--block-size=64", "--device=cpu", "--micro-batch-size=2", "--steps=1"]
    return parse_flags(BenchConfig, [*flags, f"--data-dir={tiny_data}"])


def test_score_one_at_a_time_predicts_as_the_batched_scorer():
    """Two layouts of the endings: a row for each, and one row that shares the context."""
    torch.manual_seed(0)
    model = randomize_weights(GPT(GPTConfig(block_size=64, n_layer=2, n_head=2, n_embd=16)))
    examples = load_examples(EXAMPLES)
    batched = evaluate_hellaswag(model, examples, dtype=torch.float32)
    single = score_one_at_a_time(model, examples, torch.float32)
    assert torch.equal(single, batched.mean.argmin(dim=1))
    assert len(single.unique()) > 1


def test_hellaswag_compares_rates_and_predictions(config, tmp_path, monkeypatch):
    # In bfloat16 it depends on the CPU's kernels whether close endings change places.
    monkeypatch.setattr(components, "select_dtype", lambda *_: torch.float32)
    shorter = replace(config, block_size=32)  # some examples do not fit
    assert {example.fits(32) for example in load_examples(EXAMPLES)} == {True, False}
    measures = COMPONENTS["hellaswag"](shorter, tmp_path)
    for measure in measures.values():
        values = measure()
        assert values["share of equal predictions"] == 1.0
        assert values["examples/s"] > 0


def test_sample_compares_with_and_without_the_cache(config, tmp_path):
    plain, cached = COMPONENTS["sample"](config, tmp_path).values()
    assert plain().keys() == cached().keys() == {"tokens/s"}


def test_data_compares_training_with_the_loader_alone(commands, config, tmp_path, monkeypatch):
    fork_trainers(monkeypatch, commands, ladder)
    train, load = COMPONENTS["data"](config, tmp_path).values()
    for _ in range(2):  # the loader is read in each round
        assert load()["tokens/s"] > 0
    assert train()["tokens/s"] > 0


def test_tokenize_counts_the_same_tokens_as_tiktoken(config, tmp_path):
    text = tmp_path / "text.jsonl"
    rows = [{"text": f"Document {i}, about nothing.\n"} for i in range(300)] + [{"text": ""}]
    text.write_text("\n".join(json.dumps(row) for row in rows))
    measures = COMPONENTS["tokenize"](replace(config, text=text), tmp_path)
    # " Document", " i", ",", " about", " nothing", ".", "\n" and the end of text: 8 each.
    assert [measure()["tokens"] for measure in measures.values()] == [2400, 2400]
