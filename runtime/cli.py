"""A script's command line: flags from a dataclass, errors as one line with exit code 2."""

import argparse
import ast
import difflib
import inspect
import io
import os
import re
import shlex
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, cast, get_args, get_type_hints

from runtime.errors import DivergedError, RunStopped, UserError, is_out_of_memory, is_user_error
from runtime.files import redact_secrets

Config = TypeVar("Config")
PathOrName = Annotated[str, Path]  # the type of a flag for a path, whose `~` is expanded, or a name
# Other ranks wait before they print an error. If rank 0 has failed, too, torchrun ends them first.
RANK_0_SECONDS = 5
POSITIONAL = {"positional": True}  # metadata of a field with one or more values and no --NAME
HELP_NOTE = "The value after a flag is its default. (on), (off): a switch; use --NAME or --no-NAME."
UNITS = {"k": "e3", "m": "e6", "b": "e9"}  # suffixes of whole numbers
DURATIONS = ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))
ROOT = str(Path(__file__).parents[1])  # the folder of the code
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


# --- flags ------------------------------------------------------------------------------------


def parse_flags(config_class: type[Config], args: Sequence[str] | None = None) -> Config:
    """Build a dataclass from command-line flags: one flag per field, its docstring as the help.

    `--help` prints each flag with its default and the first sentence of its docstring, and exits.
    Two class attributes are optional. `HELP_GROUPS` maps the first field of each group of flags to
    the group's title. `OTHER_NAMES` maps flags of other programs to the flags that error messages
    suggest instead ("" for none), and `FILE` to the flag for file names without a flag.

    Args:
        config_class: the dataclass.
        args: command-line arguments, by default the ones of this process.

    Raises:
        UserError: a flag is unknown or its value is invalid; the message is one line.
    """
    values = read_flags(config_class, args)
    with name_help():
        return config_class(**values)


def read_flags(config_class: type[Any], args: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the values of the flags that are passed, by field; see `parse_flags`."""
    args = sys.argv[1:] if args is None else args
    dashed = [re.sub(r"^--[\w-]+(?==|$)", lambda m: m[0].replace("_", "-"), arg) for arg in args]
    with name_help():
        given, unknown = _new_parser(config_class).parse_known_intermixed_args(dashed)
        if unknown:
            raise UserError(_explain_unknown(unknown, config_class))
    return {k: tuple(v) if isinstance(v, list) else v for k, v in vars(given).items()}


@contextmanager
def name_help() -> Iterator[None]:
    """Name `--help` in a UserError that the body raises."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error} (--help lists the flags)") from None


def usable_settings(config_class: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, saved by another version, without unknown names and invalid values."""
    usable = {f.name: settings[f.name] for f in fields(config_class) if f.name in settings}

    def problem(left_out: str = "") -> str:
        try:
            parse_flags(config_class, as_flags({n: usable[n] for n in usable if n != left_out}))
        except UserError as error:
            return str(error)
        return ""

    while found := problem():
        # Leaving out the cause of a problem changes the problem.
        del usable[next(name for name in usable if problem(name) != found)]
    return usable


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Return a command's flags from values by field name; a value of None omits the flag."""
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
    """Return the flag of a field; a name such as `from_` avoids a keyword of Python."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def shell_line(*words: object) -> str:
    """Join the words of a command, quoted so that the line can be pasted into a shell."""
    return shlex.join(map(str, words))


def check_settings(
    config: object, above_zero: Collection[str], *problems: str, at_most_1: Collection[str] = ()
) -> None:
    """Raise a UserError if a configuration has invalid numbers or other `problems`; list them all.

    Numbers in the fields `above_zero` must be above 0, all others at least 0; numbers in the fields
    `at_most_1` must not be above 1. Floats must be finite, and integers must fit in 64 bits.
    """
    found = []
    for name, value in vars(config).items():
        if type(value) not in (int, float):
            continue
        limits = {  # the message names the first one that is not met
            "finite": abs(value) < float("inf"),
            "above 0": value > 0 or name not in above_zero,
            "at least 0": value >= 0,
            "at most 1": value <= 1 or name not in at_most_1,
            "below 2**63": value < 2**63 or isinstance(value, float),
        }
        unmet = [limit for limit, is_met in limits.items() if not is_met]
        found += [f"{flag_of(name)} must be {limit}, not {value}" for limit in unmet[:1]]
    if found := [*found, *problems]:
        raise UserError("; ".join(found))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UserError, where argparse would print the usage of every flag and exit."""
        message = message.replace("ignored explicit argument", "use one of them without")
        raise UserError(message.removeprefix("argument "))


def _explain_unknown(unknown: Sequence[str], config_class: type[Any]) -> str:
    """Describe unknown arguments and suggest the flags that were probably intended."""
    others, problems = getattr(config_class, "OTHER_NAMES", {}), []
    names = {flag_of(field.name): flag_of(field.name) for field in fields(config_class)} | others
    for flag in (arg.split("=")[0] for arg in unknown if arg.startswith("-")):
        similar = [names[n] for n in difflib.get_close_matches(flag, names, 1, cutoff=0.75)]
        hint = f": did you mean {similar[0]}?" if any(similar) else ""
        problems.append(f"unknown flag {flag}{hint}")
    hint = ": use --NAME or --no-NAME" if unknown[0].lower() in ("true", "false") else ""
    if suggested := others.get("FILE"):
        hint = f": use {suggested} {shell_line(*unknown)}"
    return "; ".join(problems) or f"unexpected argument {unknown[0]!r}{hint}"


def _new_parser(config_class: type[Any]) -> argparse.ArgumentParser:
    """Create a parser whose result contains only the flags that are passed."""
    parser = _Parser(
        usage=argparse.SUPPRESS,
        description=f"{str(inspect.getdoc(config_class)).splitlines()[0]} {HELP_NOTE}",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    titles, docstrings = getattr(config_class, "HELP_GROUPS", {}), _field_docstrings(config_class)
    kinds, group = get_type_hints(config_class, include_extras=True), cast(Any, parser)
    for field in fields(config_class):
        if field.name in titles:
            group = parser.add_argument_group(titles[field.name])
        value = field.default_factory() if callable(field.default_factory) else field.default
        _add_flag(group, field, kinds[field.name], value, docstrings.get(field.name, ""))
    return parser


def _add_flag(group: Any, field: Field[Any], kind: object, value: object, docstring: str) -> None:  # noqa: ANN401
    """Add a field to a parser; the help text shows its default after the flag."""
    flag = flag_of(field.name)
    text = re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0].replace("%", "%%")
    if kind is bool:
        text += " (on)" if value else " (off)"
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return
    choices = _choices(kind)
    names = [METAVARS.get(c, c) for c in choices if c in METAVARS or isinstance(c, str)]
    if len(names) > 1 and not all(name in text for name in names):
        text += f" [{', '.join(names)}]"

    def read(given: str) -> Any:  # noqa: ANN401 - a value of the field's type
        if Path in choices:  # the shell does not expand `~` in `--flag=~/x`
            given = os.path.expanduser(given)
        for choice in choices:
            if choice == given:
                return given
            if choice in METAVARS:
                with suppress(ValueError):
                    return parse_int(given) if choice is int else choice(given)
        kind, _, gpu = given.partition(":")
        hint = f": use cuda, and set CUDA_VISIBLE_DEVICES={gpu}" if kind == "cuda" and gpu else ""
        raise argparse.ArgumentTypeError(f"{given!r:.80} is not {' or '.join(names)}{hint}")

    options: dict[str, Any] = {"nargs": "*", "action": "extend"}
    if field.metadata == POSITIONAL:
        flag, metavar, options = field.name, field.name.upper(), {"nargs": "+"}
    elif isinstance(value, tuple):
        metavar = " ".join(value) or "NAME"
    else:
        metavar = names[0] if value in (None, "", MISSING) else str(value)
        options = {"required": value is MISSING}
    if field.metadata != POSITIONAL:
        options["dest"] = field.name
    group.add_argument(flag, type=read, metavar=metavar, help=text, **options)


def parse_int(text: str) -> int:
    """Parse a whole number, which may be written as `1e9`, `1.5B`, `500M` or `10k`."""
    with suppress(ValueError):
        return int(text)
    number = float(re.sub("[kmb]$", lambda unit: UNITS[unit[0]], text.lower()))
    if not number.is_integer():
        raise UserError(f"{text} is not a whole number")
    return int(number)


def _choices(kind: object) -> list[Any]:
    """Return the classes and words of a type: int and "auto" for `int | Literal["auto"]`."""
    return [choice for member in get_args(kind) for choice in _choices(member)] or [kind]


def _field_docstrings(config_class: type[Any]) -> dict[str, str]:
    """Return the docstring below each field in the source of a dataclass, as one line."""
    definition: Any = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0]
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(below.value).split())
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


# --- numbers in messages ------------------------------------------------------------------------


def format_count(count: float) -> str:
    """Format a count with three digits, in thousands, millions or billions: `250M`, `2.46B`."""
    count = float(f"{count:.3g}")
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"


def format_duration(seconds: float | None) -> str:
    """Format seconds in at most two units: `43s`, `5m07s`, `1h43m`, `2d04h`; `n/a` for None."""
    if seconds is None:
        return "n/a"
    whole = round(seconds)
    for (size, unit), (next_size, next_unit) in pairwise(DURATIONS):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // next_size:02d}{next_unit}"
    return f"{whole}s"


# --- errors and exit codes --------------------------------------------------------------------


def run_command(main: Callable[[], None], memory_flag: str = "model") -> None:
    """Run a script's `main`; print a user error as one line and exit with code 2.

    A run that had to stop (RunStopped, or DivergedError: the loss or gradient is not finite)
    exits with code 1, Ctrl-C with 130, and output to a closed pipe (`| head`) with 141. If memory
    runs out, the error suggests a smaller value of `memory_flag`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as a daemon's
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends
        if mode == "w" and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal's encoding may lack characters
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        _exit(141)
    except (RunStopped, DivergedError) as error:
        print_error(f"stopped: {error}")
        _exit(1)
    except Exception as error:
        if is_user_error(error):
            if os.environ.get("LOCAL_RANK", "0") != "0":  # print the same error once per machine
                time.sleep(RANK_0_SECONDS)
            print_error(f"error: {error}{_place(error)}")
        elif is_out_of_memory(error):
            fix = f"stop other programs on the device, or use a smaller {memory_flag}"
            print_error(f"error: the device is out of memory: {fix} ({str(error)[:300]})")
        else:
            with suppress(OSError):  # the disk of the log is full
                traceback.print_exc()
            _exit(1)
        _exit(2)
    except KeyboardInterrupt as interrupt:
        print_error(" ".join(["interrupted", *interrupt.args]))
        _exit(130)
    except SystemExit as stop:  # another rank prints the error
        _exit(int(stop.code or 0))


def _place(error: Exception) -> str:
    """Return the line of the code that could not use a file; a UserError explains itself."""
    if isinstance(error, UserError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(ROOT) and "site-packages" not in f.filename]
    frame = (ours or frames)[-1]
    return f" ({os.path.relpath(frame.filename, ROOT)}:{frame.lineno}: {frame.line})"


def print_error(message: str) -> None:
    """Print one line to stderr, without secrets; prefix it with the rank unless this is rank 0."""
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    line = prefix + " ".join(redact_secrets(message).split()) + "\n"
    with suppress(OSError):  # the terminal was closed: only the exit code is left
        sys.stderr.write(line)  # print() writes twice, which would mix the ranks' lines


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # full disk or closed pipe: Python would fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    distributed = sys.modules.get("torch.distributed")
    if code == 130 or (distributed is not None and distributed.is_initialized()):
        os._exit(code)  # SystemExit would wait for compiler threads, and gloo's can abort
    raise SystemExit(code)
