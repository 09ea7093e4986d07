import json

import numpy as np
import pytest

from formats.metrics import Series, logged_values, read_metrics
from model import GPTConfig
from runtime.cli import format_count, format_duration
from runtime.flops import flops_per_token, mfu, peak_flops

PEAKS = {  # the driver's names, and the dense bfloat16 peak
    **dict.fromkeys(("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312e12),
    **{"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "Tesla T4": 65e12},
    # Unknown ones, never a guess.
    **dict.fromkeys(("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100X", "NVIDIA H20")),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD Instinct MI300X", "")),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_read_metrics_skips_what_is_not_a_record(path):
    path.write_bytes(b'{"step": 1}\n{"step": 2, "tr\n\n\x00\x00\xff\n[1, 2]\n7\n{"step": 3}\n{"s')
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]


def test_read_metrics_has_the_last_record_of_what_a_resumed_run_did_again(path):
    """The evaluation of step 2 was interrupted; a run that resumed there repeated it."""
    before = [{"step": step, "train_loss": 9.0} for step in (1, 2)]
    dropped = [{"step": 2, "val_loss": 8.0, "samples": 4}, {"step": 3, "train_loss": 8.0}]
    again = [{"step": 2, "val_loss": 8.5, "hellaswag_acc": 0.25}, {"step": 3, "train_loss": 1.0}]
    last = {"step": 3, "train_loss": 0.5}
    write(path, *before, *dropped, {"resumed_from": 2}, *again, {"resumed_from": 2}, last)
    assert read_metrics(path) == [*before, again[0] | {"samples": 4}, last]
    assert logged_values(path, "resumed_from") == [2, 2]


def test_flops_per_token_of_gpt2_is_the_published_860_million():
    assert flops_per_token(GPTConfig()) == 860_101_632


def test_peak_flops_is_the_dense_peak_of_known_gpus_and_none_of_others():
    assert {name: peak_flops(name) for name in PEAKS} == PEAKS
    tf32 = {name: peak and peak / 2 for name, peak in PEAKS.items()}
    assert {name: peak_flops(name, float32=True) for name in PEAKS} == tf32 | {"Tesla T4": None}


def test_mfu_of_eight_a100_matches_the_published_60_percent():
    # 8 x A100 at 218k tokens/s each were published as 60 % MFU.
    assert mfu(8 * 218_000, 860_101_632, 312e12, world_size=8) == pytest.approx(0.60, abs=0.005)
    assert mfu(1000.0, 860_101_632, None, world_size=1) is None


def test_format_count_has_three_digits_and_a_unit():
    texts = {0: "0", 999: "999", 24_576: "24.6K", 999_900: "1M", 2_457_600: "2.46M", 250e6: "250M"}
    texts |= {9_999_220_736: "10B", 2.5e9: "2.5B"}
    assert {count: format_count(count) for count in texts} == texts


def test_format_duration_uses_the_two_largest_units():
    texts = {0: "0s", 59.4: "59s", 59.6: "1m00s", 307: "5m07s", 3599.9: "1h00m", 6190: "1h43m"}
    texts |= {187_200: "2d04h", None: "n/a"}
    assert {seconds: format_duration(seconds) for seconds in texts} == texts


def test_series_leaves_out_what_is_missing():
    losses = ({"train_loss": 1.0}, {"train_loss": None}, {"val_loss": 9.0}, {"train_loss": 2.5})
    records = [{"tokens_seen": 10 * i, **loss} for i, loss in enumerate(losses)]
    tokens, values = Series.of(records, "train_loss")
    assert (tokens.tolist(), values.tolist()) == ([0, 30], [1.0, 2.5])
    assert len(Series.of(records, "mfu").values) == 0


def test_series_smoothed_is_a_centred_mean_worked_by_hand():
    values = np.arange(200.0) ** 2
    smooth = Series(np.arange(200.0), values).smoothed().values  # 2 % of 200: two to each side
    assert smooth[0] == 0.0
    assert smooth[1] == pytest.approx((0 + 1 + 4) / 3)
    assert smooth[100] == pytest.approx(values[98:103].mean())
    assert smooth[199] == pytest.approx(values[197:].mean())
