"""Where documents come from: local files, a function of `SOURCES`, or a data set of the hub.

A source is a list of files, each of which yields texts, always the same ones in the same order. So
the number of a file and of a text in it say where a stopped run resumes, and several machines share
a source by its files.
"""

import codecs
import csv
import glob
import hashlib
import io
import json
import platform
import re
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from corpus.shards import WHOLE, Part
from formats.hub import explain_hub_errors, resolve_revision
from tokenizer import CUT

FINEWEB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
JSON_LINES = tuple(f".json{line}{end}" for line in ("l", "") for end in ("", ".gz", ".zst"))
FILE_TYPES = (*JSON_LINES, ".parquet", ".csv", ".tsv", ".txt")
PLAIN = ("", ".txt")  # of what `file_type` gives
NO_UTF8 = "invalid UTF-8; if it is text of Windows, use iconv -f cp1252 -t utf-8 FILE > NEW_FILE"
NO_TEXT = {  # by a pattern of a file's first bytes
    b"%PDF": "a PDF; use pdftotext FILE NEW_FILE.txt",
    b"PK\3\4": "a zip file; use pandoc -t plain -o NEW_FILE.txt FILE (.docx, .odt) or unzip FILE",
    b"\x1f\x8b": "a gzip file; use gunzip < FILE > NEW_FILE.txt",
    b"\xff\xfe|\xfe\xff|[^\0]*\0": "UTF-16 or binary; use iconv -f utf-16 -t utf-8 FILE > NEW_FILE",
}
JSON_ARRAY = "a JSON array, not JSON lines; convert it by jq -c '.[]' FILE > NEW_FILE.jsonl"
TABLE_ROWS = 256  # rows that are read together
HASHED_BYTES = 1 << 20  # of a file's head, and of its tail
BLOCK_BYTES = 1 << 20  # read together, and about what is tokenised together of a plain text
# Folders of the standard library that are not its own code, and tests, which are half of its text.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Cursor = dict[str, int]  # `file` and `text`: the document's place, see `Source.documents`


class Document(NamedTuple):
    """A document, or a block of a plain text that is too long to be read at once."""

    text: str
    cursor: Cursor
    """Where its source resumes with this document."""
    begins: bool = True
    """False for a block that continues the previous one's document."""


class SourceFile(NamedTuple):
    """A file of a source; a part of the work takes whole files."""

    read: Callable[[], Iterable[str]]
    """Yields its texts, always the same ones in the same order."""
    is_document: bool = False
    """Its texts are the blocks of one document."""


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order."""

    identity: dict[str, Any]
    """What tells it from other sources, for the manifest."""
    open_files: Callable[[], Sequence[SourceFile]]
    """Lists its files when they are needed: a finished data set needs no network."""
    tokens: int | None = None
    """An estimate of its size."""

    def documents(self, cursor: Cursor | None, part: Part = WHOLE) -> Iterator[Document]:
        """Read a part from the document with `cursor` on, or from its start."""
        files = self.open_files()
        if part.count > len(files):
            raise ValueError(f"--parts {part.count}: more than the source has files, {len(files)}")
        start, stop = (len(files) * i // part.count for i in (part.index, part.index + 1))
        first, skipped = (start, 0) if cursor is None else (cursor["file"], cursor["text"])
        for number in range(first, stop):
            file = files[number]
            for i, text in enumerate(file.read()):
                if number > first or i >= skipped:
                    begins = i == 0 or not file.is_document
                    yield Document(text, {"file": number, "text": i}, begins)


def file_source(
    paths: list[Path], identity: dict[str, Any] | None = None, field: str = "text"
) -> Source:
    """Local files, in order; those that are of none of `FILE_TYPES` are plain texts."""
    files = [
        SourceFile(partial(read_file, path, field), file_type(path) in PLAIN) for path in paths
    ]
    if identity is None:
        identity = {"kind": "files", "files": [describe_file(path) for path in paths]}
    return Source(identity, lambda: files)


def describe_file(path: Path) -> dict[str, str | int]:
    """What tells a file from others, and mostly from itself before an edit."""
    size = path.stat().st_size
    with path.open("rb") as file:
        ends = file.read(HASHED_BYTES)
        file.seek(max(0, size - HASHED_BYTES))
        ends += file.read()
    digest = hashlib.sha256(ends).hexdigest()
    return {"name": path.name, "bytes": size, "sha256 of head and tail": digest}


def stdlib_source() -> Source:
    """The built-in corpus: the running Python's standard library, one document per file.

    Files come in the order of a hash of their names, so that validation is a fair sample.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("[!.]*.py")
        if not STDLIB_LEFT_OUT.intersection(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfigdata")  # holds this machine's paths
    ]
    names.sort(key=hash_of_name)
    sizes = "".join(f"{name}\0{(root / name).stat().st_size}\0" for name in names)
    identity = {
        "kind": "stdlib",
        "python": platform.python_version(),
        "modules": len(names),
        "sha256 of names and sizes": hashlib.sha256(sizes.encode()).hexdigest(),
    }
    return file_source([root / name for name in names], identity)


def hash_of_name(name: str) -> bytes:
    """A key that sorts files by chance, always in the same way, for a fair validation split."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def file_type(path: Path | str) -> str:
    """The end of a file's name that says how it is read, one of `FILE_TYPES`; else empty."""
    return next((kind for kind in FILE_TYPES if str(path).endswith(kind)), "")


def local_paths(pattern: str) -> list[Path]:
    """The files and folders that a path or glob means, sorted."""
    return [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]


def local_files(patterns: tuple[str, ...], field: str = "text") -> list[Path]:
    """The files of paths, folders and globs, each file once; those of a glob are sorted."""
    paths = []
    for pattern in patterns:
        matches = local_paths(pattern)
        if not matches:
            raise FileNotFoundError(f"--source {pattern}: no such file or folder")
        for path in matches:
            paths += folder_files(path, field) if path.is_dir() else [path]
    for path in paths:
        if not path.is_file():  # it may be a pipe, which is read once only
            raise ValueError(f"--source {path} is not a file: copy it into one")
    once = dict[Path, Path]()
    for path in paths:
        once.setdefault(path.resolve(), path)  # not again through a link
    return [*once.values()]


def folder_files(folder: Path, field: str) -> list[Path]:
    """The text files in and below a folder that are not hidden; says what it leaves out, and why.

    They come in the order of a hash of their names: validation, the first of them, is of all kinds.
    """
    folders, seen, found = [folder], set[Path](), dict[str, Path]()
    for each in folders:  # it grows
        if (real := each.resolve()) not in seen:  # links may lead to a folder that holds them
            seen.add(real)
            paths = sorted(each.glob("[!.]*"))
            folders += filter(Path.is_dir, paths)
            found |= {p.relative_to(folder).as_posix(): p for p in paths if p.is_file()}
    texts, reasons = [], []
    for name in sorted(found, key=hash_of_name):
        try:
            next(iter(read_file(found[name], field)), None)
            texts.append(found[name])
        except (ValueError, OSError) as error:
            reasons.append(str(error))
    if reasons:
        count = f"{len(reasons):,} of {len(found):,} files left out"
        print(f"--source {folder}: {count}, such as {min(reasons)}")
    if not texts:
        raise ValueError(f"--source {folder} has no text files, in it or below it")
    return texts


def read_file(path: Path, field: str) -> Iterator[str]:
    """The texts of a local file."""
    kind = file_type(path)
    if kind == ".parquet":
        return read_parquet(path, field)
    if kind in (".csv", ".tsv"):
        return read_csv(path, field)
    return read_jsonl(path, field) if kind in JSON_LINES else read_plain(path)


def read_parquet(path: Path, field: str = "text") -> Iterator[str]:
    """A column of a Parquet file."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check_text_field(file.schema_arrow.names, field, str(path))
            tables = file.iter_batches(TABLE_ROWS, columns=[field])
            yield from _column_texts(tables, field, str(path))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from None


def read_jsonl(path: Path, field: str = "text") -> Iterator[str]:
    """A field of every line of a JSON Lines file; blank lines are skipped."""
    import pyarrow

    try:
        decompressed = pyarrow.input_stream(path)  # by the suffix
        with io.BufferedReader(decompressed, BLOCK_BYTES) as lines:
            if lines.peek(9).lstrip().startswith(b"["):
                raise ValueError(f"{path}: {JSON_ARRAY}")
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse_line(line, field, f"{path}, line {number}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}): is it complete?") from None


def _parse_line(line: bytes, field: str, where: str) -> str:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError(f"{where}: {_no_text(line) or NO_UTF8}") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from None
    _check_text_field(value if isinstance(value, dict) else (), field, where)
    return _string(value[field], field, where)


def read_csv(path: Path, field: str = "text") -> Iterator[str]:
    """A column of a table, whose first line names all; between are commas, semicolons or tabs."""
    csv.field_size_limit(2**31 - 1)  # characters; by default 131,072, too few for a document
    with open_text(path) as file:
        header = file.peek().partition(b"\n")[0]
        delimiter = chr(max(b",;\t", key=header.count))
        rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter)
        _check_text_field(rows.fieldnames or (), field, str(path))
        yield from (row[field] or "" for row in rows)


def read_plain(path: Path) -> Iterator[str]:
    """A plain text in blocks whose tokens, joined, are those of the whole (see `tokenizer.CUT`)."""
    # It drops a byte-order mark; open() would decode 8 KB at a time.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest = ""
    with open_text(path) as file:
        while more := file.read(BLOCK_BYTES):
            rest += decoder.decode(more)
            while cut := CUT.search(rest, BLOCK_BYTES):
                yield rest[: cut.start()]
                rest = rest[cut.start() :]
        yield rest + decoder.decode(b"", final=True)


@contextmanager
def open_text(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file of UTF-8 text; for others the error names the tool that converts them."""
    with path.open("rb") as file:
        try:
            if reason := _no_text(file.peek()):
                raise ValueError(f"{path}: {reason}")
            yield file
        except UnicodeDecodeError:
            raise ValueError(f"{path}: {NO_UTF8}") from None


def _no_text(start: bytes) -> str | None:
    """What else than UTF-8 text a file is, by its first bytes, and what makes text of it."""
    return next((reason for kind, reason in NO_TEXT.items() if re.match(kind, start)), None)


def _check_text_field(names: Collection[str], field: str, where: str) -> None:
    if field not in names:
        has = f"it has {', '.join(names)}: choose by --text-field" if names else "it has no fields"
        raise ValueError(f"{where}: no `{field}`, the field of a document; {has}")


def _string(value: object, field: str, where: str) -> str:
    if not isinstance(value, str | None):
        raise ValueError(f"{where}: `{field}` is {type(value).__name__}, not a string")
    return value or ""  # a null is an empty document


def _column_texts(tables: Iterable[Any], field: str, origin: str) -> Iterator[str]:
    """The strings of a column of Arrow tables, whose rows are counted from 1."""
    row = 0
    for table in tables:
        _check_text_field(table.schema.names, field, origin)
        for value in table.column(field):
            row += 1
            yield _string(value.as_py(), field, f"{origin}, row {row}")


def hub_source(
    dataset: str, name: str | None, revision: str | None, known: str | None, field: str
) -> Source:
    """A data set of the Hugging Face hub (OWNER/NAME, configuration), streamed.

    It is read at `revision`, by default the `known` commit of an earlier run, or else the newest.
    """
    commit = known
    if known is None or revision not in (None, known):
        commit = resolve_revision(dataset, revision)

    def open_files() -> list[SourceFile]:
        import datasets

        with explain_hub_errors(f"reading {dataset} failed"):
            stream = datasets.load_dataset(
                dataset, name, split="train", streaming=True, revision=commit
            )
        return [
            SourceFile(partial(read_stream, stream, number, field, f"{dataset}, file {number + 1}"))
            for number in range(stream.num_shards)
        ]

    identity = {"kind": "hub", "dataset": dataset, "name": name, "revision": commit}
    billions = re.fullmatch(r"sample-(\d+)BT", name or "")
    tokens = int(billions[1]) * 10**9 if billions and dataset in FINEWEB.values() else None
    return Source(identity, open_files, tokens)


def read_stream(stream: Any, number: int, field: str, origin: str) -> Iterator[str]:  # noqa: ANN401
    """A column of a file of a streamed `IterableDataset`, which messages call `origin`."""

    def tables() -> Iterator[Any]:
        with explain_hub_errors(f"reading {origin} failed"):
            file = stream.shard(stream.num_shards, number, contiguous=True)
            yield from file.with_format("arrow").iter(batch_size=TABLE_ROWS)

    return _column_texts(tables(), field, origin)


# What `--source NAME` opens. To add a source, write a generator function that yields the texts of
# its documents, always the same ones in the same order, and add a line here: its NAME and
# `lambda: Source({"kind": "NAME"}, lambda: [SourceFile(the_function)])`.
SOURCES: dict[str, Callable[[], Source]] = {
    "stdlib": stdlib_source,
}
