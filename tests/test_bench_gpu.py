import json
import re
import sys
import time
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from conftest import ROOT, TINY_MODEL
from forked import HangingProgram, fork_trainers

from bench import __main__ as bench_main
from bench import gpu, ladder, measurement
from bench.config import BenchConfig, Part
from bench.gpu import PART_SECONDS, TOTAL_SECONDS, config_of, draw_ladder, part_measures
from bench.ladder import PRODUCT, Workspace
from bench.plain import OPTIMIZATIONS
from runtime.cli import parse_flags, run_command
from training.config import TrainConfig

H200_RESULTS = ROOT / "bench/results/nvidia-h200.json"
UNITS = ["tokens/s", "MFU", "peak GiB", "planned GiB", "first step s", "ms per step"]


@pytest.fixture
def h100(monkeypatch):
    """Let torch report an H100."""
    for function, value in {
        **{"is_available": True, "device_count": 1, "is_bf16_supported": True},
        **{"get_device_capability": (9, 0), "get_arch_list": []},
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_properties": SimpleNamespace(total_memory=79 * 2**30),
    }.items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value, **__: value)


def check(monkeypatch, data_dir, out_dir, *flags):
    """Rehearse `python -m bench --gpu` with a tiny model; return its results file."""
    tiny = [*TINY_MODEL, "--device=cpu", "--steps=2", f"--data-dir={data_dir}"]
    monkeypatch.setattr(sys, "argv", ["bench", "--gpu", *tiny, f"--out-dir={out_dir}", *flags])
    bench_main.main()
    (path,) = out_dir.glob("*.json")
    return json.loads(path.read_text())


def test_parts_take_twelve_minutes_at_most():
    assert [*PART_SECONDS] == [*get_args(Part)]
    assert min(PART_SECONDS.values()) > 0
    assert sum(PART_SECONDS.values()) <= TOTAL_SECONDS <= 12 * 60


@pytest.mark.usefixtures("h100")
def test_parts_train_what_they_are_named_after(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(ladder, "run_python", lambda *args, **_: str(commands.append(args)))
    monkeypatch.setattr(ladder, "prepare_compiler", lambda _: None)
    config = parse_flags(BenchConfig, ["--gpu", "--device=cuda", f"--data-dir={tmp_path}"])
    given = {}
    for part in ("defaults", "muon", "xl", "context"):
        measures = part_measures(part, config_of(part, config), Workspace(tmp_path))
        (measure,) = measures.values()
        with pytest.raises(ValueError, match="not enough values"):  # the command did not run
            measure()
        assert commands[-1][0] == "train_gpt2.py"
        run = given[part] = parse_flags(TrainConfig, commands[-1][1:])
        assert run.micro_batch_size == "auto"
        assert (run.val_every, run.hellaswag_every, run.sample_every) == (0, 0, 0)
    sizes = {
        part: (run.optimizer, run.size, run.block_size, run.total_batch_size, run.max_steps)
        for part, run in given.items()
    }
    assert sizes == {
        "defaults": ("adamw", "gpt2", 1024, 524_288, 21),
        "muon": ("muon", "gpt2", 1024, 524_288, 21),
        "xl": ("adamw", "gpt2-xl", 1024, 131_072, 5),
        "context": ("adamw", "gpt2", 131_072, 131_072, 5),
    }
    commands.clear()
    measures = part_measures("ladder", config, Workspace(tmp_path, deadline=1e9))
    assert [*measures] == ["float32", *OPTIMIZATIONS]
    ahead = {args[2] for args in commands}
    assert ahead == {",".join(OPTIMIZATIONS[:count]) for count in (3, 4, 5, 6)}
    for measure in measures.values():
        with pytest.raises(ValueError, match="not enough values"):
            measure()
    runs = [parse_flags(TrainConfig, args[3:]) for args in commands]
    assert [run.max_steps for run in runs] == [2] * 4 + [21] * 7
    assert {(run.micro_batch_size, run.total_batch_size) for run in runs} == {(16, 16_384)}
    assert len({run.out_dir for run in runs}) == len(runs)  # none writes into another's folder


def test_rehearsal_measures_every_part(commands, tiny_data, tmp_path, monkeypatch, capsys):
    fork_trainers(monkeypatch, commands, ladder)
    monkeypatch.setattr(ladder, "prepare_compiler", lambda _: "none is looked for")
    monkeypatch.delitem(PART_SECONDS, "tests")  # below
    file = check(monkeypatch, tiny_data, tmp_path)
    shown = capsys.readouterr().out
    assert "not measured" not in shown
    assert [*file] == ["device", *PART_SECONDS]
    assert all(file[part]["versions"]["torch"] == torch.__version__ for part in PART_SECONDS)
    for part, context in (
        ("defaults", 32),
        ("muon", 32),
        ("xl", 32),
        ("context", 128 * 32),
    ):
        assert file[part]["model"]["block_size"] == context
        values = file[part]["results"][part]
        assert [*values] == [*UNITS, "loss after 2 steps"]
        assert all(len(runs) == 1 and runs[0] > 0 for runs in values.values())
    rows = file["ladder"]["results"]
    assert [*rows] == ["float32", *(o for o in OPTIMIZATIONS if o in rows)]
    assert {"flash attention", "padded vocabulary", "fused AdamW"} < {*rows}
    (figure,) = tmp_path.glob("*-ladder.png")
    assert str(figure) in shown


def test_only_and_peer_measure_one_part_in_turn(commands, tiny_data, tmp_path, monkeypatch, capsys):
    fork_trainers(monkeypatch, commands, ladder)
    script = tmp_path / "theirs.py"
    script.write_text("for step in range(9): print(f'step {step} | tok/sec: {step}')")
    flags = ["--only=defaults", f"--peer={script}"]
    file = check(monkeypatch, tiny_data, tmp_path / "results", *flags)
    assert [*file] == ["device", "defaults"]
    labels = [line.split(" | ")[1].strip() for line in capsys.readouterr().out.splitlines()[2:6]]
    assert labels == ["theirs.py", PRODUCT] * 2
    assert file["defaults"]["results"]["theirs.py"] == {"tokens/s": [5.5, 5.5]}  # 3 to 8
    assert len(file["defaults"]["results"][PRODUCT]["tokens/s"]) == 2


def test_unknown_part_is_one_line_that_names_the_parts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--gpu", "--only=everything"])
    with pytest.raises(SystemExit) as stop:
        run_command(bench_main.main)
    error = capsys.readouterr().err
    assert (stop.value.code, error.count("\n")) == (2, 1)
    assert all(part in error for part in ("everything", *PART_SECONDS))


@pytest.mark.parametrize("passes", [True, False])
def test_tests_are_counted_or_named_with_their_last_line(passes, tmp_path, monkeypatch):
    tests = tmp_path / "test_gpu.py"
    skipped = "import pytest\ndef test_a(): pytest.skip()\ndef test_b(): pass\n"
    tests.write_text(f"{skipped}def test_c(): assert {passes}\n")
    monkeypatch.setattr(gpu, "TEST_FILE", str(tests))
    (measure,) = part_measures("tests", BenchConfig(), Workspace(tmp_path)).values()
    if passes:
        assert measure() == {"passed": 2, "skipped": 1}
    else:
        with pytest.raises(ValueError, match=r"^1 failed, 1 passed, 1 skipped in "):
            measure()


def test_part_that_hangs_is_stopped_and_the_next_one_runs(tiny_data, tmp_path, monkeypatch, capsys):
    hanging = HangingProgram(tmp_path)

    def clock():  # an hour is over when the program hangs
        return time.monotonic() + 3600 * hanging.hangs()

    monkeypatch.setattr(measurement, "monotonic", clock)
    programs = {"tests": hanging.program, "muon": "print('a result')"}
    programs["xl"] = "raise SystemExit('a reason')"
    programs["context"] = "print('not reached')"

    def measures(part, _, work):
        def measure():
            work.run("-c", programs[part])
            if part == "xl":
                raise AssertionError
            return {"s": 1.0}

        if part == "context":  # by now, the time for all parts is over
            work = work._replace(deadline=0)
        return {part: measure}

    monkeypatch.setattr(gpu, "part_measures", measures)
    monkeypatch.setattr(gpu, "PART_SECONDS", dict.fromkeys(programs, 600))
    file = check(monkeypatch, tiny_data, tmp_path / "results")
    assert hanging.is_over()
    stopped = file["tests"]["not_measured"]["tests"]
    assert re.fullmatch(r"stopped at its time limit, after \d+ s", stopped)
    reasons = {"tests": stopped, "xl": "a reason", "context": "no time was left"}
    for part in programs:
        reason = {part: reasons[part]} if part in reasons else {}
        assert file[part]["not_measured"] == reason
    assert file["muon"]["results"] == {"muon": {"s": [1.0]}}
    shown = capsys.readouterr().out.splitlines()[-5:]
    assert shown[:3] == [f"not measured: {p}: {p}: {why}" for p, why in reasons.items()]
    (log,) = (tmp_path / "results").glob("*.log")
    assert shown[3:] == [str(log), str(log.with_suffix(".json"))]
    assert "a result" in log.read_text()
    assert "not reached" not in log.read_text()


def test_no_part_gets_more_time_than_is_left(tiny_data, tmp_path, monkeypatch):
    clock, deadlines = [1000.0], {}

    def measures(part, _, work):
        deadlines[part] = work.deadline
        clock[0] += 300  # each part takes as long
        return {}

    monkeypatch.setattr(gpu, "part_measures", measures)
    monkeypatch.setattr(gpu, "monotonic", lambda: clock[0])
    check(monkeypatch, tiny_data, tmp_path)
    starts = {part: 1000 + 300 * i for i, part in enumerate(PART_SECONDS)}
    assert deadlines == {
        part: min(starts[part] + seconds, 1000 + TOTAL_SECONDS)
        for part, seconds in PART_SECONDS.items()
    }
    assert deadlines["context"] < starts["context"]


def test_published_ladder_has_the_shape_of_a_measured_one(tmp_path):
    file = json.loads(H200_RESULTS.read_text())
    assert {"device", "note", *PART_SECONDS} == {*file}
    assert [*file["ladder"]["results"]] == ["float32", *OPTIMIZATIONS]
    for part in PART_SECONDS:
        measured = file[part]
        assert {"commit", "versions", "model", "not_measured", "results"} <= {*measured}
        for values in measured["results"].values():
            assert {*values} <= {*UNITS} or part == "tests"
            assert all(isinstance(runs, list) for runs in values.values())
    copy = tmp_path / "nvidia-h200.json"
    copy.write_text(H200_RESULTS.read_text())
    figure = draw_ladder(copy)
    assert figure.name == "nvidia-h200-ladder.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert H200_RESULTS.with_name(figure.name).is_file()


def test_command_refuses_a_machine_without_a_gpu(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as if there was none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = ["bench", "--gpu", f"--data-dir={tiny_data}", f"--out-dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", flags)
    with pytest.raises(ValueError, match=r"^--gpu found no usable GPU: use"):
        bench_main.main()
