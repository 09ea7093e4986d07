"""One data set from many machines: the same bytes as from one."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import test_fineweb as single
from conftest import torchrun
from corpus.parts import part_folder
from hypothesis import given
from hypothesis import strategies as st
from test_fineweb import (
    TIMEOUT_S,
    assert_killed,
    contents,
    mtimes,
    reference,
    run_driver,
    texts_of,
    tokens_of,
    write_jsonl,
    write_parquet,
)

import fineweb
from corpus.shards import Manifest
from corpus.sources import FileSource, Part

make, hub = single.make, single.hub


def write_files(folder, kinds, documents=40):
    """A file of each kind; their sizes differ."""
    for i, kind in enumerate(kinds):
        texts = texts_of(documents * (i % 3 + 1), seed=i)
        path = folder / f"{i}.{kind}"
        if kind == "txt":
            path.write_text("\n".join(texts), encoding="utf-8")
        else:
            {"jsonl": write_jsonl, "parquet": write_parquet}[kind](path, texts)
    return ["--source", *(f"{i}.{kind}" for i, kind in enumerate(kinds))]


@pytest.fixture
def flags(tmp_path, make):
    """Flags of five files of all kinds, of which `whole` is what one machine makes."""
    flags = write_files(tmp_path, ["jsonl", "parquet", "txt", "jsonl", "parquet"])
    flags += ["--shard-size", "700"]
    make(*flags, "--data-dir", "whole")
    return flags


def make_parts(make, *flags, count):
    """Every part, the last one first."""
    return [make(*flags, "--part", part, "--parts", count) for part in reversed(range(count))]


def part_path(folder, index, count):
    return part_folder(Path(folder), Part(index, count))


# The same bytes


def test_merge_gives_the_bytes_of_one_machine(make, flags):
    for size, counts in (700, (1, 2, 5)), (100_000_000, (3,)):
        common = [*flags, "--shard-size", size, "--data-dir"]
        make(*common, f"whole {size}")
        for count in counts:
            folder = f"merged {count}"
            make_parts(make, *common, folder, count=count)
            assert make(*common, folder, "--parts", count).startswith(f"{folder}: ")
            assert contents(Path(folder)) == contents(Path(f"whole {size}"))
            assert "finished earlier" in make(*common, folder)


def test_merge_takes_parts_without_tokens(make, tmp_path):
    for name, texts in [("a", ["", ""]), ("b", texts_of(60)), ("c", [""])]:
        write_jsonl(tmp_path / f"{name}.jsonl", texts * (1 if name == "b" else 200))
    (tmp_path / "d.txt").write_text("")
    flags = ["--source", "a.jsonl", "b.jsonl", "c.jsonl", "d.txt", "--shard-size", "300"]
    make(*flags, "--data-dir", "whole")
    for _ in range(2):
        make_parts(make, *flags, "--data-dir", "merged", count=4)
    assert not Manifest.load(part_path("merged", 0, 4)).shards
    make(*flags, "--data-dir", "merged", "--parts", 4)
    assert contents(Path("merged")) == contents(Path("whole"))


def test_torchrun_gives_each_process_a_part_and_the_first_merges(flags, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(single.DRIVER.format(root=str(single.ROOT), hide=False))
    command = torchrun(script, *flags, "--data-dir=merged")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("waiting for")]
    assert sorted(line.split(":")[0] for line in said) == [
        "merged",
        "merged/parts/part_00000_of_00002",
        "merged/parts/part_00001_of_00002",
    ]
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")


# The slices


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_files_of_divides_all_files_in_order_and_evenly(tmp_path_factory, sizes, data):
    paths = [tmp_path_factory.getbasetemp() / f"{i}.txt" for i in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(b"x" * size)
    source = FileSource(paths)
    count = data.draw(st.integers(1, len(sizes)))
    parts = [source.files_of(Part(i, count)) for i in range(count)]
    assert list(itertools.chain(*parts)) == list(range(len(sizes)))
    for files in parts:
        weight = sum(sizes[i] + 1 for i in files)
        assert abs(weight - sum(size + 1 for size in sizes) / count) <= max(sizes) + 1


# Interrupted runs


def test_a_part_and_the_merge_killed_at_any_moment_go_on_to_the_same_bytes(make, flags, tmp_path):
    merged = [*flags, "--data-dir", "merged"]
    part = part_path("merged", 1, 2)
    for kill_at in (1, 3, 9):  # before the first manifest and the second; further on
        assert_killed(run_driver(tmp_path, *merged, "--part=1", "--parts=2", kill_at=kill_at))
    kept = mtimes(part)
    make_parts(make, *merged, count=2)
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in part.iterdir()}.items()
    for kill_at in (1, 3, 64):
        assert_killed(run_driver(tmp_path, *merged, "--parts=2", kill_at=kill_at))
    kept = mtimes(Path("merged"))
    tokens = sum(shard.tokens for shard in Manifest.load(part_path("merged", 0, 2)).shards)
    assert len(kept) * 700 > tokens  # it was in the second part
    make(*merged, "--parts", 2)
    assert kept.items() <= {p: p.stat().st_mtime_ns for p in Path("merged").iterdir()}.items()
    assert contents(Path("merged")) == contents(Path("whole"))


def test_one_machine_and_a_merge_go_on_with_each_others_shards(make, flags, tmp_path):
    for first, then in (("--parts=2", "--workers=1"), ("--workers=1", "--parts=2")):
        shutil.rmtree("merged", ignore_errors=True)
        make_parts(make, *flags, "--data-dir", "merged", count=2)
        assert_killed(run_driver(tmp_path, *flags, "--data-dir", "merged", first, kill_at=7))
        assert len(mtimes(Path("merged"))) > 2
        make(*flags, "--data-dir", "merged", then)
        shutil.rmtree("merged/parts", ignore_errors=True)
        assert contents(Path("merged")) == contents(Path("whole"))


def test_parts_have_locks_of_their_own(make, flags):
    with fineweb.folder_lock(part_path("merged", 0, 2)):
        make(*flags, "--data-dir", "merged", "--part", 1, "--parts", 2)
        with pytest.raises(ValueError, match=r"another fineweb\.py is .* merged/parts/part_0"):
            make(*flags, "--data-dir", "merged", "--part", 0, "--parts", 2)


# The hub


def test_parts_of_the_hub_are_of_one_revision(hub, make, tmp_path, monkeypatch):
    texts = [texts_of(40 + 9 * part, seed=part) for part in range(5)]
    files, environment = hub.repos["dataset", "o/n"]["files"], hub.environment(tmp_path / "hf")
    for part in range(5):
        path = write_parquet(tmp_path / "part.parquet", texts[part])
        files[f"sample/10BT/{part:03}.parquet"] = path.read_bytes()
    flags = ["--source=o/n", "--name=sample-10BT", "--shard-size=1500", "--data-dir=merged"]
    flags += ["--parts=2"]
    done = run_driver(tmp_path, *flags, "--part=1", environment=environment)
    assert done.returncode == 0, done.stderr
    hub.head = "b" * 40  # the data set has moved on, the other part has not
    done = run_driver(tmp_path, *flags, "--part=0", "--revision=main", environment=environment)
    assert done.returncode == 2
    assert f"part_00001_of_00002 holds other data, revision {'a' * 40} instead of" in done.stderr
    assert_killed(run_driver(tmp_path, *flags, "--part=0", kill_at=4, environment=environment))
    done = run_driver(tmp_path, *flags, "--part=0", environment=environment)
    assert done.returncode == 0, done.stderr
    path = part_path("merged", 1, 2) / "manifest.json"
    manifest = path.read_text()
    path.write_text(manifest.replace("a" * 40, "b" * 40))  # as if brought from elsewhere
    monkeypatch.setattr("socket.socket", None)  # the merge needs no network
    with pytest.raises(ValueError, match=f"part_00001_of_00002 holds .* revision {'b' * 40}"):
        make(*flags)
    path.write_text(manifest)
    make(*flags)
    assert tokens_of(tmp_path / "merged") == reference(itertools.chain(*texts))
    assert Manifest.load(tmp_path / "merged").source["revision"] == "a" * 40


# Bad input


def test_merge_names_the_parts_that_are_not_finished(make, flags, tmp_path):
    merged = [*flags, "--data-dir", "merged", "--parts", "3"]
    message = r"merged/parts: part {} of 3 not finished: give the same command with --part {} first"
    with pytest.raises(ValueError, match=message.format("0, 1, 2", 0)):
        make(*merged)
    assert not Path("merged").exists()
    make(*merged, "--part", 1)
    run_driver(tmp_path, *merged, "--part", "2", kill_at=5)
    with pytest.raises(ValueError, match=message.format("0, 2", 0)):
        make(*merged)
    assert {path.name for path in Path("merged").iterdir()} == {"parts"}


def test_a_part_of_other_data_is_refused_at_once(make, flags):
    merged = [*flags, "--data-dir", "merged", "--parts", "2"]
    make(*merged, "--part", 0)
    for others, difference in [
        (["--shard-size=701"], "shard size 700 instead of 701"),
        (["--parts=3"], "parts 2 instead of 3"),
        (["--source=stdlib"], "kind files instead of stdlib"),
    ]:
        with pytest.raises(ValueError, match=rf"part_00000_of_00002 holds .* {difference}"):
            make(*merged, *others, "--part", 1)
    assert [path.name for path in Path("merged/parts").iterdir()] == ["part_00000_of_00002"]


def test_merge_refuses_a_part_under_the_name_of_another(make, flags):
    merged = [*flags, "--data-dir", "merged"]
    make_parts(make, *merged, count=2)
    first, second = (part_path("merged", i, 2) for i in range(2))
    shutil.rmtree(first)
    shutil.copytree(second, first)
    with pytest.raises(ValueError, match=r"part_00000_of_00002 holds .* part 1 instead of 0"):
        make(*merged, "--parts", 2)
    assert not list(Path("merged").glob("*.npy"))


def test_merge_refuses_a_damaged_part_and_goes_on_once_it_is_made_again(make, flags):
    merged = [*flags, "--data-dir", "merged"]
    make_parts(make, *merged, count=2)
    part = part_path("merged", 1, 2)
    shard = part / "train_000002.npy"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"{shard} has changed since .* delete {part} and run"):
        make(*merged, "--parts", 2)
    assert part.exists()
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{shard} is missing: delete {part} and run"):
        make(*merged, "--parts", 2)
    shutil.rmtree(part)
    make(*merged, "--part", 1, "--parts", 2)
    make(*merged, "--parts", 2)
    assert contents(Path("merged")) == contents(Path("whole"))


@pytest.mark.parametrize(
    ("others", "world_size", "message"),
    [
        (["--part=0"], 1, "--part 0 of how many. Add --parts"),
        (["--part=3", "--parts=3"], 1, "--part 3: parts of 3 are 0 to 2"),
        (["--parts=0"], 1, "--parts must be at least 1, not 0"),
        (["--part=0", "--parts=6"], 1, "6 parts of 5 files: .* so 5 parts are the most"),
        (["--parts=2"], 2, "torchrun gives each of its 2 processes a part: leave out"),
    ],
)
def test_main_explains_parts_that_cannot_be(
    make, tmp_path, monkeypatch, others, world_size, message
):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    flags = write_files(tmp_path, ["jsonl"] * 5)
    with pytest.raises(ValueError, match=message):
        make(*flags, "--data-dir=merged", *others)
    assert not Path("merged").exists()
