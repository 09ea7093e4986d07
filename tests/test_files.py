import errno
import os
import re
import socket
import stat
from contextlib import contextmanager
from io import FileIO
from unittest.mock import Mock

import pytest

from runtime.errors import UserError
from runtime.files import (
    append_atomically,
    atomic_write,
    lock_folder,
    read_json,
    redact_secrets,
    write_folder,
    write_json,
)

posix_only = pytest.mark.skipif(os.name != "posix", reason="POSIX signals and locks")


def test_atomic_write_makes_the_folder_and_shows_only_complete_files(tmp_path):
    path = tmp_path / "a" / "b" / "file.bin"
    with atomic_write(path) as file:
        file.write(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:  # noqa: PT012
        file.write(b"half")
        raise KeyboardInterrupt
    assert [entry.read_bytes() for entry in path.parent.iterdir()] == [b"new"]


@pytest.mark.parametrize("content", [b"", b"{'a': 1}", b"\xff\xfe\x00", b"[" * 100_000])
def test_read_json_of_something_else_names_the_file(tmp_path, content):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json is not valid JSON"):
        read_json(tmp_path / "broken.json")


@posix_only
def test_lock_folder_lets_one_in_and_leaves_no_empty_folder(tmp_path):
    folder = tmp_path / "a" / "b"
    said = f" is at work in {folder}: wait for the other process to end, or use another folder$"
    with lock_folder(folder, ".lock"), pytest.raises(ValueError, match=said):  # noqa: SIM117
        with lock_folder(folder, ".lock"):
            pass
    assert not folder.exists()  # nothing was written
    with pytest.raises(KeyError), lock_folder(folder, ".lock"):  # noqa: PT012
        (folder / "file").touch()
        raise KeyError
    assert (folder / "file").exists()
    with lock_folder(folder, ".lock"):  # free again
        pass


@posix_only
def test_lock_folder_names_the_folder_that_is_gone_or_has_no_locks(tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone" / "disk")
    exists = f"[Errno {errno.EEXIST}] File exists: '{link}'"
    no_locks = OSError(errno.ENOLCK, "No locks available")  # as NFS without its lock service
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=no_locks))
    for folder, problem in ((link, exists), (tmp_path, str(no_locks))):
        said = f"{folder} cannot be written and locked ({problem}): use another --data-dir"
        with (
            pytest.raises(UserError, match=re.escape(said)),
            lock_folder(folder, ".lock", remedy="use another --data-dir"),
        ):
            pass


@posix_only
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, 524])
def test_lock_folder_without_flock_names_the_owner_and_how_to_take_the_lock_over(
    tmp_path, monkeypatch, number, recwarn
):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, "not here")))
    folder, owner = tmp_path / "a", tmp_path / "a" / ".lock.owner"
    said = f"process {os.getpid()} on {socket.gethostname()} has held it for 0:00:0"
    with lock_folder(folder, ".lock"), pytest.raises(ValueError, match=said):  # noqa: SIM117
        with lock_folder(folder, ".lock"):
            pass
    assert not folder.exists()
    folder.mkdir()
    owner.write_text("1\nanother-machine\n")  # a process that was killed there
    os.utime(owner, (0, 0))
    said = r"process 1 on another-machine has held it for \d+ days, "
    with pytest.raises(ValueError, match=said) as caught:  # noqa: SIM117
        with lock_folder(folder, ".lock"):
            pass
    remedy = "if that has ended, delete "
    assert str(caught.value).partition(remedy)[2] == str(owner)
    owner.unlink()
    with lock_folder(folder, ".lock"):
        (folder / "file").touch()
    assert {path.name for path in folder.iterdir()} == {".lock", "file"}
    assert not recwarn.list


@posix_only
def test_writing_continues_on_a_disk_that_cannot_flush_a_folder(tmp_path, monkeypatch):
    def fsync(descriptor, flush=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for number in (errno.EINVAL, errno.EOPNOTSUPP):  # as CIFS, as some FUSE disks
        with write_folder(tmp_path / "folder") as folder:
            write_json(folder / "file", number)
        assert read_json(tmp_path / "folder" / "file") == number
    number = errno.EIO
    with pytest.raises(OSError, match=re.escape(f"error: '{tmp_path}'")):
        write_json(tmp_path / "file", 1)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no address", "no address"),
        ("at http://me:secret@h:80/x.", "at http://h:80/x."),
        ('"https://h/x?X-Signature=secret&a=b" failed', '"https://h/x" failed'),
        ("http://a:s3@cr3t@h/x then https://b:s@i/?t=s end", "http://h/x then https://i/ end"),
        ("mail me@here?", "mail me@here?"),
        ("no answer from /x?X-Signature=secret at all", "no answer from /x at all"),
        ("the token abcd-1234 of the environment", "the token *** of the environment"),
    ],
)
def test_redact_secrets_keeps_the_address(message, expected, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abcd-1234")
    assert redact_secrets(message) == expected


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("HF_TOKEN", "hf_abcdefgh", True),
        ("HF_TOKEN_2", "hf_abcdefgh", True),
        ("AWS_SECRET_ACCESS_KEY", "/abcd/efghijkl+mn/o", True),
        ("SECRET_KEY_BASE", "abcdefgh", True),
        ("PGPASSWORD", "abcdefgh", True),
        ("TOKENIZED_DATA", "data/of-fineweb", False),
        ("TOKENIZER", "gpt2-medium", False),
        ("KEYBOARD_LAYOUT", "us-international", False),
        ("TOKENS_DIR", "{tmp_path}/tokens-of-fineweb", False),
        ("MONKEY", "{tmp_path}/", False),
    ],
)
def test_redact_secrets_keeps_paths_and_what_is_named_like_a_secret(
    name, value, is_secret, monkeypatch, tmp_path
):
    value = value.format(tmp_path=tmp_path)
    monkeypatch.setenv(name, value)
    assert redact_secrets(f"no {value} there") == f"no {'***' if is_secret else value} there"


@contextmanager
def largest_file(size):
    """As a full disk: a file of this process may not grow beyond `size` bytes."""
    resource = pytest.importorskip("resource")  # POSIX has it
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def test_append_atomically_appends_all_or_nothing(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    with largest_file(30), FileIO(path, "a") as file:
        append_atomically(file, b"fits easily\n")
        for _ in range(2):
            with pytest.raises(OSError, match=r"too large: .*log"):
                append_atomically(file, b"x" * 20 + b"\n")
        append_atomically(file, b"fits too\n")
    assert path.read_bytes() == b"old\nfits easily\nfits too\n"
