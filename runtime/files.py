"""Files and folders that are either complete or absent: atomic writes, locks, hashes, JSON."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, SoftFileLock, Timeout

from runtime.errors import LockedError, UserError

URL_SECRETS = re.compile(r"(?<=://)[^\s/'\"]*@|\?[\w.%-]+=[^\s'\"]*")  # password, query
LFS_POINTER = b"version https://git-lfs"
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)  # in os.environ
# Errors of network disks and FUSE for what they do not support; 524 is Linux's own ENOTSUPP.
UNSUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, 524)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears under its name only when it is complete and on disk.

    The data is written to a temporary file in the same folder, which is flushed to disk and then
    renamed. If the body raises or the process dies, `path` is unchanged. A missing folder is
    created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:  # an interrupt may arrive as soon as the file exists
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(path)  # the error for a full disk does not name the file
        raise
    sync_folder(path.parent)


@contextmanager
def write_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder for files; it becomes `path` when they are complete and on disk.

    The temporary folder is next to `path`. A folder that already has this name is deleted right
    before the temporary folder is renamed. If the body raises or the process dies earlier, `path`
    is unchanged. A missing parent folder is created.

    An existing folder that is empty, except for hidden files, may be a mount point, which cannot be
    renamed. It stays: the temporary folder is in it, and the files move up in the order of writing.
    """
    path = path.resolve()  # a link stays, and the folder that it leads to is replaced
    stays = path.is_dir() and not any(path.glob("[!.]*"))
    temporary = path / ".tmp" if stays else path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # exists if a process was killed
    temporary.mkdir(parents=True)
    try:
        yield temporary
        names = sorted(temporary.iterdir(), key=os.path.getmtime)
        for name in names:
            with name.open("r+b") as file:
                os.fsync(file.fileno())
        if stays:
            for name in names:
                name.rename(path / name.name)
        else:
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
        sync_folder(path if stays else path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # exists only after an error


def open_lines(path: Path) -> FileIO:
    """Open an unbuffered file to append lines; end a last line that a power cut left incomplete."""
    file = FileIO(path, "a")
    if path.read_bytes()[-1:] not in (b"", b"\n"):
        append_atomically(file, b"\n")
    return file


def append_atomically(file: FileIO, data: bytes) -> None:
    """Append all of `data` to an unbuffered file opened for appending, or nothing."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:  # if the disk fills up, only a part is written
            data = data[file.write(data) :]
    except OSError as error:
        file.truncate(end)
        error.filename = file.name
        raise


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power cut (POSIX).

    Some disks cannot flush a folder, such as CIFS and VirtualBox's shared folders: do nothing.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise OSError(error.errno, error.strerror, str(folder)) from None
    finally:
        os.close(descriptor)


def check_downloaded(path: Path) -> None:
    """Raise if a file is only Git LFS's pointer to the file."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{path} is a Git LFS pointer: run git lfs pull to download the file")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write `value` as indented JSON, atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON file; raise a UserError that names the file if it is not valid JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


@contextmanager
def lock_folder(path: Path, file_name: str, remedy: str = "use another folder") -> Iterator[None]:
    """Create a folder and lock it against other processes while the body runs.

    On a disk without flock, the lock is a file that names this process and machine. The folder is
    removed if the body leaves it empty (POSIX).

    Args:
        path: the folder.
        file_name: name of the lock file.
        remedy: what a user can do if the folder cannot be locked.

    Raises:
        LockedError: another process holds the lock.
        UserError: the folder cannot be written or locked.
    """
    owner = path / f"{file_name}.owner"
    try:
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(path / file_name, fallback_to_soft=False).acquire(timeout=0)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            lock = SoftFileLock(owner).acquire(timeout=0)
    except Timeout:
        fix = f"wait for the other process to end, or {remedy}"
        if owner.exists():
            process = " on ".join(owner.read_text().split()[:2])
            age = timedelta(seconds=round(max(0, time.time() - owner.stat().st_mtime)))
            fix += f"; process {process} has held it for {age}: if that has ended, delete {owner}"
        raise LockedError(f"another process is at work in {path}: {fix}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written and locked ({error}): {remedy}") from None
    with lock:
        try:
            yield
        finally:
            if os.name == "posix" and {*os.listdir(path)} <= {file_name, owner.name}:
                shutil.rmtree(path, ignore_errors=True)  # NFS keeps an open file


def redact_secrets(message: str) -> str:
    """Remove the environment's secrets, and the user, password and query of URLs."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) >= 8:  # shorter ones may occur in any text
            message = message.replace(value, "***")
    return URL_SECRETS.sub("", message)
