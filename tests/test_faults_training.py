"""Training meets kills, signals and hung ranks: real processes, real signals."""

import json
import os
import pty
import random
import signal
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
import torch.distributed.run
from conftest import ROOT, TINY_RUN, series, torchrun

from formats.checkpoint import verify_checkpoint
from formats.load import latest_checkpoint
from train_gpt2 import main
from training.stopping import StopRequest

PATIENCE = 600  # seconds: what takes longer hangs

# train_gpt2.py with hooks that make some of its work slow, so that a signal can fall into it.
SLOWED = """
import os, sys, time
from contextlib import suppress
sys.path.insert(0, {root!r})
import evaluation, train_gpt2
from runtime.cli import run_command

def slowed(function, word, seconds=0.3):
    def wrapper(*args, **kwargs):
        with suppress(OSError):  # the terminal may be closed
            sys.stdout.write(word + "\\n")  # in one write, so that lines of two ranks stay whole
            sys.stdout.flush()
        time.sleep(seconds)
        return function(*args, **kwargs)
    return wrapper

slow = {slow!r}
if "validation" in slow:
    validation_batches = evaluation.validation_batches
    evaluation.validation_batches = lambda *args, **kwargs: map(
        slowed(lambda batch: batch, "validating", 0.1), validation_batches(*args, **kwargs)
    )
if "disk" in slow:
    os.fsync = slowed(os.fsync, "flushing", 0.1)
if "step" in slow:
    train_gpt2.train_step = slowed(train_gpt2.train_step, "training")
{more}
run_command(train_gpt2.main)
"""


@pytest.fixture
def slowed(tmp_path):
    """A script that is train_gpt2.py with slow parts."""

    def write(*slow, more=""):
        script = tmp_path / "slowed.py"
        script.write_text(SLOWED.format(root=str(ROOT), slow=slow, more=more), encoding="utf-8")
        return script

    return write


def run_flags(tiny_data, out_dir):
    return [f"--data-dir={tiny_data}", f"--out-dir={out_dir}", *TINY_RUN, "--max-steps=24"]


@pytest.fixture(scope="module")
def whole(tiny_data, tmp_path_factory):
    """The losses of an uninterrupted run of the flags that the tests here use."""
    out_dir = tmp_path_factory.mktemp("whole")
    main([*run_flags(tiny_data, out_dir), "--run-name=a"])
    return losses(out_dir / "a")


@pytest.fixture
def flags(tiny_data, tmp_path):
    return [*run_flags(tiny_data, tmp_path / "runs"), "--run-name=a", "--resume=auto"]


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "runs" / "a"


class Job:
    """A script that runs, alone or as torchrun's ranks; as a context manager, it ends them all."""

    def __init__(self, commands, folder, script, *args):
        self.commands, self.folder, self.code = commands, folder, None
        self.pid = commands.start(folder, script, *args)

    @property
    def output(self):
        path = self.folder / "stdout"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    @property
    def errors(self):
        return (self.folder / "stderr").read_text("utf-8", "replace")

    def wait_for(self, word, count=1):
        """Wait until the output has a word so many times more than now."""
        wanted, deadline = self.output.count(word) + count, time.monotonic() + PATIENCE
        while self.output.count(word) < wanted:
            is_running = psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
            assert is_running, f"no {word!r} in {self.output}\n{self.errors}"
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)

    def send(self, number):
        os.kill(self.pid, number)

    def ranks(self):
        """The trainers that torchrun has started, by their rank."""
        children = psutil.Process(self.pid).children()
        return {int(child.environ()["RANK"]): child for child in children}

    def end(self):
        """Wait for the end; return the exit code and what was said on stderr."""
        [self.code], _ = self.commands.wait([self.pid], PATIENCE)
        return self.code, self.errors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.code is None:
            for process in (*psutil.Process(self.pid).children(), psutil.Process(self.pid)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.end()


@pytest.fixture
def start(commands, tmp_path):
    """What starts a script as a `Job`; with `ranks`, under torchrun."""

    def start(script, *args, ranks=None):
        if ranks is not None:
            launcher = ("--standalone", f"--nproc_per_node={ranks}")
            launcher += ("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",)
            script, args = torch.distributed.run.__file__, (*launcher, script, *args)
        return Job(commands, Path(tempfile.mkdtemp(dir=tmp_path)), script, *args)

    return start


def losses(run_dir):
    return series(run_dir, "train_loss")


def saved_steps(run_dir):
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))


def mark(run_dir):
    written = json.loads((run_dir / "PREEMPTED").read_text())
    return written["step"], written["reason"]


# --- kill -9 ----------------------------------------------------------------------------------


def test_killed_in_the_middle_of_a_save_goes_on_bit_for_bit(start, slowed, flags, run_dir, whole):
    script, chance = slowed("disk"), random.Random(0)
    torn = 0
    for _ in range(3):
        with start(script, *flags, "--checkpoint-every=2", "--val-every=0") as job:
            job.wait_for("| loss")
            job.wait_for("flushing", chance.randint(6, 20))  # each save flushes several times
            job.send(signal.SIGKILL)
            job.end()
        torn += len(list(run_dir.glob("checkpoints/.step_*.tmp")))
        verify_checkpoint(latest_checkpoint(run_dir))
    assert torn, "no kill fell into a save"
    main([*flags, "--val-every=0"])
    assert losses(run_dir) == whole
    assert not list(run_dir.glob("checkpoints/.*"))


@pytest.mark.parametrize("fate", ["killed", "hangs"])
def test_lost_rank_ends_the_job_and_leaves_no_process(
    commands, start, slowed, flags, run_dir, whole, fate
):
    flags += ["--micro-batch-size=2"]
    timeout = ["--step-timeout=0.2"] if fate == "hangs" else []
    with start(slowed("step"), *flags, *timeout, ranks=2) as job:
        job.wait_for("step  9/")
        ranks = job.ranks()
        if fate == "hangs":
            ranks[1].suspend()
            assert not psutil.wait_procs([ranks[0]], PATIENCE)[1]
        ranks[1].kill()  # torchrun waits 30 s for one that hangs before it does this
        code, errors = job.end()
    assert code != 0
    assert not any(rank.is_running() for rank in ranks.values())
    [stopped] = [line for line in errors.splitlines() if line.startswith("stopped:")]
    assert "another process has exited or cannot be reached: " in stopped
    assert "last checkpoint step_0" in stopped
    assert "resume with --resume" in stopped
    assert commands.run_ranks(2, "train_gpt2", *flags).code == 0
    assert losses(run_dir) == pytest.approx(whole, rel=0, abs=1e-5)


def test_save_that_takes_longer_than_the_step_timeout_does_not_end_the_run(
    commands, slowed, flags, run_dir
):
    more = """
if os.environ["RANK"] == "0":
    os.fsync = slowed(os.fsync, "flushing", 2.5)  # each save flushes seven times
"""
    flags += ["--micro-batch-size=2", "--step-timeout=0.2", "--max-steps=2", "--checkpoint-every=1"]
    done = commands.run_ranks(2, slowed(more=more), *flags)
    assert done.codes == [0, 0], done.stderr
    assert saved_steps(run_dir) == [1, 2]


# --- SIGTERM, SIGUSR1, SIGHUP, Ctrl-C -----------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_marks_and_resumes_bit_for_bit(start, slowed, flags, run_dir, whole, number):
    with start(slowed("step"), *flags, "--checkpoint-every=0") as job:
        job.wait_for("step  2/")
        job.send(number)
        code, errors = job.end()
    step, reason = mark(run_dir)
    assert reason == number.name
    assert 2 <= step < 24
    assert saved_steps(run_dir) == [step]
    said = f"after step {step}; last checkpoint step_{step:08d}, resume with --resume {run_dir}\n"
    if number == signal.SIGINT:
        assert (code, errors) == (130, f"interrupted {said}")
    else:
        assert (code, errors) == (0, "")
        assert f"{number.name}: stopped {said}" in job.output
    main(flags)
    assert losses(run_dir) == whole
    assert not (run_dir / "PREEMPTED").exists()


@pytest.mark.parametrize(
    ("target", "number"), [("torchrun", signal.SIGUSR1), ("one rank", signal.SIGTERM)]
)
def test_signal_to_torchrun_or_a_rank_stops_all_after_the_same_step(
    start, slowed, flags, run_dir, target, number
):
    flags += ["--micro-batch-size=2", "--checkpoint-every=0"]
    with start(slowed("step"), *flags, ranks=2) as job:
        job.wait_for("step  2/")
        if target == "torchrun":
            job.send(number)
        else:
            job.ranks()[1].send_signal(number)
        code, errors = job.end()
    assert code == 0 if target == "one rank" else "SignalException" in errors  # torchrun's own
    step, reason = mark(run_dir)
    assert reason == number.name
    assert saved_steps(run_dir) == [step]
    assert sorted(losses(run_dir)) == list(range(1, step + 1))
    assert job.output.count(f": stopped after step {step}; last checkpoint") == 1
    verify_checkpoint(latest_checkpoint(run_dir))


@pytest.mark.parametrize(
    ("launcher", "ending", "reason"),
    [("python", "close", "SIGHUP"), ("torchrun", "^C", "SIGINT")],
)
def test_terminal_that_is_closed_or_sends_ctrl_c_saves_and_marks(
    slowed, flags, run_dir, launcher, ending, reason
):
    flags += ["--micro-batch-size=2", "--checkpoint-every=0"]
    script = slowed("step")
    command = (
        torchrun(script, *flags) if launcher == "torchrun" else [sys.executable, script, *flags]
    )
    pid, terminal = pty.fork()  # as ssh makes it
    if pid == 0:
        os.execv(command[0], command)
    shown = ""
    while "step  2/" not in shown:
        shown += os.read(terminal, 4096).decode(errors="replace")  # the end may tear a character
    family = psutil.Process(pid).children(recursive=True)
    if ending == "^C":
        os.write(terminal, b"\x03")
        with suppress(OSError):  # it has closed its end
            while True:
                os.read(terminal, 4096)
    os.close(terminal)  # the kernel sends SIGHUP; from now on a write to the terminal is an error
    os.waitpid(pid, 0)
    assert not psutil.wait_procs(family, PATIENCE)[1]
    step, marked = mark(run_dir)
    assert marked == reason
    assert 2 <= step < 24
    assert saved_steps(run_dir) == [step]
    verify_checkpoint(latest_checkpoint(run_dir))


def test_stop_request_ignores_what_nohup_ignores_and_ends_at_a_second_ctrl_c_only():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for first in (signal.SIGTERM, signal.SIGINT):
            with StopRequest() as stop:
                os.kill(os.getpid(), signal.SIGHUP)
                assert not stop.signal
                os.kill(os.getpid(), first)
                assert stop.signal
                with pytest.raises(KeyboardInterrupt) if first == signal.SIGINT else nullcontext():
                    os.kill(os.getpid(), signal.SIGINT)
                assert stop.signal_name() == first.name
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_interrupts_the_first_evaluation_and_auto_begins_again(
    start, slowed, flags, run_dir
):
    flags += ["--micro-batch-size=1", "--val-tokens=1900"]  # 59 batches of a tenth of a second
    with start(slowed("validation"), *flags) as job:
        job.wait_for("validating")
        job.send(signal.SIGTERM)
        assert job.end() == (0, "")
    assert mark(run_dir) == (0, "SIGTERM")
    assert "val_loss" not in job.output
    assert "after step 0; no checkpoint yet: start over with the same command" in job.output
    main([*flags, "--max-steps=2"])
    assert sorted(losses(run_dir)) == [1, 2]
