import json
import time
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from bench.components import (
    COMPONENTS,
    ClockedBatches,
    Figure,
    Setup,
    in_turn,
    measure_startup,
    measure_tokenize,
    score_one_at_a_time,
    seconds_of,
)
from hellaswag import evaluate_hellaswag, load_examples
from model import GPT, GPTConfig
from runtime.distributed import DistInfo

TINY = GPTConfig(block_size=64, n_layer=2, n_head=2, n_embd=16)
EXAMPLES = ROOT / "assets" / "hellaswag_sample.jsonl"


@pytest.fixture
def setup(tiny_data, tmp_path):
    (tmp_path / "scratch").mkdir()
    return Setup(
        model=TINY,
        device=torch.device("cpu"),
        dtype=torch.float32,
        micro_batch_size=2,
        rounds=2,
        steps=2,
        folder=tmp_path / "scratch",
        data_dir=tiny_data,
        compile=False,
    )


def test_figure_median_and_spread_worked_by_hand():
    figure = Figure("a", "s", [4.0, 1.0, 2.0])
    assert (figure.median, figure.spread) == (2.0, 1.5)
    assert Figure("none", "s", [0.0, 0.0]).spread == 0


def test_in_turn_alternates():
    calls = []

    def measure(name):
        calls.append(name)
        return len(calls)

    runs = in_turn(3, lambda: measure("A"), lambda: measure("B"))
    assert "".join(calls) == "ABABAB"
    assert runs == [[1, 3, 5], [2, 4, 6]]


def test_clocked_batches_counts_the_waiting_only():
    def slow():
        for item in range(3):
            time.sleep(0.05)
            yield item

    clocked = ClockedBatches(slow())
    total = seconds_of(lambda: [time.sleep(0.05) for _ in clocked])
    assert 0.15 <= clocked.seconds <= total - 0.15


def test_score_one_at_a_time_equals_the_batched_scorer():
    """Two ways of laying the endings out: rows of their own, and one row that they share."""
    torch.manual_seed(0)
    model = GPT(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    examples = load_examples(EXAMPLES)
    alone = DistInfo(torch.device("cpu"))
    batched = evaluate_hellaswag(model, examples, alone, torch.float32)
    single = score_one_at_a_time(model, examples, torch.float32)
    torch.testing.assert_close(single.summed, batched.summed, rtol=0, atol=1e-4)
    torch.testing.assert_close(single.mean, batched.mean, rtol=0, atol=1e-4)
    assert torch.equal(single.predictions, batched.predictions)
    assert torch.equal(single.predictions_norm, batched.predictions_norm)
    assert torch.equal(single.labels, batched.labels)


def units(figures):
    return [figure.unit for figure in figures]


def test_components_are_those_of_the_command():
    names = ["data", "tokenize", "hellaswag", "sample", "checkpoint", "startup"]
    assert list(COMPONENTS) == names


def test_data_measures_the_loader_and_its_share(setup):
    alone, share = COMPONENTS["data"](setup)
    assert len(alone.runs) == len(share.runs) == setup.rounds
    assert alone.median > 1000
    assert all(0 < run < 1 for run in share.runs)
    records = (setup.folder / "runs" / "bench" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [1, 2, 3, 4]


def test_hellaswag_compares_rates_and_predictions(setup):
    lines = EXAMPLES.read_text().splitlines()[:6]
    data = setup.folder / "six.jsonl"
    data.write_text("\n".join(lines))
    ours, theirs, agreement = COMPONENTS["hellaswag"](replace(setup, hellaswag_data=data))
    assert ours.unit == theirs.unit == "examples/s"
    assert (len(ours.runs), len(theirs.runs)) == (2, 2)
    assert agreement.runs == [1.0]


def test_sample_compares_with_and_without_the_cache(setup):
    cached, plain = COMPONENTS["sample"](replace(setup, rounds=1))
    assert units([cached, plain]) == ["tokens/s", "tokens/s"]
    assert min(*cached.runs, *plain.runs) > 0
    assert torch.get_float32_matmul_precision() == "highest"


def test_checkpoint_saves_a_whole_one_each_time(setup):
    blocked, alone, beside, complete = COMPONENTS["checkpoint"](setup)
    assert units([blocked, alone, beside]) == ["s"] * 3
    assert all(len(f.runs) == setup.rounds for f in (blocked, alone, beside, complete))
    for save, step, whole in zip(blocked.runs, beside.runs, complete.runs, strict=True):
        assert whole >= save + step
    assert list(setup.folder.rglob("manifest.json"))


def test_tokenize_counts_the_same_tokens_as_tiktoken(setup):
    text = setup.folder / "text.jsonl"
    rows = [{"text": f"Document {i}, about nothing.\n"} for i in range(300)] + [{"text": ""}]
    text.write_text("\n".join(json.dumps(row) for row in rows))
    figures = measure_tokenize(replace(setup, text=text, rounds=1))
    assert len(figures) == 6
    assert units(figures[:3]) == units(figures[3:])
    assert figures[0].label == "fineweb.py"
    # " Document", " i", ",", " about", " nothing", ".", "\n" and the end of text: 8 each.
    assert figures[0].unit == "s for 2,400 tokens"


def test_tokenize_says_why_a_command_failed(setup):
    text = setup.folder / "text.jsonl"
    text.write_text('{"no text": 1}\n')
    with pytest.raises(ValueError, match=r"fineweb\.py failed: error: .*text"):
        measure_tokenize(replace(setup, text=text, rounds=1))


def test_startup_runs_the_trainer_to_its_first_update(setup):
    cold, warm = measure_startup(replace(setup, rounds=1))
    assert cold.unit != warm.unit
    assert 0 < min(*cold.runs, *warm.runs) < 60


def test_startup_says_why_there_was_no_update(setup, tmp_path):
    with pytest.raises(ValueError, match=r"made no update: error: .*elsewhere"):
        measure_startup(replace(setup, rounds=1, data_dir=tmp_path / "elsewhere"))
