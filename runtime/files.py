"""Files that are either complete or absent: atomic writes, downloads, hashes, JSON."""

import hashlib
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

Item = TypeVar("Item")
URL_SECRETS = re.compile(  # the second kind is an address without its host, as urllib3 names it
    r"(\w://)(?:[^\s/'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?|(?<=\S)\?[\w.%-]+=[^\s'\"]*"
)
MAX_JSON_BYTES = 64 << 20  # our largest file, a manifest of 150,000 shards, has 30 MB


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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_atomically(file: FileIO, data: bytes) -> None:
    """Append `data` to an unbuffered file opened for appending: all of it, or nothing.

    Raises:
        OSError: the disk is full; the message names the file.
    """
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


def finish_within(seconds: float, download: Callable[[], Item]) -> Item:
    """Run a download in a thread and wait for its result; a late one is left to itself.

    A library's own timeout is of each read, so that a server which sends a byte now and then would
    hold the caller for ever.

    Raises:
        TimeoutError: it has not ended in time.
    """
    future: Future[Item] = Future()

    def run() -> None:
        try:
            future.set_result(download())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"not complete after {seconds:,} s")
    return future.result()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write `value` as indented JSON, atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, or has more than `MAX_JSON_BYTES`.
    """
    with path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)  # bounded even if the file grows, or is a device
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{path} has more than {MAX_JSON_BYTES >> 20} MiB: it is not one of ours")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def check_types(values: Mapping[str, Any], types: Mapping[str, type]) -> None:
    """Refuse a file's values that do not have their field's type, and negative counts.

    Raises:
        ValueError: naming the first such value.
    """
    for name, kind in types.items():
        value = values.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise ValueError(f"{name} is {repr(value)[:60]}, not a valid {kind.__name__}")


def is_plain_name(name: object) -> bool:
    """Whether a name from a file can only mean an entry of the file's own folder."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..")


def find_escaping_link(folder: Path) -> Path | None:
    """A link at any depth of a folder that leads out of the folder; None if there is none."""
    home = os.path.realpath(folder)
    links = (path for path in folder.rglob("*") if path.is_symlink())
    return next(
        (link for link in links if not Path(os.path.realpath(link)).is_relative_to(home)), None
    )


def redact_secrets(message: str) -> str:
    """Remove user, password and query, which may be secret, from a message's addresses."""
    return URL_SECRETS.sub(r"\1\2", message)
