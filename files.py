"""Files that are either whole or not there: atomic writes, hashes, JSON."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

HASH_BLOCK_BYTES = 1 << 20


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears under its name only once it is complete and on disk.

    The bytes go to a temporary sibling, which is flushed to disk and then renamed. If the body
    raises, or the process dies, `path` stays as it was.

    Args:
        path: the final name; its folder is created if it is missing.

    Yields:
        The open temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    opened = temporary.open("xb")
    try:
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write `value` as indented JSON, atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
