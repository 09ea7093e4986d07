"""Errors that `runtime.cli.run_command` prints as one line, without a traceback."""

import errno
import re

# Matches the messages of torch (GPU and CPU), Triton, NCCL, cuBLAS and cuDNN.
OUT_OF_MEMORY = re.compile(
    r"out of memory|Failed to CUDA \w+|_ALLOC(ATION)?_FAILED|can't allocate memory"
)
LOST_PROCESS = (
    "another process has exited or cannot be reached: the cause is the first error above, from "
    "another rank or machine; without one, it was killed, or a port is closed (NCCL_DEBUG=INFO)"
)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)  # also while printing, where no file has a name


class UserError(ValueError):
    """A problem that a user can fix; the message has the value, and the flag or command to use.

    Any other error is a mistake in the code, so it keeps its traceback.
    """


class LockedError(UserError):
    """Another process has locked a folder."""


class DivergedError(FloatingPointError):
    """The loss, a gradient, a weight or a moment is not finite; every rank raises it together."""


def is_user_error(error: BaseException | None) -> bool:
    """Return whether a user can fix an error: a UserError, or a file that cannot be used."""
    is_of_file = isinstance(error, OSError) and (error.filename or error.errno in FULL_DISK)
    return isinstance(error, UserError) or bool(is_of_file)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch, or a library that it uses, reports that the device is out of memory."""
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


class RunStopped(Exception):  # noqa: N818 - it reports an event, not a mistake
    """A run had to stop, but not because of a user error; it can be resumed."""
