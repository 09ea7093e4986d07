"""fineweb.py killed, stopped, or on a full disk: real processes, signals and limits."""

import resource
import signal

import pytest
from fineweb_runs import assert_killed, contents, run_driver, texts_of, write_texts

from corpus.shards import Manifest, verify_shards

FLAGS = ("--source=a.jsonl", "--shard-size=5000", "--workers=2")
SHARD_BYTES = 2 * 5000 + 128
AT_TENTH_SHARD = 20  # renamings: the manifest, two shards, the manifest, a shard, the manifest, …


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a source and, in `whole`, what an uninterrupted run makes of it."""
    folder = tmp_path_factory.mktemp("fineweb")
    write_texts(folder / "a.jsonl", texts_of(10_000))
    finish(folder, "whole")
    assert len(Manifest.load(folder / "whole").shards) > 100
    return folder


def finish(work, name):
    """Run to the end."""
    done = run_driver(work, *FLAGS, f"--data-dir={name}")
    assert done.returncode == 0, done.stderr


def check_shards(stopped, whole):
    """The shards that a stopped run has finished are those of an uninterrupted one."""
    if (stopped / "manifest.json").exists():
        verify_shards(stopped, Manifest.load(stopped).shards)
    for path in stopped.glob("*.npy"):
        assert path.read_bytes() == (whole / path.name).read_bytes()


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
    check_shards(stopped, work / "whole")
    finish(work, stopped)
    assert contents(stopped) == contents(work / "whole")


@pytest.mark.parametrize("too_long", ["shard", "manifest"])
def test_main_that_cannot_write_says_so_and_goes_on(work, tmp_path, too_long):
    full = tmp_path / "full"
    flags, limit = (*FLAGS, f"--data-dir={full}"), SHARD_BYTES
    if too_long == "shard":  # after some finished ones
        limit -= 1000
        assert_killed(run_driver(work, *flags, kill_at=AT_TENTH_SHARD))
    kept = len(Manifest.load(full).shards) if full.exists() else 1
    done = run_driver(
        work,
        *flags,
        hide=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert done.stderr.splitlines()[-1].startswith(f"error: [Errno 27] File too large: '{full}/")
    assert not list(full.glob(".*.tmp"))
    check_shards(full, work / "whole")
    assert len(Manifest.load(full).shards) >= kept
    finish(work, full)
    assert contents(full) == contents(work / "whole")
