"""Files that are complete or absent: atomic writes, locks, hashes, JSON."""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

# Of the first kind, a `Path` has made `//` one `/`; the second has no host, as urllib3 names it.
URL_SECRETS = re.compile(
    r"(\w:/{1,2})(?:[^\s/'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?|(?<=\S)\?[\w.%-]+=[^\s'\"]*"
)
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)  # of a variable


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears under its name only once it is complete and on disk.

    The bytes go to a temporary sibling, which is flushed to disk and then renamed. If the body
    raises, or the process dies, `path` stays as it was. A missing folder is created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:  # an interrupt may come as soon as the file is there
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(path)  # the error of a full disk names no file
        raise
    sync_folder(path.parent)


def append_atomically(file: FileIO, data: bytes) -> None:
    """Append `data` to an unbuffered file opened for appending: all of it, or nothing."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:  # a disk that fills up takes only a part
            data = data[file.write(data) :]
    except OSError as error:
        file.truncate(end)
        raise OSError(f"{file.name} was not written: {error}") from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power cut (POSIX)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write `value` as indented JSON, atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON file; a ValueError names one that is none."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


@contextmanager
def lock_folder(path: Path, file_name: str) -> Iterator[None]:
    """Make a folder, and keep other processes out of it for the length of the body.

    If the body leaves nothing in the folder, it goes again. Where another process has it,
    `filelock.Timeout` (an OSError) is raised.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / file_name).acquire(timeout=0)
    except OSError as error:
        refusal = f"{path} cannot be locked ({error}): mount its disk with locks, or use another"
        raise error if isinstance(error, Timeout) else OSError(refusal) from None
    with lock:
        try:
            yield
        finally:
            if os.name == "posix" and os.listdir(path) == [file_name]:
                (path / file_name).unlink()
                path.rmdir()


def redact_secrets(message: str) -> str:
    """Remove the environment's secrets, and user, password and query of addresses."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) >= 8:  # others may be a part of any message
            message = message.replace(value, "***")
    return URL_SECRETS.sub(r"\1\2", message)
