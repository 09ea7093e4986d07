import inspect
import math
import os
import pkgutil
import re
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from conftest import ROOT

from runtime.cli import POSITIONAL, as_flags, bad_numbers, parse_flags, run_command

TIMEOUT_S = 600  # ends a process that hangs; none that is slow
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


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
    micro_batch_size: int | Literal["auto"] = "auto"
    """Sequences at once."""
    run_name: str | None = None
    """By default, the time."""
    logger: tuple[Literal["wandb", "trackio"], ...] = ()
    """Trackers."""

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"--max-steps must be at least 1, not {self.max_steps}")


def script_of(tmp_path, body, imports=""):
    """A script whose main has this body, and the environment that it runs in."""
    script = tmp_path / "script.py"
    if "Config" in body:  # this module's imports take most of a second
        imports += "\nfrom test_cli import Config"
    script.write_text(
        "if __name__ == '__main__':\n"
        f"    from runtime.startup import prepare_process\n    prepare_process()\n{imports}\n"
        "from runtime.cli import parse_flags, run_command\n"
        f"def main() -> None:\n    {body}\n"
        "if __name__ == '__main__':\n    run_command(main)\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return script, os.environ | {"PYTHONPATH": path, "COLUMNS": "80", "TERM": "xterm-256color"}


def run_script(tmp_path, body, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environ):
    """Run a script whose main has this body, in a process of its own."""
    script, environment = script_of(tmp_path, body)
    return subprocess.run(
        [sys.executable, str(script), *args],
        stdout=stdout,
        stderr=stderr,
        text=True,
        env=environment | environ,
        check=False,
    )


def read_terminal(terminal, end=None):
    """What a terminal shows: up to `end`, or all of a process that has ended."""
    shown = b""
    with suppress(OSError):  # how Linux says that no process has the terminal open
        while (end is None or not shown.endswith(end)) and (piece := os.read(terminal, 10_000)):
            shown += piece  # a line may come in parts
    return shown


# --- flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--max-lr=6e-5", "--max_steps", "3"], Config(max_lr=6e-5, max_steps=3)),
        (["--no-compile", "--data-dir", "my data"], Config(Path("my data"), compile=False)),
        (["--micro-batch-size=8", "--no_compile"], Config(compile=False, micro_batch_size=8)),
        (["--micro-batch-size", "auto", "--logger", "wandb"], Config(logger=("wandb",))),
        (
            ["--logger", "wandb", "trackio", "--run-name", "a_b"],
            Config(run_name="a_b", logger=("wandb", "trackio")),
        ),
        (["--logger=wandb", "--logger"], Config()),
        # As flags, what JSON has for each type of a field.
        (
            as_flags({"max_lr": 1e-300, "size": "gpt2-xl", "logger": ["wandb"]}),
            Config(max_lr=1e-300, size="gpt2-xl", logger=("wandb",)),
        ),
        (
            as_flags(
                {"compile": False, "data_dir": "-x y", "micro_batch_size": 4, "run_name": None}
            ),
            Config(Path("-x y"), compile=False, micro_batch_size=4),
        ),
        (as_flags({"compile": True, "logger": []}), Config()),
    ],
)
def test_parse_flags_takes_every_form(args, expected):
    assert parse_flags(Config, args) == expected


def test_parse_flags_lays_flags_over_given_defaults():
    default = Config(max_steps=3, compile=False, run_name="a")
    assert parse_flags(Config, ["--compile"], default) == Config(max_steps=3, run_name="a")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-stps", "3"], "there is no flag --max-stps: did you mean --max-steps?"),
        (
            ["--lr=3", "--no-such"],
            "there is no flag --lr: use --max-lr; there is no flag --no-such",
        ),
        (["--max-step", "3"], "there is no flag --max-step: did you mean --max-steps?"),
        (["stray"], "'stray' belongs to no flag"),
        (["--compile", "False"], "'False' belongs to no flag: give --NAME or --no-NAME"),
        (["--max-steps", "a/ b"], "--max-steps: 'a/ b' is not INT"),
        (as_flags({"max_steps": 1.5}), "--max-steps: '1.5' is not INT"),
        (["--micro-batch-size=all"], "--micro-batch-size: 'all' is not INT or auto"),
        (["--size", "gpt3"], "--size: 'gpt3' is not gpt2 or gpt2-xl"),
        (["--logger", "wandb", "x"], "--logger: 'x' is not wandb or trackio"),
        (["--compile=no"], "--compile/--no-compile: ignored explicit argument 'no'"),
        (["--max-steps"], "--max-steps: expected one argument"),
        (["--max-steps", "0"], "--max-steps must be at least 1, not 0"),
    ],
)
def test_parse_flags_error_is_one_plain_line(args, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        parse_flags(Config, args, hints={"--lr": "use --max-lr"})
    assert str(caught.value) == f"{message} (--help lists the flags)"


@dataclass(frozen=True)
class Numbers:
    """Numbers."""

    count: int | None = 0
    rate: float = 0.0
    name: str = "-1"
    switch: bool = False


@pytest.mark.parametrize(
    ("numbers", "problems"),
    [
        (Numbers(), []),
        (Numbers(None, 1e300), []),
        (Numbers(-1), ["--count must be above 0, not -1"]),
        (Numbers(2**63), [f"--count {2**63} is too large"]),
        (
            Numbers(0, -0.1),
            ["--count must be above 0, not 0", "--rate must be at least 0, not -0.1"],
        ),
        (Numbers(1, math.nan), ["--rate must be at least 0, not nan"]),
        (Numbers(1, math.inf), ["--rate inf is too large"]),
    ],
)
def test_bad_numbers_names_every_flag(numbers, problems):
    above_zero = ["count"] if problems else []
    assert bad_numbers(numbers, above_zero) == problems


def help_of(config_class, capsys, default=None):
    with pytest.raises(SystemExit) as stop:
        parse_flags(config_class, ["--help"], default)
    assert stop.value.code == 0
    return capsys.readouterr().out


@dataclass(frozen=True)
class Grouped:
    """Take flags of any kind."""

    HELP_GROUPS: ClassVar = {"model": "what", "weights": "numbers"}

    model: str
    """A model. The folder of a run, say."""
    files: tuple[Path, ...] = field(default=(), metadata=POSITIONAL)
    """Files."""
    weights: tuple[str, ...] = ("a", "b")
    """Weights."""
    workers: int = field(default_factory=lambda: 7)
    """Threads, 100% busy."""
    kind: Literal["x", "y"] | None = None
    """Kind."""


def test_help_has_titles_first_sentences_defaults_and_choices(capsys):
    shown = " ".join(help_of(Grouped, capsys).split())
    assert "Take flags of any kind." in shown
    for part in (
        *("FILES Files.", "what: --model TEXT A model.", "numbers: --weights [a b ...] Weights."),
        *("--workers 7 Threads, 100% busy.", "--kind x Kind. [x, y]"),
    ):
        assert part in shown
    assert "folder" not in shown
    assert "--compile, --no-compile Whether to compile. (on)" in " ".join(
        help_of(Config, capsys).split()
    )


def test_positional_arguments_may_stand_between_flags_and_a_needed_flag_is_named():
    expected = Grouped("m", (Path("a"), Path("b")), workers=2)
    assert parse_flags(Grouped, ["a", "--model=m", "--workers", "2", "b"]) == expected
    with pytest.raises(ValueError, match="the following arguments are required: --model"):
        parse_flags(Grouped, ["a"])


def test_help_shows_given_defaults_and_breaks_lines_of_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = help_of(Config, capsys, Config(Path("my-data"), compile=False, run_name="a"))
    for expected in ("--data-dir my-data", "(off)", "--run-name a"):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 40


SCRIPTS = {  # the configuration of each script
    "train_gpt2": "training.config:TrainConfig",
    "fineweb": "fineweb:FineWebConfig",
    "hellaswag": "hellaswag:HellaSwagConfig",
    "sample": "sample:SampleConfig",
    "plot": "plot:PlotConfig",
    "export": "export:ExportConfig",
    "demo": "demo:DemoConfig",
    "bench": "bench.config:BenchConfig",
    "bench.recipes": "bench.recipes:RecipesConfig",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_every_script_has_every_flag_in_100_columns(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config_class = pkgutil.resolve_name(SCRIPTS[script])
    text = help_of(config_class, capsys)
    assert max(map(len, text.splitlines())) <= 100
    names = {f"--{field.name.replace('_', '-')}" for field in fields(config_class)}
    assert names - set(re.findall(r"^ +(--[\w-]+)", text, re.MULTILINE)) <= {"--runs"}
    titles = getattr(config_class, "HELP_GROUPS", {})
    assert titles.keys() <= {field.name for field in fields(config_class)}
    assert all(f"\n{title}:\n" in text for title in titles.values())


def test_bad_flag_is_one_line_and_told_by_rank_0_only(tmp_path):
    body = "import runtime.cli; runtime.cli.RANK_0_SECONDS = 0; print(parse_flags(Config))"
    ranks = [run_script(tmp_path, body, "--max-stps=3", RANK=i) for i in "01"]
    message = "error: there is no flag --max-stps: did you mean --max-steps?"
    assert [done.returncode for done in ranks] == [2, 2]
    assert [done.stderr for done in ranks] == [f"{message} (--help lists the flags)\n", ""]


# --- errors and exit codes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("raise ValueError('a bad\\nvalue')", 2, "error: a bad value"),
        ("raise FloatingPointError('loss is nan')", 1, "stopped: loss is nan"),
        ("import os; os.kill(os.getpid(), 2)", 130, "interrupted"),
        ("raise OSError('no https://me:secret@host/x?key=1')", 2, "error: no https://host/x"),
    ],
)
def test_run_command_ends_in_one_line(body, code, line, tmp_path):
    done = run_script(tmp_path, body)
    assert (done.returncode, done.stderr) == (code, f"{line}\n")


def test_exit_codes_are_those_that_the_document_lists():
    section = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    section = section.split("## Exit codes")[1].split("\n## ")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    source = inspect.getsource(run_command)
    assert listed == {0, *(int(code) for code in re.findall(r"_exit\((\d+)\)", source))}


@pytest.mark.parametrize("size", [10, 10**6])  # printed at the end, or while main runs
def test_run_command_is_quiet_where_its_output_is_not_read(size, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = run_script(tmp_path, f"print('x' * {size})", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_run_command_prints_its_line_in_one_write(tmp_path):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps writes apart
    with ours, theirs:
        run_script(tmp_path, "raise ValueError('bad')", stderr=theirs)
        assert ours.recv(100, socket.MSG_DONTWAIT) == b"error: bad\n"


def test_run_command_does_not_wait_for_a_process_group_to_end_in_order(tmp_path):
    join = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    lines = "import atexit; import torch.distributed as dist; atexit.register(print, 'in order')"
    done = run_script(tmp_path, f"{lines}; {join}; print('out'); raise ValueError('bad')")
    assert (done.returncode, done.stdout) == (2, "out\n")


def test_run_command_shows_a_programming_error_in_full(tmp_path):
    done = run_script(tmp_path, "{}['no such key']")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError" in done.stderr


@needs_full
@pytest.mark.parametrize("body", ["raise ValueError('bad')", "print('x'); raise ValueError('bad')"])
def test_run_command_keeps_its_exit_code_where_nothing_can_be_written(body, tmp_path):
    with open("/dev/full", "w") as full:
        assert run_script(tmp_path, body, stdout=full, stderr=full).returncode == 2


# --- before the imports -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "1000 None"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
        ({"OMP_WAIT_POLICY": "active"}, "None active"),
    ],
)
def test_prepare_process_limits_spinning_unless_the_user_has_set_it(given, expected):
    code = (
        "import os; from runtime.startup import prepare_process; prepare_process()\n"
        "print(*map(os.environ.get, ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')))"
    )
    environment = {**os.environ}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        environment.pop(name, None)
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, text=True, cwd=ROOT, env=environment | given)
    assert printed.strip() == expected


def test_ctrl_c_while_importing_ends_in_one_line(tmp_path):
    imports = "import time; print('importing', flush=True); time.sleep(600)"
    script, environment = script_of(tmp_path, "pass", imports)
    process = subprocess.Popen(
        [sys.executable, script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(2)
    assert process.communicate(timeout=TIMEOUT_S) == ("", "interrupted\n")
    assert process.returncode == 130
