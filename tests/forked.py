"""Commands as processes of their own, without the seconds that importing torch takes.

One process has imported all scripts; each command is a fork of it, with its own arguments,
environment, output and exit code.
"""

import json
import os
import subprocess
import sys
from typing import NamedTuple

from conftest import ROOT

SCRIPTS = ("train_gpt2", "sample", "export", "fineweb", "plot", "hellaswag")
SERVER = f"""
import importlib, json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from cli import run_command
import torch._inductor  # what the first settings of a run import
mains = {{name: importlib.import_module(name).main for name in {SCRIPTS!r}}}
for line in sys.stdin:
    script, args, cwd, environment = json.loads(line)
    pid = os.fork()
    if not pid:
        os.chdir(cwd)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.environ.update(environment)
        sys.argv = [script + ".py", *(os.fsdecode(bytes.fromhex(arg)) for arg in args)]
        code = 1
        try:
            run_command(mains[script])
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
    _, status, usage = os.wait4(pid, 0)
    unit = 1 if sys.platform == "darwin" else 1024
    print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss * unit]), flush=True)
"""


class Done(NamedTuple):
    """What a command came to."""

    code: int
    stdout: str
    stderr: str
    peak_bytes: int


class Commands:
    """A context manager; `run` runs one command and waits for it."""

    def __init__(self, folder, **environment):
        self.folder = folder
        self.environment = os.environ | environment

    def __enter__(self):
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
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
        """Run `script` with flags, in `self.folder`."""
        encoded = [os.fsencode(str(arg)).hex() for arg in args]
        job = [script, encoded, str(self.folder), environment]
        print(json.dumps(job), file=self.server.stdin, flush=True)
        code, peak_bytes = json.loads(self.server.stdout.readline())
        stdout, stderr = (
            (self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr")
        )
        return Done(code, stdout, stderr, peak_bytes)


def assert_refused(done, *parts):
    """Exit code 2 and one line of error that has each of `parts`."""
    assert done.code == 2, done
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for part in parts:
        assert part in done.stderr
