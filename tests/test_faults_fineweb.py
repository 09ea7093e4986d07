"""fineweb.py killed, stopped, or on a full disk: real processes, signals and limits."""

import random
import resource
import signal

import pytest
from soak_kill import faults_of_shards
from test_fineweb import (
    TIMEOUT_S,
    assert_killed,
    contents,
    run_driver,
    start_fineweb,
    texts_of,
    write_jsonl,
    write_parquet,
)

from corpus.shards import Manifest

FLAGS = ("--source=a.jsonl", "--shard-size=5000", "--workers=2")
SHARD_BYTES = 2 * 5000 + 128


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a source and, in `whole`, what an uninterrupted run makes of it."""
    folder = tmp_path_factory.mktemp("fineweb")
    write_jsonl(folder / "a.jsonl", texts_of(10_000))
    finish(folder, "whole")
    assert len(Manifest.load(folder / "whole").shards) > 100
    return folder


def finish(work, name):
    """Run to the end."""
    process = start_fineweb(work, *FLAGS, f"--data-dir={name}")
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors


def limit_files_to(size):
    """What a child process calls so that none of its files can grow beyond `size` bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


AT_TENTH_SHARD = 20  # renaming: see AT_THIRD_SHARD


def test_main_killed_at_random_moments_loses_and_repeats_nothing(work, tmp_path):
    """By the kernel's own timer: a test that waits for a core would kill when all is finished."""
    rng = random.Random(0)
    killed = tmp_path / "killed"
    flags = (*FLAGS, f"--data-dir={killed}")
    kept = 0
    for attempt in range(6):
        renaming, seconds = rng.randrange(1, 40), rng.uniform(0.0001, 0.01)
        kill = {"INSTEAD": f"signal.setitimer(signal.ITIMER_REAL, {seconds})"}  # no handler
        done = run_driver(work, *flags, hide=attempt % 2, kill_at=renaming, environment=kill)
        assert done.returncode == -signal.SIGALRM, done.stderr
        assert faults_of_shards(killed, work / "whole") == []
        manifest = Manifest.load(killed)
        shards = 0 if manifest is None else len(manifest.shards)
        assert shards >= kept
        kept = shards
    assert kept > 5
    finish(work, killed)
    assert contents(killed) == contents(work / "whole")  # the manifest with its counts, too


@pytest.mark.parametrize("hide", [False, True], ids=["gigatoken", "tiktoken"])
@pytest.mark.parametrize(("stop", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_main_stopped_by_a_signal_ends_its_threads_and_goes_on(work, tmp_path, hide, stop, code):
    stopped = tmp_path / "stopped"
    flags = (*FLAGS, f"--data-dir={stopped}")
    # To the whole group, as from the terminal, and soon after a shard: from here it could be late.
    send = f"import threading; threading.Timer(0.003, os.killpg, (0, {stop:d})).start()"
    options = {"kill_at": AT_TENTH_SHARD, "environment": {"INSTEAD": send}}
    done = run_driver(work, *flags, hide=hide, start_new_session=True, **options)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    if stop == signal.SIGINT:
        assert done.stderr.splitlines()[-1] == "interrupted"
        assert not list(stopped.glob(".*.tmp"))
    assert faults_of_shards(stopped, work / "whole") == []
    finish(work, stopped)
    assert contents(stopped) == contents(work / "whole")


@pytest.mark.parametrize("too_long", ["shard", "manifest"])
def test_main_that_cannot_write_says_so_and_goes_on(work, tmp_path, too_long):
    full = tmp_path / "full"
    flags = (*FLAGS, f"--data-dir={full}")
    limit = SHARD_BYTES
    if too_long == "shard":  # after some finished ones
        limit -= 1000
        assert_killed(run_driver(work, *flags, kill_at=AT_TENTH_SHARD))
    kept = Manifest.load(full).shards if full.exists() else ()
    written = {shard.file: (full / shard.file).stat().st_mtime_ns for shard in kept}
    process = start_fineweb(work, *flags, hide=True, preexec_fn=limit_files_to(limit))
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, "Traceback" in errors) == (2, False)
    assert errors.splitlines()[-1].startswith(f"error: [Errno 27] File too large: '{full}/")
    assert not list(full.glob(".*.tmp"))
    assert faults_of_shards(full, work / "whole") == []
    assert len(Manifest.load(full).shards) >= max(1, len(kept))
    finish(work, full)
    assert contents(full) == contents(work / "whole")
    for name, time_ns in written.items():  # finished shards were not made again
        assert (full / name).stat().st_mtime_ns == time_ns


# Source files that change

AT_THIRD_SHARD = 6  # renaming: the manifest, two shards, the manifest, a shard, the manifest


@pytest.mark.parametrize(("kind", "change"), [("jsonl", "grown"), ("parquet", "touched")])
def test_main_refuses_a_source_that_changes_while_it_is_read(tmp_path, kind, change):
    """When the third shard is finished, most of the file is still to be read."""
    for name, count in (("a", 10_000), ("b", 100)):
        write = {"jsonl": write_jsonl, "parquet": write_parquet}[kind]
        write(tmp_path / f"{name}.{kind}", texts_of(count))
    changes = {
        "grown": f"open('a.{kind}', 'ab').write(b' ')",
        "touched": f"os.utime('a.{kind}', (0, 0))",  # now may be the time that it has
    }
    flags = (f"--source=*.{kind}", "--shard-size=5000", "--workers=1", "--data-dir=d")
    options = {"kill_at": AT_THIRD_SHARD, "environment": {"INSTEAD": changes[change]}}
    done = run_driver(tmp_path, *flags, **options)
    assert done.returncode == 2, done
    assert done.stderr.startswith(f"error: a.{kind} was changed while it was read: ")
    assert not Manifest.load(tmp_path / "d").complete
