"""Text to shards: the same bytes from every source, encoder and interrupted run."""

import codecs
import csv
import gzip
import hashlib
import json
import os
import re
from pathlib import Path

import fineweb_runs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from fineweb_runs import (
    assert_killed,
    contents,
    reference,
    run_driver,
    texts_of,
    tokens_of,
    write_texts,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fineweb
from corpus import sources
from corpus.shards import Manifest, Part, open_shards
from corpus.sources import Source, SourceFile, file_source, read_plain
from fineweb import FineWebConfig, tokenize_documents
from runtime.cli import format_count
from tokenizer import gpt2_encoding

make, hub = fineweb_runs.make, fineweb_runs.hub


# Shards


def test_main_writes_the_tokens_of_every_document(make, tmp_path):
    texts = texts_of(200)
    write_texts(tmp_path / "a1.jsonl", texts[:80])
    write_texts(tmp_path / "a2.jsonl", texts[80:])
    line = make("--source", "a*.jsonl", "--data-dir", "d", "--shard-size", 1500)
    assert tokens_of(Path("d")) == reference(texts)
    manifest = Manifest.load(Path("d"))
    assert manifest.complete
    assert (manifest.documents, manifest.skipped) == (199, 1)
    for name, file in zip(("a1.jsonl", "a2.jsonl"), manifest.source["files"], strict=True):
        digest = hashlib.sha256(2 * Path(name).read_bytes()).hexdigest()  # head and tail are all
        size = os.path.getsize(name)
        assert file == {"name": name, "bytes": size, "sha256 of head and tail": digest}
    sizes = [shard.tokens for shard in manifest.shards]
    assert sizes[:-1] == [1500] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= 1500
    assert [shard.split for shard in manifest.shards] == ["val"] + ["train"] * (len(sizes) - 1)
    assert str(tmp_path) not in Path("d/manifest.json").read_text()
    assert line.startswith(f"d: 199 documents (1 empty skipped), {sum(sizes):,} tokens, ")


@pytest.mark.parametrize("hide", [False, True], ids=["gigatoken", "tiktoken"])
def test_main_gives_the_same_bytes_however_it_encodes(make, tmp_path, hide):
    source = write_texts(tmp_path / "a.parquet", texts_of(300))
    flags = ["--source", source, "--shard-size", 2000]
    make(*flags, "--data-dir", "one", "--workers", 1)
    done = run_driver(tmp_path, *flags, "--data-dir", "two", "--workers", 3, hide=hide)
    assert done.returncode == 0, done.stderr
    assert ("gigatoken is not installed" in done.stderr) == hide
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_main_splits_a_small_corpus_into_both_splits(make, tmp_path):
    source = tmp_path / "small.txt"
    source.write_text("one two three four five six seven eight nine ten")
    assert "data/small: 1 document, 11 tokens, 2 shards\n" in make("--source", source)
    val, train = (open_shards(Path("data/small"), split) for split in ("val", "train"))
    assert (val.total_tokens, train.total_tokens) == (2, 9)


def test_main_takes_a_file_that_is_given_twice_once(make, tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("b", "c"):
        write_texts(tmp_path / f"a/{name}.txt", [f"one two three {name}"])
    (tmp_path / "a/link.txt").symlink_to(tmp_path / "a/b.txt")
    make("--source", "a/*.txt", "a/b.txt", "--data-dir", "d")
    assert tokens_of(Path("d")) == reference(["one two three b", "one two three c"])


def test_main_takes_the_text_of_a_folder_and_says_what_it_leaves_out(make, tmp_path):
    texts = {
        "b.py": "one two",
        "a/c.xml": "<x>y</x>",
        "a/README": "état",
        "y.json": "four",
        "z.jsonl": "three",
    }
    others = {"a.png": b"\x89PNG", "a/b.dat": b"\1\0\0", ".d/e.txt": b"f", "latin.txt": b"caf\xe9"}
    others |= {"package.json": b'{\n  "name": "x"\n}\n', "rows.json": b'[{"text": "x"}]'}
    others |= {"a.json.gz": gzip.compress(b'{\n"a": 1}'), "b.jsonl": b'{"content": "x"}\n'}
    others |= {"c.csv": b"id,body\n1,x\n", "d.parquet": b"PAR1", "f.txt": "x".encode("utf-16")}
    for folder in ("mine/a", "mine/.d"):
        (tmp_path / folder).mkdir(parents=True)
    for name, content in others.items():
        (tmp_path / "mine" / name).write_bytes(content)
    for name, text in texts.items():
        write_texts(tmp_path / "mine" / name, [text])
    printed = make("--source", "mine")
    left_out = (
        "--source mine: 10 of 15 files skipped, for example mine/a.json.gz, line 1: not JSON (Exp"
    )
    assert printed.startswith(left_out)
    by_chance = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert by_chance != sorted(texts)
    assert tokens_of(Path("data/mine")) == reference([texts[name] for name in by_chance])
    assert "finished earlier" in make("--source", "mine")
    with pytest.raises(ValueError, match=r"mine/latin\.txt: invalid UTF-8; .* iconv"):
        make("--source", "mine/latin.txt", "--data-dir", "d")
    with pytest.raises(ValueError, match=r"rows\.json: a JSON array, .* jq -c '\.\[\]' FILE > NEW"):
        make("--source", "mine/rows.json", "--data-dir", "d")
    assert " 11 of 15 files skipped, for example " in make(
        *("--source=mine", "--text-field=body", "--data-dir=e")
    )
    assert len(tokens_of(Path("e"))) == len(reference(["x", *list(texts.values())[:3]]))


def test_main_lists_a_folder_with_links_to_its_parents_once(make, tmp_path):
    texts = {"a/b/c.txt": "one two", "d.txt": "three"}
    for name, text in texts.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        write_texts(tmp_path / "mine" / name, [text])
    for folder in ("mine", "mine/a", "mine/a/b"):  # without an end, 3^40 paths
        for link in ("up", "back", "root"):
            (tmp_path / folder / link).symlink_to(tmp_path / "mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "mine/other").symlink_to(tmp_path / "other")  # is followed
    write_texts(tmp_path / "other/e.txt", ["four"])
    make("--source", "mine")
    texts["other/e.txt"] = "four"
    by_chance = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert tokens_of(Path("data/mine")) == reference([texts[name] for name in by_chance])


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        (["a/b.py"], "b"),
        (["a/README"], "README"),
        (["a/*"], "a"),
        (["c", "a/b.py"], "c"),
        (["c"], "c"),
    ],
)
def test_main_names_the_data_after_the_file_or_folder(make, tmp_path, sources, name):
    for file in ("a/b.py", "a/README", "c/d.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        write_texts(tmp_path / file, ["one two three"])
    assert f"data/{name}: " in make("--source", *sources)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_main_takes_the_text_from_another_field(make, tmp_path, kind):
    texts = texts_of(50)
    for name, field in (("a", "text"), ("b", "content")):
        write_texts(tmp_path / f"{name}.{kind}", texts, field)
    make("--source", f"a.{kind}", "--text-field", "text")
    assert "text field" not in Manifest.load(Path("data/a")).source
    flags = ["--source", f"b.{kind}"]
    with pytest.raises(ValueError, match=r"field `text` .* id, content: choose one with --text-f"):
        make(*flags)
    with pytest.raises(ValueError, match="`id` is int, not a string"):
        make(*flags, "--text-field", "id")
    make(*flags, "--text-field", "content")
    assert tokens_of(Path("data/b")) == tokens_of(Path("data/a")) == reference(texts)
    with pytest.raises(ValueError, match=r"holds another dataset \(text field content instead of"):
        make(*flags, "--text-field", "id")


@pytest.mark.parametrize(("kind", "delimiter"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_main_takes_the_rows_of_a_csv(make, tmp_path, kind, delimiter):
    texts = [*texts_of(50), '"Two\r\nlines", a;b\tc', "longer than csv takes " * 10_000]
    with (tmp_path / f"a.{kind}").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "my body"], *enumerate(texts), ["a row without text"]])
    with pytest.raises(ValueError, match=r"field `text` .* id, my body: choose one with --text-f"):
        make("--source", f"a.{kind}")
    printed = make("--source", f"a.{kind}", "--text-field", "my body")
    assert "data/a: 51 documents (2 empty skipped), " in printed
    assert tokens_of(Path("data/a")) == reference(texts)
    for encoding, name in (("cp1252", "cp1252"), ("utf-16", "utf-16")):
        (tmp_path / f"a.{kind}").write_text("“body”", encoding=encoding)
        with pytest.raises(ValueError, match=rf"^a\.{kind}: .* use iconv -f {name} -t utf-8 "):
            make("--source", f"a.{kind}", "--data-dir", "d")


def test_main_touches_no_file_that_it_did_not_make(make, tmp_path):
    flags = ["--source", write_texts(tmp_path / "a.jsonl", ["text"]), "--data-dir", "."]
    for name, content, message in [
        ("train.npy", "", r"\.npy files that fineweb\.py did not make"),
        ("manifest.json", "{}", "not a shard manifest"),
    ]:
        (tmp_path / name).write_text(content)
        (tmp_path / ".mine.tmp").touch()
        with pytest.raises(ValueError, match=message):
            make(*flags)
    assert contents(tmp_path).keys() == {"train.npy", "manifest.json", "a.jsonl"}
    assert (tmp_path / ".mine.tmp").exists()


# Interrupted runs


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt", "jsonl.gz"])
def test_main_killed_at_any_moment_goes_on_to_the_same_bytes(make, tmp_path, kind):
    source = write_texts(tmp_path / f"a.{kind}", texts_of(200))
    flags = ["--source", source, "--shard-size", 1000]
    make(*flags, "--data-dir", "whole")
    # Before the first manifest, the first two shards and their manifest; then further on.
    for kill_at in (1, 2, 4, 9) if kind == "jsonl" else (9,):
        assert_killed(run_driver(tmp_path, *flags, "--data-dir", "killed", kill_at=kill_at))
        assert list(Path("killed").glob(".*.tmp"))
    finished = {path: path.stat().st_mtime_ns for path in Path("killed").glob("*.npy")}
    assert len(finished) > 2
    with pytest.raises(ValueError, match="is incomplete"):
        open_shards("killed", "train")
    make(*flags, "--data-dir", "killed")
    assert contents(Path("killed")) == contents(Path("whole"))
    assert not list(Path("killed").glob(".*.tmp"))
    assert finished == {path: path.stat().st_mtime_ns for path in finished}  # not made again


def test_main_leaves_a_finished_data_set_as_it_is(make, tmp_path):
    flags = ["--source", write_texts(tmp_path / "a.jsonl", texts_of(50))]
    make(*flags)
    before = {path: path.stat().st_mtime_ns for path in Path("data/a").iterdir()}
    assert "finished earlier" in make(*flags)
    assert {path: path.stat().st_mtime_ns for path in Path("data/a").iterdir()} == before
    shard = Path("data/a/train_000001.npy")
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\1")
    with pytest.raises(ValueError, match=r"train_000001\.npy is missing or"):
        make(*flags)


def test_main_refuses_other_data_in_the_same_folder(make, tmp_path):
    write_texts(tmp_path / "a.jsonl", texts_of(50))
    write_texts(tmp_path / "b.jsonl", texts_of(50))
    same = ["--source", "a.jsonl", "--shard-size", 500, "--data-dir", "d"]
    make(*same)
    before = contents(Path("d"))
    for flags, difference in [
        (["--shard-size", 501], "shard size 500 instead of 501"),
        (["--source", "b.jsonl"], r"file 1 a\.jsonl instead of b\.jsonl"),
        (["--source", "stdlib"], "kind files instead of stdlib"),
    ]:
        with pytest.raises(ValueError, match=rf"another dataset \({difference}\): choose another"):
            make(*same, *flags)
    assert contents(Path("d")) == before


@pytest.mark.parametrize("kill_at", [0, 9], ids=["rerun", "resume"])
def test_main_refuses_a_source_that_was_edited_and_has_the_same_size(make, tmp_path, kill_at):
    source = write_texts(tmp_path / "a.jsonl", texts_of(200))
    flags = ["--source", source, "--shard-size", 1000, "--data-dir", "d"]
    run_driver(tmp_path, *flags, kill_at=kill_at)
    assert Manifest.load(Path("d")).complete == (not kill_at)
    good, before = source.read_text(), contents(Path("d"))
    source.write_text(good.replace('"id": 1', '"id": 2', 1))
    with pytest.raises(ValueError, match=r"another dataset \(a\.jsonl has changed\): choose"):
        make(*flags)
    assert contents(Path("d")) == before
    source.write_text(good)
    make(*flags)
    assert Manifest.load(Path("d")).complete


def test_main_refuses_a_second_writer(make, tmp_path):
    source = write_texts(tmp_path / "a.jsonl", ["some text"])
    with (
        fineweb.folder_lock(Path("data/a")),
        pytest.raises(ValueError, match=r"another fineweb\.py is writing to data/a"),
    ):
        make("--source", source)
    make("--source", source)


# A part of a source


def full_shards(folder, size):
    """The shards of `size` tokens, by name."""
    return {p.name: p.read_bytes() for p in folder.glob("*.npy") if len(np.load(p)) == size}


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@pytest.mark.parametrize("limit", [200, 1500, 2000, 3500])  # of less than two shards, and of more
def test_max_tokens_keeps_whole_documents_and_goes_on_to_the_bytes_of_a_full_run(
    make, tmp_path, kind, limit
):
    texts = texts_of(200)
    flags = ["--source", write_texts(tmp_path / f"a.{kind}", texts), "--shard-size", 1000]
    make(*flags, "--data-dir", "whole")
    everything, flags = tokens_of(Path("whole")), [*flags, "--data-dir", "d"]
    for more in (limit, limit + 7, limit + 2500):
        printed = make(*flags, "--max-tokens", more)
        assert printed.startswith(f"d: at most {format_count(more)} tokens, {2 * more / 1e9:.2g} ")
        assert "download" not in printed
        tokens, manifest = tokens_of(Path("d")), Manifest.load(Path("d"))
        assert tokens == everything[: len(tokens)]
        longest = 0 if kind == "txt" else max(map(len, (reference([text]) for text in texts)))
        assert more - longest <= len(tokens) <= more
        assert kind == "txt" or everything[len(tokens)] == 50256  # the next document's first
        assert manifest.documents == tokens.count(50256)
        whole = full_shards(Path("whole"), 1000)
        assert full_shards(Path("d"), 1000).items() <= whole.items() or len(tokens) < 2000
        before = contents(Path("d"))
        for same_or_less in (more, limit, 2):
            assert "finished earlier" in make(*flags, "--max-tokens", same_or_less)
        assert contents(Path("d")) == before
    for every in (len(everything), len(everything) + 1):  # the source ends with it, or before it
        make(*flags, "--max-tokens", every)
        assert contents(Path("d")) == contents(Path("whole"))
        assert "finished earlier" in make(*flags)


def test_max_tokens_cuts_a_first_document_that_is_longer(make, tmp_path):
    text = "one two three"
    source = write_texts(tmp_path / "a.jsonl", [400 * text, text])
    make("--source", source, "--max-tokens", "0.1k", "--data-dir", "d")
    assert tokens_of(Path("d")) == reference([400 * text])[:100]


def test_max_tokens_killed_at_any_moment_goes_on_to_the_same_bytes(make, tmp_path):
    flags = ["--source", write_texts(tmp_path / "a.jsonl", texts_of(200)), "--shard-size", 1000]
    make(*flags, "--data-dir", "some", "--max-tokens", 3500)
    make(*flags, "--data-dir", "whole")
    flags += ["--data-dir", "killed"]
    for kill_at in (3, 2):
        assert_killed(run_driver(tmp_path, *flags, "--max-tokens=3500", kill_at=kill_at))
    make(*flags, "--max-tokens", 3500)
    assert contents(Path("killed")) == contents(Path("some"))
    for kill_at in (1, 2, 3, 6):  # while it goes on, before and after its last shard is replaced
        assert_killed(run_driver(tmp_path, *flags, kill_at=kill_at))
        if kill_at == 1:
            assert contents(Path("killed")) == contents(Path("some"))
            assert open_shards("killed", "train")  # still whole
    make(*flags)
    assert contents(Path("killed")) == contents(Path("whole"))


def test_max_tokens_below_what_a_killed_run_has_ends_it_there(make, tmp_path):
    flags = ["--source", write_texts(tmp_path / "a.jsonl", texts_of(200)), "--shard-size", 1000]
    make(*flags, "--data-dir", "whole")
    flags += ["--data-dir", "d"]
    assert_killed(run_driver(tmp_path, *flags, kill_at=11))
    shards = contents(Path("d")).keys() - {"manifest.json"}
    assert len(shards) >= 4
    make(*flags, "--max-tokens", 1500)
    assert open_shards("d", "train").total_tokens == 1000 * (len(shards) - 1)
    make(*flags)
    assert contents(Path("d")) == contents(Path("whole"))


# Bad input


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"{'text': 1}", "not JSON .Expecting property name enclosed in double quotes"),
        (b'{"body": "x", "id": 2}', "field `text` .* body, id"),
        (b'["text"]', "field `text` .* no fields at all"),
        (b'{"text": true}', "`text` is bool, not a string"),
        (b'{"text": "\xff"}', r"invalid UTF-8; .* iconv -f cp1252 -t utf-8 "),
    ],
)
def test_read_jsonl_names_the_bad_line(tmp_path, row, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "once upon a time"}\n\n{"text": ""}\n' + row + b"\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 4: .*({message})"):
        list(sources.read_jsonl(path))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_read_jsonl_takes_json_for_json_lines(make, tmp_path, suffix):
    texts = texts_of(50)
    write_texts(tmp_path / f"a.json{suffix}", texts)
    make("--source", f"a.json{suffix}")
    assert tokens_of(Path("data/a")) == reference(texts)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_read_jsonl_gives_the_texts_of_a_compressed_file(tmp_path, suffix):
    texts = texts_of(300)
    path = write_texts(tmp_path / f"a.jsonl{suffix}", texts)
    assert list(sources.read_jsonl(path)) == texts
    content = path.read_bytes()
    for damaged in (content[:-9], content[: len(content) // 4], b"{}\n"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"a\.jsonl\{suffix}(, line| cannot be read)"):
            list(sources.read_jsonl(path))


def test_main_ends_at_a_bad_row_and_the_repaired_file_is_another(make, tmp_path):
    source = write_texts(tmp_path / "a.jsonl", texts_of(100))
    flags = ["--source", source, "--shard-size", 1000, "--data-dir", "d"]
    good = source.read_bytes()
    source.write_bytes(good + b'{"text": 3}\n')
    for _ in range(2):  # a resumed run finds the same line
        done = run_driver(tmp_path, *flags)
        # One line: no progress bar is drawn into a pipe.
        message = f"error: {source}, line 101: `text` is int, not a string\n"
        assert (done.returncode, done.stderr) == (2, message)
    assert len(Manifest.load(Path("d")).shards) > 2
    source.write_bytes(good)
    with pytest.raises(ValueError, match=r"another dataset \(a\.jsonl has changed\): choose"):
        make(*flags)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"body": ["x"]}, "field `text` .* body"),
        ({"text": [1, 2]}, "`text` is int"),
        ({"text": [["a"]] * 2}, "row 1: `text` is list"),
    ],
)
def test_read_parquet_names_the_bad_row(tmp_path, column, message):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(column), path)
    with pytest.raises(ValueError, match=rf"a\.parquet.*{message}"):
        list(sources.read_parquet(path))
    path.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file"):
        list(sources.read_parquet(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("“Windows” text".encode("cp1252"), "invalid UTF-8; .* use iconv -f cp1252 -t utf-8 FILE"),
        ("état".encode("utf-16"), "UTF-16 or binary; use iconv -f utf-16 -t utf-8 FILE > NEW"),
        (
            codecs.BOM_UTF16_BE + "état".encode("utf-16-be"),
            "UTF-16 or binary; use iconv -f utf-16 ",
        ),
        ("text".encode("utf-16-le"), "UTF-16 or binary; use iconv -f utf-16 "),
        (b"%PDF-1.4 text", "a PDF; use pdftotext FILE NEW_FILE.txt"),
        (b"PK\3\4text", r"a zip file; use pandoc .* FILE \(\.docx, \.odt\) or unzip FILE"),
        (gzip.compress(b"text"), "a gzip file; use gunzip < FILE > NEW_FILE.txt"),
    ],
    ids=["Windows", "UTF-16", "big-endian", "no-mark", "PDF", "zip", "gzip"],
)
def test_main_names_the_tool_for_what_is_no_utf8(make, tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^a\.txt: {message}"):
        make("--source", "a.txt")
    assert not Path("data/a").exists()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_read_jsonl_of_windows_is_read_or_names_the_tool(tmp_path, encoding):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "état"}\n', encoding=encoding)
    if encoding == "utf-8-sig":
        assert list(sources.read_jsonl(path)) == ["état"]
    else:
        with pytest.raises(ValueError, match=r"line 1: UTF-16 or binary; .* iconv -f utf-16"):
            list(sources.read_jsonl(path))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_main_counts_a_null_as_an_empty_document(make, tmp_path, kind):
    texts = texts_of(50)
    source = write_texts(tmp_path / f"a.{kind}", [*texts[:40], None, *texts[40:]])
    assert "a: 49 documents (2 empty skipped), " in make("--source", source)
    assert tokens_of(Path("data/a")) == reference(texts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source", "none*.txt"], r"none\*.txt: no such file or folder"),
        (["--source", "finewebedu"], "finewebedu is not fineweb-edu, fineweb, stdlib"),
        (["--source", "a.csv"], r"a\.csv: no such file or folder"),
        (["--source", "empty"], "--source empty and its subfolders have no text files"),
        (["--source", "empty.txt", os.devnull], f"{os.devnull} is not a regular file: copy"),
        (["--source", "empty.txt"], r"too small for two splits \(0 tokens\)"),
        (["--source", "stdlib", "fineweb"], "pass a single name, or only files"),
        (["--source"], "--source needs a value"),
        (["--source", ""], "--source needs a value"),
        (["--shard-size", "0"], "--shard-size must be above 0, not 0"),
        (["--max-tokens", "0"], "--max-tokens must be above 0, not 0"),
        (["--max-tokens", "1.5"], "--max-tokens: '1.5' is not INT"),
    ],
)
def test_main_explains_flags_that_cannot_be(make, flags, message):
    Path("empty.txt").touch()
    Path("empty").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make(*flags)
    assert not list(Path("data").glob("*/[!.]*"))


def test_main_without_network_says_what_works(tmp_path):
    done = run_driver(
        tmp_path, environment={"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "0"}
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: could not look up ")
    assert re.search(r"--source stdlib .*\(text, \.jsonl, \.parquet\)\n$", done.stderr)
    assert not list(tmp_path.glob("data/*/[!.]*"))


# Plain texts and the standard library


@settings(max_examples=300)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"))
    | st.text(st.sampled_from("a9. \n\t\x85\xa0\u2003éж日🦄\u0d10\u3001")),
    st.integers(1, 20),
)
@example("0ࠀ ࠀ 0", 3)
@example("\ufeffOnce upon", 3)
def test_read_plain_blocks_have_the_tokens_of_the_whole(tmp_path_factory, text, block_bytes):
    path = tmp_path_factory.getbasetemp() / "hypothesis.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
        blocks = list(read_plain(path))
    text = text.removeprefix("\ufeff")  # a byte-order mark is none of the text
    assert "".join(blocks) == text
    encode = gpt2_encoding().encode_ordinary
    assert [id for block in blocks for id in encode(block)] == encode(text)


def test_tokenize_documents_joins_blocks_and_marks_documents_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 64)
    text = "".join(f"word{n} and 語 \n" for n in range(200))
    source = file_source([write_texts(tmp_path / name, [text]) for name in ("a.txt", "b.txt")])
    batches = list(tokenize_documents(source.documents(None), 1))
    assert len(batches) > 50
    assert np.concatenate([tokens for _, tokens in batches]).tolist() == reference([text, text])


def test_stdlib_source_is_the_librarys_own_files_in_a_fixed_order():
    files = [file.read.args[0] for file in sources.stdlib_source().open_files()]
    names = [path.name for path in files]
    assert {"argparse.py", "os.py", "typing.py"} <= set(names)
    parts = {part for path in files for part in path.parts}
    assert not parts & {"test", "site-packages"}
    assert names != sorted(names)
    assert files == [file.read.args[0] for file in sources.stdlib_source().open_files()]


def test_source_resumes_from_any_document(tmp_path):
    files = {"a.jsonl": ["a", "", "b"], "b.jsonl": [], "c.parquet": ["c"]}
    source = file_source([write_texts(tmp_path / name, texts) for name, texts in files.items()])
    documents = list(source.documents(None))
    assert [document.text for document in documents] == ["a", "", "b", "c"]
    for n, document in enumerate(documents):
        assert list(source.documents(json.loads(json.dumps(document.cursor)))) == documents[n:]


@given(st.integers(1, 20), st.data())
def test_source_divides_its_files_in_order_and_evenly(files, data):
    source = Source({}, lambda: [SourceFile(lambda i=i: [str(i)]) for i in range(files)])
    count = data.draw(st.integers(1, files))
    parts = [list(source.documents(None, Part(i, count))) for i in range(count)]
    assert [int(document.text) for part in parts for document in part] == list(range(files))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# The hub


@pytest.mark.slow
def test_main_streams_the_hub_and_goes_on_at_the_same_revision(hub, tmp_path):
    flags = ["--source", "o/n", "--name", "sample-10BT", "--shard-size", "1500"]
    flags += ["--text-field", "content"]
    environment = hub.environment(tmp_path / "hf")
    assert_killed(run_driver(tmp_path, *flags, kill_at=8, environment=environment))
    folder = tmp_path / "data" / "n-10BT"
    assert len(Manifest.load(folder).shards) > 2
    hub.head = "b" * 40  # the data set has moved on, the rerun has not
    hub.asked.clear()
    done = run_driver(tmp_path, *flags, environment=environment)
    assert done.returncode == 0, done.stderr
    assert tokens_of(folder) == reference(hub.texts)
    assert Manifest.load(folder).source["revision"] == "a" * 40
    assert not any("b" * 40 in path for _, path in hub.asked)
    closed = {**environment, "HF_ENDPOINT": "http://127.0.0.1:1"}
    done = run_driver(tmp_path, *flags, environment=closed)
    assert "finished earlier" in done.stdout  # and that needs no network
    done = run_driver(tmp_path, *flags, "--revision", "main", environment=environment)
    assert done.returncode == 2
    assert f"revision {'a' * 40} instead of {'b' * 40}" in done.stderr


@pytest.mark.slow
def test_max_tokens_of_the_hub_downloads_no_further_file(hub, tmp_path):
    flags = ["--source=o/n", "--name=sample-10BT", "--text-field=content", "--shard-size=1000"]
    environment = hub.environment(tmp_path / "hf")
    done = run_driver(tmp_path, *flags, "--max-tokens=2.5k", environment=environment)
    assert done.stdout.startswith("data/n-10BT: at most 2.5K tokens, 5e-06 GB on disk ("), done
    assert done.stdout.splitlines()[0].endswith(" free), about 7e-06 GB to download")
    assert hub.requests("GET", "000.parquet")
    assert not hub.requests("GET", "001.parquet")
    for name, head in (("n-10BT", "b"), ("whole", "a")):
        hub.head = 40 * head  # the data set has moved on, the one that grows has not
        done = run_driver(tmp_path, *flags, f"--data-dir=data/{name}", environment=environment)
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "data/n-10BT") == contents(tmp_path / "data/whole")


def test_main_ends_with_the_next_command(make, tmp_path):
    files = [write_texts(tmp_path / f"{name}.jsonl", texts_of(400)) for name in "ab"]
    flags = ["--source", *files, "--data-dir", "d", "--parts", 2]
    assert "next: " not in make(*flags, "--part", 0)
    for part in (1, 0):  # the last that was missing, and one that is found
        baseline, line = make(*flags, "--part", part).splitlines()[-2:]
        assert re.fullmatch(
            r"unigram baseline .*: loss [\d.]+ nats .*, [\d.]+ bits per byte", baseline
        )
        script, recipe = (
            re.escape(f"{ROOT}/{n}") for n in ("train_gpt2.py", "recipes/gpt2-4m.json")
        )
        assert re.fullmatch(rf"next: python {script} --config {recipe} --data-dir d --run-.*", line)


def test_find_source_names_the_folder_after_the_source():
    for source, name, folder in [
        ("fineweb-edu", None, "fineweb-edu-10BT"),
        ("fineweb-edu", "sample-100BT", "fineweb-edu-100BT"),
        ("owner/stories", None, "stories"),
        ("stdlib", None, "stdlib"),
    ]:
        assert fineweb.find_source(FineWebConfig(source=(source,), name=name))[0] == folder
