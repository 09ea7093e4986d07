"""Documents of files: every kind is read as it is meant, and what is none is named."""

import bz2
import csv
import gzip
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fineweb_runs import texts_of, write_texts
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fineweb
from corpus import sources
from corpus.sources import file_source, read_file, read_plain
from runtime.errors import UserError
from tokenizer import gpt2_encoding

LONG_ZSTD = b"\x28\xb5\x2f\xfd\0\xa8\x19\0\0abc"  # its window is larger than 128 MiB


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"{'text': 1}", "not JSON .Expecting property name enclosed in double quotes"),
        (b'{"body": "x", "id": 2}', "field `text` .* body, id"),
        (b'["text"]', "field `text` .* no fields at all"),
        (b'{"text": true}', "`text` is bool, not a string"),
    ],
)
def test_read_jsonl_names_the_bad_line(tmp_path, row, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "once"}\n\n{"text": "\\ud800"}\n' + row + b"\n")
    lines = sources.read_jsonl(path)
    assert (next(lines), next(lines)) == ("once", "\ufffd")
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 4: .*({message})"):
        next(lines)


def test_half_of_a_surrogate_pair_has_the_ids_that_tiktoken_reads(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["caf\ud83d time", "\ude00\ud83d", "\ufeff\U0001f600?", "\ud83d\ud83d"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    batches = fineweb.tokenize_documents(file_source([path]).documents(None), workers=1)
    ids = [int(id) for _, tokens in batches for id in tokens if id != 50256]
    assert ids == [id for text in texts for id in gpt2_encoding().encode_ordinary(text)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_text_field_may_be_inside_an_object(tmp_path, kind):
    path = tmp_path / f"a.{kind}"

    def texts(field, *rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist([*rows]), path)
        return [*read_file(path, field)]

    rows = [{"doc": {"text": "once", "part": {"text": "deep"}, "id": 1}}, {"doc": None}]
    assert texts("doc.text", *rows) == ["once", ""]
    assert texts("doc.part.text", *rows) == ["deep", ""]
    assert texts("doc.text", {"doc.text": "flat", "doc": {"text": "once"}}) == ["flat"]
    assert texts("a.b.text", {"a.b": {"text": "once"}}) == ["once"]
    for field, found in [
        ("text", "doc"),
        ("doc", "doc.text, doc.part, doc.id"),
        ("doc.part", "doc.part.text"),
        ("doc.none", "doc.text, doc.part, doc.id"),
    ]:
        with pytest.raises(
            UserError, match=f"field `{field}` with the text, found {found}: choose"
        ):
            texts(field, *rows)
    with pytest.raises(UserError, match=r"1: `doc.id` is int, not a string"):
        texts("doc.id", *rows)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_read_jsonl_names_the_compressed_file_that_is_damaged(tmp_path, suffix):
    path = write_texts(tmp_path / f"a.jsonl{suffix}", texts_of(300))
    content = path.read_bytes()
    for damaged in (content[:-9], content[: len(content) // 4], b"{}\n"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"a\.jsonl\{suffix}(, line| cannot be read)"):
            list(read_file(path, "text"))


def test_read_parquet_names_the_bad_row(tmp_path):
    path = tmp_path / "a.parquet"
    for column, message in [
        ({"body": ["x"]}, "field `text` .* body"),
        ({"text": [["a"]] * 2}, "row 1: `text` is list"),
    ]:
        pq.write_table(pa.table(column), path)
        with pytest.raises(ValueError, match=rf"a\.parquet.*{message}"):
            list(sources.read_parquet(path))
    path.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file"):
        list(sources.read_parquet(path))


def test_read_file_names_the_tool_for_other_files(tmp_path):
    for name, content, message in [
        ("a.txt", "\n“Windows” text".encode("cp1252"), "line 2: byte 0x93 is not UTF-8; to drop"),
        ("c.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', "line 2: byte 0xe9 is not UTF-8; to drop"),
        ("t.csv", "“body”".encode("cp1252"), "line 1: byte 0x93 is not UTF-8"),
        ("a", "état".encode("utf-16"), "not UTF-8; use iconv -f utf-16 -t utf-8"),
        ("b.jsonl", "état".encode("utf-16-le"), "not a text; for UTF-16, use iconv -f utf-16le"),
        ("a.json", b'[{"text": "x"}]', "a JSON array; use jq"),
        ("b.json", b'{\n "text": "x"}', "line 1: not JSON .*several lines, use jq -c"),
        ("d.json", b'{"text": ' + b"[" * 10**5, "line 1: not JSON .maximum recursion"),
        ("p.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer: run"),
        ("a.xz", b"\xfd7zXZ\0", "compressed with xz; use xz -dk"),
        (
            "data-00000.arrow",
            b"\xff\xff\xff\xff\0",
            "an Arrow file; for its FOLDER from save_to_disk",
        ),
        ("a.tar", b"a".ljust(257, b"\0") + b"ustar", "an archive; unpack it"),
        ("z.zst", LONG_ZSTD, "cannot be read .*use zstd -d --long=31"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"/{name}[:, ]+{message}"):
            list(read_file(tmp_path / name, "text"))


def test_read_file_recognizes_json_lines_and_compression_by_content(tmp_path):
    line = b'{"id": 1, "text": "once"}\n'
    for name, content in {
        **{"a.JSONL": line, "b.ndjson": line, "c": line, "d.txt": b"\xef\xbb\xbf" + line},
        **{"e.jsonl.gz": line, "f": gzip.compress(line), "g.TSV": b"id\ttext\n1\tonce\n"},
        "h.csv.bz2": bz2.compress(b"text\nonce\n"),
        "no content, then some": bz2.compress(b"") + bz2.compress(line),
        "two members and padding": gzip.compress(line[:9]) + gzip.compress(line[9:]) + bytes(9999),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert [*read_file(tmp_path / name, "text")] == ["once"], name


def test_read_file_goes_by_the_name_of_a_link_or_else_of_its_file(tmp_path):
    table = "id,text\n1,once"
    for link, file in {"a.csv": "0a1b", "b.txt": "b.csv", "c": "c.csv", "d": "d"}.items():
        (tmp_path / "cache").mkdir(exist_ok=True)
        (tmp_path / "cache" / file).write_text(table)
        (tmp_path / link).symlink_to(f"cache/{file}")
        expected = table if link in ("b.txt", "d") else "once"
        assert [*read_file(tmp_path / link, "text")] == [expected]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
@pytest.mark.parametrize("codec", ["gzip", "bz2", "zstd", "lz4", "zstd --long"])
@pytest.mark.parametrize("block_bytes", [10, 1 << 20])
def test_damaged_compressed_file_is_an_error_with_a_fix(
    tmp_path, monkeypatch, capsys, name, codec, block_bytes
):
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)  # the damage is in the first, or later
    path = tmp_path / f"{name}.compressed"
    with pa.output_stream(path, compression=codec.split()[0]) as file:
        file.write(b"text\n" + b"once\n" * 99 if ".csv" in name else b'{"text": "once"}\n' * 99)
    path.write_bytes(LONG_ZSTD if "--long" in codec else path.read_bytes()[:-5])
    fix = "check that it is complete or, after zstd --long, use zstd -d --long=31 FILE"
    with pytest.raises(UserError, match=rf"^{path} cannot be read \(.*\): {fix}$"):
        list(file_source([path]).documents(None))
    (tmp_path / "good.txt").write_text("good")
    assert sources.local_files((str(tmp_path),)) == [tmp_path / "good.txt"]
    assert f"1 of 2 files skipped, for example {path} cannot be read (" in (
        out := capsys.readouterr().out
    )
    assert out.endswith(f"{fix}\n")


def test_reader_that_decodes_compressed_bytes_is_an_error_that_names_the_file(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sources.READERS, ".md", lambda path, _: iter([path.read_text("utf-8")]))
    (tmp_path / "a.md.gz").write_bytes(gzip.compress(b"once"))
    with pytest.raises(ValueError, match=r"a\.md\.gz cannot be read: 'utf-8' codec can't decode"):
        list(read_file(tmp_path / "a.md.gz", "text"))


@pytest.mark.parametrize("pattern", ["mine", "mine/**/*.txt", "mine/**", "m*/**/*.txt", "**/*.txt"])
def test_local_files_lists_a_folder_once_however_many_links_lead_to_it(
    tmp_path, monkeypatch, pattern
):
    monkeypatch.chdir(tmp_path)
    for name in ("mine/a/b/1.txt", "mine/2.txt", "mine/c/3.txt", "mine/.git/4.txt", "other/5.txt"):
        write_texts(Path(name), [f"text {name}"])
    for folder in ("mine", "mine/a", "mine/a/b"):  # without a limit, 3^40 paths
        for link in ("up", "back", "root"):
            Path(folder, link).symlink_to(tmp_path / "mine")
    for link, target in {
        **{"mine/c/a": "../a", "mine/a/c": "../c", "mine/self": "self", "mine/none": "nothing"},
        **{"mine/linked.txt": "a/b/1.txt", "mine/z.txt": "a/b/1.txt", "mine/other": "../other"},
    }.items():
        Path(link).symlink_to(target)
    files = [path.resolve().name for path in sources.local_files((pattern,))]
    assert sorted(files) == ["1.txt", "2.txt", "3.txt", "5.txt"]


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_pipe_is_an_error_before_it_is_read(tmp_path):
    """As `--source <(zcat a.gz)`: a pipe can be read only once, or never ends."""
    os.mkfifo(tmp_path / "pipe")
    for pattern in ("pipe", "p*"):
        with pytest.raises(UserError, match="/pipe is not a regular file: write its text to"):
            sources.local_files((f"{tmp_path}/{pattern}",))


def test_local_paths_takes_an_existing_name_as_it_is(tmp_path):
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / name).touch()
    assert sources.local_paths(f"{tmp_path}/a[1].txt") == [tmp_path / "a[1].txt"]
    assert sources.local_paths(f"{tmp_path}/a[12].txt") == [tmp_path / "a1.txt"]


@pytest.mark.parametrize("mark", [",", ""])
def test_read_plain_without_whitespace_has_bounded_blocks(tmp_path, monkeypatch, mark):
    """They have the ids of the whole if there is a mark at which a word ends."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 50)
    monkeypatch.setattr(sources, "MAX_BLOCK_CHARS", 100)
    path = tmp_path / "a.txt"
    path.write_text(text := f"acgtgca{mark}" * 500)
    blocks = [*read_plain(path)]
    assert "".join(blocks) == text
    assert max(map(len, blocks)) <= 200
    encode = gpt2_encoding().encode_ordinary
    assert not mark or [id for block in blocks for id in encode(block)] == encode(text)


@settings(max_examples=150)
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


def test_stdlib_source_is_the_librarys_own_files_in_a_fixed_order():
    files = [file.read.args[0] for file in sources.stdlib_source().open_files()]
    names = [path.name for path in files]
    assert {"argparse.py", "os.py", "typing.py"} <= set(names)
    parts = {part for path in files for part in path.parts}
    assert not parts & {"test", "site-packages"}
    assert names != sorted(names)
    assert files == [file.read.args[0] for file in sources.stdlib_source().open_files()]


@pytest.mark.filterwarnings("ignore:gigatoken is not installed")
@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from("ab ,\ufeff|").flatmap(lambda c: st.integers(0, 30).map(c.__mul__))
        | st.text("ab ,|", max_size=30),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["", "|", ","]),
    st.sampled_from([1, 9, 1000]),
)
@example(["a" * 8, "b"], "", 1000)
@example(["\ufeff", "", "a|", "|b"], "|", 1000)
def test_source_has_one_end_of_text_per_document_that_is_not_empty(
    tmp_path_factory, texts, separator, batch_chars
):
    paths = [tmp_path_factory.getbasetemp() / f"{i}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sources, "BLOCK_BYTES", 4)
        monkeypatch.setattr(sources, "MAX_BLOCK_CHARS", 8)
        monkeypatch.setattr(fineweb, "BATCH_CHARS", batch_chars)
        monkeypatch.setitem(sys.modules, "gigatoken", None)  # tiktoken starts faster
        source = replace(file_source(paths), separator=separator)
        documents = list(source.documents(None))
        batches = fineweb.tokenize_documents(documents, workers=1)
        ids = [int(id) for _, tokens in batches for id in tokens]
        for n in (0, len(documents) // 2, -1) if documents else ():
            assert list(source.documents(documents[n].cursor)) == documents[n:]
    texts = [text.removeprefix("\ufeff") for text in texts]
    texts = [part for text in texts for part in (text.split(separator) if separator else [text])]
    assert gpt2_encoding().decode(ids).split("<|endoftext|>") == ["", *filter(None, texts)]


def test_source_resumes_from_any_document(tmp_path):
    files = {"a.jsonl": ["a", "", "b"], "b.jsonl": [], "c.parquet": ["c"]}
    source = file_source([write_texts(tmp_path / name, texts) for name, texts in files.items()])
    documents = list(source.documents(None))
    assert [document.text for document in documents] == ["a", "b", "c"]
    for n, document in enumerate(documents):
        assert list(source.documents(json.loads(json.dumps(document.cursor)))) == documents[n:]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_read_csv_reads_a_column_and_names_the_line_of_a_broken_row(tmp_path, delimiter):
    texts = [*texts_of(50), '"Two\r\nlines", a;b\tc', "longer than csv takes " * 10_000]
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["id", "my body"], *enumerate(texts)])
    assert [*read_file(path, "my body")] == texts
    with pytest.raises(ValueError, match=r"field `text` .* id, my body: choose one with --text-f"):
        next(read_file(path, "text"))
    for rows, message in [
        ("1|a\na|b|c", "line 3: 3 fields, but the table has 2: put quotes"),
        ('1|"never closed\n2|b', "line 2: unexpected end of data: put quotes"),
        ("1|hello\nworld", "line 3: 1 fields, but the table has 2"),
    ]:
        path.write_text(f"id|text\n{rows}\n".replace("|", delimiter))
        with pytest.raises(ValueError, match=rf"a\.csv, {message}"):
            list(read_file(path, "text"))
