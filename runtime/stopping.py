"""Stop together: what one process is asked to do, all of them do after the same step.

SIGTERM and SIGUSR1 (schedulers send them before they kill), Ctrl-C, and a failure that only one
process meets are remembered here, and told to the others at the next place that all pass.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Self, TypeVar

from runtime.distributed import DistInfo, all_reduce_max

Item = TypeVar("Item")
SIGNALS = [  # Windows has no SIGUSR1
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
]
FAILURE = 1 << 16  # above every signal's number


class EvaluationStopped(Exception):  # noqa: N818 - not an error
    """The work at hand was broken off, on every process at the same place."""


class StopRequest:
    """Whether training is to stop; as a context manager, it listens for signals.

    A signal no longer ends the process, but a second Ctrl-C does, unless `torchrun` is there: it
    passes the first one on, to processes that had it from the terminal already.

    Args:
        dist_info: rank, world size and device of this process.
    """

    def __init__(self, dist_info: DistInfo) -> None:
        self.error: Exception | None = None
        self._dist_info = dist_info
        self._own = 0  # what this process was asked: a signal's number, or FAILURE
        self._reason_code = 0  # the same, of all processes
        self._handlers: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        """What all processes stop for: a signal's name, or `failure`; None if nothing."""
        if self._reason_code >= FAILURE:
            return "failure"
        return signal.Signals(self._reason_code).name if self._reason_code else None

    def fail(self, error: Exception) -> None:
        """Ask all processes to stop for an error that this one met."""
        self.error, self._own = self.error or error, FAILURE

    def sync_stop(self) -> bool:
        """Whether any process was asked to stop; every process must call this, and learns it."""
        self._reason_code = all_reduce_max(self._own, self._dist_info)
        return self._reason_code > 0

    def watch(self, items: Iterable[Item]) -> Iterator[Item]:
        """Pass items on, until any process is asked to stop.

        Args:
            items: as many on every process.

        Raises:
            EvaluationStopped: on every process, before the same item.
        """
        for item in items:
            if self.sync_stop():
                raise EvaluationStopped
            yield item

    def raise_failure(self) -> None:
        """End this process if all stop for a failure: with its message where it was met.

        Raises:
            Exception: the error.
            SystemExit: another process had the error; exit code 2.
        """
        if self._reason_code < FAILURE:
            return
        raise self.error if self.error is not None else SystemExit(2)

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells ask for
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._own == number == signal.SIGINT and self._dist_info.world_size == 1:
            raise KeyboardInterrupt
        if not self._own and self._dist_info.is_main and os.isatty(2):
            # Not print: a signal may come in the middle of one.
            os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())
        self._own = self._own or number
