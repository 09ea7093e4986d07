"""Stop together: what one process is asked to do, all processes do after the same step.

SIGTERM and SIGUSR1 (schedulers send them before they kill), SIGHUP (the terminal is closed),
Ctrl-C, and a file that only one process cannot write are remembered here, until all processes
learn of them in `sync_stop`.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from runtime.distributed import all_reduce_max, is_main, print0, world_size

SIGNALS = [  # Windows has neither SIGUSR1 nor SIGHUP
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
    if hasattr(signal, name)
]
FAILURE = 1 << 16  # above every signal's number
BATCHES_PER_SYNC = 8  # of an evaluation: ranks wait for each other when they sync


class EvaluationStopped(Exception):  # noqa: N818 - not an error
    """An evaluation was interrupted, on every process before the same batch."""


class StopRequest:
    """Whether training is to stop; as a context manager, it listens for signals.

    The first signal only asks to stop. A second Ctrl-C ends the process at once, except under
    `torchrun`, which repeats the first one to processes that had it from the terminal already.
    """

    def __init__(self, stop_on_write_error: bool = False) -> None:
        self.error: OSError | None = None  # what this process stops for
        self._stop_on_write_error = stop_on_write_error
        self._own_code = 0  # what this process was asked: a signal's number, or FAILURE
        self._code = 0  # the largest of all processes
        self._batches = 0
        self._handlers: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        """What all processes stop for: a signal's name, or `failure`; None if nothing."""
        if self._code >= FAILURE:
            return "failure"
        return signal.Signals(self._code).name if self._code else None

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked to stop; the others may not know it yet."""
        return self._own_code > 0

    def sync_stop(self) -> bool:
        """Whether any process was asked to stop: an all-reduce, which every process must call."""
        self._code = all_reduce_max(self._own_code)
        return self._code > 0

    def interrupt_evaluation(self) -> None:
        """Raise `EvaluationStopped` on every process if any was asked to stop; all must call it."""
        self._batches += 1
        if self._batches % BATCHES_PER_SYNC == 0 and self.sync_stop():
            raise EvaluationStopped

    def write_failed(self, error: OSError, at_end: bool = False) -> None:
        """Warn of a file that could not be written or, if the flags say so, ask all to stop.

        A warning is not enough `at_end` of the run.
        """
        if at_end or self._stop_on_write_error:
            self.error, self._own_code = self.error or error, FAILURE
        else:
            print0(f"warning: {error}")

    @contextmanager
    def on_write_error(self) -> Iterator[None]:
        """Pass an OSError of the body to `write_failed`."""
        try:
            yield
        except OSError as error:
            self.write_failed(error)

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells ask for
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._own_code == number == signal.SIGINT and world_size() == 1:
            raise KeyboardInterrupt
        if not self._own_code and is_main() and os.isatty(2):
            line = f"{signal.Signals(number).name}: stopping after this step\n"
            with suppress(OSError):  # the terminal is gone
                os.write(2, line.encode())  # not print: a signal may come in the middle of one
        self._own_code = self._own_code or number
