"""Document sources: local files, functions in `SOURCES`, or a dataset on the Hugging Face hub.

A source is a list of files, each of which always yields the same texts in the same order. So a
stopped run can resume from a file number and a text number, and several machines can split the
files.
"""

import codecs
import csv
import glob
import gzip
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from corpus.parts import FULL_DATASET, Part
from formats.hub import explain_hub_errors, resolve_revision
from runtime.errors import UserError
from runtime.files import check_downloaded, sha256_of
from tokenizer import CUT, WORD_END

FINEWEB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
# The last such word in a file's path names its split, as on the hub. If a dataset has several of
# SPLITS, the first one is for training, and the last one is for validation.
SPLIT = re.compile(r"(?s).*(?<![a-z])(train|test|eval|val|dev)(ing|uation|id|idation)?(?![a-z])")
SPLITS = ("train", "other", "eval", "test", "dev", "val")
# Compressed files: the end of the name, pyarrow's codec, and the first bytes. For gzip, Python's
# module is used, which allows zeros after the content.
CODECS = {
    ".gz": (None, rb"\x1f\x8b"),
    ".bz2": ("bz2", rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    ".zst": ("zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    ".lz4": ("lz4", rb"\x04\x22\x4d\x18"),
}
NOT_UTF8 = (
    "is not UTF-8; to drop such bytes, use iconv -c -f utf-8 -t utf-8 FILE > NEW_FILE; for a text "
    "in cp1252, gbk, cp1251, shift_jis or latin1, use iconv -f ENCODING -t utf-8 FILE > NEW_FILE"
)
MAX_REASONS, MAX_REASON_CHARS = 10, 300  # printed for a folder's skipped files
TABLE_ROWS = 256  # rows read at a time
HASHED_BYTES = 1 << 20  # hashed at the start of a file, and at its end
BLOCK_BYTES = 1 << 20  # read at a time; also about the size of the blocks of a plain text
MAX_BLOCK_CHARS = 1 << 22  # a plain text without whitespace is cut elsewhere
MAX_DOCUMENT_CHARS = 1 << 26  # between two separators
# Installed packages and caches are not the standard library, and tests are half of its text.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Cursor = dict[str, int]  # place of a document: number of its `file`, and of its `text` in that file
Known = Mapping[str, list[str]]  # hashes of files that an earlier run read: ends, and all
NONE: Known = {}


class Document(NamedTuple):
    """A document, or one block of a plain text, which may be too long to read in one piece.

    Neither is empty.
    """

    text: str
    cursor: Cursor
    """Place from which its source resumes with this document."""
    starts_document: bool = True
    """False for a block that continues the document of the previous block."""


class SourceFile(NamedTuple):
    """A file of a source."""

    read: Callable[[], Iterable[str]]
    """Function that yields the texts, always the same ones in the same order."""
    is_document: bool = False
    """Whether the texts are the blocks of one document."""


@dataclass(frozen=True)
class Source:
    """A sequence of documents in a fixed order."""

    identity: dict[str, Any]
    """Values for the manifest that distinguish this source from others."""
    open_files: Callable[[], Sequence[SourceFile]]
    """Function that lists the files; not called for a finished dataset, which needs no network."""

    separator: str = ""
    """If any, text that ends a document inside the files' texts."""
    val_paths: Sequence[Path] = ()
    """Files of the source that its datasets provide for validation."""

    def documents(self, cursor: Cursor | None, part: Part = FULL_DATASET) -> Iterator[Document]:
        """Yield the documents of a part, starting at `cursor`; None = at the start of the part."""
        files = self.open_files()
        numbers = part.file_numbers(len(files))
        start = (cursor["file"], cursor["text"]) if cursor else (numbers.start, 0)
        for number in range(start[0], numbers.stop):
            file = files[number]
            if self.separator:
                file = SourceFile(partial(split_texts, file, self.separator))
            starts_document = True
            for i, text in enumerate(file.read()):
                if text and (number, i) >= start:
                    yield Document(text, {"file": number, "text": i}, starts_document)
                starts_document &= not (text and file.is_document)


def split_texts(file: SourceFile, separator: str) -> Iterator[str]:
    """Yield the texts of a file, each split at `separator`; the blocks of a document are joined."""
    rest = ""
    for text in file.read():
        *documents, rest = (rest + text).split(separator)
        yield from documents
        if not file.is_document:
            yield rest
            rest = ""
        if len(rest) > MAX_DOCUMENT_CHARS:
            count = f"{len(rest):,} characters"
            raise UserError(f"--separator {separator!r} does not occur in {count}: correct it")
    yield rest


def file_source(paths: Sequence[Path], field: str = "text", known: Known = NONE) -> Source:
    """Return a source of local files, in order; files of unknown type are read as plain text."""
    stamps = [(stamp_of(path), path) for path in paths]
    contents = {s: known.get(s) or [hash_ends(p), sha256_of(p)] for s, p in stamps}
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256 of head and tail": ends}
        for path, (ends, _) in zip(paths, contents.values(), strict=True)
    ]
    identity = {"kind": "files", "files": files, "contents": contents}
    return Source(identity, lambda: [local_file(path, field) for path in paths])


def local_file(path: Path, field: str = "text") -> SourceFile:
    """Return a local file, which is a single document if it is plain text."""
    return SourceFile(partial(read_file, path, field), find_reader(path) is read_plain)


def hash_ends(path: Path) -> str:
    """Return a hash of a file's head and tail, which change with nearly every edit."""
    with path.open("rb") as file:
        ends = file.read(HASHED_BYTES)
        file.seek(max(0, path.stat().st_size - HASHED_BYTES))
        return hashlib.sha256(ends + file.read()).hexdigest()


def stamp_of(path: Path) -> str:
    """Return a hash of a file's name, place, size and times, which changes when it is written."""
    stat = path.stat()
    times = stat.st_mtime_ns, stat.st_ctime_ns  # programs can set only the first one
    return hash_of_name(repr((path.name, os.path.realpath(path), stat.st_size, times))).hex()


def stdlib_source() -> Source:
    """Return the built-in corpus: the running Python's standard library, one document per file.

    The files are sorted by a hash of their names, so that validation is a fair sample.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in root.rglob("[!.]*.py"))
    names = [path.as_posix() for path in paths if not STDLIB_EXCLUDED.intersection(path.parts)]
    # _sysconfigdata contains paths of this machine.
    names = sorted((n for n in names if "_sysconfigdata" not in n), key=hash_of_name)
    sizes = "".join(f"{name}\0{(root / name).stat().st_size}\0" for name in names)
    digest = hashlib.sha256(sizes.encode()).hexdigest()
    version = {"kind": "stdlib", "python": platform.python_version()}
    identity = version | {"modules": len(names), "sha256 of names and sizes": digest}
    return Source(identity, lambda: [local_file(root / name) for name in names])


def hash_of_name(name: str) -> bytes:
    """Return a key that sorts files in a random but fixed order, for a fair validation split."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def decompressed_name(path: Path) -> Path:
    """Return the path without `.gz` or another ending in `CODECS`."""
    return path.with_suffix("") if path.suffix.lower() in CODECS else path


def walk_folder(folder: Path) -> Iterator[Path]:
    """Yield the files and folders below a folder that are not hidden; list each folder once."""
    folders, seen = [folder], set[str]()
    for each in folders:  # the list grows
        if (real := os.path.realpath(each)) not in seen:  # links may lead to a folder above them
            seen.add(real)
            paths = sorted(filter(Path.exists, each.glob("[!.]*")))
            folders += filter(Path.is_dir, paths)
            yield from paths


def local_paths(pattern: str) -> list[Path]:
    """Return the files and folders that match a path or glob, sorted."""
    if Path(pattern).exists():
        return [Path(pattern)]
    top, *below = re.split(r"(?<![^/])\*\*(?:/|$)", pattern, maxsplit=1)
    if not below:
        return [Path(match) for match in sorted(glob.glob(pattern))]
    found = chain(*map(walk_folder, local_paths(top or ".")))
    return sorted(path for path in found if path.match(below[0] or "*"))


def local_files(patterns: tuple[str, ...], field: str = "text", known: Known = NONE) -> list[Path]:
    """Return the files of paths, folders and globs, each once; a glob's matches are sorted."""
    paths = []
    for pattern in patterns:
        if not (matches := local_paths(pattern)):
            raise UserError(f"{pattern}: no such file or folder")
        for path in matches:
            if not (path.is_file() or path.is_dir()):  # a pipe can be read only once
                raise UserError(f"{path} is not a regular file: write its text to a file first")
            paths += folder_files(path, field, known) if path.is_dir() else [path]
    # Links may lead to the same file.
    return [*{os.path.realpath(path): path for path in paths}.values()]


def folder_files(folder: Path, field: str, known: Known) -> list[Path]:
    """Return the text files in and below a folder; print how many files are skipped, and why.

    The files are sorted by a hash of their names, so that validation, which comes first, has all
    kinds of files. Files that an earlier run read are known to be texts.
    """
    paths = [path for path in walk_folder(folder) if path.is_file()]
    texts, reasons = [], dict[str, str]()
    for path in sorted(paths, key=lambda path: hash_of_name(path.relative_to(folder).as_posix())):
        try:
            if stamp_of(path) not in known:
                next(read_file(path, field), None)
                if find_reader(path) is not read_parquet:
                    check_utf8(path)
            texts.append(path)
        except (UserError, OSError) as error:
            # Errors of one kind have the same first words, apart from the path and numbers.
            words = re.findall(r"\b[A-Za-z]+\b", str(error).replace(str(path), ""))
            reasons.setdefault(" ".join(words[:4]), str(error)[:MAX_REASON_CHARS])
    if reasons:
        count = f"{len(paths) - len(texts):,} of {len(paths):,} files skipped"
        examples = " | ".join(sorted(reasons.values())[:MAX_REASONS])
        print(f"--source {folder}: {count}, for example {examples}")
    if not texts:
        raise UserError(f"--source {folder} and its subfolders have no text files")
    return texts


def choose_splits(patterns: tuple[str, ...], paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Return the files of `patterns` to train on, and the validation files of datasets' folders.

    A folder is a dataset if its README.md begins with `---`, as on the hub, or if all files other
    than README.md and LICENSE are tables and .txt files that are named after splits, including
    `train`. Print how many files of a dataset are used.
    """
    val: list[Path] = []
    for folder in filter(Path.is_dir, chain(*map(local_paths, patterns))):
        texts, readme = {path for path in paths if folder in path.parents}, folder / "README.md"
        splits = dict[str, list[Path]]()
        for path in (p for p in paths if p in texts and p != readme and p.stem != "LICENSE"):
            is_data = decompressed_name(path).suffix.lower() in READERS
            named = is_data and SPLIT.match(path.relative_to(folder).as_posix().lower())
            splits.setdefault(named[1] if named else "other", []).append(path)
        names = sorted(splits, key=SPLITS.index)
        is_named = "train" in names and "other" not in names
        if is_named or (names and readme in texts and readme.read_bytes().startswith(b"---")):
            train = splits[names[0]]
            held_out = splits[names[-1]] if names[-1] not in (names[0], "other") else []
            unused = texts.difference(train)
            left = sorted(unused.difference(held_out))
            roles = {"for training": train, "for validation by default": held_out, "skipped": left}
            counts = [f"{role}: {len(p):,}, such as {p[0]}" for role, p in roles.items() if p]
            print(f"--source {folder} is a dataset; files {'; '.join(counts)}")
            paths = [path for path in paths if path not in unused]
            val += held_out
    return paths, val


def read_file(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a local file."""
    try:
        yield from find_reader(path)(path, field)
    except UnicodeDecodeError as error:
        check_utf8(path)
        raise UserError(f"{path} cannot be read: {error}") from None  # from a new reader


def find_reader(path: Path) -> "Reader":
    """Return the reader for a file's first bytes or, if they do not show it, for its name."""
    check_downloaded(path)
    with open_bytes(path) as file:
        head = file.peek()
    kinds = (kind for magic, kind in MAGIC.items() if re.match(magic, head, re.DOTALL))
    # A link without an ending is read as the file that it leads to.
    name = decompressed_name(path if path.suffix else path.resolve())
    kind = next(kinds, READERS.get(name.suffix.lower(), read_plain))
    if isinstance(kind, str):
        raise UserError(f"{path}: {kind}")
    return kind


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file; its bytes are decompressed if they begin as one of `CODECS`."""
    with path.open("rb") as file:
        content = file
        if found := [codec for codec, magic in CODECS.values() if re.match(magic, file.peek())]:
            import pyarrow

            [codec] = found
            stream = pyarrow.input_stream(file, codec) if codec else gzip.GzipFile(fileobj=file)
            content = io.BufferedReader(stream, BLOCK_BYTES)
        try:
            yield content
        except (EOFError, OSError, zlib.error) as error:
            remedy = "check that it is complete or, after zstd --long, use zstd -d --long=31 FILE"
            raise UserError(f"{path} cannot be read ({error}): {remedy}") from None


def decode_file(path: Path, encoding: str) -> Iterator[str]:
    """Yield the text of a file in blocks, which may end anywhere."""
    with open_bytes(path) as file:
        yield from codecs.iterdecode(iter(partial(file.read, BLOCK_BYTES), b""), encoding)


def check_utf8(path: Path) -> None:
    """Raise if a file is not UTF-8; the error names the line and the byte."""
    line = 1
    try:
        for text in decode_file(path, "utf-8"):
            line += text.count("\n")
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        byte = error.object[error.start]
        raise UserError(f"{path}, line {line}: byte {byte:#04x} {NOT_UTF8}") from None


def read_parquet(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the texts in a column of a Parquet file."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names = file.schema_arrow.names
            column = next((n for n in names if f"{field}.".startswith(f"{n}.")), field)
            _check_text_field(names, column, str(path))
            tables = file.iter_batches(TABLE_ROWS, columns=[column])
            yield from _column_texts(tables, field, str(path))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from None


def read_jsonl(path: Path, field: str = "text") -> Iterator[str]:
    """Yield a field of each line of a JSON Lines file; blank lines are skipped."""
    with open_bytes(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse_line(line, field, f"{path}, line {number}")


def _parse_line(line: bytes, field: str, where: str) -> str:
    content = line.decode("utf-8-sig")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        problem = f"{where}: not JSON ({getattr(error, 'msg', error)})"
        other_fix = "if objects have several lines, use jq -c . FILE > NEW_FILE.jsonl"
        raise UserError(f"{problem}: correct or delete the line; {other_fix}") from None
    text = _text_of(value, field, where)
    # JSON can have half of a surrogate pair. It becomes U+FFFD, as in tiktoken.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_csv(path: Path, field: str = "text") -> Iterator[str]:
    """Yield a column of a table whose first line has the column names.

    The delimiter is the comma, semicolon or tab, whichever the first line has most often.
    """
    csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters, is too small for documents
    with open_bytes(path) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as file:
        first = file.readline()
        delimiter = max(",;\t", key=first.count)
        rows = csv.reader(chain([first], file), delimiter=delimiter, strict=True)
        line = 1
        try:
            names = next(rows, [])
            _check_text_field(names, field, str(path))
            column = names.index(field)
            line += rows.line_num
            for row in rows:
                if row and len(row) != len(names):
                    raise csv.Error(f"{len(row)} fields, but the table has {len(names)}")
                yield row[column] if row else ""
                line = rows.line_num + 1
        except csv.Error as error:
            texts = f"texts with {delimiter!r}, quotes or line breaks"
            fix = f"put quotes around {texts}, and double the quotes in them"
            raise UserError(f"{path}, line {line}: {error}: {fix}") from None


def read_plain(path: Path, _: str = "") -> Iterator[str]:
    """Yield a plain text in blocks, whose token ids together are the ids of the full text.

    Each block ends at a match of `tokenizer.CUT`. In a text without whitespace, it ends at a match
    of `tokenizer.WORD_END`, which cuts a longer word anywhere.
    """
    rest = ""
    for text in decode_file(path, "utf-8-sig"):  # removes a byte-order mark
        start = max(BLOCK_BYTES, len(rest) - 1)  # the text before it has no match
        rest += text
        while cut := CUT.search(rest, start) or (
            len(rest) >= MAX_BLOCK_CHARS and WORD_END.search(rest, BLOCK_BYTES)
        ):
            yield rest[: cut.start()]
            rest = rest[cut.start() :]
            start = BLOCK_BYTES
    yield rest


# Readers of local files by the end of the file's name; others are read as plain text. A reader gets
# the path, which `open_bytes` opens and decompresses, and the field that holds the text. It yields
# documents or, as `read_plain`, parts of one.
Reader = Callable[[Path, str], Iterator[str]]
READERS: dict[str, Reader] = {
    ".parquet": read_parquet,
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), read_jsonl),
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    **dict.fromkeys((".txt", ".raw", ".tokens"), read_plain),  # .raw, .tokens: WikiText
}
# Readers by the first bytes of a file, which count more than its name, or what to do with files
# that are not read.
MAGIC: dict[bytes, Reader | str] = {
    rb"PAR1": read_parquet,
    rb'(\xef\xbb\xbf)?\s*\{[^\n]*"\s*:\s*"': read_jsonl,  # an object with a string, on one line
    rb'(\xef\xbb\xbf)?\s*\[\s*\{\s*"': "a JSON array; use jq -c '.[]' FILE > NEW_FILE.jsonl",
    rb"\xfd7zXZ": "compressed with xz; use xz -dk FILE",
    rb"PK\x03\x04|Rar!|7z\xbc\xaf|.{257}ustar": "an archive; unpack it (documents: pandoc)",
    rb"%PDF-": "a PDF; use pdftotext FILE NEW_FILE.txt",
    rb"ARROW1|\xff\xff\xff\xff": "an Arrow file; for its FOLDER from save_to_disk, use python -c "
    "\"import datasets; datasets.load_from_disk('FOLDER').to_parquet('NEW_FILE.parquet')\"",
    rb"\xff\xfe|\xfe\xff": "not UTF-8; use iconv -f utf-16 -t utf-8 FILE > NEW_FILE",
    rb".{0,8000}?\0": "not a text; for UTF-16, use iconv -f utf-16le -t utf-8 FILE > NEW_FILE",
}


def _check_text_field(names: Collection[str], field: str, where: str) -> None:
    if field not in names:
        found = f"{', '.join(names)}: choose one with --text-field" if names else "no fields at all"
        raise UserError(f"{where}: expected a field `{field}` with the text, found {found}")


def _text_of(row: object, field: str, where: str, above: str = "") -> str:
    """Return the string in a field of a row: `text` or, for `text` in an object `doc`, `doc.text`.

    Null, also instead of the object, is an empty document. `above` is the prefix of the names.
    """
    values = {above + name: value for name, value in row.items()} if isinstance(row, dict) else {}
    names = (name for name in values if f"{field}.".startswith(f"{name}."))
    value = values.get(name := max(names, key=len, default=field), 0)
    if isinstance(value, dict):
        return _text_of(value, field, where, f"{name}.")
    if value is not None:
        _check_text_field(values, field, where)
        if not isinstance(value, str):
            raise UserError(f"{where}: `{field}` is {type(value).__name__}, not a string")
    return value or ""


def _column_texts(tables: Iterable[Any], field: str, origin: str) -> Iterator[str]:
    """Yield the strings in a column of Arrow tables; errors count the rows from 1."""
    row = 0
    for table in tables:
        columns = [name for name in table.schema.names if f"{field}.".startswith(f"{name}.")]
        for value in table.select(columns or table.schema.names).to_pylist():
            row += 1
            yield _text_of(value, field, f"{origin}, row {row}")


def hub_source(
    dataset: str, name: str | None, revision: str | None, field: str, earlier: Mapping[str, Any]
) -> Source:
    """Return a source that streams a dataset (OWNER/NAME, configuration) from the hub.

    The default `revision` is the commit in the identity that an earlier run recorded; without one,
    it is the newest commit.
    """
    commit = earlier.get("revision")
    if commit is None or revision not in (None, commit):
        commit = resolve_revision(dataset, revision)

    def open_files() -> list[SourceFile]:
        import datasets

        with explain_hub_errors(f"reading {dataset} failed"):
            try:
                options: dict[str, Any] = {"split": "train", "revision": commit}
                stream = datasets.load_dataset(dataset, name, streaming=True, **options)
            except ValueError as error:
                if "onfig" not in str(error):
                    raise
                names = datasets.get_dataset_config_names(dataset, revision=commit)
                raise UserError(f"choose one with --name: {', '.join(names)}") from None
        numbers = range(stream.num_shards)
        return [SourceFile(partial(read_stream, stream, dataset, i, field)) for i in numbers]

    identity = {"kind": "hub", "dataset": dataset, "name": name, "revision": commit}
    return Source(identity, open_files)


def read_stream(stream: Any, dataset: str, number: int, field: str) -> Iterator[str]:  # noqa: ANN401
    """Yield a column of one file of a streamed `IterableDataset`."""
    origin = f"{dataset}, file {number + 1}"
    with explain_hub_errors(f"reading {origin} failed"):
        file = stream.shard(stream.num_shards, number, contiguous=True)
        tables = file.with_format("arrow").iter(batch_size=TABLE_ROWS)
        yield from _column_texts(tables, field, origin)


# Sources by their `--source NAME`. To add one, write a generator function that yields the text of
# each document, always the same ones in the same order. Then add a line here: its NAME and
# `lambda: Source({"kind": "NAME"}, lambda: [SourceFile(the_function)])`.
SOURCES: dict[str, Callable[[], Source]] = {
    "stdlib": stdlib_source,
}
