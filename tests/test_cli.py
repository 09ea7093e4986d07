import os
import pkgutil
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from conftest import ROOT

from runtime import cli
from runtime.cli import (
    POSITIONAL,
    PathOrName,
    as_flags,
    check_settings,
    flag_of,
    parse_flags,
    read_flags,
)
from runtime.errors import UserError
from training.config import TrainConfig
from training.resume import parse_config

BOTH = ("wandb", "trackio")
LEAST, ABOVE, FINITE = (f"must be {limit}, not" for limit in ("at least 0", "above 0", "finite"))
DEVICE = "--device: 'cuda:1' is not auto or cuda or cpu"


@dataclass(frozen=True)
class Config:
    """Train a model."""

    HELP_GROUPS: ClassVar = {"max_lr": "numbers", "size": "words"}

    data_dir: Path = Path("data")
    """Where the shards are. They are many."""
    compile: bool = True
    """Whether to compile."""
    max_lr: float = 6e-4
    """Peak learning rate, 100% of it."""
    max_steps: int = 10
    """Updates."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Sequences at once."""
    workers: int = field(default_factory=lambda: 7)
    """Threads."""
    size: Literal["gpt2", "gpt2-xl"] = "gpt2"
    """Which GPT-2."""
    run_name: str | None = None
    """By default, the time."""
    logger: tuple[Literal["wandb", "trackio"], ...] = ()
    """Trackers."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device."""
    model: PathOrName = "gpt2"
    """A model."""
    bare: int = 2  # without a docstring

    def __post_init__(self) -> None:
        check_settings(self, ("max_steps",))


@dataclass(frozen=True)
class Needy:
    """Needs a flag."""

    model: str
    """A model."""


@dataclass(frozen=True)
class Files:
    """Takes files."""

    files: tuple[Path, ...] = field(metadata=POSITIONAL)
    """Files."""
    workers: int = 7
    """Threads."""


def run_script(tmp_path, body, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environ):
    """Start a script whose main has this body, in a process of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "from runtime.cli import run_command\nfrom runtime.errors import DivergedError, UserError\n"
        f"def main():\n    {body}\nrun_command(main)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environ
    command = [sys.executable, str(script)]
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, env=environment)


def end(process):
    """The exit code of a process, and what it has printed."""
    out, errors = process.communicate(timeout=600)
    return process.returncode, out, errors


# --- flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--max-lr=6e-5", "--max_steps", "3"], Config(max_lr=6e-5, max_steps=3)),
        (["--no-compile", "--data-dir", "my data"], Config(Path("my data"), compile=False)),
        (["--micro-batch-size=8", "--no_compile"], Config(compile=False, micro_batch_size=8)),
        (["--micro-batch-size", "auto", "--logger", "wandb"], Config(logger=("wandb",))),
        (["--logger", "wandb", "trackio", "--run-name=a_b"], Config(run_name="a_b", logger=BOTH)),
        (["--logger", "--bare=3"], Config(bare=3)),
        (["--logger=wandb", "--logger=trackio"], Config(logger=("wandb", "trackio"))),
        (["--max-steps=1e9", "--workers=1.5B"], Config(max_steps=10**9, workers=1_500_000_000)),
        (
            ["--max-steps=500M", "--micro-batch-size=10k"],
            Config(max_steps=500_000_000, micro_batch_size=10_000),
        ),
        (["--max-lr=1e3", "--run-name=1e3"], Config(max_lr=1000.0, run_name="1e3")),
        (["a", "--workers", "2", "b"], Files((Path("a"), Path("b")), workers=2)),
        # What JSON has for each type of a field.
        (as_flags({"max_lr": 1e-300, "size": "gpt2-xl"}), Config(max_lr=1e-300, size="gpt2-xl")),
        (as_flags({"compile": False, "data_dir": "-x y"}), Config(Path("-x y"), compile=False)),
        (as_flags({"micro_batch_size": 4, "run_name": None}), Config(micro_batch_size=4)),
        (as_flags({"compile": True, "logger": [*BOTH]}), Config(logger=BOTH)),
    ],
)
def test_parse_flags_takes_every_form(args, expected):
    assert repr(parse_flags(type(expected), args)) == repr(expected)  # 10.0 is not 10


def test_read_flags_has_only_the_flags_that_are_passed():
    assert read_flags(Config, ["--compile", "--logger", "wandb"]) == {
        "compile": True,
        "logger": ("wandb",),
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-stps", "3"], "unknown flag --max-stps: did you mean --max-steps?"),
        (["--lr=3", "--no"], "unknown flag --lr; unknown flag --no"),
        (["--max-step", "3"], "unknown flag --max-step: did you mean --max-steps?"),
        (["--compile=no"], "--compile/--no-compile: use one of them without 'no'"),
        (["--device=cuda:1"], f"{DEVICE}: use cuda, and set CUDA_VISIBLE_DEVICES=1"),
        (["--max-steps", "a/ b"], "--max-steps: 'a/ b' is not INT"),
        (as_flags({"max_steps": 1.5}), "--max-steps: '1.5' is not INT"),
        (["--max-steps=1.0001k"], "--max-steps: '1.0001k' is not INT"),
        (["--max-steps", "1e300"], f"--max-steps must be below 2**63, not {int(1e300)}"),
        (["--max-steps", "5kk"], "--max-steps: '5kk' is not INT"),
        (["--micro-batch-size=all"], "--micro-batch-size: 'all' is not INT or auto"),
        (["--size", "gpt3"], "--size: 'gpt3' is not gpt2 or gpt2-xl"),
        (["--logger", "wandb", "x"], "--logger: 'x' is not wandb or trackio"),
        (["--max-steps"], "--max-steps: expected one argument"),
        (["--max-steps=0"], "--max-steps must be above 0, not 0"),
        ([f"--workers={2**70}"], f"--workers must be below 2**63, not {2**70}"),
        (["--max-lr=inf"], f"--max-lr {FINITE} inf"),
        (["--max-steps=-1", "--max-lr=-2"], f"--max-lr {LEAST} -2.0; --max-steps {ABOVE} -1"),
        (["--max-lr=nan", "--workers=-1"], f"--max-lr {FINITE} nan; --workers {LEAST} -1"),
    ],
)
def test_parse_flags_error_is_one_plain_line(args, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        parse_flags(Config, args)
    assert str(caught.value) == f"{message} (--help lists the flags)"


def test_parse_flags_says_what_a_flag_of_another_trainer_is_called_here():
    for flag, *meant in (
        ("--lr", "--max-lr"),
        ("--lerning-rate", "--max-lr"),
        ("--max_iters", "--max-steps"),
        ("--save-steps", "--checkpoint-every"),
        ("--gradient_checkpointing", "--activation-checkpointing"),
        ("--epochs", "--max-steps", "--total-batch-size"),
        ("--batch-size", "--micro-batch-size", "--total-batch-size"),
        ("--local_rank", "--nproc-per-node"),
        ("--save-every", "--checkpoint-every"),  # nanochat's, close to --sample-every
        ("--sample-interval", "--sample-every"),
        ("--warmdown-ratio", "--lr-schedule"),
        ("--max-tokens", "--max-steps", "--total-batch-size"),
        ("--cuda", "--device"),  # close to --no-cuda, which means the CPU
        ("--test-every", "--val-every"),  # close to --save-every
        ("--checkpoint", "--resume"),
        ("--config-file", "--config"),
        ("--cache-dir",),
        ("--embedding-lr",),  # there is none
        ("--vocab_size",),
    ):
        with pytest.raises(ValueError, match="unknown flag") as error:
            parse_flags(TrainConfig, [f"{flag}=3"])
        found = re.findall("(?<=[ ])--[a-z-]+", str(error.value))
        assert found == [flag.replace("_", "-"), *meant]
    names = {flag_of(field.name) for field in fields(TrainConfig)}
    for other, meant in TrainConfig.OTHER_NAMES.items():
        assert other not in names
        assert meant.startswith("torchrun ") or names >= {*re.findall("--[a-z0-9-]+", meant)}
        for flag, value in re.findall("^(--[a-z-]+) ([a-z0-9]+)$", meant):
            parse_flags(TrainConfig, [flag, value])


def test_parse_flags_expands_the_home_folder_in_paths_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for args in (
        ["--data-dir=~/d", "--model=~/m", "--run-name=~/n"],
        as_flags({"data_dir": "~/d", "model": "~/m", "run_name": "~/n"}),  # from a JSON file
    ):
        expected = Config(tmp_path / "d", model=str(tmp_path / "m"), run_name="~/n")
        assert parse_flags(Config, args) == expected
    fineweb, train = (pkgutil.resolve_name(SCRIPTS[name]) for name in ("fineweb", "train_gpt2"))
    sources = parse_flags(fineweb, ["--source", "~/a.txt", "stdlib"]).source
    assert sources == (str(tmp_path / "a.txt"), "stdlib")
    config = parse_flags(train, ["--init-from=~/a", "--sample-prompt=~/c"])
    assert config.init_from == str(tmp_path / "a")
    assert config.sample_prompt == "~/c"
    for flag in ("--config", "--resume", "--init-from"):  # read before the other flags
        with pytest.raises(UserError, match=re.escape(str(tmp_path / "d"))):
            parse_config([f"{flag}=~/d"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: --model"),
        (["--model=a", "stray"], "unexpected argument 'stray'"),
        (["--model=a", "False"], "unexpected argument 'False': use --NAME or --no-NAME"),
    ],
)
def test_parse_flags_refuses_too_few_and_too_many(args, message):
    with pytest.raises(ValueError, match=message):
        parse_flags(Needy, args)


def help_of(config_class, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags(config_class, ["--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_has_titles_first_sentences_defaults_and_choices(capsys, monkeypatch):
    shown = " ".join(help_of(Config, capsys).split())
    for part in (
        *("Train a model.", "--data-dir data Where the shards are. --compile"),
        *("--compile, --no-compile Whether to compile. (on)", "numbers: --max-lr 0.0006 Peak"),
        *("100% of it.", "--micro-batch-size auto Sequences at once. [INT, auto]"),
        *("--workers 7", "words: --size gpt2 Which GPT-2. [gpt2, gpt2-xl]", "--run-name TEXT By"),
        "--logger [NAME ...] Trackers. [wandb, trackio]",
    ):
        assert part in shown
    monkeypatch.setenv("COLUMNS", "40")
    text = help_of(Config, capsys)
    assert max(map(len, text.splitlines())) <= 40


SCRIPTS = {  # the configuration of each script
    "train_gpt2": "training.config:TrainConfig",
    "fineweb": "fineweb:FineWebConfig",
    "hellaswag": "hellaswag:HellaSwagConfig",
    "sample": "sample:SampleConfig",
    "plot": "plot:PlotConfig",
    "export": "export:ExportConfig",
    "demo": "demo:DemoConfig",
    "bench": "bench.__main__:BenchConfig",
    "bench.recipes": "bench.recipes:RecipesConfig",
    "bench.trial": "bench.trial:TrialConfig",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_every_script_has_every_flag(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    config_class = pkgutil.resolve_name(SCRIPTS[script])
    text = help_of(config_class, capsys)
    assert max(map(len, text.splitlines())) <= 100
    names = {f"--{field.name.replace('_', '-')}" for field in fields(config_class)}
    assert names - set(re.findall(r"^ +(--[\w-]+)", text, re.MULTILINE)) <= {"--runs"}
    titles = getattr(config_class, "HELP_GROUPS", {})
    assert titles.keys() <= {field.name for field in fields(config_class)}
    assert all(f"\n{title}:\n" in text for title in titles.values())


def test_help_of_training_shows_the_flags_that_matter_first(capsys):
    first = help_of(TrainConfig, capsys).split("most used:")[1].split("\n\n")[0]
    flags = set(re.findall(r"^ +(--[\w-]+)", first, re.MULTILINE))
    assert {"--data-dir", "--size", "--max-steps", "--run-name", "--resume", "--plan"} < flags
    assert len(flags) == 12


# --- errors and exit codes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("raise UserError('a bad\\nvalue')", 2, "error: a bad value"),
        ("raise DivergedError('loss is nan')", 1, "stopped: loss is nan"),
        ("import os; os.kill(os.getpid(), 2)", 130, "interrupted"),
        ("raise UserError('no https://me:secret@host/x?key=1')", 2, "error: no https://host/x"),
    ],
)
def test_run_command_ends_in_one_line(body, code, line, tmp_path):
    assert end(run_script(tmp_path, body)) == (code, "", f"{line}\n")


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [cli.RANK_0_SECONDS])])
def test_run_command_lets_rank_0_print_an_error_first(rank, waits, monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit, match="2"):
        cli.run_command(lambda: parse_flags(Config, ["--max-stps"]))
    assert slept == waits


@pytest.mark.parametrize("size", [10, 10**6])  # printed at the end, or while main runs
def test_run_command_is_quiet_where_its_output_is_not_read(size, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    process = run_script(tmp_path, f"print('x' * {size})", stdout=writer)
    os.close(writer)
    assert end(process) == (141, None, "")


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the streams")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_run_command_works_where_streams_are_closed(closed, tmp_path):
    script, written = tmp_path / "script.py", tmp_path / "written"
    script.write_text(
        "import sys\nfrom runtime.cli import RunStopped, run_command\n"
        "from runtime.distributed import print0\n"
        "def main():\n    print('a')\n    print0('b')\n    print('c', file=sys.stderr)\n"
        f"    text = sys.stdin.read()\n    open({str(written)!r}, 'w').write(f'read {{text!r}}')\n"
        "    raise RunStopped('stopped here')\nrun_command(main)\n"
    )
    command = f"exec {shlex.quote(sys.executable)} {shlex.quote(str(script))} {closed}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert (done.returncode, written.read_text()) == (1, "read ''")
    assert done.stdout == (b"" if " >&-" in f" {closed}" else b"a\nb\n")
    assert done.stderr == (b"" if "2>&-" in closed else b"c\nstopped: stopped here\n")


def test_run_command_does_not_wait_for_a_process_group_to_end_in_order(tmp_path):
    join = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    lines = "import atexit; import torch.distributed as dist; atexit.register(print, 'in order')"
    process = run_script(tmp_path, f"{lines}; {join}; print('out'); raise UserError('bad')")
    assert end(process)[:2] == (2, "out\n")


@pytest.mark.parametrize(
    "body", ["{}['no such key']", "raise FloatingPointError('as numpy.seterr lets it')"]
)
def test_run_command_shows_a_programming_error_in_full(body, tmp_path):
    code, _, errors = end(run_script(tmp_path, body))
    assert code == 1
    assert errors.startswith("Traceback")
    assert body in errors


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("body", "code"),
    [("print('x'); raise cli.UserError('bad')", 2), ("raise ValueError('bad')", 1)],
)
def test_run_command_keeps_its_exit_code_where_nothing_can_be_written(
    unbuffered, body, code, tmp_path
):
    with open("/dev/full", "w") as full:
        outputs = {"stdout": full, "stderr": full, "PYTHONUNBUFFERED": unbuffered}
        script = run_script(tmp_path, f"from runtime import cli; {body}", **outputs)
        assert end(script)[0] == code


# --- before torch -----------------------------------------------------------------------------

LOADING = """
import os, sys
class Finder:
    def find_spec(name, *_):
        if name == "torch":
            raise SystemExit(os.environ.get("GOMP_SPINCOUNT"))
sys.meta_path.insert(0, Finder)
import {}
"""


@pytest.mark.parametrize(
    ("module", "given", "count"),
    [
        *((name, {}, "1000") for name in ("train_gpt2", "hellaswag", "sample", "bench.__main__")),
        ("runtime.threads, torch", {"GOMP_SPINCOUNT": "5"}, "5"),
        ("runtime.threads, torch", {"OMP_WAIT_POLICY": "active"}, ""),
    ],
)
def test_scripts_limit_spinning_before_torch_is_loaded_unless_the_user_has_set_it(
    module, given, count
):
    rest = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", LOADING.format(module)]
    done = subprocess.run(command, env=rest | given, stderr=subprocess.PIPE, cwd=ROOT)
    assert done.stderr.decode().strip() == count
