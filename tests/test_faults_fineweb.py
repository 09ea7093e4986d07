"""fineweb.py killed, stopped, short of a worker or of disk: real processes, signals and limits."""

import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from soak_kill import (
    children,
    differences,
    faults_of_shards,
    outlive,
    start_fineweb,
    write_documents,
)

from corpus.shards import MANIFEST_NAME, Manifest, verify_shards

FLAGS = ("--source=a.jsonl", "--shard-size=5000")
SHARD_BYTES = 2 * 5000 + 128
needs_proc = pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a source and, in `whole`, what an uninterrupted run makes of it."""
    folder = tmp_path_factory.mktemp("fineweb")
    write_documents(folder / "a.jsonl", 2000)
    finish(folder, "whole")
    assert len(verify_shards(folder / "whole").shards) > 100
    return folder


def finish(work, name, hide=False):
    """Run to the end."""
    process = start_fineweb(work, *FLAGS, f"--data-dir={name}", hide=hide)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def wait_for(condition, process):
    """Wait until a condition holds; the process is not to end before."""
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def workers_of(process):
    """The worker processes that have started, once there are two."""
    spawned = [
        pid
        for pid in children(process.pid)
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return spawned if len(spawned) == 2 else None


def limit_files_to(size):
    """What a child process does so that no file may grow beyond `size` bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def assert_one_line(errors, line):
    """The last line is `line`, and no other shows an exception."""
    assert errors.splitlines()[-1] == line
    assert "Traceback" not in errors
    assert "Error" not in errors.removesuffix(f"{line}\n")


@pytest.mark.parametrize("hide", [False, True], ids=["gigatoken", "tiktoken"])
def test_main_killed_at_random_moments_loses_and_repeats_nothing(work, tmp_path, hide):
    rng = random.Random(hide)
    killed = tmp_path / "killed"
    flags = (*FLAGS, f"--data-dir={killed}")
    kept = 0
    for _ in range(5):
        process = start_fineweb(work, *flags, hide=hide)
        wanted = len(list(killed.glob("*.npy"))) + rng.randrange(20)
        wait_for(lambda n=wanted: len(list(killed.glob("*.npy"))) >= n, process)
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert faults_of_shards(killed, work / "whole") == []
        manifest = Manifest.load(killed)
        shards = 0 if manifest is None else len(manifest.shards)
        assert shards >= kept
        kept = shards
    assert kept > 5
    finish(work, killed, hide)
    assert differences(killed, work / "whole") == []  # the manifest with its counts, too


@needs_proc
@pytest.mark.parametrize(
    ("stop", "code"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, 130)],
    ids=["kill", "term", "ctrl-c"],
)
@pytest.mark.parametrize("when", ["as the workers start", "in the middle"])
def test_main_stopped_leaves_no_process_and_goes_on(work, tmp_path, stop, code, when):
    stopped = tmp_path / "stopped"
    process = start_fineweb(work, *FLAGS, f"--data-dir={stopped}", hide=True)
    workers = wait_for(lambda: workers_of(process), process)
    if when == "in the middle":
        wait_for((stopped / "train_000009.npy").exists, process)
    else:
        time.sleep(0.1)  # they import
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as the terminal does
    else:
        process.send_signal(stop)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert outlive(workers, seconds=5) == []
    if stop == signal.SIGINT:
        assert_one_line(errors, "interrupted")
        assert not list(tmp_path.glob("stopped/.*"))
    elif when == "in the middle":  # a worker that is just being started cannot know why it ends
        assert "Traceback" not in errors
    assert faults_of_shards(stopped, work / "whole") == []
    if when == "in the middle":
        finish(work, stopped)
        assert differences(stopped, work / "whole") == []


@needs_proc
@pytest.mark.parametrize("when", ["as it starts", "in the middle"])
def test_main_names_a_dead_worker_and_goes_on(work, tmp_path, when):
    died = tmp_path / "died"
    process = start_fineweb(work, *FLAGS, f"--data-dir={died}", hide=True)
    workers = wait_for(lambda: workers_of(process), process)
    if when == "in the middle":
        wait_for((died / "train_000009.npy").exists, process)
    os.kill(workers[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert_one_line(
        errors,
        "error: a tokenizer process died, perhaps for want of memory: try a smaller --workers",
    )
    assert outlive(workers, seconds=5) == []
    assert not list(tmp_path.glob("died/.*"))
    assert faults_of_shards(died, work / "whole") == []
    finish(work, died)
    assert differences(died, work / "whole") == []


@pytest.mark.parametrize(
    ("limit", "file"), [(SHARD_BYTES - 1000, "shard"), (SHARD_BYTES, "manifest")]
)
def test_main_that_cannot_write_says_so_and_goes_on(work, tmp_path, limit, file):
    full = tmp_path / "full"
    flags = (*FLAGS, f"--data-dir={full}")
    if file == "shard":  # some are there before the disk is full; else the manifest grows too long
        process = start_fineweb(work, *flags)
        wait_for((full / "train_000009.npy").exists, process)
        process.kill()
        process.communicate()
    kept = Manifest.load(full).shards if full.exists() else ()
    written = {shard.file: (full / shard.file).stat().st_mtime_ns for shard in kept}
    process = start_fineweb(work, *flags, hide=True, preexec_fn=limit_files_to(limit))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith(f"error: {full} cannot be written (")
    assert errors.splitlines()[-1].endswith("give the same command again to go on")
    assert "Traceback" not in errors
    assert not list(full.glob(".*"))
    assert faults_of_shards(full, work / "whole") == []
    assert len(Manifest.load(full).shards) >= max(1, len(kept))
    finish(work, full)
    assert differences(full, work / "whole") == []
    for name, time_ns in written.items():  # finished shards were not made again
        assert (full / name).stat().st_mtime_ns == time_ns


def test_main_without_room_for_its_temporary_file_names_it(work, tmp_path):
    flags = (*FLAGS, f"--data-dir={tmp_path}/d")
    process = start_fineweb(work, *flags, preexec_fn=limit_files_to(100_000))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "gpt2.tiktoken: File too large; make room there, or set TMPDIR" in errors
    assert not (tmp_path / "d").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 300 kB, and what gives it more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(disk)]
    if os.name != "posix" or os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system, and not everywhere")
    yield disk, lambda: subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
    subprocess.run(["umount", str(disk)], check=True)


def test_main_on_a_full_disk_says_so_and_goes_on_once_there_is_room(work, small_disk):
    disk, make_room = small_disk
    for _ in range(2):  # again, while it is still full
        process = start_fineweb(work, *FLAGS, f"--data-dir={disk}")
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert errors.splitlines()[-1].startswith(f"error: {disk} cannot be written (")
        assert "Traceback" not in errors
        assert not list(disk.glob(".*"))
        assert faults_of_shards(disk, work / "whole") == []
    assert len(Manifest.load(disk).shards) > 10
    assert (disk / MANIFEST_NAME).exists()
    make_room()
    finish(work, disk)
    assert differences(disk, work / "whole") == []
