import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from forked import free_port

from runtime.cli import parse_flags, run_command

DEEP_PATH = "/data/" + "a-folder/and_more/" * 7 + "with some words, and more/file.txt"


@dataclass(frozen=True)
class Config:
    """Train a model."""

    data_dir: Path = Path("data")
    """Where the shards are."""
    max_lr: float = 6e-4
    """Peak learning rate."""
    max_steps: int = 10
    """Updates."""
    compile: bool = True
    """Whether to compile."""
    size: Literal["gpt2", "gpt2-xl"] = "gpt2"
    """Which GPT-2."""
    run_name: str | None = None
    """By default, the time."""

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"--max-steps must be at least 1, not {self.max_steps}")


def run_script(tmp_path, body, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
    """Run a script whose main has this body, in a process of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "from test_cli import Config\n"
        "from runtime.cli import parse_flags, run_command\n"
        f"def main() -> None:\n    {body}\n"
        "if __name__ == '__main__':\n    run_command(main)\n"
    )
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]),
        "COLUMNS": "80",
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
        "TERM": "xterm-256color",
    }
    return subprocess.run(
        [sys.executable, str(script), *args],
        stdout=stdout,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        env=environment,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], Config()),
        (["--max-lr", "6e-5"], Config(max_lr=6e-5)),
        (["--max_lr=6e-5"], Config(max_lr=6e-5)),
        (["--max-lr=6e-5", "--max_steps", "3"], Config(max_lr=6e-5, max_steps=3)),
        (["--no-compile"], Config(compile=False)),
        (["--no_compile"], Config(compile=False)),
        (["--compile"], Config()),
        (["--data-dir", "my data"], Config(data_dir=Path("my data"))),
        (["--size", "gpt2-xl", "--run-name", "x"], Config(size="gpt2-xl", run_name="x")),
    ],
)
def test_parse_flags_takes_every_form(args, expected):
    assert parse_flags(Config, args) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--max-stps", "3"],
            "Unrecognized options: --max-stps, 3. Perhaps you meant --max-steps? "
            "(--help lists the flags)",
        ),
        (["stray"], "Unrecognized options: stray (--help lists the flags)"),
        (
            ["--max-steps", "abc"],
            "Error parsing --max-steps: invalid literal for int() with base 10: 'abc' "
            "(--help lists the flags)",
        ),
        (
            ["--size", "gpt3"],
            "invalid choice 'gpt3' for argument '--size'. Expected one of ('gpt2', 'gpt2-xl'). "
            "(--help lists the flags)",
        ),
        (
            ["--max-steps"],
            "Missing value for argument '--max-steps'. Expected 1 values. (--help lists the flags)",
        ),
        (["--max-steps", "0"], "--max-steps must be at least 1, not 0 (--help lists the flags)"),
    ],
)
def test_parse_flags_error_is_one_plain_line(args, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        parse_flags(Config, args)

    assert str(caught.value) == message


@pytest.mark.parametrize("columns", ["40", "80", None])
def test_parse_flags_error_does_not_break_a_long_path(monkeypatch, columns):
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)

    with pytest.raises(ValueError, match="invalid literal") as caught:
        parse_flags(Config, ["--max-steps", DEEP_PATH])

    assert repr(DEEP_PATH) in str(caught.value)
    assert os.environ.get("COLUMNS") == columns


def test_parse_flags_help_has_every_flag_and_its_docstring(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    with pytest.raises(SystemExit) as caught:
        parse_flags(Config, ["--help"])
    text = capsys.readouterr().out

    assert caught.value.code in (0, None)
    for expected in ("--max-lr FLOAT", "Peak learning rate.", "--no-compile", "{gpt2,gpt2-xl}"):
        assert expected in text
    below_usage = text.split("\n\n", 1)[1]  # the usage line names pytest
    assert max(len(line) for line in below_usage.splitlines()) <= 80


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--max-steps", "0"], "error: --max-steps must be at least 1, not 0"),
        (["--max-steps", DEEP_PATH], f"error: Error parsing --max-steps: .*'{DEEP_PATH}'"),
    ],
)
def test_command_with_a_bad_flag_ends_with_one_line_and_code_2(tmp_path, args, line):
    done = run_script(tmp_path, "print(parse_flags(Config))", *args)

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    expected_start, _, expected_end = line.partition(".*")
    assert done.stderr.startswith(expected_start)
    assert expected_end in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX")
def test_command_with_a_bad_flag_on_a_terminal_shows_the_same_line(tmp_path):
    import pty

    ours, theirs = pty.openpty()
    done = run_script(
        tmp_path, "print(parse_flags(Config))", "--max-stps", DEEP_PATH, stdout=theirs
    )
    os.close(theirs)
    os.close(ours)

    assert done.returncode == 2
    assert done.stderr == (
        f"error: Unrecognized options: --max-stps, {DEEP_PATH}. Perhaps you meant --max-steps? "
        "(--help lists the flags)\n"
    )


def test_command_help_is_printed_with_code_0(tmp_path):
    done = run_script(tmp_path, "print(parse_flags(Config))", "--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert "Train a model." in done.stdout
    assert "Where the shards are." in done.stdout


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("raise ValueError('a bad\\nvalue')", 2, "error: a bad value"),
        ("open('none.txt')", 2, "error: [Errno 2] No such file or directory: 'none.txt'"),
        ("raise FloatingPointError('loss is nan')", 1, "stopped: loss is nan"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_run_command_ends_in_one_line(body, code, line, tmp_path):
    done = run_script(tmp_path, body)

    assert (done.returncode, done.stderr) == (code, f"{line}\n")


def test_run_command_prints_its_line_in_one_write(tmp_path):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps writes apart
    with here, there:
        run_script(tmp_path, "raise ValueError('bad')", stderr=there)
        assert here.recv(100, socket.MSG_DONTWAIT) == b"error: bad\n"


@pytest.mark.parametrize("body", ["raise ValueError('bad')", "raise SystemExit(2)"])
def test_run_command_does_not_wait_for_a_process_group_to_end_in_order(body, tmp_path):
    meeting = f"tcp://127.0.0.1:{free_port()}"
    join = f"dist.init_process_group('gloo', init_method='{meeting}', rank=0, world_size=1)"
    lines = "import atexit; import torch.distributed as dist; atexit.register(print, 'in order')"
    done = run_script(tmp_path, f"{lines}; {join}; print('out'); {body}")

    assert (done.returncode, done.stdout) == (2, "out\n")


def test_run_command_shows_a_programming_error_in_full(tmp_path):
    done = run_script(tmp_path, "{}['no such key']")

    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError" in done.stderr


def test_run_command_returns_when_main_does():
    calls = []

    run_command(lambda: calls.append("main"))

    assert calls == ["main"]
