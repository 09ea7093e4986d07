"""A script's command line: flags from a dataclass, errors as one line with exit code 2."""

import argparse
import ast
import ctypes
import difflib
import inspect
import io
import os
import re
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, get_args, get_type_hints

from runtime.files import redact_secrets

Config = TypeVar("Config")
RANK_0_SECONDS = 5  # in which rank 0 prints its error; then torchrun ends the other ranks
POSITIONAL = {"positional": True}  # metadata of a field of one value or more, without --NAME
HELP_NOTE = "A value that is shown is the default. (on), (off): a switch, --NAME or --no-NAME."
UNITS = {"k": "e3", "m": "e6", "b": "e9"}  # of whole numbers
WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
PR_SET_PDEATHSIG = 1  # from Linux's prctl.h


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
    groups of the class's `HELP_GROUPS` (titles by their first field), and exits. `default` has the
    values of flags that are not given. `OTHER_NAMES` of it has other programs' flags, or FILE.

    Raises:
        ValueError: a flag is unknown or its value is refused; the message is one line.
    """
    dashed = [
        re.sub(r"^--[\w-]+(?==|$)", lambda flag: flag[0].replace("_", "-"), arg)
        for arg in (sys.argv[1:] if args is None else args)
    ]
    try:
        given, unknown = _new_parser(config_class, default).parse_known_intermixed_args(dashed)
        if unknown:
            raise ValueError(_explain_unknown(unknown, config_class))
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(given).items()}
        return replace(cast(Any, default), **values) if default else config_class(**values)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":  # one line under torchrun, too
            raise ValueError(f"{error} (--help lists the flags)") from None
    time.sleep(RANK_0_SECONDS)
    raise SystemExit(2)


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """A command's flags, from their values by field; None is a flag that is not given."""
    flags = list[str]()
    for name, value in values.items():
        if isinstance(value, bool):
            flags.append(flag_of(name if value else f"no-{name}"))
        elif isinstance(value, list):
            flags += [flag_of(name), *map(str, value)]
        elif value is not None:
            flags.append(f"{flag_of(name)}={value}")
    return flags


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def shell_line(*words: object) -> str:
    """Words of a command as one would paste them into a shell."""
    return shlex.join(map(str, words))


def bad_numbers(config: object, above_zero: Collection[str]) -> list[str]:
    """What is wrong with a configuration's numbers, of which some must be `above_zero`."""
    problems = []
    for name, value in vars(config).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        too_large = 2**63 if isinstance(value, int) else float("inf")
        if name in above_zero and not 0 < value < too_large:
            problems.append(f"{flag_of(name)} must be above 0, not {value}")
        elif not 0 <= value < too_large:
            problems.append(f"{flag_of(name)} must be at least 0, not {value}")
    return problems


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below a usage of sixty flags."""
        raise ValueError(message.removeprefix("argument "))


def _explain_unknown(unknown: Sequence[str], config_class: type[Any]) -> str:
    """That these arguments belong to no flag, and which flags were probably meant."""
    names, problems = [flag_of(field.name) for field in fields(config_class)], []
    for flag in (arg.split("=")[0] for arg in unknown if arg.startswith("-")):
        similar = difflib.get_close_matches(flag, names, 1, cutoff=0.75)
        meant = getattr(config_class, "OTHER_NAMES", {}).get(flag) or "".join(similar)
        hint = f": did you mean {meant}?" if meant else ""
        problems.append(f"there is no flag {flag}{hint}")
    hint = ": give --NAME or --no-NAME" if unknown[0].lower() in ("true", "false") else ""
    if meant := getattr(config_class, "OTHER_NAMES", {}).get("FILE"):
        hint = f": give {meant} {shell_line(*unknown)}"
    return "; ".join(problems) or f"{unknown[0]!r} belongs to no flag{hint}"


def _new_parser(config_class: type[Any], default: object | None) -> argparse.ArgumentParser:
    """A parser whose result has the flags that are given, and no others."""
    parser = _Parser(
        usage=argparse.SUPPRESS,
        description=f"{str(inspect.getdoc(config_class)).splitlines()[0]} {HELP_NOTE}",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    titles, docstrings = getattr(config_class, "HELP_GROUPS", {}), _field_docstrings(config_class)
    kinds, group = get_type_hints(config_class), cast(Any, parser)
    for field in fields(config_class):
        if field.name in titles:
            group = parser.add_argument_group(titles[field.name])
        value = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(default, field.name, value)
        _add_flag(group, field, kinds[field.name], value, docstrings.get(field.name, ""))
    return parser


def _add_flag(group: Any, field: Field[Any], kind: object, value: object, docstring: str) -> None:  # noqa: ANN401
    """Add a field to a parser; its default is what the help text shows in a value's place."""
    flag = flag_of(field.name)
    text = re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0].replace("%", "%%")
    if kind is bool:
        text += " (on)" if value else " (off)"
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return
    parts = _parts(kind)
    words = [WORDS.get(part, part) for part in parts if part in WORDS or isinstance(part, str)]
    if len(words) > 1 and not all(word in text for word in words):
        text += f" [{', '.join(words)}]"

    def read(given: str) -> Any:  # noqa: ANN401 - of the field's type
        for part in parts:
            if part == given:
                return given
            if part in WORDS:
                with suppress(ValueError):
                    return parse_int(given) if part is int else part(given)
        raise argparse.ArgumentTypeError(f"{given!r:.80} is not {' or '.join(words)}")

    options: dict[str, Any] = {"nargs": "*"}
    if field.metadata == POSITIONAL:
        flag, shown, options = field.name, field.name.upper(), {"nargs": "+"}
    elif isinstance(value, tuple):
        shown = " ".join(value) or "NAME"
    else:
        shown = words[0] if value in (None, "", MISSING) else str(value)
        options = {"required": value is MISSING}
    group.add_argument(flag, type=read, metavar=shown, help=text, **options)


def parse_int(text: str) -> int:
    """A whole number, which may be written as `1e9`, `1.5B`, `500M` or `10k`."""
    with suppress(ValueError):
        return int(text)
    number = float(re.sub("[kmb]$", lambda unit: UNITS[unit[0]], text.lower()))
    if not number.is_integer() or abs(number) > 2**53:  # beyond it, floats are not exact
        raise ValueError(f"{text} is no whole number")
    return int(number)


def _parts(kind: object) -> list[Any]:
    """The classes and words that a type is made of: int and "auto" of `int | Literal["auto"]`."""
    return [part for each in get_args(kind) for part in _parts(each)] or [kind]


def _field_docstrings(config_class: type[Any]) -> dict[str, str]:
    """The string below each field in the source of a dataclass, on one line."""
    definition: Any = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(below.value).split())
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


# --- numbers in messages ------------------------------------------------------------------------


def format_count(count: float) -> str:
    """A count to three digits, in thousands, millions or billions: `250M`, `2.46B`."""
    count = float(f"{count:.3g}")
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"


def format_duration(seconds: float | None) -> str:
    """Seconds in the two largest units that matter: `43s`, `5m07s`, `1h43m`, `2d04h`."""
    if seconds is None:
        return "n/a"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m{rest:02d}s"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h" if days else f"{hours}h{minutes:02d}m"


# --- errors and exit codes --------------------------------------------------------------------


def run_command(main: Callable[[], None]) -> None:
    """Run a script's `main`; an error that a user can cause ends as one line and exit code 2.

    A run that had to stop (RunStopped; FloatingPointError: loss or gradient are not finite) exits
    with code 1, Ctrl-C with 130, and output into a pipe that is closed (`| head`) with 141.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # `torchrun` that dies by `kill -9` ends no rank: SIGTERM then lets each save and end.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # A closed stream, as a daemon's, is None.
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # noqa: SIM115
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
        from runtime.device import is_out_of_memory  # takes torch, which some scripts do without

        if not is_out_of_memory(error):
            raise
        advice = "end what else uses it, or use a smaller model, --batch-size or --num-samples"
        print_error(f"error: the device is out of memory, {advice}: {str(error)[:300]}")
        _exit(2)
    except KeyboardInterrupt as interrupt:
        print_error(" ".join(["interrupted", *interrupt.args]))
        _exit(130)
    except SystemExit as stop:  # a rank whose error another rank prints
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
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk or a closed pipe; Python would complain at exit once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    distributed = sys.modules.get("torch.distributed")
    if code == 130 or (distributed is not None and distributed.is_initialized()):
        os._exit(code)  # an exit in order waits for the compiler's threads; gloo's can abort it
    raise SystemExit(code)
