"""Commands as processes of their own, without the seconds that importing torch takes.

One process has imported all scripts; each command is a fork of it, or several that are the ranks
of one run, with its own arguments, environment, output and exit code.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SCRIPTS = ("train_gpt2", "sample", "export", "fineweb", "plot", "hellaswag")
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
    *job, environments, seconds = json.loads(line)
    print(json.dumps(wait([start(*job, each) for each in environments], seconds)), flush=True)
"""


class Done(NamedTuple):
    """What a command came to."""

    code: int  # the first that is not 0, where several ranks ran
    stdout: str
    stderr: str
    peak_bytes: int


def free_port():
    """A TCP port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Commands:
    """A context manager; `run` runs one command and waits for it."""

    def __init__(self, folder, root=ROOT, **environment):
        self.folder, self.root = folder, root
        self.environment = os.environ | environment

    def __enter__(self):
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(self.root), *SCRIPTS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        return self

    def __exit__(self, *_):
        self.server.stdin.close()
        self.server.wait(10)
        self.server.stdout.close()

    def run(self, script, *args, **environment):
        """Run `script` (a name of `SCRIPTS`, or a file) with flags, in `self.folder`."""
        return self._run(script, args, [environment])

    def run_ranks(self, processes, script, *args, timeout=240, **environment):
        """The same as the gloo ranks of one run, with what torchrun would tell each of them.

        None is ended because another failed: a rank that waits for ever fails the test.
        """
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        places = (dict.fromkeys(("RANK", "LOCAL_RANK"), str(i)) for i in range(processes))
        shared = meeting | sizes | environment
        return self._run(script, args, [shared | place for place in places], timeout)

    def _run(self, script, args, environments, timeout=300):
        for name in ("stdout", "stderr"):
            (self.folder / name).write_bytes(b"")
        path = str(self.root / f"{script}.py") if script in SCRIPTS else str(script)
        encoded = [os.fsencode(str(arg)).hex() for arg in args]
        job = [path, encoded, str(self.folder), environments, timeout]
        print(json.dumps(job), file=self.server.stdin, flush=True)
        codes, peak_bytes = json.loads(self.server.stdout.readline())
        stdout, stderr = (
            (self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")
        )
        return Done(next(filter(None, codes), 0), stdout, stderr, peak_bytes)


def assert_refused(done, *parts):
    """Exit code 2 and one line of error that has each of `parts`."""
    assert done.code == 2, done
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for part in parts:
        assert part in done.stderr
