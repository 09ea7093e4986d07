import json
import math
import os
import re
import shutil
import sqlite3
import struct
import sys
import time
from contextlib import suppress

import pytest
from conftest import ROOT
from run_files import log_step, new_log

from formats.metrics import read_lines, read_metrics
from report import collect_run
from runtime.files import write_json
from train_gpt2 import main
from training.trackers import TRACKERS, Tracker, skip_sent, tracker_id


class Recorder:
    """A tracker as a user would write it."""

    def __init__(self, run_dir, settings, start_step):
        self.settings, self.values, self.is_finished = settings, [], False

    def log(self, step, values):
        self.values += [(step, name, value) for name, value in values.items()]

    def finish(self):
        self.is_finished = True


def refuse(*_):
    raise RuntimeError("the server\nrefuses")


@pytest.fixture
def recorders(monkeypatch):
    """The recorders that stand for TensorBoard, which `make test` does not install."""
    started = []

    def start(*args):
        started.append(Recorder(*args))
        return started[-1]

    monkeypatch.setitem(TRACKERS, "tensorboard", start)
    monkeypatch.setattr("training.trackers.PACKAGES", ())
    return started


def measured(run_dir):
    """The numbers in `metrics.jsonl`, as a `Recorder` has them."""
    return [
        (record["step"], name, value)
        for record in read_metrics(run_dir / "metrics.jsonl")
        for name, value in record.items()
        if name != "step" and value is not None
    ]


def by_step(values):
    """The last value of each name and step."""
    return {(step, name): value for step, name, value in values}


def test_run_gives_its_trackers_and_its_report_what_it_writes(recorders, tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=a", "--sample-every=8", "--logger=tensorboard"])
    run_dir, [recorder] = tmp_path / "runs/a", recorders
    assert by_step(recorder.values) == by_step(measured(run_dir))
    assert {"train_loss", "lr", "val_loss", "samples"} <= {name for _, name, _ in recorder.values}
    assert recorder.settings == json.loads((run_dir / "config.json").read_text())
    assert recorder.is_finished
    environment = collect_run(run_dir)["environment"]
    assert environment["environment"].startswith("1 x cpu, float32, torch ")
    assert re.fullmatch(r"[0-9a-f]{16}", environment["data fingerprint"])


@pytest.mark.parametrize(
    "failing",
    [
        refuse,
        lambda *_: Tracker(refuse, list),
        lambda *_: Tracker(lambda *_: None, refuse),
    ],
)
def test_tracker_that_fails_costs_one_warning(recorders, monkeypatch, tmp_path, capsys, failing):
    monkeypatch.setitem(TRACKERS, "wandb", failing)
    with new_log(tmp_path, logger=("wandb", "tensorboard")) as log:
        for step, norm in ((1, 1.0), (2, math.nan)):  # what is not finite is left out
            log_step(log, step, grad_norm=norm)
    [warning] = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warning == (
        "warning: --logger wandb failed and is now disabled: RuntimeError: the server refuses"
    )
    assert recorders[0].values == measured(tmp_path)  # the other one has everything
    assert recorders[0].is_finished


def test_tracker_id_stays_with_a_run_and_not_with_its_copy_or_another_of_its_name(tmp_path):
    run, moved, copied = (tmp_path / name for name in ("a", "moved", "b/a"))
    first = tracker_id(run, "trackio")
    assert tracker_id(run, "trackio") == first
    assert tracker_id(tmp_path / "other/a", "trackio") != first
    shutil.copytree(run, copied)
    second = tracker_id(copied, "trackio")
    assert second != first
    run.rename(moved)
    tracker_id(run, "trackio")  # a new run in the place of the old one
    ids = [tracker_id(folder, "trackio") for folder in (moved, copied)]
    assert ids == [first, second]
    write_json(tmp_path / "old/trackers/wandb.json", {"id": "ours"})  # of an earlier version
    assert tracker_id(tmp_path / "old", "wandb") == "ours"
    assert tracker_id(tmp_path / "old", "wandb", "given") == "given"
    assert tracker_id(tmp_path / "old", "wandb") == "given"


def test_values_of_earlier_starts_are_not_sent_again(monkeypatch, tmp_path):
    """A resumed run repeats steps; a killed run may lack the evaluation of its last step."""
    run_dir, recorders = tmp_path / "a", []

    def start(run_dir, *_):
        tracker_id(run_dir, "wandb")
        recorder = Recorder(run_dir, {}, 0)
        recorders.append(recorder)
        return Tracker(skip_sent(run_dir, "wandb", recorder.log), recorder.finish)

    def session(folder, start_step, end, tracker, *, evaluates=True):
        recorders.clear()
        with new_log(folder, start_step, logger=(tracker,)) as log:
            for step in range(start_step + 1, end + 1):
                log_step(log, step)
            if evaluates:
                with log.evaluation(end) as record:
                    record["val_loss"] = 1.0
        values = [value for recorder in recorders for value in recorder.values]
        return sorted(step for step, name, _ in values if name in ("train_loss", "val_loss"))

    monkeypatch.setitem(TRACKERS, "wandb", start)
    monkeypatch.setitem(TRACKERS, "trackio", lambda *_: Tracker(lambda *_: None, list))
    run_dir.mkdir()
    assert session(run_dir, 0, 3, "trackio") == []  # with another tracker
    assert session(run_dir, 2, 4, "wandb", evaluates=False) == [3, 4]
    assert session(run_dir, 2, 4, "wandb") == [4]  # only the evaluation
    assert session(run_dir, 2, 5, "wandb") == [5, 5]
    shutil.copytree(run_dir, tmp_path / "copy")
    assert session(tmp_path / "copy", 2, 4, "wandb") == [3, 4, 4]  # it has an id of its own


def test_missing_package_is_refused(monkeypatch, tiny_flags, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it was not installed
    with pytest.raises(ValueError, match=r"--logger wandb needs .* pip install -r requirements"):
        main([*tiny_flags, "--run-name=a", "--logger=wandb"])
    assert not (tmp_path / "runs/a").exists()


# --- what the libraries wrote, read back ------------------------------------------------------


def tensorboard_values(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    steps = [scalar.step for scalar in events.Scalars("train_loss")]
    assert steps == list(range(1, 11))  # those of the first session after step 4 are removed
    for name in events.Tags()["scalars"]:
        yield from ((scalar.step, name, scalar.value) for scalar in events.Scalars(name))


def wandb_values(run_dir):
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    assert [path.name for path in files] == ["run-ours.wandb"] * 2  # of one id
    assert b"my name" in files[0].read_bytes()
    values, deadline = [], time.monotonic() + 600
    while (10, "train_loss") not in by_step(values):
        assert time.monotonic() < deadline
        time.sleep(0.1)  # wandb's own process may write the last rows after ours has ended
        with suppress(Exception):  # the last record is not whole yet
            values = [value for path in files for value in wandb_history(path)]
    return values


def wandb_history(path):
    """The values in an offline file, in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, body = path.read_bytes(), 7, b""
    while position < len(data):
        if 32768 - position % 32768 < 7:  # a header does not cross a block's edge
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        body += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            items, body = Record.FromString(body).history.item, b""
            row = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in items}
            yield from ((row["step"], *item) for item in row.items())


def trackio_values(run_dir):
    with sqlite3.connect(run_dir.parent / "hf" / "trackio" / "gpt2.db") as database:
        query = "SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id"
        rows = database.execute(query).fetchall()
    assert len({(run_id, name) for run_id, name, *_ in rows}) == 1
    return [(step, *item) for *_, step, row in rows for item in json.loads(row).items()]


SESSION = f"""
import os, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
for name in [*os.environ]:  # this machine's settings
    if name.startswith(("WANDB_", "TRACKIO_")): del os.environ[name]
os.environ |= ENVIRONMENT
from training import trackers
trackers.WANDB_SECONDS = 600  # on a machine that is slow, or busy
from run_files import log_session
"""


@pytest.mark.slow
@pytest.mark.parametrize("tracker", TRACKERS)
def test_library_has_the_run_and_its_resumed_part(commands, tmp_path, tracker):
    """Under the test's own settings and logins of the libraries alone."""
    pytest.importorskip(tracker)
    environment = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CONFIG", "CACHE", "DATA")}
    environment |= {"NETRC": str(tmp_path / "none"), "HF_HOME": str(tmp_path / "hf")}
    environment |= {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "WANDB_INIT_TIMEOUT": "600"}
    first = environment | {"WANDB_RUN_ID": "ours", "WANDB_NAME": "my name"}
    script, run_dir = tmp_path / "script.py", tmp_path / "a"
    for start, end, given in ((0, 8, first), (4, 10, environment)):
        session = f"log_session(Path({str(run_dir)!r}), {tracker!r}, {start}, {end})"
        script.write_text(f"ENVIRONMENT = {given!r}\n{SESSION}{session}\n")
        done = commands.run(script)
        assert done.code == 0, done
        assert "warning: --logger" not in done.stdout
    values = {"tensorboard": tensorboard_values, "wandb": wandb_values, "trackio": trackio_values}
    found = [*values[tracker](run_dir)]
    steps = [step for step, name, _ in found if name == "train_loss"]
    assert steps == list(range(1, 11))
    shown, expected = by_step(found), by_step(measured(run_dir))
    if tracker != "tensorboard":  # which cannot replace the values of steps 5 to 8
        lines = [line for line in read_lines(run_dir / "metrics.jsonl") if "step" in line]
        first = [(r["step"], n, x) for r in reversed(lines) for n, x in r.items() if n != "step"]
        expected = {key: by_step(first)[key] for key in expected}
    assert {key: shown[key] for key in expected} == pytest.approx(expected, rel=1e-6)
