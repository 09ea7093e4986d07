"""Ctrl-C while a script is still importing: one line, no traceback."""

import os
import signal


def exit_on_ctrl_c() -> None:
    """End the process at Ctrl-C, until `restore_ctrl_c`; scripts call this before their imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _end)


def restore_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)
