"""A script's command line: flags from a dataclass, errors as one line with exit code 2."""

import argparse
import ast
import difflib
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from runtime.files import redact_secrets
from runtime.startup import finish_startup

Config = TypeVar("Config")
T = TypeVar("T")
Positional = Annotated[T, "positional"]  # a field that is given without --NAME
HELP_COLUMNS = 100
HELP_NOTE = "A value that is shown is the default. (on), (off): a switch, --NAME or --no-NAME."
MADE_FROM: dict[Any, tuple[type, ...]] = {  # by type: what flags and JSON have for it
    int: (int, str),
    float: (float, int, str),
    str: (str,),
    Path: (str,),
    bool: (bool,),
}
WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "true or false"}
RANK_0_SECONDS = 5  # in which rank 0 prints its error; then torchrun ends the other ranks


class RunStopped(Exception):  # noqa: N818 - it reports an event, not a mistake
    """A run has to stop through nobody's mistake; it can be resumed."""


# --- flags ------------------------------------------------------------------------------------


def parse_flags(
    config_class: type[Config],
    args: Sequence[str] | None = None,
    default: Config | None = None,
) -> Config:
    """Build a dataclass from command-line flags: each field is one, its docstring the help text.

    `--help` prints each flag with its default and the first sentence of its docstring, in the
    groups of the class's `HELP_GROUPS` (titles by their first field), and exits.

    Args:
        config_class: the dataclass.
        args: by default the process's own.
        default: has the values of flags that are not given, by default those of the class.

    Raises:
        ValueError: a flag is unknown or its value is refused; the message is one line. Under
            torchrun only rank 0 raises it; the other ranks exit with code 2 and print nothing.
    """
    try:
        values = _read_flags(config_class, args, default)
        return build_config(config_class, values, default, flag_of)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            raise ValueError(f"{error} (--help lists the flags)") from None
    time.sleep(RANK_0_SECONDS)
    raise SystemExit(2)


def build_config(
    config_class: type[Config],
    values: Mapping[str, Any],
    default: Config | None = None,
    name_of: Callable[[str], str] = str,
) -> Config:
    """A dataclass from values by field: text of flags, or JSON of a recipe or `config.json`.

    Args:
        config_class: the dataclass.
        values: by the names of its fields.
        default: has the values of other fields, by default those of the class.
        name_of: what a message calls a field.

    Raises:
        ValueError: a value is not of its field's type, or the class refuses it.
    """
    kinds, converted = get_type_hints(config_class), {}
    for name, value in values.items():
        try:
            converted[name] = _convert(value, kinds[name])
        except ValueError:
            expected = " or ".join(_alternatives(kinds[name]))
            raise ValueError(f"{name_of(name)} is {value!r:.80}, expected {expected}") from None
    return replace(cast(Any, default), **converted) if default else config_class(**converted)


def _convert(value: object, kind: object) -> Any:  # noqa: ANN401 - of the field's type
    """The value of a field from the text of a flag, or from JSON."""
    if get_origin(kind) is tuple:
        if isinstance(value, list):
            return tuple(_convert(each, get_args(kind)[0]) for each in value)
        raise ValueError
    for part in _parts(kind):
        if value == part or (value is None and part is NoneType):
            return value
        if type(value) in MADE_FROM.get(part, ()):
            with suppress(ValueError, OverflowError):
                return part(value)
    raise ValueError


def _parts(kind: object) -> list[Any]:
    """The classes of a union and the values of a Literal; a class itself."""
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    return [part for each in get_args(kind) for part in _parts(each)] or [kind]


def _alternatives(kind: object) -> list[str]:
    """What a field may be, in words for a user."""
    return [WORDS.get(part, part) for part in _parts(kind) if part in WORDS or type(part) is str]


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below a usage of sixty flags."""
        raise ValueError(message.removeprefix("argument "))


def _read_flags(
    config_class: type[Any], args: Sequence[str] | None, default: object | None
) -> dict[str, Any]:
    """The flags that are given: by field their text, for a switch a bool."""
    parser = _new_parser(config_class, default)
    dashed = [
        re.sub(r"^--[\w-]+(?==|$)", lambda flag: flag[0].replace("_", "-"), arg)
        for arg in (sys.argv[1:] if args is None else args)
    ]
    given, unknown = parser.parse_known_intermixed_args(dashed)
    if not unknown:
        return vars(given)
    flags = [arg.split("=")[0] for arg in unknown if arg.startswith("-")]
    if not flags:
        switch = ": give --NAME or --no-NAME" if unknown[0].lower() in ("true", "false") else ""
        raise ValueError(f"{unknown[0]!r} belongs to no flag{switch}")
    names = [flag_of(field.name) for field in fields(config_class)]
    raise ValueError("; ".join(_explain_unknown(flag, names) for flag in flags))


def _explain_unknown(flag: str, names: Sequence[str]) -> str:
    """That there is no such flag, and which one was probably meant."""
    similar = difflib.get_close_matches(flag, names, 1, cutoff=0.75)
    return f"there is no flag {flag}" + (f": did you mean {similar[0]}?" if similar else "")


def _new_parser(config_class: type[Any], default: object | None) -> argparse.ArgumentParser:
    """A parser of what is given and nothing else: `build_config` fills in the defaults."""
    columns = min(HELP_COLUMNS, shutil.get_terminal_size((HELP_COLUMNS, 24)).columns)
    parser = _Parser(
        usage=argparse.SUPPRESS,
        description=f"{str(inspect.getdoc(config_class)).splitlines()[0]} {HELP_NOTE}",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, 4, columns // 3, columns),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    titles, docstrings = getattr(config_class, "HELP_GROUPS", {}), _field_docstrings(config_class)
    kinds, group = get_type_hints(config_class, include_extras=True), cast(Any, parser)
    for field in fields(config_class):
        if field.name in titles:
            group = parser.add_argument_group(titles[field.name])
        value = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(default, field.name, value)
        _add_flag(group, field.name, kinds[field.name], value, docstrings[field.name])
    return parser


def _add_flag(group: Any, name: str, kind: object, value: object, docstring: str) -> None:  # noqa: ANN401
    """Add a field to a parser; its default is what the help text shows in a value's place."""
    text = re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0].replace("%", "%%")
    choices = _alternatives(kind)
    if len(choices) > 1 and not all(choice in text for choice in choices):
        text += f" [{', '.join(choices)}]"
    if kind is bool:
        text += " (on)" if value else " (off)"
        group.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(kind) is Annotated:
        group.add_argument(name, nargs="*", metavar=name.upper(), help=text)
    elif isinstance(value, tuple):
        shown = " ".join(value) or "NAME"
        group.add_argument(flag_of(name), nargs="*", metavar=shown, help=text)
    else:
        shown = choices[0] if value in (None, "", MISSING) else str(value)
        group.add_argument(flag_of(name), required=value is MISSING, metavar=shown, help=text)


def _field_docstrings(config_class: type[Any]) -> dict[str, str]:
    """The string below each field in the source of a dataclass, on one line."""
    definition: Any = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(below.value).split())
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


# --- errors and exit codes --------------------------------------------------------------------


def run_command(main: Callable[[], None]) -> None:
    """Run a script's `main`; an error that a user can cause ends as one line and exit code 2.

    A run that had to stop (RunStopped; FloatingPointError: loss or gradient are not finite) exits
    with code 1, Ctrl-C with 130, and output into a pipe that is closed (`| head`) with 141.
    """
    finish_startup()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack characters that text has
            stream.reconfigure(errors="replace")
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


def print_error(message: str) -> None:
    """Print one line on stderr, without secrets; a rank that `torchrun` started says which."""
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    line = prefix + " ".join(redact_secrets(message).split()) + "\n"
    with suppress(OSError):  # the terminal is gone: only the exit code can tell
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
