import json
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT2_SIZES, GPTConfig
from runtime.metrics import (
    MetricsLogger,
    StepTimer,
    flops_per_token,
    format_duration,
    format_step,
    mfu,
    peak_flops,
    read_metrics,
)

GPU_NAMES = {  # what the driver calls them, and the dense bfloat16 peak
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "Tesla T4": 65e12,
    "Tesla V100-SXM2-16GB": 125e12,
}
UNKNOWN_NAMES = [
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA H20",
    "NVIDIA A100X",
    "NVIDIA L40",
    "NVIDIA GB200",
    "AMD Instinct MI300X",
    "",
]


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_logger_writes_one_json_object_a_line(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsLogger(path) as logger:
        logger.log(step=1, tokens_seen=512, train_loss=3.5)
        logger.log(step=2, tokens_seen=1024, train_loss=3.25)

    lines = path.read_text().splitlines()

    assert json.loads(lines[0]) == {"step": 1, "tokens_seen": 512, "train_loss": 3.5}
    assert json.loads(lines[1]) == {"step": 2, "tokens_seen": 1024, "train_loss": 3.25}


def test_logger_record_is_readable_at_once_while_the_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLogger(path) as logger:
        logger.log(step=1, tokens_seen=512, train_loss=3.5)

        assert read_metrics(path) == [{"step": 1, "tokens_seen": 512, "train_loss": 3.5}]


def test_logger_appends_to_what_an_earlier_process_wrote(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        with MetricsLogger(path) as logger:
            logger.log(step=step)

    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logger_writes_a_non_finite_float_as_null(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    with MetricsLogger(path) as logger:
        logger.log(step=1, train_loss=value)

    assert path.read_text() == '{"step": 1, "train_loss": null}\n'


def test_logger_without_a_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with MetricsLogger(None) as logger:
        logger.log(step=1, train_loss=3.5)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("torn_at", [1, 10, 30])
def test_logger_starts_on_its_own_line_after_a_torn_one(tmp_path, torn_at):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 2, "train_loss": 3.25}\n'
    path.write_bytes(b'{"step": 1}\n' + whole[:torn_at])
    before = path.read_bytes()

    with MetricsLogger(path) as logger:
        logger.log(step=3)

    assert path.read_bytes().startswith(before)
    assert [record["step"] for record in read_metrics(path)][-1] == 3
    assert {record["step"] for record in read_metrics(path)} >= {1, 3}


def test_logger_keeps_every_finished_record_when_the_process_is_killed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from runtime.metrics import MetricsLogger\n"
        "logger = MetricsLogger(Path(sys.argv[1]))\n"
        "for step in range(100): logger.log(step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)

    assert done.returncode != 0
    assert [record["step"] for record in read_metrics(path)] == list(range(100))


@settings(deadline=None)
@given(
    records=st.lists(
        st.dictionaries(
            st.sampled_from(["tokens_seen", "train_loss", "note", "mfu"]),
            st.none()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
        ),
        max_size=5,
    ),
    cut=st.integers(min_value=0, max_value=60),
)
def test_read_metrics_gives_back_what_was_logged_up_to_a_torn_end(tmp_path_factory, records, cut):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with MetricsLogger(path) as logger:
        for step, record in enumerate(records):
            logger.log(step=step, **record)
    whole = path.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    path.write_bytes(kept)

    logged = [{"step": step, **record} for step, record in enumerate(records)]

    # A line that lost nothing but its newline still counts.
    assert read_metrics(path) in (logged[: kept.count(b"\n")], logged[: kept.count(b"\n") + 1])


def test_read_metrics_skips_what_is_not_a_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "tr\n\n\x00\x00\xff\n[1, 2]\n7\n{"step": 3}\n{"s')

    assert read_metrics(path) == [{"step": 1}, {"step": 3}]


def test_read_metrics_drops_the_steps_that_a_resumed_run_did_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLogger(path) as logger:
        for step in (1, 2, 3, 4):
            logger.log(step=step, train_loss=9.0)
    with MetricsLogger(path) as logger:
        logger.log(resumed_from=2)
        logger.log(step=3, train_loss=1.0)
    with MetricsLogger(path) as logger:
        logger.log(resumed_from=2)
        logger.log(step=3, train_loss=0.5)

    assert [(record["step"], record["train_loss"]) for record in read_metrics(path)] == [
        (1, 9.0),
        (2, 9.0),
        (3, 0.5),
    ]


def test_read_metrics_of_a_missing_file_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_flops_per_token_of_gpt2_is_the_published_860_million():
    assert flops_per_token(124_475_904, n_layer=12, n_embd=768, block_size=1024) == 860_101_632


@pytest.mark.parametrize("size", GPT2_SIZES)
def test_flops_per_token_is_close_to_three_forward_passes_counted_product_by_product(size):
    config = GPTConfig(**GPT2_SIZES[size])
    C, T, V = config.n_embd, config.block_size, config.padded_vocab_size
    matrices = config.n_layer * (3 * C * C + C * C + 4 * C * C + 4 * C * C) + V * C
    scores_and_values = config.n_layer * 2 * C * T
    by_hand = 3 * 2 * (matrices + scores_and_values)

    counted = flops_per_token(config.n_params, config.n_layer, C, T)

    assert counted == pytest.approx(by_hand, rel=0.01)  # biases and positions are the rest


@pytest.mark.parametrize(("name", "peak"), GPU_NAMES.items())
def test_peak_flops_of_a_known_gpu_is_its_dense_bfloat16_peak(name, peak):
    assert peak_flops(name) == peak


@pytest.mark.parametrize("name", UNKNOWN_NAMES)
def test_peak_flops_of_an_unknown_gpu_is_none_not_a_guess(name):
    assert peak_flops(name) is None


def test_mfu_of_eight_a100_matches_the_published_60_percent():
    # facts.md: 8 x A100 at 218k tokens/s each, 60 % MFU.
    assert mfu(8 * 218_000, 860_101_632, 312e12, world_size=8) == pytest.approx(0.60, abs=0.005)


def test_mfu_without_a_known_peak_is_none():
    assert mfu(1000.0, 860_101_632, None) is None


def test_step_timer_measures_steps_and_not_what_is_paused():
    clock = Clock()
    timer = StepTimer(step=0, max_steps=10, tokens_per_step=1000, clock=clock)
    clock.now += 2.0
    with timer.paused():
        clock.now += 100.0
    clock.now += 1.0

    timing = timer.lap(1)

    assert timing.step_time_ms == pytest.approx(3000.0)
    assert timing.tokens_per_second == pytest.approx(1000 / 3)


def test_step_timer_pause_ends_when_the_body_raises():
    clock = Clock()
    timer = StepTimer(step=0, max_steps=10, tokens_per_step=1000, clock=clock)

    def evaluation_that_fails():
        with timer.paused():
            clock.now += 100.0
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - raised two lines up
        evaluation_that_fails()
    clock.now += 2.0

    assert timer.lap(1).step_time_ms == pytest.approx(2000.0)


def test_step_timer_lap_of_several_steps_gives_their_mean():
    clock = Clock()
    timer = StepTimer(step=100, max_steps=200, tokens_per_step=1000, clock=clock)
    clock.now += 5.0

    timing = timer.lap(110)

    assert timing.step_time_ms == pytest.approx(500.0)
    assert timing.tokens_per_second == pytest.approx(2000.0)


def test_step_timer_eta_leaves_out_the_first_lap_which_compiles():
    clock = Clock()
    timer = StepTimer(step=0, max_steps=10, tokens_per_step=1000, clock=clock)
    clock.now += 60.0
    first = timer.lap(1)
    clock.now += 1.0
    timer.lap(2)
    clock.now += 3.0
    third = timer.lap(3)

    assert first.eta_seconds is None
    assert third.eta_seconds == pytest.approx(7 * 2.0)


def test_step_timer_eta_follows_the_recent_steps():
    clock = Clock()
    timer = StepTimer(step=0, max_steps=1000, tokens_per_step=1, clock=clock)
    for step in range(1, 501):
        clock.now += 1.0 if step <= 300 else 5.0
        timing = timer.lap(step)

    assert timing.eta_seconds == pytest.approx(500 * 5.0)


def test_format_step_shows_every_figure():
    record = {
        "step": 250,
        "train_loss": 3.28123,
        "lr": 6e-4,
        "grad_norm": 0.291,
        "step_time_ms": 330.14,
        "tokens_per_second": 1_588_000.4,
        "mfu": 0.523,
        "peak_memory_gib": 33.21,
    }

    assert format_step(record, max_steps=19073, eta_seconds=6190.0) == (
        "step   250/19073 | loss 3.2812 | lr 6.00e-04 | norm 0.29 | 330.1 ms | 1,588,000 tok/s"
        " | mfu 52.3% | eta 1h43m | peak 33.2 GiB"
    )


def test_format_step_shows_na_for_what_is_not_known():
    record = {"step": 1, "train_loss": 10.9, "lr": 8e-7, "mfu": None}

    assert format_step(record, max_steps=10, eta_seconds=None) == (
        "step  1/10 | loss 10.9000 | lr 8.00e-07 | norm n/a | n/a | n/a | mfu n/a | eta n/a"
        " | peak n/a"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (307, "5m07s"),
        (3599.9, "1h00m"),
        (6190, "1h43m"),
        (187_200, "2d04h"),
        (None, "n/a"),
    ],
)
def test_format_duration_uses_the_two_largest_units(seconds, text):
    assert format_duration(seconds) == text
