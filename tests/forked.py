"""Commands as processes of their own, without the seconds that importing torch takes.

One process has imported all scripts; each command is a fork of it, or several that are the ranks
of one run, with its own arguments, environment, output and exit code.
"""

import json
import os
import random
import select
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from runtime.errors import UserError

ROOT = Path(__file__).parent.parent
SCRIPTS = ("train_gpt2", "sample", "export", "fineweb", "plot", "hellaswag", "read_step", "replay")
NO_COMPILER = {"PATH": "/nonexistent", "CXX": ""}  # compiling takes a minute
SERVER = """
import json, os, runpy, signal, sys, time
sys.path.insert(0, sys.argv[1])
for script in sys.argv[2:]:
    __import__(script)
import torch._inductor  # what the first settings of a run import

def start(script, args, cwd, environment):
    pid = os.fork()
    if pid:
        return pid
    os.chdir(cwd)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(environment)
    sys.argv = [script, *(os.fsdecode(bytes.fromhex(arg)) for arg in args)]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        from multiprocessing import util
        util._run_finalizers()  # as at an ordinary exit: Python 3.14 warns of tqdm's semaphore
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

def wait(pids, seconds):
    deadline, codes, peak = time.monotonic() + seconds, dict.fromkeys(pids), 0
    while None in codes.values():
        for pid in [pid for pid in pids if codes[pid] is None]:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                peak = max(peak, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return list(codes.values()), peak

for line in sys.stdin:
    action, *job = json.loads(line)
    print(json.dumps({"start": start, "wait": wait}[action](*job)), flush=True)
"""


class Done(NamedTuple):
    """What a command came to."""

    code: int  # the first that is not 0, where several ranks ran
    stdout: str
    stderr: str
    peak_bytes: int
    codes: list[int]  # of every rank


def free_port():
    """A TCP port that nobody listens at.

    It is below those that systems hand out themselves, and so give to the next who asks for any.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as server:
            server.bind(("", port))
            return port


class Commands:
    """A context manager; `run` runs one command and waits for it, `start` does not wait."""

    def __init__(self, folder, root=ROOT, **environment):
        self.folder, self.root = folder, root
        self.environment = os.environ | environment

    def __enter__(self):
        self.server = subprocess.Popen(
            [sys.executable, "-X", "utf8", "-c", SERVER, str(self.root), *SCRIPTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=self.environment,
        )
        return self

    def __exit__(self, *_):
        self.server.stdin.close()
        self.server.wait(300)
        self.server.stdout.close()

    def run(self, script, *args, **environment):
        """Run `script` (a name of `SCRIPTS`, or a file) with flags, in `self.folder`."""
        return self._run(script, args, [environment])

    def run_ranks(self, processes, script, *args, timeout=600, **environment):
        """The same as the gloo ranks of one run, with what torchrun would tell each of them.

        None is ended because another failed: a rank that waits for ever fails the test.
        """
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        places = (dict.fromkeys(("RANK", "LOCAL_RANK"), str(i)) for i in range(processes))
        shared = meeting | sizes | environment
        return self._run(script, args, [shared | place for place in places], timeout)

    def start(self, folder, script, *args, **environment):
        """Start a command in `folder`, whose `stdout` and `stderr` it writes; return its pid."""
        path = str(self.root / f"{script}.py") if script in SCRIPTS else str(script)
        encoded = [os.fsencode(str(arg)).hex() for arg in args]
        return self._ask("start", path, encoded, str(folder), environment)

    def wait(self, pids, timeout=600):
        """The exit codes of started processes, and the most memory that one of them took."""
        return self._ask("wait", pids, timeout)

    def _ask(self, *request):
        print(json.dumps(request), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def _run(self, script, args, environments, timeout=600):
        for name in ("stdout", "stderr"):
            (self.folder / name).write_bytes(b"")
        pids = [self.start(self.folder, script, *args, **each) for each in environments]
        codes, peak_bytes = self.wait(pids, timeout)
        stdout, stderr = (
            (self.folder / name).read_text("utf-8", "replace") for name in ("stdout", "stderr")
        )
        return Done(next(filter(None, codes), 0), stdout, stderr, peak_bytes, codes)


class HangingProgram:
    """A program that forks, prints `x` twice and hangs; the text of it is `program`."""

    def __init__(self, folder):
        pipe, self.marker = folder / "pipe", folder / "hangs"
        os.mkfifo(pipe)
        self.reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.program = (
            f"import os, time; pipe = open({str(pipe)!r}, 'w'); os.fork(); os.write(1, b'x\\n'); "
            f"open({str(self.marker)!r}, 'w').close(); time.sleep(600)"
        )

    def hangs(self):
        """Whether it has come so far."""
        return self.marker.exists()

    def is_over(self):
        """Whether both processes are gone, who held the pipe open; waits for a minute."""
        readable, _, _ = select.select([self.reader], [], [], 60)
        return bool(readable) and os.read(self.reader, 1) == b""


def assert_refused(done, *parts):
    """Exit code 2 and one line of error that has each of `parts`."""
    assert done.code == 2, done
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for part in parts:
        assert part in done.stderr


def fork_trainers(monkeypatch, commands, module):
    """Let a module's children be forks, which skip the seconds of imports and compiling.

    Children that have a folder, as other projects' scripts do, stay what they are.
    """
    run_fresh = module.run_python

    def run_python(script, *args, seconds=None, log=None, is_done=None, folder=None, **environment):
        if folder:
            return run_fresh(script, *args, seconds=600, folder=folder, is_done=is_done)
        ranks = 1
        if args[:2] == ("torch.distributed.run", "--standalone"):
            ranks = int(args[2].removeprefix("--nproc_per_node="))
            script, *args = args[3:]
        if script == "-m":
            module, *args = args
            script = module.replace(".", "/") + ".py"
        environment |= NO_COMPILER
        run = partial(commands.run_ranks, ranks) if ranks > 1 else commands.run
        done = run(ROOT / script, *args, **environment)
        if done.code:
            raise UserError(done.stderr)
        return done.stdout

    monkeypatch.setattr(module, "run_python", run_python)
