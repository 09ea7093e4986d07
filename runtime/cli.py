"""A script's command line: flags from a dataclass, errors as one line with exit code 2."""

import ast
import contextlib
import difflib
import inspect
import io
import os
import re
import select
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TextIO,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from runtime.files import redact_secrets
from runtime.startup import finish_startup

Config = TypeVar("Config")
BOX_DRAWING = "╭╮╰╯│─ "
COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
HELP_COLUMNS = 100
HELP_NOTE = "A value that is shown is the default. (on), (off): a switch, --NAME or --no-NAME."
PLACEHOLDERS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
RANK_0_SECONDS = 5  # in which rank 0 prints its error; then torchrun ends the other ranks


class RunStopped(Exception):  # noqa: N818 - it reports an event, not a mistake
    """A run has to stop through nobody's mistake; it can be resumed."""


def parse_flags(
    config_class: type[Config],
    args: Sequence[str] | None = None,
    default: Config | None = None,
    hints: Mapping[str, str] | None = None,
) -> Config:
    """Build a dataclass from command-line flags: each field is one, its docstring the help text.

    `--help` prints `help_text` and exits.

    Args:
        config_class: the dataclass.
        args: by default the process's own.
        default: has the values of flags that are not given, by default those of the class.
        hints: by flag that does not exist, what to do instead.

    Raises:
        ValueError: a flag is unknown or its value is refused; the message is one line. Under
            torchrun only rank 0 raises it; the other ranks exit with code 2 and print nothing.
    """
    args = sys.argv[1:] if args is None else args
    if {"-h", "--help"} & set(args):
        print(help_text(config_class, default), end="")
        raise SystemExit(0)
    try:
        return _parse(config_class, args, default, hints or {})
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            hint = "" if "--help" in str(error) else " (--help lists the flags)"
            raise ValueError(f"{error}{hint}") from None
    time.sleep(RANK_0_SECONDS)
    raise SystemExit(2)


def _parse(
    config_class: type[Config],
    args: Sequence[str],
    default: Config | None,
    hints: Mapping[str, str],
) -> Config:
    captured = io.StringIO()
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"  # otherwise tyro breaks the path in a message in two
    try:
        with contextlib.redirect_stderr(captured):
            config, unknown = tyro.cli(
                config_class, args=args, return_unknown_args=True, **defaults
            )
    except SystemExit:
        raise ValueError(_unboxed(captured.getvalue())) from None
    finally:
        if columns is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = columns
    if unknown:
        flags = [arg for arg in unknown if arg.startswith("-")]
        if not flags:
            switch = ": give --NAME or --no-NAME" if unknown[0].lower() in ("true", "false") else ""
            raise ValueError(f"{unknown[0]!r} belongs to no flag{switch}")
        names = [field.name.replace("_", "-") for field in fields(cast(Any, config_class))]
        raise ValueError("; ".join(_explain_unknown(flag, names, hints) for flag in flags))
    return config


def _explain_unknown(flag: str, names: Sequence[str], hints: Mapping[str, str]) -> str:
    """That there is no such flag, and which one was probably meant."""
    flag = flag.split("=")[0].replace("_", "-")
    similar = difflib.get_close_matches(flag.removeprefix("--"), names, 1, cutoff=0.75)
    hint = hints.get(flag) or (f"did you mean --{similar[0]}?" if similar else "")
    return f"there is no flag {flag}" + (f": {hint}" if hint else "")


def _unboxed(text: str) -> str:
    """The message inside the box that tyro drew, on one line."""
    title, *body = [line.strip(BOX_DRAWING) for line in COLOUR_CODE.sub("", text).splitlines()]
    end = body.index("") if "" in body else len(body)  # a rule; below it is the help text
    return re.sub(r"^Error parsing [A-Z]\w*: ", "", " ".join(body[:end]) or title)


def help_text(config_class: type[Any], default: object | None = None) -> str:
    """What `--help` prints: each flag with its default and the first sentence of its docstring.

    Plain text, of at most 100 columns.

    Args:
        config_class: the dataclass; its `HELP_GROUPS`, if any, has titles by their first field.
        default: has the defaults to show, by default those of the class.
    """
    columns = min(HELP_COLUMNS, shutil.get_terminal_size((HELP_COLUMNS, 24)).columns)
    kinds = get_type_hints(config_class, include_extras=True)
    flags = {f.name: f"  {_flag(f, kinds[f.name], default)}  " for f in fields(config_class)}
    indent = min(max(map(len, flags.values())), columns // 3)
    groups, texts = getattr(config_class, "HELP_GROUPS", {}), _field_docstrings(config_class)
    summary = (inspect.getdoc(config_class) or "").split("\n\n")[0]
    lines = [textwrap.fill(f"{summary} {HELP_NOTE}", columns), ""]
    for name, flag in flags.items():
        lines += [groups[name]] if name in groups else []
        sentence = re.split(r"(?<=\.)\s", texts[name], maxsplit=1)[0]
        choices = _choices(kinds[name])
        if len(choices) > 1 and not all(choice in sentence for choice in choices):
            sentence += f" [{', '.join(choices)}]"
        lines.append(
            textwrap.fill(
                sentence,
                columns,
                initial_indent=flag.ljust(indent),
                subsequent_indent=" " * indent,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines) + "\n"


def _flag(field: Field[Any], kind: Any, default: object | None) -> str:  # noqa: ANN401 - a type
    """A flag with its default, or with a word for its kind where there is none to show."""
    flag = f"--{field.name.replace('_', '-')}"
    value = field.default_factory() if callable(field.default_factory) else field.default
    value = getattr(default, field.name, value)
    if get_origin(kind) is Annotated:  # tyro's Positional
        return f"{field.name.upper()} ..."
    if isinstance(value, bool):
        return f"{flag} ({'on' if value else 'off'})"
    if value in (None, "", MISSING):
        words = [word for cls, word in PLACEHOLDERS.items() if cls in (kind, *get_args(kind))]
        return f"{flag} {words[0] if words else 'NAME'}{' (needed)' if value is MISSING else ''}"
    if isinstance(value, tuple):
        return f"{flag} {' '.join(value) or 'NAME ...'}"
    return f"{flag} {value}"


def _choices(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 - a type
    """The values of the Literals in a field's type."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(choice for each in get_args(kind) for choice in _choices(each))


def _field_docstrings(config_class: type[Any]) -> dict[str, str]:
    """The string below each field in the source of a dataclass, on one line."""
    definition: Any = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(below.value).split())
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


class OptionalOutput:
    """Standard output or error of a run that must not wait for its reader, nor end with it.

    Text that the stream does not take at once (a terminal after Ctrl-S, a pipe whose reader
    sleeps) or at all (a terminal or a reader that is gone, a full disk) is left out.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines_left_out = 0

    def write(self, text: str) -> int:
        """Write a line, or leave it out."""
        if not takes_output(self._stream.fileno()):
            self._lines_left_out += text.count("\n")
            return len(text)
        left_out, self._lines_left_out = self._lines_left_out, 0
        notice = f"({left_out} lines left out: nobody read them)\n" if left_out else ""
        with contextlib.suppress(OSError):
            self._stream.write(notice + text)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Nothing is left to flush."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self._stream, name)


def takes_output(descriptor: int) -> bool:
    """Whether a line written now would not wait for a reader; True where this is not known."""
    try:
        return bool(select.select([], [descriptor], [], 0)[1])
    except OSError:  # Windows asks only of sockets
        return True


def run_command(main: Callable[[], None], optional_output: bool = False) -> None:
    """Run a script's `main`; an error that a user can cause ends as one line and exit code 2.

    A run that had to stop (RunStopped; FloatingPointError: loss or gradient are not finite) exits
    with code 1, Ctrl-C with 130, and output into a pipe that is closed (`| head`) with 141.

    Args:
        main: what to run.
        optional_output: whether `main` goes on where its output is not taken: it makes files.
    """
    finish_startup()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack characters that text has
            stream.reconfigure(errors="replace")
    if optional_output:
        sys.stdout, sys.stderr = (
            cast(TextIO, OptionalOutput(stream)) for stream in (sys.stdout, sys.stderr)
        )
    _redact_writes(sys.stderr)
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        _exit(141)
    except (ValueError, OSError) as error:
        print_error(f"error: {error}")
        _exit(2)
    except (RunStopped, FloatingPointError) as error:
        print_error(f"stopped: {error}")
        _exit(1)
    except RuntimeError as error:
        device = sys.modules.get("runtime.device")  # not imported for this: it takes torch
        if device is None or not device.is_out_of_memory(error):
            raise
        advice = "end what else uses it, or use a smaller batch or model"
        print_error(f"error: the device is out of memory, {advice}: {str(error)[:300]}")
        _exit(2)
    except KeyboardInterrupt as interrupt:
        print_error(" ".join(["interrupted", *interrupt.args]))
        _exit(130)
    except SystemExit as stop:  # --help, or a rank whose error another rank prints
        _exit(int(stop.code or 0))


def _redact_writes(stream: TextIO) -> None:
    """Keep secrets in addresses out of a stream: of our errors, of warnings, of libraries' logs."""
    write = stream.write
    cast(Any, stream).write = lambda text: write(redact_secrets(text))


def print_error(message: str) -> None:
    """Print one line on stderr, with the rank of a process that `torchrun` started."""
    rank = os.environ.get("RANK", "0")
    line = ("" if rank == "0" else f"[rank {rank}] ") + " ".join(message.split()) + "\n"
    with contextlib.suppress(OSError):  # the terminal is gone: only the exit code can tell
        sys.stderr.write(line)  # one write, where print makes two: lines of ranks stay whole
        sys.stderr.flush()


def _exit(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:  # a full disk or a closed pipe; Python would complain at exit once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        os._exit(code)  # gloo's threads can abort an interpreter that exits in order
    raise SystemExit(code)
