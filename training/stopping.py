"""Stop together: what one process is asked to do, all processes do after the same step.

SIGTERM and SIGUSR1 (schedulers send them before they kill), SIGHUP (the terminal is closed) and
Ctrl-C are remembered here, until all processes learn of them.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from runtime.distributed import DistInfo, all_reduce_max, is_main

SIGNALS = [  # Windows has neither SIGUSR1 nor SIGHUP
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
    if hasattr(signal, name)
]
BATCHES_PER_SYNC = 8  # of an evaluation: ranks wait for each other when they sync


class _EvaluationStopped(Exception):  # noqa: N818 - not an error
    pass


class StopRequest:
    """Whether training is to stop; as a context manager, it listens for signals.

    The first signal only asks to stop. A second Ctrl-C ends the process at once, except under
    `torchrun`, which repeats the first one to processes that had it from the terminal already.
    """

    def __init__(self, dist_info: DistInfo) -> None:
        self.is_agreed = False  # all processes know that they are to stop
        self.cut_evaluation = False  # before its end
        self._is_alone = dist_info.world_size == 1
        self._signal = 0  # that this process got
        self._batches = 0
        self._handlers: dict[int, Any] = {}

    @property
    def is_asked(self) -> bool:
        """Whether this process was asked to stop; the others may not know it yet."""
        return self._signal > 0

    def sync(self) -> None:
        """Agree to stop if any process was asked to; all must call this."""
        self.is_agreed = all_reduce_max(self.is_asked) > 0

    def signal_name(self) -> str | None:
        """The signal that any process got; every process must call this."""
        number = all_reduce_max(self._signal)
        return signal.Signals(number).name if number else None

    def interrupt_evaluation(self) -> None:
        """Leave an `interruptible` body if any process was asked to stop; all must call this."""
        self._batches += 1
        if self._batches % BATCHES_PER_SYNC == 0:
            self.sync()
        if self.is_agreed:
            raise _EvaluationStopped

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around an evaluation that calls `interrupt_evaluation` before each batch."""
        try:
            yield
        except _EvaluationStopped:
            self.cut_evaluation = True

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells ask for
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT and self._is_alone:
            raise KeyboardInterrupt
        if not self._signal and is_main() and os.isatty(2):
            line = f"{signal.Signals(number).name}: stopping after this step\n"
            with suppress(OSError):  # the terminal is gone
                os.write(2, line.encode())  # not print: a signal may come in the middle of one
        self._signal = self._signal or number
