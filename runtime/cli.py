"""A command's face: flags from a dataclass, and errors as one line with exit code 2."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

import tyro

from runtime.startup import restore_ctrl_c

Config = TypeVar("Config")
BOX_DRAWING = "╭╮╰╯│─ "
COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")


class RunStopped(Exception):  # noqa: N818 - what happened, not what was wrong
    """A run that nobody did anything wrong with cannot go on; it may be resumed."""


def parse_flags(config_class: type[Config], args: Sequence[str] | None = None) -> Config:
    """Build a configuration dataclass from command-line flags.

    Args:
        config_class: a dataclass; each field is a flag and its docstring the help text.
        args: the arguments, by default the process's own.

    Raises:
        ValueError: a flag is unknown or its value is refused; the message is one line.
    """
    args = sys.argv[1:] if args is None else args
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured), _lines_unbroken(args):
            return tyro.cli(config_class, args=args)
    except SystemExit as stop:
        if stop.code in (0, None):  # --help
            raise
        raise ValueError(_first_sentence(captured.getvalue())) from None


@contextlib.contextmanager
def _lines_unbroken(args: Sequence[str]) -> Iterator[None]:
    """Keep tyro from breaking a long path in its message in two; help fits the terminal still."""
    columns = os.environ.get("COLUMNS")
    if not {"-h", "--help"} & set(args):
        os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _first_sentence(boxed: str) -> str:
    """The message inside a box that tyro drew, on one line."""
    boxed = COLOUR_CODE.sub("", boxed)
    title, *body = [line.strip(BOX_DRAWING) for line in boxed.splitlines()]
    lines = []
    for line in body:
        if not line:  # the rule between the message and the help text
            break
        lines.append(line)
    message = re.sub(r"^Error parsing [A-Z]\w*: ", "", " ".join(lines) or title)
    if suggestion := re.search(r"Perhaps you meant:\W*(--[\w-]+)", boxed):
        message += f". Perhaps you meant {suggestion[1]}?"
    return message if "--help" in message else f"{message} (--help lists the flags)"


def run_command(main: Callable[[], None]) -> None:
    """Run a script's `main`; what a user can cause ends as one line and exit code 2.

    A run that had to stop (RunStopped; FloatingPointError: the numbers went bad) exits 1, Ctrl-C
    exits 130.
    """
    restore_ctrl_c()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack characters that text has
            stream.reconfigure(errors="replace")
    try:
        main()
    except (ValueError, OSError) as error:
        print_error(f"error: {error}")
        _exit(2)
    except (RunStopped, FloatingPointError) as error:
        print_error(f"stopped: {error}")
        _exit(1)
    except KeyboardInterrupt as interrupt:
        print_error(" ".join(["interrupted", *interrupt.args]))
        _exit(130)
    except SystemExit as stop:  # --help, or what another process says the reason of
        _exit(int(stop.code or 0))


def print_error(message: str) -> None:
    """Print one line on stderr, with the rank of a process that `torchrun` started."""
    rank = os.environ.get("RANK", "0")
    origin = "" if rank == "0" else f"[rank {rank}] "
    line = origin + " ".join(message.split()) + "\n"
    sys.stderr.write(line)  # one write where print makes two: lines of several ranks stay whole
    sys.stderr.flush()


def _exit(code: int) -> NoReturn:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(OSError):  # a full disk or a closed pipe
            sys.stdout.flush()
        os._exit(code)  # gloo's threads can abort an interpreter that exits in order
    raise SystemExit(code)
