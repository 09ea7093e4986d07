import math
import statistics
from contextlib import suppress

import numpy as np
import pytest

from model import GPTConfig
from runtime.metrics import (
    LEAST_NORMS,
    LINE_COLUMNS,
    NORM_WINDOW,
    MetricsLogger,
    RecentNorms,
    Series,
    StepTimer,
    flops_per_token,
    format_count,
    format_duration,
    format_evaluation,
    format_step,
    logged_metrics,
    logged_values,
    mfu,
    peak_flops,
    read_metrics,
)

PEAKS = {  # the driver's names, and the dense bfloat16 peak
    **dict.fromkeys(("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"), 989e12),
    **{"NVIDIA H100 PCIe": 756e12, "NVIDIA L40S": 362e12, "NVIDIA A10G": 70e12, "Tesla T4": 65e12},
    # Unknown ones, never a guess.
    **dict.fromkeys(("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti")),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20", "NVIDIA A100X")),
    **dict.fromkeys(("NVIDIA L40", "NVIDIA GB200", "AMD Instinct MI300X", "")),
    # torch's builds for CUDA 13 have no code for these.
    **dict.fromkeys(("Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB")),
}


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def write(path, *records):
    with MetricsLogger(path) as logger:
        for record in records:
            logger.log(**record)


def test_logger_writes_a_non_finite_float_as_null(path):
    write(path, {"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf})
    assert path.read_text() == '{"step": 1, "a": null, "b": null, "c": null}\n'


def test_logger_without_a_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(None, {"step": 1, "train_loss": 3.5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("torn_at", [1, 30])
def test_logger_starts_on_its_own_line_after_a_torn_one(path, torn_at):
    path.parent.mkdir()
    path.write_bytes(b'{"step": 1}\n' + b'{"step": 2, "train_loss": 3.25}\n'[:torn_at])
    before = path.read_bytes()
    write(path, {"step": 3})
    assert path.read_bytes().startswith(before)
    assert [record["step"] for record in read_metrics(path)][-1] == 3
    assert {record["step"] for record in read_metrics(path)} >= {1, 3}


def test_logger_keeps_every_finished_record_when_the_process_is_killed(commands, path, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys; from pathlib import Path\n"
        "from runtime.metrics import MetricsLogger\n"
        "logger = MetricsLogger(Path(sys.argv[1]))\n"
        "for step in range(100): logger.log(step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert commands.run(script, path).code == -9
    assert [record["step"] for record in read_metrics(path)] == list(range(100))


def test_read_metrics_skips_what_is_not_a_record(path):
    path.parent.mkdir()
    path.write_bytes(b'{"step": 1}\n{"step": 2, "tr\n\n\x00\x00\xff\n[1, 2]\n7\n{"step": 3}\n{"s')
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]


def test_read_metrics_drops_the_steps_that_a_resumed_run_did_again(path):
    write(path, *({"step": step, "train_loss": 9.0} for step in (1, 2, 3, 4)))
    write(path, {"resumed_from": 2}, {"step": 3, "train_loss": 1.0})
    write(path, {"resumed_from": 2}, {"step": 3, "train_loss": 0.5})
    records = [(record["step"], record["train_loss"]) for record in read_metrics(path)]
    assert records == [(1, 9.0), (2, 9.0), (3, 0.5)]


def test_logged_values_are_in_order(path):
    write(path, {"resumed_from": 0}, {"step": 1}, {"step": 2}, {"resumed_from": 1}, {"step": 2})
    write(path, {"resumed_from": 2}, {"step": 3})
    assert logged_values(path, "resumed_from") == [0, 1, 2]


def test_logged_metrics_are_those_of_the_step_that_no_resume_undid(path):
    assert logged_metrics(path, 0) == set()  # no file yet
    write(path, {"step": 4, "tokens_seen": 40, "train_loss": 3.0}, {"step": 4, "val_loss": 3.1})
    write(path, {"step": 8, "val_loss": None, "hellaswag_acc": 0.25})
    assert logged_metrics(path, 4) == {"train_loss", "val_loss"}
    assert logged_metrics(path, 8) == {"val_loss", "hellaswag_acc"}
    assert logged_metrics(path, 6) == set()
    write(path, {"resumed_from": 4}, {"step": 8, "train_loss": 2.0})
    assert logged_metrics(path, 4) == {"train_loss", "val_loss"}
    assert logged_metrics(path, 8) == {"train_loss"}


def test_flops_per_token_of_gpt2_is_the_published_860_million():
    assert flops_per_token(GPTConfig()) == 860_101_632


def test_peak_flops_is_the_dense_bfloat16_peak_of_known_gpus_and_none_of_others():
    assert {name: peak_flops(name) for name in PEAKS} == PEAKS


def test_mfu_of_eight_a100_matches_the_published_60_percent():
    # 8 x A100 at 218k tokens/s each were published as 60 % MFU.
    assert mfu(8 * 218_000, 860_101_632, 312e12, world_size=8) == pytest.approx(0.60, abs=0.005)
    assert mfu(1000.0, 860_101_632, None) is None


def test_step_timer_measures_the_mean_step_and_not_what_is_paused():
    clock = Clock()

    def finish_the_steps_last_work():
        clock.now += 0.5

    timer = StepTimer(
        step=100,
        max_steps=200,
        tokens_per_step=1000,
        clock=clock,
        synchronize=finish_the_steps_last_work,
    )
    clock.now += 1.5
    with suppress(KeyError), timer.paused():
        clock.now += 100.0
        raise KeyError
    clock.now += 3.0
    timing = timer.lap(110)
    assert timing.step_time_ms == pytest.approx(500.0)
    assert timing.tokens_per_second == pytest.approx(2000.0)
    assert timer.overall_tokens_per_second() == pytest.approx(10_000 / 105.0)


def test_step_timer_eta_follows_the_recent_steps_after_the_first_which_compiles():
    clock = Clock()
    timer = StepTimer(step=0, max_steps=1000, tokens_per_step=1, clock=clock)
    etas = {}
    for step in range(1, 501):
        clock.now += 60.0 if step == 1 else 1.0 if step <= 300 else 5.0
        etas[step] = timer.lap(step).eta_seconds
    assert etas[1] is None
    assert etas[2] == pytest.approx(998 * 1.0)
    assert etas[500] == pytest.approx(500 * 5.0)


def test_format_step_shows_every_figure_that_is_known():
    record = {
        **{"step": 250, "train_loss": 3.28123, "lr": 6e-4, "grad_norm": 0.2912, "mfu": 0.523},
        **{"step_time_ms": 330.14, "tokens_per_second": 1_588_000.4, "peak_memory_gib": 33.21},
    }
    assert format_step(record, max_steps=19073, eta_seconds=6190.0) == (
        "step   250/19073 | loss 3.2812 | lr 6.0e-4, norm 0.291"
        " | 1.59M tok/s, mfu 52%, 33.2 GiB | eta 1h43m"
    )
    record = {"step": 1, "train_loss": 10.9, "lr": 8e-7, "grad_norm": 12.0, "mfu": None}
    assert format_step(record, max_steps=10, eta_seconds=None) == (
        "step  1/10 | loss 10.9000 | lr 8.0e-7, norm 12 | eta n/a"
    )


@pytest.mark.parametrize(
    ("mfu", "max_steps", "eta_seconds"),
    [(0.523, 19_073, 28 * 3600.0), (0.523, 999_999, 28 * 3600.0), (None, 19_073, 164 * 86_400.0)],
)
def test_format_step_fits_100_columns_at_large_values(mfu, max_steps, eta_seconds):
    record = {
        **{"step": 1, "train_loss": 10.9876, "lr": 6.25e-4, "grad_norm": 1234.5, "mfu": mfu},
        **{"tokens_per_second": 12_588_000.4, "peak_memory_gib": 139.81},
    }
    line = format_step(record, max_steps, eta_seconds)
    assert len(line) <= LINE_COLUMNS == 100, len(line)


def test_format_evaluation_begins_another_line_where_one_would_be_too_long():
    record = {"val_loss": 10.82512, "hellaswag_acc": 0.301234, "hellaswag_acc_norm": 0.3012345}
    record |= {"hellaswag_total": 10042, "hellaswag_left_out": 123, "samples": 4}
    record |= {"evaluation_seconds": 1234.567, "overall_tokens_per_second": 1.588e6}
    lines = format_evaluation(19073, record).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= LINE_COLUMNS
    parts = [line.split(" | ") for line in lines]
    assert [part[0] for part in parts] == ["step 19073"] * 3
    shown = dict(part.split(" ") for line in parts for part in line[1:])
    assert {name: float(text) for name, text in shown.items()} == pytest.approx(record, rel=1e-4)
    assert format_evaluation(0, {"val_loss": 10.82512}) == "step 0 | val_loss 10.825"


def test_format_count_has_three_digits_and_a_unit():
    texts = {0: "0", 999: "999", 24_576: "24.6K", 999_900: "1M", 2_457_600: "2.46M", 250e6: "250M"}
    texts |= {9_999_220_736: "10B", 2.5e9: "2.5B"}
    assert {count: format_count(count) for count in texts} == texts


def test_format_duration_uses_the_two_largest_units():
    texts = {0: "0s", 59.4: "59s", 59.6: "1m00s", 307: "5m07s", 3599.9: "1h00m", 6190: "1h43m"}
    texts |= {187_200: "2d04h", None: "n/a"}
    assert {seconds: format_duration(seconds) for seconds in texts} == texts


def filled(norms, zscore=3.0):
    recent = RecentNorms(zscore)
    recent.extend(norms)
    return recent


def test_norm_limit_is_the_mean_and_so_many_standard_deviations():
    norms = [1.0 + 0.01 * i for i in range(LEAST_NORMS)]
    expected = statistics.mean(norms) + 3 * statistics.pstdev(norms)
    assert filled(norms).limit() == pytest.approx(expected)
    assert filled(norms[1:]).limit() == math.inf  # too few
    assert filled(norms, zscore=0).limit() == math.inf
    assert filled([*norms, math.inf, math.nan]).as_list() == norms


def test_norm_limit_forgets_norms_before_the_window_and_follows_a_lasting_change():
    recent = filled([1.0] * NORM_WINDOW)
    assert recent.limit() < 5
    recent.extend([5.0] * NORM_WINDOW)
    assert recent.limit() == 5.0
    assert recent.as_list() == [5.0] * NORM_WINDOW


def test_series_takes_each_step_once_in_order_and_leaves_out_what_is_missing():
    records = [
        {"step": 2, "tokens_seen": 20, "train_loss": 2.0},
        {"step": 1, "tokens_seen": 10, "train_loss": 1.0},
        {"step": 3, "tokens_seen": 30, "train_loss": None},
        {"step": 4, "tokens_seen": 40, "val_loss": 9.0},
        {"step": 2, "tokens_seen": 20, "train_loss": 2.5},
    ]
    series = Series.of(records, "train_loss")
    assert series.tokens.tolist() == [10, 20]
    assert series.values.tolist() == [1.0, 2.5]


def test_series_smoothed_is_a_centred_mean_worked_by_hand():
    values = np.arange(200.0) ** 2
    smooth = Series(np.arange(200.0), values).smoothed().values  # 2 % of 200: two to each side
    assert smooth[0] == 0.0
    assert smooth[1] == pytest.approx((0 + 1 + 4) / 3)
    assert smooth[100] == pytest.approx(values[98:103].mean())
    assert smooth[199] == pytest.approx(values[197:].mean())
