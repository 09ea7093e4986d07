"""Coordinated stop: a signal to one process stops all processes after the same step.

SIGTERM and SIGUSR1 (schedulers send them before they kill a job), SIGHUP (the terminal was closed)
and Ctrl-C are recorded here until all processes know about them.
"""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from runtime.distributed import all_reduce_max, is_main, print0, world_size

# Windows has neither SIGUSR1 nor SIGHUP.
SIGNALS = [s for s in signal.Signals if s.name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")]


class StopRequested(Exception):  # noqa: N818 - not an error
    """Ends an evaluation or a measurement on all processes, because one received a signal."""


class StopRequest:
    """Request to stop training; as a context manager, it handles signals.

    Only the main thread can handle signals: in another thread, they keep their usual effect. The
    first signal only requests a stop. A second Ctrl-C ends a single process immediately.
    Several processes ignore it, because `torchrun` forwards the first Ctrl-C to processes that
    already received it from the terminal.
    """

    def __init__(self) -> None:
        self.is_agreed = False  # all processes know that they must stop
        self.interrupted_evaluation = False
        self.signal = 0  # received by this process; 0 = none
        self._handlers: dict[int, Any] = {}

    def request(self) -> None:
        """Stop all processes as if this one had received SIGTERM."""
        self.signal = self.signal or signal.SIGTERM

    def signal_name(self) -> str | None:
        """Return the name of the signal that any process received; every process must call this."""
        number = all_reduce_max(self.signal)
        return signal.Signals(number).name if number else None

    def raise_if_requested(self) -> None:
        """Raise StopRequested if any process got a signal; all processes must call this."""
        self.is_agreed = self.interrupted_evaluation = all_reduce_max(self.signal) > 0
        if self.is_agreed:
            raise StopRequested

    def report(self, message: str) -> None:
        """Print that a signal stopped the run; every process must call this.

        Raise after Ctrl-C, for the exit code.
        """
        if (name := self.signal_name()) == "SIGINT":
            raise KeyboardInterrupt(message) if is_main() else SystemExit(130)
        print0(f"{name}: stopped {message}")

    def __enter__(self) -> Self:
        is_main_thread = threading.current_thread() is threading.main_thread()
        for number in SIGNALS if is_main_thread else ():
            if signal.getsignal(number) is not signal.SIG_IGN:  # which nohup and shells set
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal == number == signal.SIGINT and world_size() == 1:
            raise KeyboardInterrupt
        if not self.signal and is_main() and os.isatty(2):
            line = f"{signal.Signals(number).name}: stopping after this step\n"
            with suppress(OSError):  # the terminal was closed
                os.write(2, line.encode())  # not print, which the signal may have interrupted
        self.signal = self.signal or number
