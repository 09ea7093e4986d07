"""One data set from many processes: each writes shards of its own, one manifest lists them."""

import subprocess
from pathlib import Path

import fineweb_runs
import pytest
from conftest import ROOT, torchrun
from fineweb_runs import (
    DRIVER,
    TIMEOUT_S,
    assert_killed,
    contents,
    reference,
    run_driver,
    texts_of,
    tokens_of,
    write_texts,
)

from corpus.shards import Manifest, open_shards

make, hub = fineweb_runs.make, fineweb_runs.hub


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
    return [make(*flags, "--part", part, "--parts", count) for part in reversed(range(count))]


@pytest.mark.parametrize("count", [2, 5])
def test_parts_hold_the_tokens_of_one_process_in_order(make, flags, count):
    flags = [*flags, "--data-dir", "d"]
    printed = make_parts(make, *flags, count=count)
    assert f"d: part 0 of {count} not finished yet" in printed[-2]
    assert count == 2 or "d: parts 0, 1, 2 and 3 of 5 not finished yet" in printed[0]
    assert "d: all parts are finished" in printed[-1]
    folder, one, other = Path("d"), Manifest.load(Path("whole")), Manifest.load(Path("d"))
    assert tokens_of(folder) == tokens_of(Path("whole"))
    assert [shard.split for shard in other.shards].count("val") == 1
    assert other.shards[0].file == "val_p00000_000000.npy"
    counts = [(part.source, part.documents, part.skipped, part.tokens) for part in (one, other)]
    assert counts[0] == counts[1]
    before, one_part = contents(folder), ["--part", 1, "--parts", count]
    for own in ([], one_part):
        assert "finished earlier, and unchanged" in make(*flags, *own)
    (folder / "manifest.json").unlink()  # as in a folder to which parts were copied
    assert "d: all parts are finished" in make(*flags, *one_part)
    assert contents(folder) == before
    read = [open_shards(folder, split) for split in ("train", "val")]
    for path in folder.glob("*.json"):
        path.unlink()
    for shards, split in zip(read, ("train", "val"), strict=True):  # names have that order, too
        assert open_shards(folder, split).paths == shards.paths


def test_parts_may_have_no_tokens(make, tmp_path):
    for name, texts in [("a", texts_of(60)), ("b", ["", ""]), ("c", [""])]:
        write_texts(tmp_path / f"{name}.jsonl", texts)
    flags = ["--source", "a.jsonl", "b.jsonl", "c.jsonl", "--shard-size", "300", "--data-dir", "d"]
    make_parts(make, *flags, count=3)
    assert tokens_of(Path("d")) == reference(texts_of(60))


def test_torchrun_gives_each_process_a_part(flags, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(root=str(ROOT), hide=False))
    command = torchrun(script, *flags, "--data-dir=d")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "d: all parts are finished" in done.stdout
    assert tokens_of(tmp_path / "d") == tokens_of(tmp_path / "whole")


def test_a_part_killed_at_any_moment_goes_on_to_the_same_bytes(make, flags, tmp_path):
    make_parts(make, *flags, "--data-dir", "straight")
    killed = [*flags, "--data-dir", "killed"]
    for part, *moments in ((1, 1, 2, 3, 9), (0, 5)):  # before the first manifest; further on
        killed_part = [*killed, f"--part={part}", "--parts=2"]
        for kill_at in moments:
            assert_killed(run_driver(tmp_path, *killed_part, kill_at=kill_at))
        with pytest.raises(ValueError, match="killed is incomplete"):
            open_shards("killed", "train")
        make(*killed_part)
    assert contents(Path("killed")) == contents(Path("straight"))
    assert not list(Path("killed").glob(".*.tmp"))


def test_parts_take_equal_shares_of_max_tokens_and_go_on(make, flags, tmp_path):
    make_parts(make, *flags, "--data-dir", "straight")
    flags = [*flags, "--data-dir", "d"]
    printed = make_parts(make, *flags, "--max-tokens", 4000)
    assert printed[1].startswith("d: at most 4K tokens, 8e-06 GB on disk")
    assert "at most" not in printed[0]  # said once
    parts = [Manifest.load(Path("d"), f"part_0000{i}_of_00002.json") for i in range(2)]
    assert all(1500 < part.tokens <= 2000 for part in parts)
    assert Manifest.load(Path("d")).max_tokens == 4000
    assert open_shards("d", "train").total_tokens == sum(part.tokens for part in parts) - 700
    assert "finished earlier" in make(*flags, "--max-tokens", 4000)
    before = contents(Path("d"))
    for others in ([], ["--part=1", "--parts=3"]):
        with pytest.raises(ValueError, match=r"d holds another dataset \(parts? "):
            make(*flags, *others)
    assert contents(Path("d")) == before
    for part, kill_at in ((1, 4), (0, 2)):
        one = [*flags, f"--part={part}", "--parts=2"]
        assert_killed(run_driver(tmp_path, *one, kill_at=kill_at))
        with pytest.raises(ValueError, match="d is incomplete"):
            open_shards("d", "train")
        end = "part 0 of 2 not finished yet" if part else "all parts are finished"
        assert f"d: {end}" in make(*one)
    assert contents(Path("d")) == contents(Path("straight"))


def test_parts_of_the_hub_are_of_one_revision(hub, tmp_path):
    flags = ["--source=o/n", "--name=sample-10BT", "--text-field=content", "--data-dir=d"]
    flags += ["--shard-size=1500", "--parts=2"]
    environment = hub.environment(tmp_path / "hf")
    done = run_driver(tmp_path, *flags, "--part=1", environment=environment)
    assert done.returncode == 0, done.stderr
    hub.head = "b" * 40  # the data set has moved on, the other part has not
    newest = [*flags, "--part=0", "--revision=main"]
    done = run_driver(tmp_path, *newest, environment=environment)
    assert done.returncode == 2
    assert f"d holds another dataset (revision {'a' * 40} instead of" in done.stderr
    done = run_driver(tmp_path, *flags, "--part=0", environment=environment)
    assert done.returncode == 0, done.stderr
    assert tokens_of(tmp_path / "d") == reference(hub.texts)
    assert Manifest.load(tmp_path / "d").source["revision"] == "a" * 40


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
        with pytest.raises(ValueError, match=rf"d holds another dataset \({difference}"):
            make(*flags, *others)
    assert contents(Path("d")) == before


@pytest.mark.parametrize(
    ("others", "rank", "message"),
    [
        (["--part=0"], None, "--part 0 --parts None: pass both"),
        (["--part=3", "--parts=3"], None, "--part 3 --parts 3: .* from 0 to --parts - 1"),
        (["--parts=2"], None, "--part None --parts 2: pass both"),
        (["--part=0", "--parts=6"], None, "--parts 6 exceeds .*: use --parts 5 or fewer"),
        (["--part=0", "--parts=2"], "1", "torchrun assigns a part to each process"),
    ],
)
def test_main_explains_parts_that_cannot_be(make, flags, monkeypatch, others, rank, message):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        make(*flags, "--data-dir=d", *others)
    assert not list(Path("d").glob("[!.]*"))
