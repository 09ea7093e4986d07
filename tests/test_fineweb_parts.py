"""One data set from many processes: each writes shards of its own, and a manifest of them."""

from dataclasses import asdict
from pathlib import Path

import fineweb_runs
import pytest
from fineweb_runs import contents, reference, texts_of, tokens_of, write_texts

from corpus.parts import Part
from corpus.shards import Manifest, open_shards
from runtime.files import read_json, write_json

make, drive = fineweb_runs.make, fineweb_runs.drive


@pytest.fixture
def flags(tmp_path, make):
    """Flags of five files of all kinds, of which `whole` is what one process makes."""
    for i, kind in enumerate(["jsonl", "parquet", "txt", "jsonl", "parquet"]):
        write_texts(tmp_path / f"{i}.{kind}", texts_of(40 * (i % 3 + 1), seed=i))
    flags = ["--source", *sorted(path.name for path in tmp_path.glob("[0-9].*"))]
    flags += ["--shard-size", "700"]
    make(*flags, "--data-dir", "whole")
    return flags


def make_parts(make, *flags, count=2):
    """Every part, the last one first; returns what each printed."""
    return [make(*flags, f"--part={part}/{count}") for part in reversed(range(count))]


@pytest.mark.parametrize("count", [2, 5])
def test_parts_hold_the_tokens_of_one_process_in_order(make, flags, count):
    printed = make_parts(make, *flags, "--data-dir=d", count=count)
    assert f"\nd, part {count - 1}/{count}: " in printed[0]
    assert all("\nother parts are not finished yet" in line for line in printed[:-1])
    assert "\nnext: python " in printed[-1]
    folder, one, other = Path("d"), Manifest.load(Path("whole")), Manifest.load(Path("d"))
    assert tokens_of(folder) == tokens_of(Path("whole"))
    assert [shard.split for shard in other.shards].count("val") == 1
    assert other.shards[0].file == "val_p00000_000000.npy"
    assert (one.documents, one.tokens) == (other.documents, other.tokens)
    before = contents(folder)
    assert "finished earlier, and unchanged" in make(*flags, "--data-dir=d", f"--part=1/{count}")
    assert contents(folder) == before
    read = [open_shards(folder, split) for split in ("train", "val")]
    for path in folder.glob("*.json"):
        path.unlink()
    for shards, split in zip(read, ("train", "val"), strict=True):  # names have that order, too
        assert open_shards(folder, split).paths == shards.paths


def test_parts_of_an_earlier_version_open(make, flags):
    """It also wrote a manifest of all parts, and counted empty documents."""
    make_parts(make, *flags, "--data-dir=d")
    fingerprint = open_shards("d", "train").fingerprint
    joined = asdict(Manifest.load(Path("d"))) | {"skipped": 2}
    joined["source"].pop("parts")
    write_json(Path("d/manifest.json"), joined)
    for path in Path("d").glob("part_*.json"):
        write_json(path, read_json(path) | {"skipped": 1})
    assert open_shards("d", "train").fingerprint == fingerprint
    with pytest.raises(ValueError, match=r"another dataset \(parts None instead of 2\)"):
        make(*flags, "--data-dir=d", "--part=0/2")
    Path("d/manifest.json").unlink()
    assert "finished earlier" in make(*flags, "--data-dir=d", "--part=0/2")


def test_parts_may_have_no_tokens(make, tmp_path):
    for name, texts in [("a", texts_of(60)), ("b", ["", ""]), ("c", [""])]:
        write_texts(tmp_path / f"{name}.jsonl", texts)
    flags = ["--source", "a.jsonl", "b.jsonl", "c.jsonl", "--shard-size", "300", "--data-dir", "d"]
    make_parts(make, *flags, count=3)
    assert tokens_of(Path("d")) == reference(texts_of(60))


def test_parts_have_equal_numbers_of_max_tokens_and_more_can_be_added(make, drive, flags):
    """Also with a kill on the way."""
    make_parts(make, *flags, "--data-dir", "straight")
    flags = [*flags, "--data-dir", "d"]
    make_parts(make, *flags, "--max-tokens", 4000)
    parts = [Manifest.load(Path("d"), Part(i, 2)) for i in range(2)]
    assert [part.tokens for part in parts] == [2000, 2000]
    assert Manifest.load(Path("d")).max_tokens == 4000
    assert open_shards("d", "train").total_tokens == 4000 - 140
    drive(*flags, "--part=1/2", kill_at=4)
    with pytest.raises(ValueError, match="d is incomplete"):
        open_shards("d", "train")
    make_parts(make, *flags)
    assert contents(Path("d")) == contents(Path("straight"))
    assert not list(Path("d").glob(".*.tmp"))


def test_parts_of_different_sources_are_not_one_data_set(make, flags):
    """As of two parts that started before and after the dataset on the hub changed."""
    make(*flags, "--data-dir=d", "--part=1/2")
    Path("0.jsonl").write_bytes(Path("3.jsonl").read_bytes())
    make(*flags, "--data-dir=e", "--part=0/2")
    for path in Path("e").glob("[!.]*"):
        path.rename(Path("d") / path.name)
    with pytest.raises(ValueError, match="is incomplete"):
        open_shards("d", "train")
    with pytest.raises(ValueError, match="d holds another dataset"):
        make(*flags, "--data-dir=d", "--part=1/2")


def test_parts_of_copies_with_other_times_are_one_data_set(make, flags):
    """As on machines that each copied the files."""
    for part in (1, 0):
        make(*flags, "--data-dir=d", f"--part={part}/2")
        Path("0.jsonl").touch()
    assert tokens_of(Path("d")) == tokens_of(Path("whole"))
    assert Manifest.load(Path("d")).complete


def test_a_part_of_other_data_is_refused_at_once(make, flags):
    flags = [*flags, "--data-dir", "d"]
    make(*flags, "--part=0/2")
    before = contents(Path("d"))
    for others, difference in [
        (["--part=1/3"], "parts 2 instead of 3"),
        (["--part=1/2", "--text-field=body"], "text field None instead of body"),
        ([], "parts 2 instead of None"),
    ]:
        with pytest.raises(ValueError, match=rf"d holds another dataset \({difference}"):
            make(*flags, *others)
    assert contents(Path("d")) == before


def test_main_explains_parts_that_cannot_be(make, flags, monkeypatch):
    for part, message in [
        ("0", r"--part 0: use PART/PARTS, such as 0/32 to 31/32"),
        ("3/3", r"--part 3/3: use PART"),
        ("0/6", r"--part 0/6: the source has fewer files: use --part 0/5 to 4/5"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(*flags, "--data-dir=d", f"--part={part}")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="torchrun is not supported: use python, and --part on"):
        make(*flags, "--data-dir=d")
    assert not list(Path("d").glob("[!.]*"))
