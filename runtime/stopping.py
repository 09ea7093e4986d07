"""Stop together: what one process is asked to do, all processes do after the same step.

SIGTERM and SIGUSR1 (schedulers send them before they kill), SIGHUP (the terminal is closed),
Ctrl-C, and a failure that only one process meets are remembered here, until all processes learn of
them in `sync_stop`. A process that hangs can ask for nothing: the others' `Watchdog`s end them.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from runtime.cli import print_error
from runtime.distributed import DistInfo, all_reduce_max, print0

SIGNALS = [  # Windows has neither SIGUSR1 nor SIGHUP
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
    if hasattr(signal, name)
]
FAILURE = 1 << 16  # above every signal's number
LAST_WORDS_SECONDS = 10  # in which a watchdog says its line, which a dead disk may hinder


class EvaluationStopped(Exception):  # noqa: N818 - not an error
    """An evaluation was interrupted, on every process before the same batch."""


class Watchdog:
    """Ends this process if nothing goes on in it for some minutes; a context manager.

    A collective that waits for a process which hangs, or is gone with its machine, ends at the
    process group's own timeout at best, and no exception reaches it before.

    Args:
        minutes: between two calls of `beat`, at most; 0 = for ever. Time in which this process
            itself is stopped (Ctrl-Z, a suspended laptop) does not count.
        hint: what to do then.
    """

    def __init__(self, minutes: float = 0.0, hint: Callable[[], str] = str) -> None:
        self._minutes = min(minutes, threading.TIMEOUT_MAX)
        self._hint = hint
        self._beat = (0, time.time())  # the updates done, and the time of the last beat
        self._ended = threading.Event()

    def beat(self, step: int | None = None) -> None:
        """Something was done; after `step` updates, if there are more now."""
        self._beat = (self._beat[0] if step is None else step, time.time())

    def __enter__(self) -> Self:
        if self._minutes > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        seen, idle = self._beat, 0
        while idle < 60:
            if self._ended.wait(self._minutes):  # seconds: a sixtieth of the time
                return
            idle = idle + 1 if self._beat is seen else 0
            seen = self._beat
        threading.Timer(LAST_WORDS_SECONDS, os._exit, [1]).start()
        step, seconds = seen
        print_error(
            f"stopped: nothing was done since {time.strftime('%H:%M:%S', time.localtime(seconds))}"
            f", after step {step}, for the {self._minutes:g} minutes of --step-timeout: this or "
            f"another process hangs; {self._hint()}"
        )
        os._exit(1)


class StopRequest:
    """Whether training is to stop; as a context manager, it listens for signals.

    The first signal only asks to stop. A second Ctrl-C ends the process at once, except under
    `torchrun`, which repeats the first one to processes that had it from the terminal already.

    Args:
        dist_info: this process.
        stop_on_write_error: whether a file that cannot be written is a reason to stop.
        watchdog: watches as long as this listens; by default never ends the process.
    """

    def __init__(
        self,
        dist_info: DistInfo,
        stop_on_write_error: bool = False,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.watchdog = watchdog or Watchdog()
        self.error: Exception | None = None
        self._stop_on_write_error = stop_on_write_error
        self._dist_info = dist_info
        self._own_code = 0  # what this process was asked: a signal's number, or FAILURE
        self._code = 0  # the largest of all processes
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

    def fail(self, error: Exception) -> None:
        """Ask all processes to stop for an error that this one met."""
        self.error, self._own_code = self.error or error, FAILURE

    @contextmanager
    def on_write_error(self, at_end: bool = False) -> Iterator[None]:
        """If the body cannot write, warn and go on or, if the flags say so, ask all to stop.

        Args:
            at_end: whether the run ends here: a warning is then not enough.
        """
        try:
            yield
        except OSError as error:
            if at_end or self._stop_on_write_error:
                self.fail(error)
            else:
                print0(f"warning: {error}")

    def sync_stop(self) -> bool:
        """Whether any process was asked to stop: an all-reduce, which every process must call."""
        self._code = all_reduce_max(self._own_code)
        return self._code > 0

    def interrupt_evaluation(self) -> None:
        """Called between the batches of an evaluation, by every process.

        Raises:
            EvaluationStopped: on every process, if any was asked to stop.
        """
        self.watchdog.beat()
        if self.sync_stop():
            raise EvaluationStopped

    def raise_failure(self) -> None:
        """End this process if all stop for a failure; the one that met it says what it was.

        Raises:
            Exception: the error.
            SystemExit: another process had the error; exit code 2.
        """
        if self._code < FAILURE:
            return
        raise self.error if self.error is not None else SystemExit(2)

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells ask for
                self._handlers[number] = signal.signal(number, self._on_signal)
        self.watchdog.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog.__exit__()
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._own_code == number == signal.SIGINT and self._dist_info.world_size == 1:
            raise KeyboardInterrupt
        if not self._own_code and self._dist_info.is_main and os.isatty(2):
            line = f"{signal.Signals(number).name}: stopping after this step\n"
            with suppress(OSError):  # the terminal is gone
                os.write(2, line.encode())  # not print: a signal may come in the middle of one
        self._own_code = self._own_code or number
