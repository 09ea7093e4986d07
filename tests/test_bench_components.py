import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_MODEL, randomize_weights
from test_bench import fork_runs

from bench.components import COMPONENTS, component_table, score_one_at_a_time
from bench.config import BenchConfig
from bench.measurement import Measurement, alternate, busy_loops
from hellaswag import evaluate_hellaswag, load_examples
from model import GPT, GPTConfig
from runtime.cli import parse_flags
from runtime.distributed import DistInfo

EXAMPLES = ROOT / "assets" / "hellaswag_sample.jsonl"


@pytest.fixture
def config(tiny_data, monkeypatch):
    """A bench of a tiny model, without a compiler: compiling takes a minute."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CXX", "")  # it may name a compiler that is not on the PATH
    flags = [*TINY_MODEL, "--block-size=64", "--device=cpu", "--micro-batch-size=2"]
    return parse_flags(BenchConfig, [*flags, "--steps=2", "--rounds=2", f"--data-dir={tiny_data}"])


def test_alternate_takes_each_measure_once_per_round():
    calls = iter(range(6))
    assert alternate(3, lambda: next(calls), lambda: next(calls)) == [[0, 2, 4], [1, 3, 5]]


def test_component_table_compares_with_the_first_of_a_unit():
    measurements = [
        Measurement("plain", "rows/s", [10.0, 20.0, 30.0]),
        Measurement("a checkpoint", "s", [0.5]),
        Measurement("ours", "rows/s", [50.0]),
    ]
    lines = component_table(measurements).splitlines()
    assert lines[1].split() == ["plain", "20", "100.0%", "1.00x", "rows/s"]
    assert lines[2].split() == ["a", "checkpoint", "0.5", "0.0%", "1.00x", "s"]
    assert lines[3].split() == ["ours", "50", "0.0%", "2.50x", "rows/s"]


def test_busy_loops_end_with_the_body():
    with busy_loops(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]
    assert None not in [loop.poll() for loop in loops]


def test_score_one_at_a_time_equals_the_batched_scorer():
    """Two layouts of the endings: a row for each, and one row that shares the context."""
    torch.manual_seed(0)
    model = randomize_weights(GPT(GPTConfig(block_size=64, n_layer=2, n_head=2, n_embd=16)))
    examples = load_examples(EXAMPLES)
    batched = evaluate_hellaswag(model, examples, DistInfo(torch.device("cpu")), torch.float32)
    single = score_one_at_a_time(model, examples, torch.float32)
    torch.testing.assert_close(single.summed, batched.summed, rtol=0, atol=1e-4)
    torch.testing.assert_close(single.mean, batched.mean, rtol=0, atol=1e-4)
    assert torch.equal(single.labels, batched.labels)


def units(measurements):
    return [measurement.unit for measurement in measurements]


def test_busy_trains_alone_and_next_to_busy_loops(commands, config, tmp_path, monkeypatch):
    fork_runs(monkeypatch, commands, tmp_path)
    monkeypatch.setattr("bench.components.usable_cores", lambda: 2)  # not a loop for each of 128
    alone, *busy = COMPONENTS["busy"](replace(config, rounds=1, steps=1), tmp_path)
    assert units([alone, *busy]) == ["tokens/s"] * 3
    assert all("busy loops" in measurement.label for measurement in busy)


def test_data_measures_the_loader_and_its_share(config, tmp_path):
    loader, share = COMPONENTS["data"](config, tmp_path)
    assert len(loader.runs) == len(share.runs) == config.rounds
    assert all(0 < run < 1 for run in share.runs)
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [1, 2, 3, 4]


def test_hellaswag_compares_rates_and_predictions(config, tmp_path, monkeypatch):
    # In bfloat16 it depends on the CPU's kernels whether close endings change places.
    monkeypatch.setattr("bench.components.select_dtype", lambda *_: torch.float32)
    data = tmp_path / "six.jsonl"
    data.write_text("\n".join(EXAMPLES.read_text().splitlines()[:6]))
    *rates, agreement = COMPONENTS["hellaswag"](replace(config, hellaswag_data=data), tmp_path)
    assert units(rates) == ["examples/s"] * 2
    assert [len(rate.runs) for rate in rates] == [2, 2]
    assert agreement.runs == [1.0]


def test_sample_compares_with_and_without_the_cache(config, tmp_path):
    cached, plain = COMPONENTS["sample"](replace(config, rounds=1), tmp_path)
    assert units([cached, plain]) == ["tokens/s"] * 2
    assert torch.get_float32_matmul_precision() == "highest"


def test_optimizer_measures_updates_and_what_muon_adds_to_a_step(config, tmp_path):
    *updates, passes, added = COMPONENTS["optimizer"](config, tmp_path)
    labels = ["AdamW", "Muon", "Muon, not compiled", "torch.optim.Muon"]
    assert [entry.label for entry in updates] == [f"update by {label}" for label in labels]
    adamw, muon = (updates[place].runs for place in (0, 1))
    step = 524_288 / 128 * passes.median  # of the micro-batch's 2 x 64 tokens
    expected = [100 * (m - a) / (step + a) for m, a in zip(muon, adamw, strict=True)]
    assert added.runs == pytest.approx(expected)


def test_checkpoint_saves_a_complete_one_each_time(config, tmp_path):
    blocked, alone, during, complete = COMPONENTS["checkpoint"](config, tmp_path)
    assert all(len(m.runs) == config.rounds for m in (blocked, alone, during, complete))
    for save, step, whole in zip(blocked.runs, during.runs, complete.runs, strict=True):
        assert whole >= save + step
    assert list(tmp_path.rglob("manifest.json"))


def test_tokenize_counts_the_same_tokens_as_tiktoken(config, tmp_path):
    text = tmp_path / "text.jsonl"
    rows = [{"text": f"Document {i}, about nothing.\n"} for i in range(300)] + [{"text": ""}]
    text.write_text("\n".join(json.dumps(row) for row in rows))
    ours = COMPONENTS["tokenize"](replace(config, text=text, rounds=1), tmp_path)
    assert units(ours[:2]) == units(ours[2:])
    # " Document", " i", ",", " about", " nothing", ".", "\n" and the end of text: 8 each.
    assert ours[0].unit == "s for 2,400 tokens"


def test_context_finds_the_longest_that_trains(commands, config, tmp_path, monkeypatch):
    """Of 100 tokens there are contexts of 64, and none of 128."""
    fork_runs(monkeypatch, commands, tmp_path)
    data_dir = tmp_path / "100_tokens"
    data_dir.mkdir()
    for name in ("val_000000.npy", "train_000001.npy"):
        np.save(data_dir / name, np.arange(100, dtype=np.uint16))
    config = replace(config, data_dir=data_dir)
    longest, speed, peak = COMPONENTS["context"](config, tmp_path)
    assert longest.runs == [64]
    assert longest.label.startswith("the longest context that fits; context 128: ")
    assert (speed.label, speed.unit, peak.unit) == ("context 64", "tokens/s", "GiB")
    with pytest.raises(ValueError, match="no context fits; context 128: "):
        COMPONENTS["context"](replace(config, block_size=128), tmp_path)


def test_startup_runs_the_trainer_to_its_first_update(config, tmp_path):
    cold, warm = COMPONENTS["startup"](replace(config, rounds=1), tmp_path)
    assert cold.unit != warm.unit
    assert min(*cold.runs, *warm.runs) > 0


def test_startup_says_why_there_was_no_update(config, tmp_path):
    config = replace(config, rounds=1, data_dir=tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"made no update: .*elsewhere"):
        COMPONENTS["startup"](config, tmp_path)
