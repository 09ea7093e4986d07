import json
import math

import pytest
import torch
from run_files import log_step, new_log

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


def test_evaluation_may_return_tensors(tmp_path, capsys):
    with new_log(tmp_path) as log, log.evaluation(0) as record:
        record |= {"accuracy": torch.tensor(0.5), "count": torch.tensor(3), "total": 10}
    assert lines_of(tmp_path)[0].items() > {"accuracy": 0.5, "count": 3, "total": 10}.items()
    assert "| accuracy 0.5 | count 3 | total 10 |" in capsys.readouterr().out


def test_a_spike_is_one_line_in_a_hundred_steps_and_names_the_command_that_shows_its_text(
    tmp_path, capsys
):
    with new_log(tmp_path, max_steps=400) as log:
        losses = [3 + 0.01 * (step % 5) for step in range(1, 301)]
        losses[39] = losses[149] = losses[159] = losses[280] = 9.0
        for step, loss in enumerate(losses, 1):
            log_step(log, step, loss)
    spikes = [line for line in capsys.readouterr().out.splitlines() if "loss spike" in line]
    command = f"python read_step.py {tmp_path} --step"
    assert spikes == [
        f"warning: loss spike at step {step}; to print its training text: {command} {step}"
        for step in (150, 281)
    ]


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
            record["val_loss"] = 2.75
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
    assert evaluation == {
        **{"step": 102, "tokens_seen": 102_000, "val_loss": 2.75},
        **{"evaluation_seconds": 30.0, "overall_tokens_per_second": 2000 / 130},
    }
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(" | ")[0] for line in shown] == ["step 102/200", "step 102"]


def test_step_logs_the_rate_of_its_tokens_and_what_train_step_returns(tmp_path, clock):
    metrics = {"train_loss": 3.0, "lr": 1e-3, "grad_norm": 0.5, "entropy": 2.0}
    with new_log(tmp_path) as log:
        for step, tokens_seen in ((1, 500), (2, 2500)):
            clock.now += 1.0
            log.step(step, tokens_seen, metrics)
        clock.now += 1.0
        with pytest.raises(ValueError, match="train_step and the log both log 'mfu'"):
            log.step(3, 4500, metrics | {"mfu": 0.5})
    records = lines_of(tmp_path)
    assert [record["tokens_per_second"] for record in records] == [500.0, 2000.0]
    assert all(record.items() >= metrics.items() for record in records)


def test_eta_follows_the_recent_steps_after_the_first_which_compiles(tmp_path, clock, capsys):
    with new_log(tmp_path, max_steps=1000) as log:
        for step in range(1, 501):
            clock.now += 60.0 if step == 1 else 1.0 if step <= 300 else 5.0
            log_step(log, step)
    shown = capsys.readouterr().out.splitlines()
    etas = [shown[step - 1].rpartition(" | ")[2] for step in (1, 2, 500)]
    assert etas == ["eta n/a", "eta 16m38s", "eta 41m40s"]


def test_eta_has_the_time_of_evaluations_as_far_as_they_were_seen(tmp_path, clock, capsys):
    with new_log(tmp_path, max_steps=1000) as log:
        for step in range(301):
            if step:
                clock.now += 60.0 if step == 1 else 1.0
                log_step(log, step)
            if step % 100 == 0:
                with log.evaluation(step) as record:
                    clock.now += 90.0 if step == 0 else 25.0  # the first of each kind compiles
                    record["val_loss"] = 3.0
                with log.paused():  # a save
                    clock.now += 25.0
    shown = [line for line in capsys.readouterr().out.splitlines() if "eta" in line]
    etas = [shown[step - 1].rpartition("eta ")[2] for step in (100, 101, 199, 300)]
    assert etas == ["15m00s", "22m33s", "20m06s", "17m32s"]


def test_samples_are_appended_and_shown(tmp_path, capsys):
    lines = [f"step 5 | sample: {'word ' * 30!r}", "step 5 | sample: 'b'"]
    for _ in range(2):
        with new_log(tmp_path) as log, log.evaluation(5):
            log.samples(["word " * 30, "b"])
    assert (tmp_path / "samples.txt").read_text().splitlines() == 2 * lines
    assert capsys.readouterr().out.splitlines() == 2 * lines


def test_format_step_shows_every_figure_that_is_known():
    record = {
        **{"step": 250, "train_loss": 3.28123, "lr": 6e-4, "grad_norm": 0.2912, "mfu": 0.523},
        **{"step_time_ms": 330.14, "tokens_per_second": 1_588_000.4, "peak_memory_gib": 33.21},
    }
    assert format_step(record, max_steps=19073, eta_seconds=6190.0) == (
        "step   250/19073 | loss 3.2812 | lr 6.0e-4, norm 0.291"
        " | 1.59M tok/s, mfu 52%, 33.2 GiB | eta 1h43m"
    )
    record |= {"step": 1, "mfu": None, "peak_memory_gib": None, "lr": 8e-7, "grad_norm": 12.0}
    assert format_step(record, max_steps=10, eta_seconds=None) == (
        "step  1/10 | loss 3.2812 | lr 8.0e-7, norm 12 | 1.59M tok/s | eta n/a"
    )
