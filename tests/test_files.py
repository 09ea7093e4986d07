import os
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest
from conftest import ROOT
from filelock import Timeout
from hypothesis import given
from hypothesis import strategies as st

from runtime import files
from runtime.files import (
    append_atomically,
    atomic_write,
    is_plain_name,
    lock_folder,
    read_json,
    redact_secrets,
)

posix_only = pytest.mark.skipif(os.name != "posix", reason="POSIX permissions and signals")


def test_atomic_write_makes_the_folder_and_shows_only_complete_files(tmp_path):
    path = tmp_path / "a" / "b" / "file.bin"
    with atomic_write(path) as file:
        file.write(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("old", [[], [b"old"]])
def test_atomic_write_that_fails_leaves_everything_as_it_was(tmp_path, old):
    for content in old:
        (tmp_path / "file.bin").write_bytes(content)
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "file.bin") as file:  # noqa: PT012
        file.write(b"half")
        raise KeyboardInterrupt
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == old


@posix_only
def test_atomic_write_killed_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    script = (
        "import os, signal, sys; from pathlib import Path; from runtime.files import atomic_write\n"
        "with atomic_write(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False, cwd=ROOT)

    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


@posix_only
def test_atomic_write_gives_the_permissions_that_open_would(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "file.bin") as file:
            file.write(b"x")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.bin").stat().st_mode) == 0o640


@pytest.mark.parametrize("content", [b"", b"{'a': 1}", b"\xff\xfe\x00", b"[" * 100_000])
def test_read_json_of_something_else_names_the_file(tmp_path, content):
    (tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json is not valid JSON"):
        read_json(tmp_path / "broken.json")


def test_read_json_reads_no_more_than_its_limit(tmp_path, monkeypatch):
    path = tmp_path / "long.json"
    path.write_text('"' + "a" * 998 + '"')
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 1000)
    assert read_json(path) == "a" * 998

    monkeypatch.setattr(files, "MAX_JSON_BYTES", 999)
    with pytest.raises(ValueError, match=r"long\.json has more than"):
        read_json(path)
    if Path("/dev/zero").exists():  # has no size, and no end
        with pytest.raises(ValueError, match="/dev/zero has more than"):
            read_json(Path("/dev/zero"))


@given(st.text())
def test_is_plain_name_means_an_entry_of_the_folder_itself(name):
    if is_plain_name(name):
        assert Path(os.path.normpath(f"/folder/{name}")).parent == Path("/folder")
    assert all(map(is_plain_name, ["a", "a.npy", ".a", "..a", "a b", "é"]))
    paths = ["", ".", "..", "/", "/a", "a/", "a/b", "../a", "./a"]
    assert not any(map(is_plain_name, [*paths, None, 3, []]))


@posix_only
def test_folder_is_locked_though_its_lock_file_is_deleted(tmp_path):
    folder = tmp_path / "a" / "b"
    with lock_folder(folder, ".lock"):
        (folder / ".lock").unlink()
        with pytest.raises(Timeout), lock_folder(folder, ".lock"):
            pass
    assert os.listdir(tmp_path) == []  # nothing was written
    with lock_folder(folder, ".lock"):
        (folder / "file").touch()
    assert os.listdir(folder) == ["file"]


@posix_only
@pytest.mark.parametrize("way", ["moved", "deleted", "replaced"])
def test_locked_folder_is_followed_where_it_goes(tmp_path, way):
    path = tmp_path / "a"
    with lock_folder(path, ".lock") as folder:
        assert not folder.follow()
        if way == "moved":
            path.rename(tmp_path / "b")
        else:
            shutil.rmtree(path)
        if way == "replaced":
            path.mkdir()
        assert folder.follow()
        assert folder.path == {"moved": tmp_path / "b"}.get(way, tmp_path / "a-2")
        assert folder.path.is_dir()
        assert not folder.follow()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no address", "no address"),
        ("at http://me:secret@h:80/x.", "at http://h:80/x."),
        ('"https://h/x?X-Signature=secret&a=b" failed', '"https://h/x" failed'),
        ("http://a:s3@cr3t@h/x then https://b:s@i/?t=s end", "http://h/x then https://i/ end"),
        ("mail me@here?", "mail me@here?"),
        ("no folder https:/me:secret@host.org/x?t=secret here", "no folder https:/host.org/x here"),
    ],
)
def test_redact_secrets_keeps_the_address(message, expected):
    assert redact_secrets(message) == expected


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
            with pytest.raises(OSError, match=r"log was not written: .*too large"):
                append_atomically(file, b"x" * 20 + b"\n")
        append_atomically(file, b"fits too\n")
    assert path.read_bytes() == b"old\nfits easily\nfits too\n"
