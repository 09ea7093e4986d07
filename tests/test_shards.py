"""The token format: what is written opens again, and what is damaged is named."""

import hashlib

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from corpus.shards import Manifest, ShardInfo, ShardWriter, open_shards, verify_shards
from runtime.errors import UserError
from tokenizer import VOCAB_SHA256


def tokens_of(count, start=0):
    return np.arange(start, start + count).astype(np.uint16)


def write(folder, count, shard_size=10):
    """A finished data set of the tokens 0, 1, 2, …"""
    writer = ShardWriter(folder, Manifest({"kind": "hub"}, VOCAB_SHA256, shard_size))
    writer.add(tokens_of(count))
    return writer.close()


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(2, [1, 1]), (20, [10, 10]), (21, [10, 10, 1]), (40, [10, 10, 10, 10])],
)
def test_shard_writer_cuts_by_hand(tmp_path, count, sizes):
    manifest = write(tmp_path, count)
    assert [shard.tokens for shard in manifest.shards] == sizes
    assert [shard.file for shard in manifest.shards[:2]] == ["val_000000.npy", "train_000001.npy"]
    arrays = [np.load(tmp_path / shard.file) for shard in manifest.shards]
    assert all(array.dtype == np.dtype("<u2") for array in arrays)
    assert np.concatenate(arrays).tolist() == list(range(count))


def test_reading_parses_no_header(tmp_path, monkeypatch):
    # ast.literal_eval in the loader's thread failed beside the main thread's compiler in CI.
    write(tmp_path, 40)
    shards = open_shards(tmp_path, "train")
    monkeypatch.setattr("ast.literal_eval", None)
    assert shards.read(5, 20).tolist() == list(range(15, 35))
    with pytest.raises(ValueError, match="cannot be read"):
        open_shards(tmp_path, "train")


def test_shard_writer_takes_validation_from_all_of_a_small_text(tmp_path):
    """A tenth in 20 blocks, equally far apart; the rest is training."""
    manifest = write(tmp_path, 1200, shard_size=1000)
    assert [(shard.split, shard.tokens) for shard in manifest.shards] == [
        *(("val", 120), ("train", 1000), ("train", 80))
    ]
    val, train = (open_shards(tmp_path, split) for split in ("val", "train"))
    blocks = [start + i for start in range(0, 1200, 60) for i in range(6)]
    assert val.read(0, 120).tolist() == blocks
    assert train.read(0, 1080).tolist() == sorted({*range(1200)} - {*blocks})
    writer = ShardWriter(tmp_path, manifest.without_changing_shards())  # of the hub, too
    writer.add(tokens_of(4000))
    assert writer.close().shards[:2] == manifest.shards[:2]
    assert sorted(open_shards(tmp_path, "all").read(0, 5000)) == [*range(4000)]


def test_open_shards_finds_the_split_as_a_word_of_a_name(tmp_path):
    names = {
        "train": ["edufineweb_train_000001", "train-0", "train000", "training_2", "x.train"],
        "val": ["edufineweb_val_000000", "shard_val", "val000", "validation_2", "valid-1"],
        "neither": ["constrained", "trainer", "retrain_0", "interval_0", "._train"],
    }
    for name in (name for group in names.values() for name in group):
        np.save(tmp_path / f"{name}.npy", tokens_of(5))
    for split in ("train", "val"):
        found = [path.stem for path in open_shards(tmp_path, split).paths]
        assert sorted(found) == sorted(names[split])


def test_open_shards_says_what_is_missing_and_how_to_make_it(tmp_path):
    make = r"try python fineweb\.py --source stdlib, then the command that it prints; use --data"
    with pytest.raises(UserError, match=rf"{tmp_path}/none has no tokens for training: {make}"):
        open_shards(tmp_path / "none", "train")
    with pytest.raises(UserError, match=rf"{tmp_path} has no tokens for validation: {make}"):
        open_shards(tmp_path, "val")
    Manifest({}, "another", 10, complete=True).save(tmp_path)
    with pytest.raises(ValueError, match="the tokens of another tokenizer"):
        open_shards(tmp_path, "train")
    Manifest({}, VOCAB_SHA256, 10).save(tmp_path)
    with pytest.raises(ValueError, match="is incomplete"):
        open_shards(tmp_path, "train")


def llm_c_header(tokens):
    return np.array([20240520, 1, tokens], "<i4").tobytes().ljust(1024, b"\0")


@pytest.mark.parametrize("header", [b"", llm_c_header(30)], ids=["nanoGPT", "llm.c"])
def test_open_shards_reads_bin_files_as_they_are(tmp_path, header):
    """The tokens, and what training reads of them, are those of the same data in `.npy`."""
    for number, split in enumerate(("val", "train", "train")):
        tokens = tokens_of(30, 100 * number)
        for folder in ("bin", "npy"):
            (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / f"bin/x_{split}_{number}.bin").write_bytes(header + tokens.tobytes())
        np.save(tmp_path / f"npy/x_{split}_{number}.npy", tokens)
    for split, count in (("train", 60), ("val", 30)):
        ours, same = (open_shards(tmp_path / name, split) for name in ("bin", "npy"))
        assert ours.read(0, count).tolist() == same.read(0, count).tolist()
        assert ours.total_tokens == count


def test_open_shards_names_the_bin_file_that_is_damaged(tmp_path):
    path = tmp_path / "train.bin"
    longer, llama = llm_c_header(30) + bytes(62), np.array([20240801, 7, 9], "<i4").tobytes()
    others = [np.arange(1, 99, dtype=dtype).tobytes() for dtype in ("<i4", "<i8")]
    for content in (
        *(llm_c_header(30) + bytes(58), llm_c_header(0), bytes(61), b"", longer),
        *(llama.ljust(2000, b"\1"), *others, b"version https://git-lfs.github.com/spec/v1"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path} (cannot be read as|is) a (token|Git)"):
            open_shards(tmp_path, "train")


def test_open_shards_prefers_npy_and_refuses_another_vocabulary(tmp_path):
    (tmp_path / "train.bin").write_bytes(tokens_of(30).tobytes())
    np.save(tmp_path / "notes.npy", tokens_of(5))
    assert open_shards(tmp_path, "train").total_tokens == 30
    (tmp_path / "meta.pkl").touch()  # nanoGPT's shakespeare_char
    with pytest.raises(ValueError, match=r"not GPT-2's, as .*meta\.pkl shows"):
        open_shards(tmp_path, "train")
    np.save(tmp_path / "train.npy", tokens_of(20))  # converted
    assert open_shards(tmp_path, "train").total_tokens == 20


def test_fingerprint_changes_with_a_token_and_with_the_manifest(tmp_path):
    """Without a manifest only with a token of a file's first 64 KiB, as this one is."""
    prints = set()
    for name, count in (("a", 40), ("b", 41)):
        write(tmp_path / name, count)
        prints.add(open_shards(tmp_path / name, "train").fingerprint)
        (tmp_path / name / "manifest.json").unlink()
        prints.add(open_shards(tmp_path / name, "train").fingerprint)
    assert len(prints) == 4


def test_fingerprint_without_a_manifest_is_the_one_that_runs_have_saved(tmp_path):
    """Or else no run on such shards could be resumed; deaa4f8 computed these."""
    for name, count in (("train_a.bin", 50_000), ("val_a.bin", 1000)):
        (np.arange(count) % 400).astype("<u2").tofile(tmp_path / name)
    prints = [open_shards(tmp_path, split).fingerprint for split in ("train", "val")]
    assert prints == ["1000cc0496a369f7", "080ba3433fa75fc0"]


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    manifest=st.booleans(),
    data=st.data(),
)
def test_open_shards_reads_any_layout_as_one_array(tmp_path_factory, sizes, manifest, data):
    folder = tmp_path_factory.mktemp("layout")
    tokens = tokens_of(sum(sizes))
    infos = []
    for number, piece in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        path = folder / f"some_train_{number:03d}.npy"
        np.save(path, piece)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        infos.append(ShardInfo(path.name, "train", len(piece), digest))
    if manifest:
        Manifest({"kind": "hub"}, VOCAB_SHA256, 40, tuple(infos), complete=True).save(folder)
    shards = open_shards(folder, "train")
    assert shards.total_tokens == len(tokens)
    start = data.draw(st.integers(0, len(tokens) - 1))
    count = data.draw(st.integers(1, len(tokens) - start))
    assert shards.read(start, count).tolist() == tokens[start : start + count].tolist()


@settings(max_examples=30)
@given(data=st.data())
def test_open_shards_refuses_any_damage_to_size_or_header(tmp_path_factory, data):
    """A file is cut, extended or changed anywhere: the message names it, or it reads as before."""
    folder = tmp_path_factory.mktemp("damaged")
    manifest = write(folder, 40)
    path = folder / "train_000002.npy"
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content)))
    added = data.draw(st.binary(max_size=9))
    content[place : place + data.draw(st.integers(0, 99))] = added
    assume(content != path.read_bytes())
    path.write_bytes(content)
    message = ""
    try:
        assert open_shards(folder, "train").read(0, 40).shape == (30,)
    except ValueError as error:
        message = str(error)
    assert not message or path.name in message
    with pytest.raises(ValueError, match=r"train_000002\.npy is missing or"):  # as --preflight does
        verify_shards(folder, manifest.shards)
