import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from forked import assert_refused

from runtime import trackers
from runtime.distributed import DistInfo
from runtime.metrics import read_metrics
from runtime.trackers import TRACKERS, Tracker, Trackers
from train_gpt2 import main
from training.config import TrainConfig, config_from_settings
from training.run_dir import parse_config

CONSTANT_RATE = ("--max-lr=1e-3", "--min-lr=1e-3")  # so that --max-steps does not change it
SECRETS = {"WANDB_API_KEY": "SECRET" * 7, "HF_TOKEN": "hf_SECRET" * 4, "MY_PASSWORD": "SECRETword"}


class Recorder(Tracker):
    """A tracker as a user would write it: a line of JSON for each value."""

    def start(self, run):
        self.file = (run.folder / "recorded.jsonl").open("a")
        self.write(run.start_step, "config", "", run.config)

    def log(self, step, values):
        for name, value in values.items():
            is_figure = isinstance(value, Path)
            self.write(step, "figure" if is_figure else type(value).__name__, name, value)

    def write(self, *entry):
        print(json.dumps(entry, default=str), file=self.file, flush=True)

    def finish(self):
        self.write(0, "end", "", "")


class Failing(Recorder):
    def log(self, step, values):
        if step == 3:
            raise RuntimeError(f"https://me:word@host/x?key=1\nrefuses {os.environ['HF_TOKEN']}")


class Hanging(Tracker):
    began, released, steps = threading.Event(), threading.Event(), []

    def start(self, run):
        self.steps.clear()

    def log(self, step, values):
        self.began.set()
        self.released.wait()
        self.steps.append(step)

    def finish(self):
        pass


def recorded(run_dir, *kinds):
    """What the recorder got, as `(step, name, value)`; by default all numbers."""
    lines = map(json.loads, (run_dir / "recorded.jsonl").read_text().splitlines())
    kinds = kinds or ("int", "float", "bool")
    return [(step, name, value) for step, kind, name, value in lines if kind in kinds]


def measured(run_dir):
    """The numbers in `metrics.jsonl` that no resumed run did again, as `recorded` gives them."""
    values = {  # both records of an evaluated step have its tokens
        (record["step"], name): value
        for record in read_metrics(run_dir / "metrics.jsonl")
        for name, value in record.items()
        if name != "step" and value is not None
    }
    return [(*key, value) for key, value in values.items()]


def is_exact(name):
    """Whether a resumed run repeats a number: it is neither a time nor a memory's size."""
    return not any(part in name for part in ("time", "second", "memory"))


def by_step(values, name):
    found = [(step, value) for step, each, value in values if each == name]
    assert len(dict(found)) == len(found)  # no step is doubled
    return dict(found)


def forget_after(run_dir, step):
    """Leave the checkpoints up to a step, as if the run had died after it."""
    for path in (run_dir / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            (path / "manifest.json").unlink()


def log_session(folder, records, start_step=0):
    """Log `(step, values)` in one session of a run, to what the name tensorboard stands for."""
    fed = Trackers(["tensorboard"], DistInfo(), list)
    with fed.follow(folder, {}, start_step):
        for step, values in records:
            fed.log(step=step, **values)


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(TRACKERS, "tensorboard", Recorder)


def test_tracker_gets_what_the_run_writes(recorder, tiny_flags, tmp_path):
    main([*tiny_flags, "--run-name=a", "--sample-every=8", "--logger=tensorboard"])
    run_dir = tmp_path / "runs/a"
    assert recorded(run_dir) == measured(run_dir)
    assert {"train_loss", "lr", "val_loss", "samples"} <= {name for _, name, _ in measured(run_dir)}
    texts = recorded(run_dir, "str")
    assert [(step, name) for step, name, _ in texts] == [(0, "sample_text"), (8, "sample_text")]
    assert "".join(f"{text}\n" for *_, text in texts) == (run_dir / "samples.txt").read_text()
    loss, throughput, _ = recorded(run_dir, "figure", "end")
    assert (loss[:2], throughput[:2]) == ((8, "figures/loss"), (8, "figures/throughput"))
    assert Path(loss[2]).read_bytes().startswith(b"\x89PNG")
    [(_, _, config)] = recorded(run_dir, "config")
    assert config == json.loads((run_dir / "config.json").read_text())
    assert config["logger"] == ["tensorboard"]


def test_resumed_run_continues_the_curve_without_doubled_steps(recorder, tiny_flags, tmp_path):
    flags, run_dir = [*tiny_flags, "--run-name=a", "--checkpoint-every=3"], tmp_path / "runs/a"
    main([*flags, *CONSTANT_RATE, "--logger=tensorboard"])
    forget_after(run_dir, 3)
    main([f"--out-dir={tmp_path}/runs", "--run-name=a", "--resume=auto", "--max-steps=10"])
    for name in ("train_loss", "lr", "val_loss"):
        curve = by_step(recorded(run_dir), name)
        assert curve == by_step(measured(run_dir), name)
    assert list(curve) == [0, 4, 8, 10]
    assert len(recorded(run_dir, "config")) == 2


@pytest.mark.slow
def test_tracker_that_is_added_at_a_resume_gets_every_step_from_there(
    recorder, tiny_flags, tmp_path
):
    flags, run_dir = [*tiny_flags, "--run-name=a", "--checkpoint-every=3"], tmp_path / "runs/a"
    main(flags)
    forget_after(run_dir, 3)
    main([*flags, "--resume=auto", "--logger", "tensorboard"])
    assert list(by_step(recorded(run_dir), "train_loss")) == [4, 5, 6, 7, 8]
    main([*flags, "--resume=auto", "--max-steps=9", "--logger"])  # without one again
    assert list(by_step(recorded(run_dir), "train_loss")) == [4, 5, 6, 7, 8]


def test_follow_logs_what_a_killed_session_had_not(recorder, tmp_path):
    log_session(tmp_path, [(4, {"train_loss": 4.0}), (4, {"val_loss": 4.5})])
    log_session(tmp_path, [(5, {"train_loss": 5.0}), (6, {"train_loss": 6.0, "lr": 0.1})], 4)
    # Killed before the validation at step 6; the one at step 4 was to be scored on something else.
    again = [(4, {"hellaswag_acc": 0.25}), (5, {"train_loss": 5.1}), (6, {"train_loss": 6.1})]
    log_session(tmp_path, [*again, (6, {"val_loss": 6.5}), (7, {"train_loss": 7.0})], 4)
    (tmp_path / "trackers/tensorboard.json").write_text("")  # torn by a crash
    log_session(tmp_path, [(8, {"train_loss": 8.0})], 7)
    assert recorded(tmp_path) == [
        *((4, "train_loss", 4.0), (4, "val_loss", 4.5), (5, "train_loss", 5.0)),
        *((6, "train_loss", 6.0), (6, "lr", 0.1), (4, "hellaswag_acc", 0.25)),
        *((6, "val_loss", 6.5), (7, "train_loss", 7.0), (8, "train_loss", 8.0)),
    ]


def test_log_leaves_out_what_is_not_finite_and_records_without_a_step(recorder, tmp_path):
    values = {"a": None, "b": float("nan"), "c": float("inf"), "d": 1.5}
    log_session(tmp_path, [(1, values), (None, {"saved_step": 1})])
    assert recorded(tmp_path) == [(1, "d", 1.5)]


def test_tracker_that_fails_costs_one_warning(monkeypatch, tiny_flags, tmp_path, capsys):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(TRACKERS, "wandb", Failing)
    monkeypatch.setitem(TRACKERS, "tensorboard", Recorder)
    main([*tiny_flags, "--run-name=a", "--logger", "wandb", "tensorboard"])
    output = capsys.readouterr()
    assert output.err == ""
    [warning] = [line for line in output.out.splitlines() if "warning" in line]
    assert warning == (
        "warning: --logger wandb has failed, and gets nothing more: "
        "RuntimeError: https://host/x refuses ***"
    )
    run_dir = tmp_path / "runs/a"
    assert recorded(run_dir) == measured(run_dir)  # the other one has everything
    assert not any("SECRET" in path.read_text() for path in run_dir.glob("*.json*"))


def test_tracker_that_hangs_costs_one_warning(monkeypatch, tiny_flags, tmp_path, capsys):
    monkeypatch.setitem(TRACKERS, "tensorboard", Hanging)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)
    Hanging.released.clear()
    try:
        main([*tiny_flags, "--run-name=a", "--logger=tensorboard"])
    finally:
        Hanging.released.set()
        for thread in threading.enumerate():
            if thread.name == "tensorboard":  # or it would count its steps in another test
                thread.join(300)
    output = capsys.readouterr().out
    assert "step 8/8 | loss" in output
    assert "done: " in output
    [warning] = [line for line in output.splitlines() if "warning" in line]
    assert "--logger tensorboard has not finished after 0.1 s" in warning


def test_tracker_that_is_slow_loses_records(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(TRACKERS, "tensorboard", Hanging)
    monkeypatch.setattr(trackers, "QUEUE_RECORDS", 3)
    Hanging.began.clear()
    Hanging.released.clear()
    fed = Trackers(["tensorboard"], DistInfo(), list)
    with fed.follow(tmp_path, {}, 0):
        fed.log(step=0, loss=1.0)
        assert Hanging.began.wait(300)
        for step in range(1, 10):
            fed.log(step=step, loss=1.0)
        Hanging.released.set()
    assert Hanging.steps == [0, 1, 2, 3]
    assert capsys.readouterr().out.count("warning: --logger tensorboard is too slow") == 1


@pytest.mark.slow
def test_process_ends_though_a_tracker_hangs(tmp_path):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from runtime import trackers; from runtime.distributed import DistInfo\n"
        "class Hanging(trackers.TensorBoard):\n"
        "    def start(self, run): time.sleep(1000)\n"
        "trackers.TRACKERS['tensorboard'], trackers.FINISH_SECONDS = Hanging, 0.1\n"
        "fed = trackers.Trackers(['tensorboard'], DistInfo(), list)\n"
        "with fed.follow(Path(sys.argv[1]), {}, 0): fed.log(step=1, loss=1.0)\n"
    )
    command = [sys.executable, "-c", script, tmp_path]
    done = subprocess.run(command, check=True, capture_output=True, timeout=600, cwd=ROOT)
    assert done.stdout.count(b"warning") == 1


def test_logger_is_saved_and_read_back():
    config, _ = parse_config(["--logger", "tensorboard", "trackio"])
    assert config.logger == ("tensorboard", "trackio")
    saved = json.loads(json.dumps(config.saved()))
    assert config_from_settings(saved, Path("config.json")).saved() == config.saved() == saved
    for wrong in ("wandb", ["wandb", 1], ["neptune"]):
        with pytest.raises(ValueError, match=r"logger is .* expected"):
            config_from_settings({"logger": wrong}, Path("config.json"))
    assert TrainConfig().logger == ()


MAIN = "import train_gpt2\nfrom runtime.cli import run_command\nrun_command(train_gpt2.main)\n"


def test_missing_package_is_refused_in_one_line(commands, tiny_flags, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom runtime.trackers import TRACKERS\n"
        f"TRACKERS['wandb'].package = 'no_such_package'\n{MAIN}"
    )
    done = commands.run(script, *tiny_flags, "--run-name=a", "--logger=wandb")
    assert_refused(done, "--logger wandb needs", "pip install -r requirements-extras.txt")
    assert not (tmp_path / "runs/a").exists()


@pytest.mark.slow
def test_only_rank_0_has_trackers(commands, tiny_flags, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "from test_trackers import TRACKERS, Recorder\n"
        "class OfRank(Recorder):\n"
        "    def start(self, run):\n"
        "        super().start(run)\n"
        "        (run.folder / f'rank_{os.environ[\"RANK\"]}').touch()\n"
        f"TRACKERS['tensorboard'] = OfRank\n{MAIN}"
    )
    flags = (*tiny_flags, "--micro-batch-size=2", "--run-name=a", "--logger=tensorboard")
    done = commands.run_ranks(2, script, *flags)
    assert done.code == 0, done.stderr
    assert [path.name for path in (tmp_path / "runs/a").glob("rank_*")] == ["rank_0"]
    assert recorded(tmp_path / "runs/a") == measured(tmp_path / "runs/a")


# --- what the libraries wrote, read back ------------------------------------------------------


def as_set_by(tmp_path, **environment):
    """The beginning of a script: only the test's own settings of the libraries, and no HOME."""
    folders = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CONFIG", "CACHE", "DATA")}
    environment |= folders | {"NETRC": str(tmp_path / "none"), "HF_HOME": str(tmp_path / "hf")}
    return (
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "for name in [*os.environ]:\n"
        "    if name.startswith(('WANDB_', 'TRACKIO_')): del os.environ[name]\n"
        f"os.environ |= {environment!r}\n"
        "from runtime import trackers\n"
        "trackers.FINISH_SECONDS = 600  # on a machine that is slow, or busy\n"
    )


def train_and_resume(commands, tiny_flags, tmp_path, logger, **environment):
    """Train to step 8, then again from step 3 to 10, as processes; the folder."""
    run_dir, output = tmp_path / "runs/a", ""
    script = tmp_path / "script.py"
    script.write_text(as_set_by(tmp_path, **SECRETS, **environment) + MAIN)
    flags = [*tiny_flags, *CONSTANT_RATE, "--run-name=a", "--checkpoint-every=3"]
    flags += ["--sample-every=8", f"--logger={logger}", "--resume=auto"]
    for more in ("--max-steps=8", "--max-steps=10"):
        done = commands.run(script, *flags, more)
        assert done.code == 0, done
        output += done.stdout + done.stderr
        if more == "--max-steps=8":
            forget_after(run_dir, 3)
    assert "warning: --logger" not in output
    assert "SECRET" not in output
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if b"SECRET" in path.read_bytes()]
    return run_dir


@pytest.mark.slow
def test_tensorboard_shows_the_run(tiny_flags, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import plugin_event_accumulator
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags, run_dir = [*tiny_flags, "--run-name=a", "--checkpoint-every=3"], tmp_path / "runs/a"
    main([*flags, "--sample-every=8", "--logger=tensorboard"])
    forget_after(run_dir, 3)
    main([*flags, "--sample-every=8", "--resume=auto", "--max-steps=10"])
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()
    names = {name for _, name, _ in measured(run_dir)}
    assert set(tags["scalars"]) == names
    for name in names:
        shown = {scalar.step: np.float32(scalar.value) for scalar in events.Scalars(name)}
        assert len(shown) == len(events.Scalars(name))
        assert shown == {s: np.float32(v) for s, v in by_step(measured(run_dir), name).items()}
    events = plugin_event_accumulator.EventAccumulator(str(run_dir / "tensorboard")).Reload()
    texts, configs = (
        [
            event.tensor_proto.string_val[0].decode()
            for event in events.Tensors(f"{tag}/text_summary")
        ]
        for tag in ("sample_text", "config")
    )
    assert [text.count("Hello, I'm a language model,") for text in texts] == [4, 4, 4]
    assert "figures/loss" in tags["images"]
    assert '"max_steps": 8' in configs[0]


def check_rows(run_dir, rows):
    """A tracker's rows, as (step, values), are those of the run, each step once."""
    shown = [(step, name, value) for step, row in rows for name, value in row.items()]
    for name in {name for _, name, _ in measured(run_dir)}:
        expected, found = by_step(measured(run_dir), name), by_step(shown, name)
        assert list(found) == list(expected)
        assert found == expected or not is_exact(name)
    assert list(by_step(shown, "sample_text")) == [0, 8, 10]
    assert list(by_step(shown, "figures/loss")) == [8, 10]


def wandb_rows(path):
    """The history of an offline file: LevelDB's log format, in it wandb's own records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, body = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position < len(data):
        if 32768 - position % 32768 < 7:  # a header does not cross a block's edge
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        body += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            record, body = Record.FromString(body), b""
            if record.WhichOneof("record_type") == "history":
                yield {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }


@pytest.mark.slow
def test_wandb_has_the_run(commands, tiny_flags, tmp_path):
    pytest.importorskip("wandb")
    run_dir = train_and_resume(commands, tiny_flags, tmp_path, "wandb", WANDB_MODE="offline")
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1  # of one id
    rows = [row for path in files for row in wandb_rows(path)]
    check_rows(run_dir, ((row["step"], row) for row in rows))


@pytest.mark.slow
def test_trackio_has_the_run(commands, tiny_flags, tmp_path):
    pytest.importorskip("trackio")
    run_dir = train_and_resume(commands, tiny_flags, tmp_path, "trackio", HF_HUB_OFFLINE="1")
    with sqlite3.connect(run_dir / "trackio/gpt2.db") as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics").fetchall()
        configs = database.execute("SELECT config FROM configs").fetchall()
    assert len({run_id for run_id, *_ in rows}) == 1
    assert {name for _, name, *_ in rows} == {"a"}
    check_rows(run_dir, ((step, json.loads(metrics)) for *_, step, metrics in rows))
    assert json.loads(configs[0][0])["n_embd"] == 32


@pytest.mark.slow
def test_wandb_without_a_login_says_what_to_do(commands, tmp_path):
    pytest.importorskip("wandb")
    script = tmp_path / "script.py"
    script.write_text(
        as_set_by(tmp_path) + "from pathlib import Path\n"
        "from runtime.distributed import DistInfo\n"
        "fed = trackers.Trackers(['wandb'], DistInfo(), list)\n"
        "with fed.follow(Path(sys.argv[1]), {}, 0): fed.log(step=1, loss=1.0)\n"
    )
    done = commands.run(script, tmp_path)
    assert done.code == 0, done
    assert done.stdout.count("not logged in: run `wandb login`, or set WANDB_MODE=offline") == 1
