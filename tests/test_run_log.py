import json
import math
import re
from decimal import Decimal

import numpy as np
import pytest
import torch
from run_files import log_step, new_log

from formats.metrics import logged_values
from runtime.errors import UserError
from training import run_log
from training.run_log import format_step


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(run_log, "perf_counter", lambda: Clock.now)
    return Clock


def test_record_is_in_the_file_at_once_with_null_for_what_is_not_finite(tmp_path):
    with new_log(tmp_path) as log:
        log.record(step=1, a=math.nan, b=math.inf, c=0.1, d="text")
        log.record(saved_step=1)
        text = (tmp_path / "metrics.jsonl").read_text()  # as after a kill
    record = '{"step": 1, "a": null, "b": null, "c": 0.1, "d": "text"}'
    assert text == f'{record}\n{{"saved_step": 1}}\n'


def test_evaluation_logs_numbers_of_any_library_and_names_what_is_none(tmp_path):
    numbers = {
        "a": np.array([0.5, 1.0], np.float32).mean(),
        "b": np.int64(3),
        "c": np.bool_(True),
        "d": np.array(0.25),
        "e": Decimal("0.125"),
        "f": torch.tensor(1.5, requires_grad=True),
        "g": 2**60 + 1,
    }
    with new_log(tmp_path) as log:
        with log.evaluation(1) as record:
            record |= numbers
        for value in ("high", None, [0.5], 1j, torch.ones(2), np.ones(2)):
            with (
                pytest.raises(
                    UserError, match=f"mine is logged as {re.escape(repr(value))}, .* me"
                ),
                log.evaluation(2) as record,
            ):
                record["mine"] = value
    (line,) = lines_of(tmp_path)
    expected = {"a": 0.75, "b": 3, "c": 1, "d": 0.25, "e": 0.125, "f": 1.5, "g": 2**60 + 1}
    assert {name: line[name] for name in numbers} == expected


def test_incomplete_last_line_is_ended_before_the_next_record(tmp_path):
    with new_log(tmp_path) as log, log.evaluation(8) as record:
        log.samples(["one"])
        record["val_loss"] = 2.0
    for name in ("metrics.jsonl", "samples.txt"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 15, "val')  # a kill, a power cut
    with new_log(tmp_path) as log, log.evaluation(8):
        log.samples(["two"])
        log.record(resumed_from=8)
    assert logged_values(tmp_path / "metrics.jsonl", "resumed_from") == [8]
    samples = (tmp_path / "samples.txt").read_text().splitlines()
    assert samples[::2] == ["step 8 | sample: 'one'", "step 8 | sample: 'two'"]
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    with new_log(tmp_path):  # a complete line gets no second end
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines() == lines


def test_only_rank_0_writes_and_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with new_log(tmp_path / "run", logger=("tensorboard",)) as log:
        log.record(resumed_from=0)
        log_step(log, 1)
        with log.evaluation(1) as record:
            log.samples(["text"])
            record["val_loss"] = 3.0
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_step_is_timed_without_what_is_paused(tmp_path, clock, capsys):
    with new_log(tmp_path, start_step=100, max_steps=200, log_every=2) as log:
        clock.now += 1.5
        with log.paused():
            clock.now += 97.0
        clock.now += 0.5
        log_step(log, 101, loss=3.0, lr=1e-3, grad_norm=0.5)
        clock.now += 1.0
        log_step(log, 102, loss=2.5, lr=1e-4, grad_norm=0.25)
        with log.evaluation(102) as record:
            clock.now += 30.0
            record |= {"val_loss": 2.75, "mine": torch.tensor(3)}
        with log.evaluation(102):  # nothing was measured
            pass
        clock.now += 1.0
        log_step(log, 103, loss=2.0, lr=1e-4, grad_norm=0.25)
    first, second, evaluation, _ = lines_of(tmp_path)
    assert first.pop("peak_memory_gib") > 0
    assert first == {
        **{"step": 101, "tokens_seen": 101_000, "train_loss": 3.0, "lr": 1e-3, "grad_norm": 0.5},
        **{"step_time_ms": 2000.0, "tokens_per_second": 500.0, "mfu": None},
    }
    assert (second["step_time_ms"], second["tokens_per_second"]) == (1000.0, 1000.0)
    tokens_seen = {"tokens_seen": 102_000}
    measured = {"val_loss": 2.75, "mine": 3, "evaluation_seconds": 30.0}
    assert evaluation == {"step": 102} | tokens_seen | measured
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(" | ")[0] for line in shown] == ["step 102/200", "step 102"]
    assert "| val_loss 2.75 | mine 3 |" in shown[1]


def test_eta_is_from_all_time_after_the_first_step_which_compiles(tmp_path, clock, capsys):
    with new_log(tmp_path, start_step=100, max_steps=1100) as log:
        for step in range(101, 301):
            clock.now += 60.0 if step == 101 else 1.0
            log_step(log, step)
            if step % 100 == 0:
                with log.evaluation(step):
                    clock.now += 25.0
    shown = capsys.readouterr().out.splitlines()
    etas = [shown[step - 101].rpartition("eta ")[2] for step in (101, 102, 200, 201)]
    assert etas == ["n/a", "16m38s", "15m00s", "18m44s"]


def test_samples_are_appended_and_shown(tmp_path, capsys):
    texts = ["word " * 30, "b\nstep 6 | saved\r\x1b[2J"]
    lines = [f"step 5 | sample: {text!r}" for text in texts]
    for _ in range(2):
        with new_log(tmp_path) as log, log.evaluation(5):
            log.samples(texts)
    assert (tmp_path / "samples.txt").read_text().splitlines() == 2 * lines
    shown = ["step 5 | sample:", f"    {texts[0]}"]
    shown += ["step 5 | sample:", "    b", "    step 6 | saved", r"    \x1b[2J"]
    assert capsys.readouterr().out.splitlines() == 2 * shown


def test_format_step_shows_every_figure_that_is_known():
    record = {
        **{"step": 250, "train_loss": 3.28123, "lr": 6e-4, "grad_norm": 0.2912, "mfu": 0.523},
        **{"step_time_ms": 330.14, "tokens_per_second": 1_588_000.4, "peak_memory_gib": 33.21},
    }
    assert format_step(record, max_steps=19073, eta_seconds=6190.0) == (
        "step   250/19073 | loss 3.2812 | lr 6.0e-4, norm 0.291"
        " | 1.59M tok/s, mfu 52%, 33.2 GiB | eta 1h43m"
    )
    own = format_step(record | {"mine": 0.123456}, max_steps=250, eta_seconds=None)
    assert ", norm 0.291 | mine 0.1235 | 1.59M tok/s" in own
    record |= {"mfu": None, "peak_memory_gib": None}
    assert format_step(record, max_steps=250, eta_seconds=None).endswith("| 1.59M tok/s | eta n/a")
