"""One data set from many processes: each writes shards of its own, one manifest lists them."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import test_fineweb as single
from conftest import torchrun
from test_fineweb import (
    TIMEOUT_S,
    assert_killed,
    contents,
    reference,
    run_driver,
    texts_of,
    tokens_of,
    write_jsonl,
    write_parquet,
)

import fineweb
from corpus.shards import Manifest, Part, open_shards

make, hub = single.make, single.hub


@pytest.fixture
def flags(tmp_path, make):
    """Flags of five files of all kinds, of which `whole` is what one process makes."""
    for i, kind in enumerate(["jsonl", "parquet", "txt", "jsonl", "parquet"]):
        texts, path = texts_of(40 * (i % 3 + 1), seed=i), tmp_path / f"{i}.{kind}"
        if kind == "txt":
            path.write_text("\n".join(texts), encoding="utf-8")
        else:
            {"jsonl": write_jsonl, "parquet": write_parquet}[kind](path, texts)
    flags = ["--source", *sorted(path.name for path in tmp_path.glob("[0-9].*"))]
    flags += ["--shard-size", "700"]
    make(*flags, "--data-dir", "whole")
    return flags


def make_parts(make, *flags, count=2):
    """Every part, the last one first; returns what each printed."""
    return [make(*flags, "--part", part, "--parts", count) for part in reversed(range(count))]


@pytest.mark.parametrize("count", [2, 5])
def test_parts_hold_the_tokens_of_one_process_in_order(make, flags, count):
    flags = [*flags, "--data-dir", "d"]
    printed = make_parts(make, *flags, count=count)
    assert f"d: part 0 of {count} not finished yet" in printed[-2]
    assert f"d: all {count} parts are finished" in printed[-1]
    folder, one, other = Path("d"), Manifest.load(Path("whole")), Manifest.load(Path("d"))
    assert tokens_of(folder) == tokens_of(Path("whole"))
    assert [shard.split for shard in other.shards].count("val") == 1
    assert other.shards[0].file == "val_p00000_000000.npy"
    counts = [(part.source, part.documents, part.skipped, part.tokens) for part in (one, other)]
    assert counts[0] == counts[1]
    assert "part 1 of" in make(*flags, "--part", 1, "--parts", count)
    assert "finished earlier, and unchanged" in make(*flags)
    read = [open_shards(folder, split) for split in ("train", "val")]
    for path in folder.glob("*.json"):
        path.unlink()
    for shards, split in zip(read, ("train", "val"), strict=True):  # names have that order, too
        assert open_shards(folder, split).paths == shards.paths


def test_parts_may_have_no_tokens(make, tmp_path):
    for name, texts in [("a", texts_of(60)), ("b", ["", ""]), ("c", [""])]:
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    flags = ["--source", "a.jsonl", "b.jsonl", "c.jsonl", "--shard-size", "300", "--data-dir", "d"]
    make_parts(make, *flags, count=3)
    assert tokens_of(Path("d")) == reference(texts_of(60))


def test_torchrun_gives_each_process_a_part(flags, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(single.DRIVER.format(root=str(single.ROOT), hide=False))
    command = torchrun(script, *flags, "--data-dir=d")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "d: all 2 parts are finished" in done.stdout
    assert tokens_of(tmp_path / "d") == tokens_of(tmp_path / "whole")


def test_a_part_killed_at_any_moment_goes_on_to_the_same_bytes(make, flags, tmp_path):
    make_parts(make, *flags, "--data-dir", "straight")
    killed = [*flags, "--data-dir", "killed"]
    part = ["--part=1", "--parts=2"]
    for kill_at in (1, 2, 3, 9):  # before the first manifest, the first shard; further on
        assert_killed(run_driver(tmp_path, *killed, *part, kill_at=kill_at))
    kept = Manifest.load(Path("killed"), Part(1, 2)).shards
    times = {shard.file: Path("killed", shard.file).stat().st_mtime_ns for shard in kept}
    assert len(times) > 2
    make(*killed, *part)
    assert_killed(run_driver(tmp_path, *killed, "--part=0", "--parts=2", kill_at=5))
    with pytest.raises(ValueError, match="killed is not finished: finish its 2 parts"):
        open_shards("killed", "train")
    make(*killed, "--part=0", "--parts=2")
    assert contents(Path("killed")) == contents(Path("straight"))
    assert not list(Path("killed").glob(".*.tmp"))
    for name, time_ns in times.items():  # finished shards were not made again
        assert Path("killed", name).stat().st_mtime_ns == time_ns


def test_parts_have_locks_of_their_own(make, flags):
    flags = [*flags, "--data-dir", "d", "--parts", "2"]
    with fineweb.folder_lock(Path("d"), Part(0, 2)):
        make(*flags, "--part", 1)
        with pytest.raises(ValueError, match=r"another fineweb\.py is writing to d"):
            make(*flags, "--part", 0)


def test_parts_of_the_hub_are_of_one_revision(hub, tmp_path):
    texts = [texts_of(40 + 9 * part, seed=part) for part in range(3)]
    files, environment = hub.repos["dataset", "o/n"]["files"], hub.environment(tmp_path / "hf")
    for part in range(3):
        path = write_parquet(tmp_path / "part.parquet", texts[part])
        files[f"sample/10BT/{part:03}.parquet"] = path.read_bytes()

    def run(*more, **options):
        flags = ["--source=o/n", "--name=sample-10BT", "--shard-size=1500", "--data-dir=d"]
        return run_driver(tmp_path, *flags, "--parts=2", *more, environment=environment, **options)

    done = run("--part=1")
    assert done.returncode == 0, done.stderr
    hub.head = "b" * 40  # the data set has moved on, the other part has not
    done = run("--part=0", "--revision=main")
    assert done.returncode == 2
    assert f"d holds other data, revision {'a' * 40} instead of" in done.stderr
    assert_killed(run("--part=0", kill_at=4))
    done = run("--part=0")
    assert done.returncode == 0, done.stderr
    assert tokens_of(tmp_path / "d") == reference(itertools.chain(*texts))
    assert Manifest.load(tmp_path / "d").source["revision"] == "a" * 40


def test_parts_that_were_brought_together_are_joined_once_all_are_there(make, flags):
    make_parts(make, *flags, "--data-dir", "there")
    Path("d").mkdir()
    for path in Path("there").glob("*p00001*"):
        shutil.copy(path, "d")
    shutil.copy("there/part_00001_of_00002.json", "d")
    with pytest.raises(ValueError, match=r"d: part 0 of 2 not finished: .* with --part 0 first"):
        make(*flags, "--data-dir", "d", "--parts", 2)
    for path in Path("there").glob("*0000*"):
        shutil.copy(path, "d")
    assert "d: " in make(*flags, "--data-dir", "d", "--parts", 2)
    assert contents(Path("d")) == contents(Path("there"))
    shard = Path("d/train_p00001_000002.npy")
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\1")
    with pytest.raises(ValueError, match=r"train_p00001_000002\.npy has changed since it was"):
        make(*flags, "--data-dir", "d", "--parts", 2)


def test_a_part_of_other_data_is_refused_at_once(make, flags):
    flags = [*flags, "--data-dir", "d"]
    make(*flags, "--part", 0, "--parts", 2)
    before = contents(Path("d"))
    for others, difference in [
        (["--part=1", "--parts=2", "--shard-size=701"], "shard size 700 instead of 701"),
        (["--part=1", "--parts=3"], "parts 2 instead of 3"),
        (["--part=1", "--parts=2", "--source=stdlib"], "kind files instead of stdlib"),
        ([], "part 0 instead of None"),
    ]:
        with pytest.raises(ValueError, match=rf"d holds other data, {difference}"):
            make(*flags, *others)
    assert contents(Path("d")) == before


@pytest.mark.parametrize(
    ("others", "world_size", "message"),
    [
        (["--part=0"], 1, "--part 0 of how many. Add --parts"),
        (["--part=3", "--parts=3"], 1, "--part 3: parts of 3 are 0 to 2"),
        (["--parts=0"], 1, "--parts must be at least 1, not 0"),
        (["--part=0", "--parts=6"], 1, "6 parts of 5 files: .* so 5 parts are the most"),
        (["--parts=2"], 2, "torchrun gives each of its 2 processes a part: leave out"),
        (["--push-to-hub=o/n"], 2, "give it after torchrun, with --parts 2"),
    ],
)
def test_main_explains_parts_that_cannot_be(make, flags, monkeypatch, others, world_size, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    if world_size == 2:  # without a rank, it is something of the cluster's own
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=message):
        make(*flags, "--data-dir=d", *others)
    assert not list(Path("d").glob("[!.]*"))
