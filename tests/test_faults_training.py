"""Training meets kills, signals and lost processes: real processes, real signals."""

import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, TINY_RUN, copy_code, no_spaces, torchrun
from forked import assert_refused

from runtime.checkpoint import latest_checkpoint, verify_checkpoint
from runtime.device import compiler_problem
from runtime.metrics import read_metrics
from train_gpt2 import main

CPU = torch.device("cpu")
SAMPLE = ROOT / "assets" / "hellaswag_sample.jsonl"
PATIENCE = 600  # seconds: what takes longer hangs

# train_gpt2.py with hooks that make some of its work slow, so that a signal can fall into it.
SLOWED = """
import os, sys, time
sys.path.insert(0, {root!r})
from runtime.startup import prepare_process
prepare_process()
import hellaswag, train_gpt2
from runtime.cli import run_command

def slowed(function, word, seconds=0.3):
    def wrapper(*args, **kwargs):
        sys.stdout.write(word + "\\n")  # in one write, so that lines of two ranks stay whole
        sys.stdout.flush()
        time.sleep(seconds)
        return function(*args, **kwargs)
    return wrapper

slow = {slow!r}
if "validation" in slow:
    validation_batches = train_gpt2.validation_batches
    train_gpt2.validation_batches = lambda *args, **kwargs: map(
        slowed(lambda batch: batch, "validating"), validation_batches(*args, **kwargs)
    )
if "hellaswag" in slow:
    hellaswag.score_examples = slowed(hellaswag.score_examples, "scoring", 1.0)
if "disk" in slow:
    os.fsync = slowed(os.fsync, "flushing", 0.1)
if "step" in slow:
    train_gpt2.train_step = slowed(train_gpt2.train_step, "training")
if "asked" in slow:  # the twelfth step waits until this process was asked to stop
    train_step, steps = train_gpt2.train_step, []
    def when_asked(trainer, *args):
        steps.append(args)
        while len(steps) == 12 and not trainer.stop.is_asked:
            time.sleep(0.01)
        return train_step(trainer, *args)
    train_gpt2.train_step = when_asked
{more}
run_command(train_gpt2.main, optional_output=True)
"""


@pytest.fixture
def slowed(tmp_path):
    """A script that is train_gpt2.py with slow parts."""

    def write(*slow, more=""):
        script = tmp_path / "slowed.py"
        script.write_text(SLOWED.format(root=str(ROOT), slow=slow, more=more), encoding="utf-8")
        return script

    return write


@pytest.fixture(scope="module")
def whole(tiny_data, tmp_path_factory):
    """The losses of an uninterrupted run of the flags that the tests here use."""
    out_dir = tmp_path_factory.mktemp("whole")
    main([*run_flags(tiny_data, out_dir), "--run-name=a"])
    return losses(out_dir / "a")


def run_flags(tiny_data, out_dir):
    return [f"--data-dir={tiny_data}", f"--out-dir={out_dir}", *TINY_RUN, "--max-steps=24"]


@pytest.fixture
def flags(tiny_data, tmp_path):
    return [*run_flags(tiny_data, tmp_path / "runs"), "--run-name=a", "--resume=auto"]


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "runs" / "a"


class Job:
    """A command whose lines can be waited for; ended, whatever happens, with its children."""

    def __init__(self, *command, **kwargs):
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **kwargs,
        )
        self.output = ""

    def wait_for(self, start):
        """Read lines until one begins with `start`."""
        for line in self.process.stdout:
            self.output += line
            if line.startswith(start):
                return
        pytest.fail(f"no line {start!r} in {self.output}\n{self.process.stderr.read()}")

    def send(self, number):
        self.process.send_signal(number)

    def ranks(self):
        """The trainers that torchrun has started, by their rank."""
        children = psutil.Process(self.process.pid).children()
        return {int(child.environ()["RANK"]): child for child in children}

    def sockets(self):
        """The network connections and listening sockets of the process and its children."""
        trainer, found = psutil.Process(self.process.pid), []
        for process in [trainer, *trainer.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # a compiler that has ended
                found += process.net_connections("inet")
        return found

    def end(self):
        """Wait for the end; return the exit code and what was said on stderr."""
        output, errors = self.process.communicate(timeout=PATIENCE)
        self.output += output
        return self.process.returncode, errors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            family = [*psutil.Process(self.process.pid).children(recursive=True)]
            self.process.kill()
            for child in family:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.communicate()


class ForkedJob:
    """The same of a script that `commands` starts: a process of its own, at once."""

    def __init__(self, commands, folder, script, *args, **environment):
        self.commands, self.folder, self.output, self.code = commands, folder, "", None
        os.mkfifo(folder / "stdout")
        self.pid = commands.start(folder, script, *args, **environment)
        self.stdout = open(folder / "stdout", encoding="utf-8", errors="replace")  # noqa: SIM115

    wait_for = Job.wait_for

    def send(self, number):
        os.kill(self.pid, number)

    @property
    def process(self):
        return self

    @property
    def stderr(self):
        return (self.folder / "stderr").open(encoding="utf-8", errors="replace")

    def end(self):
        """Wait for the end; return the exit code and what was said on stderr."""
        with ThreadPoolExecutor(1) as pool:  # its end closes the pipe, if only by the time limit
            ended = pool.submit(self.commands.wait, [self.pid], PATIENCE)
            if not self.stdout.closed:
                self.output += self.stdout.read()
            [self.code], _ = ended.result()
        return self.code, self.stderr.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.code is None:
            self.send(signal.SIGKILL)
            self.end()
        self.stdout.close()


@pytest.fixture
def start(commands, tmp_path):
    """What starts a script as a `ForkedJob`."""
    return lambda script, *args, **environment: ForkedJob(
        commands, Path(tempfile.mkdtemp(dir=tmp_path)), script, *args, **environment
    )


def losses(run_dir):
    """Training loss by step, exactly as logged; no step twice."""
    records = [r for r in read_metrics(run_dir / "metrics.jsonl") if "lr" in r]
    by_step = {r["step"]: r["train_loss"] for r in records}
    assert len(by_step) == len(records)
    return by_step


def evaluations(run_dir, name="val_loss"):
    return {r["step"]: r[name] for r in read_metrics(run_dir / "metrics.jsonl") if name in r}


def saved_steps(run_dir):
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))


def names_of(processes):
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            yield process.name()


def mark(run_dir):
    written = json.loads((run_dir / "PREEMPTED").read_text())
    return written["step"], written["reason"]


def train(*args):
    return sys.executable, ROOT / "train_gpt2.py", *args


# --- kill -9 ----------------------------------------------------------------------------------


def test_killed_in_the_middle_of_a_save_goes_on_bit_for_bit(start, slowed, flags, run_dir, whole):
    script, chance = slowed("disk"), random.Random(0)
    torn = 0
    for _ in range(3):
        with start(script, *flags, "--checkpoint-every=2", "--val-every=0") as job:
            job.wait_for("step")
            for _ in range(chance.randint(6, 20)):  # each save flushes several times
                job.wait_for("flushing")
            time.sleep(chance.uniform(0, 0.1))
            job.send(signal.SIGKILL)
        torn += len(list(run_dir.glob("checkpoints/.step_*.tmp")))
        verify_checkpoint(latest_checkpoint(run_dir))
    assert torn, "no kill fell into a save"
    main([*flags, "--val-every=0"])
    assert losses(run_dir) == whole
    assert not list(run_dir.glob("checkpoints/.*"))


def test_kill_of_one_rank_ends_the_job_and_leaves_no_process(
    commands, slowed, flags, run_dir, whole
):
    with Job(*torchrun(slowed("step"), *flags, "--micro-batch-size=2")) as job:
        job.wait_for("step  9/")
        ranks = job.ranks()
        ranks[1].kill()
        code, errors = job.end()
        assert code != 0
        assert not any(child.is_running() for child in ranks.values())
    stopped = [line for line in errors.splitlines() if line.startswith("stopped:")]
    assert len(stopped) == 1
    assert "another process of this run is gone; last checkpoint step_0000000" in stopped[0]
    assert commands.run_ranks(2, "train_gpt2", *flags, "--micro-batch-size=2").code == 0
    assert losses(run_dir) == pytest.approx(whole, rel=0, abs=1e-5)


def test_kill_of_torchrun_ends_its_ranks_saved(commands, slowed, flags, run_dir, whole):
    with Job(*torchrun(slowed("asked"), *flags, "--micro-batch-size=2")) as job:
        job.wait_for("step  9/")
        ranks = job.ranks()
        job.process.kill()
        assert not psutil.wait_procs(ranks.values(), PATIENCE)[1]
        output, errors = job.process.communicate()
    step, reason = mark(run_dir)
    assert reason == "SIGTERM"
    assert saved_steps(run_dir)[-1] == step < 24
    assert f"SIGTERM: stopped after step {step}; " in output
    assert "Traceback" not in errors
    assert commands.run_ranks(2, "train_gpt2", *flags, "--micro-batch-size=2").code == 0
    assert losses(run_dir) == pytest.approx(whole, rel=0, abs=1e-5)


def test_kill_of_torchrun_ends_a_rank_that_waits_for_another(slowed, flags):
    more = "import runtime.startup\nruntime.startup.ORPHAN_SECONDS = 1"
    with Job(*torchrun(slowed("step", more=more), *flags, "--micro-batch-size=2")) as job:
        job.wait_for("step  2/")
        ranks = job.ranks()
        ranks[1].suspend()  # rank 0 soon waits for it in a collective
        job.process.kill()
        try:
            assert not psutil.wait_procs([ranks[0]], PATIENCE)[1]
        finally:
            ranks[1].resume()
        assert not psutil.wait_procs([ranks[1]], PATIENCE)[1]


def test_kill_of_torchrun_ends_ranks_that_still_import(slowed, flags):
    script = slowed()
    importing = "os.write(1, b'importing\\n'); time.sleep(1000)\nimport hellaswag"
    script.write_text(script.read_text().replace("import hellaswag", importing, 1))
    with Job(*torchrun(script, *flags)) as job:
        for _ in range(2):
            job.wait_for("importing")
        ranks = job.ranks()
        job.process.kill()
        assert not psutil.wait_procs(ranks.values(), PATIENCE)[1]


# --- a rank that hangs -----------------------------------------------------------------------


def test_rank_that_hangs_is_not_waited_for_longer_than_the_step_timeout(slowed, flags, run_dir):
    flags += ["--micro-batch-size=2", "--step-timeout=0.25"]
    with Job(*torchrun(slowed("step"), *flags)) as job:
        job.wait_for("step  9/")
        ranks = job.ranks()
        ranks[1].suspend()
        ranks[0].wait(PATIENCE)
        ranks[1].kill()
        code, errors = job.end()
    assert code != 0
    stopped = [line for line in errors.splitlines() if line.startswith("stopped:")]
    assert len(stopped) == 1
    assert re.search(r"since \d\d:\d\d:\d\d, after step (9|1\d), for the 0.25 minutes", stopped[0])
    assert "another process hangs; last checkpoint step_0000000" in stopped[0]
    assert saved_steps(run_dir)


def test_watchdog_lets_a_process_live_that_does_something_or_is_stopped_itself(start, tmp_path):
    script = tmp_path / "watched.py"
    script.write_text(
        f"import sys, time\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from runtime.stopping import Watchdog\n"
        "with Watchdog(0.03, lambda: 'a hint') as watchdog:\n"  # 1.8 s
        "    for step in range(5):\n"
        "        watchdog.beat(step)\n"
        "        print(f'step {step}', flush=True)\n"
        "        for _ in range(8):\n"
        "            time.sleep(0.1)\n"
        "    time.sleep(600)\n"
    )
    with start(script) as job:
        job.wait_for("step 1")
        job.send(signal.SIGSTOP)
        time.sleep(2)
        job.send(signal.SIGCONT)
        job.wait_for("step 4")
        code, errors = job.end()
    assert code == 1
    assert "after step 4, for the 0.03 minutes" in errors
    assert errors.endswith("another process hangs; a hint\n")


# --- SIGTERM, SIGUSR1, SIGHUP, Ctrl-C -----------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_signal_saves_marks_and_resumes_bit_for_bit(start, slowed, flags, run_dir, whole, number):
    with start(slowed("step"), *flags, "--checkpoint-every=0") as job:
        job.wait_for("step  2/")
        job.send(number)
        code, errors = job.end()
    step, reason = mark(run_dir)
    assert reason == number.name
    assert 2 <= step < 24
    assert saved_steps(run_dir) == [step]
    if number == signal.SIGINT:
        assert code == 130
        assert interrupted(errors), errors
    else:
        assert (code, errors) == (0, "")
        assert f"{number.name}: stopped after step {step}; last checkpoint step_" in job.output
    main(flags)
    assert losses(run_dir) == whole
    assert not (run_dir / "PREEMPTED").exists()


@pytest.mark.parametrize(("slow", "word"), [("validation", "validating"), ("hellaswag", "scoring")])
def test_signal_interrupts_an_evaluation_that_the_resumed_run_repeats(
    start, slowed, flags, run_dir, whole, slow, word
):
    flags += ["--block-size=64", "--val-every=6", "--checkpoint-every=0", "--hellaswag-every=0"]
    flags += ["--val-tokens=1024"]  # four batches: the signal falls between two
    if slow == "hellaswag":
        flags += ["--hellaswag-every=6", f"--hellaswag-data={SAMPLE}"]
    with start(slowed(slow), *flags) as job:
        job.wait_for("step  6/")
        job.wait_for(word)
        job.send(signal.SIGTERM)
        assert job.end() == (0, "")
        assert job.output.count("step  7/") == 0
    assert mark(run_dir) == (6, "SIGTERM")
    interrupted_metric = "val_loss" if slow == "validation" else "hellaswag_acc_norm"
    assert sorted(evaluations(run_dir, interrupted_metric)) == [0]
    assert saved_steps(run_dir) == [6]
    saved = (run_dir / "checkpoints/step_00000006").stat().st_mtime_ns
    main([*flags, "--max-steps=6"])  # repeats the evaluation that was interrupted
    assert (run_dir / "checkpoints/step_00000006").stat().st_mtime_ns == saved
    assert sorted(evaluations(run_dir)) == [0, 6]
    if slow == "hellaswag":
        assert sorted(evaluations(run_dir, "hellaswag_acc_norm")) == [0, 6]
    assert not (run_dir / "PREEMPTED").exists()


@no_spaces
@pytest.mark.skipif(compiler_problem(CPU) is not None, reason="needs a C++ compiler")
def test_signal_while_compiling_stops_after_the_first_step_and_a_torn_library_is_one_line(
    flags, run_dir
):
    # Empty, so that there is something to compile.
    cache = Path(tempfile.mkdtemp(dir=os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = train(*flags, "--compile", "--val-every=0", "--block-size=64", "--n-layer=1")
    with Job(*command, env=environment) as job:
        job.wait_for("model")  # training begins
        trainer, deadline = psutil.Process(job.process.pid), time.monotonic() + PATIENCE
        while all("python" in name for name in names_of(trainer.children(recursive=True))):
            assert job.process.poll() is None, job.end()
            assert time.monotonic() < deadline
            time.sleep(0.01)  # until the C++ compiler is at work
        sockets = job.sockets()
        job.send(signal.SIGTERM)
        code, errors = job.end()
    assert (code, errors) == (0, "")
    assert mark(run_dir) == (1, "SIGTERM")
    assert saved_steps(run_dir) == [1]
    assert not sockets
    libraries = sorted(cache.rglob("*.so"), key=lambda path: path.stat().st_size)
    libraries[-1].write_bytes(b"")  # the largest is of the model
    shutil.rmtree(run_dir.parent)
    torn = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert torn.returncode == 2
    assert torn.stderr.count("\n") == 1
    assert f"delete its cache {cache} and start again, or add --no-compile" in torn.stderr


def test_signal_before_the_first_step_marks_and_auto_begins_again(start, slowed, flags, run_dir):
    with start(slowed("validation"), *flags) as job:
        job.wait_for("validating")
        job.send(signal.SIGTERM)
        assert job.end() == (0, "")
    assert mark(run_dir) == (0, "SIGTERM")
    assert "no checkpoint yet, begin again with --resume auto --run-name a" in job.output
    # By the mark the run is found without its name, and by its configuration without its flags.
    main([f"--out-dir={run_dir.parent}", "--resume=auto", "--max-steps=2"])
    assert sorted(losses(run_dir)) == [1, 2]


def test_fork_that_is_stopped_at_once_has_a_checkpoint_of_its_own(start, slowed, flags, run_dir):
    main([*flags, "--max-steps=4"])
    fork = [flag for flag in flags if not flag.startswith(("--resume", "--run-name"))]
    fork += [f"--resume={run_dir}", "--run-name=fork"]
    with start(slowed("step"), *fork) as job:
        job.wait_for("training")
        job.send(signal.SIGTERM)
        assert job.end() == (0, "")
    assert saved_steps(run_dir.parent / "fork")[-1] == mark(run_dir.parent / "fork")[0]


def test_checkpoint_is_chosen_again_once_no_other_trainer_can_save(
    start, slowed, flags, run_dir, tmp_path
):
    """The successor has chosen step 4 when its predecessor, still at work, saves step 8."""
    hook = """
import pathlib
from training import run_dir
open_run = run_dir.open_run
def open_late(*args):
    print("chosen", flush=True)
    while not pathlib.Path(GO).exists():
        time.sleep(0.01)
    return open_run(*args)
run_dir.open_run = open_late
"""
    main([*flags, "--max-steps=4"])
    with start(slowed(more=f"GO = {str(tmp_path / 'go')!r}\n{hook}"), *flags) as job:
        job.wait_for("chosen")
        main([*flags, "--max-steps=8"])
        (tmp_path / "go").touch()
        assert job.end() == (0, "")
    assert f"resumed from {run_dir}/checkpoints/step_00000008\n" in job.output
    assert "set aside" not in job.output
    assert losses(run_dir).keys() == set(range(1, 25))


@pytest.mark.parametrize("way", ["moved", "deleted"])
def test_run_folder_that_is_moved_or_deleted_stops_the_run_and_gets_its_last_step(
    start, slowed, flags, run_dir, whole, way
):
    there = run_dir.with_name("moved" if way == "moved" else "a-2")
    with start(slowed("step"), *flags, "--checkpoint-every=100") as job:
        job.wait_for("step  3/")
        if way == "moved":
            run_dir.rename(there)
        else:
            shutil.rmtree(run_dir)
        code, errors = job.end()
    assert code == 2
    assert errors.count("\n") == 1
    assert f"{run_dir} was moved or deleted while it trained" in errors
    assert re.search(rf"go on with --resume '?{re.escape(str(there))}", errors)
    assert os.listdir(run_dir.parent) == [there.name]
    step, reason = mark(there)
    assert (saved_steps(there), reason) == ([step], "failure")
    main([f"--resume={there}"])
    assert losses(there).items() <= whole.items()


def test_checkpoint_that_cannot_be_deleted_is_a_warning(start, slowed, flags, run_dir):
    hook = """
remove = os.rmdir
def refuse(path, **kwargs):  # as NFS does, where a reader has a deleted file open
    if ".step_00000004" in str(path):
        raise OSError(39, "Directory not empty", path)
    remove(path, **kwargs)
os.rmdir = refuse
"""
    flags += ["--keep-checkpoints=1"]
    with start(slowed(more=hook), *flags) as job:
        assert job.end() == (0, "")
    warnings = [line for line in job.output.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert f"{run_dir}/checkpoints/step_00000004 could not be deleted: " in warnings[0]
    assert saved_steps(run_dir) == [24]


def test_resume_of_an_interrupted_evaluation_with_fewer_steps_is_finished(flags, run_dir, capsys):
    main([*flags, "--max-steps=4"])
    (run_dir / "PREEMPTED").touch()
    main([*flags, "--max-steps=3"])
    assert "is finished" in capsys.readouterr().out


def test_resume_of_a_checkpoint_in_no_run_asks_for_a_name(flags, run_dir, tmp_path):
    main([*flags, "--max-steps=4"])
    copy = tmp_path / "backup/step_00000004"
    shutil.copytree(run_dir / "checkpoints/step_00000004", copy)
    with pytest.raises(ValueError, match="give a --run-name"):
        main([f"--resume={copy}"])
    assert os.listdir(copy.parent) == ["step_00000004"]


@pytest.mark.parametrize("difference", ["missing", "another"])
def test_ranks_that_find_other_checkpoints_are_refused(
    commands, flags, run_dir, tmp_path, difference
):
    """Two machines, each with a run folder of its own under the same name."""
    main([*flags, "--max-steps=4"])
    shutil.copytree(run_dir.parent, tmp_path / "0/runs")
    if difference == "another":
        main([*flags, "--max-steps=4", "--run-name=b", "--seed=1"])
        (run_dir.parent / "b").rename(tmp_path / "b")
        shutil.copytree(tmp_path / "b", tmp_path / "1/runs/a")
    else:
        (tmp_path / "1").mkdir()
    script = tmp_path / "at_home.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])\n"
        "import train_gpt2\nfrom runtime.cli import run_command\nrun_command(train_gpt2.main)\n"
    )
    flags += ["--out-dir=runs", "--micro-batch-size=4", "--seed=1337"]
    done = commands.run_ranks(2, script, *flags)
    assert_refused(done, "the checkpoints to resume from differ: rank 1 has ")


def test_more_signals_during_the_save_corrupt_nothing(start, slowed, flags, run_dir, whole):
    with start(slowed("disk", "step"), *flags, "--checkpoint-every=0") as job:
        job.wait_for("step  2/")
        job.send(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            job.wait_for("flushing")  # a save flushes more often than that
            job.send(number)
        assert job.end() == (0, "")
    verify_checkpoint(latest_checkpoint(run_dir))
    main(flags)
    assert losses(run_dir) == whole


@pytest.mark.parametrize(
    ("number", "target"),
    [
        (signal.SIGTERM, "torchrun"),
        (signal.SIGUSR1, "torchrun"),
        (signal.SIGUSR1, "one rank"),
    ],
)
def test_signal_to_torchrun_or_a_rank_stops_all_after_the_same_step(
    slowed, flags, run_dir, target, number
):
    command = torchrun(slowed("validation", "step"), *flags, "--micro-batch-size=2")
    command.insert(3, "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1")
    with Job(*command) as job:
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
    assert job.output.count(": stopped after step") == 1
    verify_checkpoint(latest_checkpoint(run_dir))


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_closed_terminal_saves_and_marks(slowed, flags, run_dir, launcher):
    flags += ["--micro-batch-size=2", "--checkpoint-every=0"]
    command = torchrun(slowed("step"), *flags)
    if launcher == "python":
        command = [sys.executable, str(slowed("step")), *flags]
    pid, terminal = pty.fork()  # as ssh makes it
    if pid == 0:
        os.execv(command[0], command)
    shown = ""
    while "step  2/" not in shown:
        shown += os.read(terminal, 4096).decode(errors="replace")  # the end may tear a character
    family = psutil.Process(pid).children(recursive=True)
    os.close(terminal)  # the kernel sends SIGHUP; from now on a write to the terminal is an error
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (0 if launcher == "python" else 1)  # 1: torchrun's own
    assert not psutil.wait_procs(family, PATIENCE)[1]
    step, reason = mark(run_dir)
    assert reason == "SIGHUP"
    assert 2 <= step < 24
    assert saved_steps(run_dir) == [step]
    verify_checkpoint(latest_checkpoint(run_dir))


def test_signal_that_nohup_ignores_stays_ignored(flags, run_dir):
    flags += ["--checkpoint-every=0", "--log-every=1000", "--val-every=12"]
    with Job("nohup", *train(*flags), stdin=subprocess.DEVNULL) as job:
        job.wait_for("step 0 | val_loss")
        job.send(signal.SIGHUP)
        code, _ = job.end()
    assert code == 0
    assert saved_steps(run_dir) == [24]
    assert not (run_dir / "PREEMPTED").exists()


def interrupted(errors):
    """Whether Ctrl-C was said in one line, without a traceback."""
    return len(errors.splitlines()) == 1 and errors.startswith("interrupted")


@pytest.mark.parametrize("seconds", [0, 1.5])
def test_interrupt_while_starting_says_one_line(flags, tmp_path, seconds):
    script = tmp_path / "announced.py"  # train_gpt2.py that says when its slow imports begin
    script.write_text(
        f"import os, runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "class Announcer:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            os.write(1, b'importing\\n')\n"
        "sys.meta_path.insert(0, Announcer())\n"
        f"runpy.run_path({str(ROOT / 'train_gpt2.py')!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    with Job(sys.executable, script, *flags, "--max-steps=100000") as job:
        job.wait_for("importing")
        starting = psutil.Process(job.process.pid)
        while job.process.poll() is None and sum(starting.cpu_times()) < seconds:  # of work
            time.sleep(0.01)
        job.send(signal.SIGINT)
        code, errors = job.end()
    assert code == 130
    assert interrupted(errors), errors


def test_second_interrupt_ends_at_once(start, slowed, flags, run_dir):
    more = """
from runtime.stopping import StopRequest
on_signal = StopRequest._on_signal
def told(*args):
    on_signal(*args)
    os.write(1, b"asked\\n")
    time.sleep(600)  # until the second
StopRequest._on_signal = told
"""
    with start(slowed("step", more=more), *flags, "--checkpoint-every=0") as job:
        job.wait_for("step  2/")
        job.wait_for("training")
        job.send(signal.SIGINT)
        job.wait_for("asked")
        job.send(signal.SIGINT)
        code, errors = job.end()
    assert (code, errors) == (130, "interrupted\n")
    assert not saved_steps(run_dir)


def press_ctrl_c(command, start, seconds):
    """Run a command on a terminal, press Ctrl-C there, return what it showed and its exit code."""
    pid, terminal = pty.fork()
    if not pid:
        os.execv(command[0], command)
    shown = ""
    try:
        while start not in shown:
            shown += os.read(terminal, 4096).decode(errors="replace")
        time.sleep(seconds)
        os.write(terminal, b"\x03")
        while True:
            shown += os.read(terminal, 4096).decode(errors="replace")
    except OSError:  # the terminal is closed at the other end
        pass
    return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(compiler_problem(CPU) is not None, reason="needs a C++ compiler")
def test_interrupt_from_a_terminal_while_compiling(flags):
    command = [str(part) for part in train(*flags, "--compile", "--val-every=0", "--block-size=64")]
    shown, code = press_ctrl_c(command, "compiling", 0.5)
    assert code == 130, shown
    assert "Traceback" not in shown
    assert "interrupted" in shown


def test_interrupt_from_a_terminal_to_torchrun_saves(slowed, flags, run_dir):
    command = torchrun(slowed("step"), *flags, "--micro-batch-size=2", "--checkpoint-every=0")
    shown, code = press_ctrl_c(command, "step  2/", 0)
    assert code != 0
    assert saved_steps(run_dir) == [mark(run_dir)[0]], shown
    assert shown.count("interrupted after step") == 1
    verify_checkpoint(latest_checkpoint(run_dir))


# --- output that nobody takes -----------------------------------------------------------------


def test_reader_that_is_gone_does_not_end_the_run(start, flags, run_dir, whole):
    with start("train_gpt2", *flags, "--val-every=0") as job:
        job.wait_for("step  2/")
        job.stdout.close()  # as `| head` does
        assert job.end() == (0, "")
    assert losses(run_dir) == whole


def test_reader_that_stalls_does_not_stop_the_run(start, slowed, flags, run_dir, whole):
    full = "import fcntl\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK)\n"
    full += "try:\n    while True:\n        os.write(1, bytes(1 << 16))\n"
    full += "except BlockingIOError:\n    fcntl.fcntl(1, fcntl.F_SETFL, 0)"
    with start(slowed("step", more=full), *flags, "--checkpoint-every=2") as job:
        deadline = time.monotonic() + PATIENCE
        while not (run_dir / "checkpoints/step_00000002").exists():
            assert time.monotonic() < deadline, job.stderr.read()
            time.sleep(0.05)
        assert job.end() == (0, "")
    assert losses(run_dir) == whole
    notice, *lines = job.output.lstrip("\0").splitlines()
    assert re.fullmatch(r"\(\d+ lines left out: nobody read them\)", notice)
    assert lines[-1] == f"done: {run_dir}"


# --- finished ---------------------------------------------------------------------------------


def test_resume_of_a_finished_run_changes_nothing(commands, flags, run_dir):
    main(flags)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    result = commands.run("train_gpt2", *flags)
    assert result.code == 0
    assert result.stdout == f"{run_dir} is finished: give a larger --max-steps to train on\n"
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


# --- ranks that differ ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("append('--max-lr=0.001')", "rank 1 has --max-lr 0.001, rank 0 has --max-lr 0.0006"),
        ("append('--val-every=3')", "rank 1 has --val-every 3, rank 0 has --val-every 4"),
        ("remove('--resume=auto')", "rank 1 has --resume None, rank 0 has --resume auto"),
    ],
)
def test_ranks_with_other_flags_are_refused(commands, flags, run_dir, tmp_path, change, difference):
    script = tmp_path / "differing.py"
    script.write_text(
        "import os, sys\nimport train_gpt2\nfrom runtime.cli import run_command\n"
        f"if os.environ['RANK'] == '1':\n    sys.argv.{change}\nrun_command(train_gpt2.main)\n"
    )
    done = commands.run_ranks(2, script, *flags)
    assert_refused(done, difference, "give the same flags")
    assert not run_dir.exists()


def test_ranks_with_other_code_are_refused(commands, flags, run_dir, tmp_path):
    copy = copy_code(tmp_path / "copy")
    looks_at = str(copy / "training/preflight.py")  # at the scripts beside its own
    with (copy / "lr_schedule.py").open("a") as file:
        file.write("# changed\n")
    script = tmp_path / "differing.py"
    script.write_text(
        "import os, train_gpt2, training.preflight\nfrom runtime.cli import run_command\n"
        f"if os.environ['RANK'] == '1':\n    training.preflight.__file__ = {looks_at!r}\n"
        "run_command(train_gpt2.main)\n",
        encoding="utf-8",
    )
    done = commands.run_ranks(2, script, *flags)
    remedy = "install the same Python, torch and scripts everywhere"
    assert_refused(done, "rank 1 has lr_schedule.py of SHA-256", remedy)
    assert not run_dir.exists()


# --- one rank alone ---------------------------------------------------------------------------


def test_one_rank_that_raises_before_a_collective_ends_all(slowed, flags, run_dir):
    more = """
def failing(trainer, step):
    if step == 8 and trainer.dist_info.rank == 1:
        raise ValueError("the disk of this machine is gone")
    return train_gpt2.write_samples(trainer, step)

train_gpt2.EVALUATIONS["samples"] = train_gpt2.Evaluation("sample_every", failing)
"""
    command = torchrun(slowed(more=more), *flags, "--micro-batch-size=2", "--sample-every=8")
    with Job(*command) as job:
        code, errors = job.end()
    assert code != 0
    assert "[rank 1] error: the disk of this machine is gone" in errors
    assert "another process of this run is gone" in errors or "SIGTERM" in errors
    assert "Traceback" not in errors.split("ChildFailedError")[0].split("torch/distributed")[0]
    verify_checkpoint(latest_checkpoint(run_dir))


def test_both_ranks_take_part_in_validation_and_hellaswag(commands, slowed, flags):
    more = """
rank = os.environ["RANK"]
evaluate_loss, score_examples = train_gpt2.evaluate_loss, hellaswag.score_examples

def counted_loss(model, batches, *args):
    batches = list(batches)
    print(f"rank {rank} validates {len(batches)} batches", flush=True)
    return evaluate_loss(model, batches, *args)

def counted_score(*args):
    print(f"rank {rank} scores", flush=True)
    return score_examples(*args)

train_gpt2.evaluate_loss, hellaswag.score_examples = counted_loss, counted_score
"""
    flags += ["--block-size=64", "--micro-batch-size=2", "--max-steps=1", "--val-tokens=1000"]
    flags += ["--hellaswag-every=1", f"--hellaswag-data={SAMPLE}"]
    done = commands.run_ranks(2, slowed(more=more), *flags)
    assert done.code == 0, done.stderr
    for rank in (0, 1):  # each time, before and after the step
        assert done.stdout.count(f"rank {rank} validates 4 batches") == 2  # 15 windows
        assert done.stdout.count(f"rank {rank} scores") == 2  # batches of 16 and 8 examples
