"""Document sources: local files, functions in `SOURCES`, or a dataset on the Hugging Face hub.

A source is a list of files, each of which always yields the same texts in the same order. So a
stopped run can resume from a file number and a text number, and several machines can split the
files.
"""

import codecs
import csv
import glob
import hashlib
import io
import json
import platform
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from corpus.parts import FULL_DATASET, Part
from formats.hub import explain_hub_errors, resolve_revision
from tokenizer import CUT

FINEWEB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
JSON_LINES = tuple(f".json{line}{end}" for line in ("l", "") for end in ("", ".gz", ".zst"))
NOT_UTF8 = (
    "not UTF-8 text; for a text from Windows, use iconv -f cp1252 -t utf-8 FILE > NEW_FILE; "
    "for UTF-16, use iconv -f utf-16 -t utf-8 FILE > NEW_FILE; for others, pdftotext or pandoc"
)
JSON_ARRAY = "a JSON array, not JSON lines; use jq -c '.[]' FILE > NEW_FILE.jsonl"
TABLE_ROWS = 256  # rows read at a time
HASHED_BYTES = 1 << 20  # hashed at the start of a file, and at its end
BLOCK_BYTES = 1 << 20  # read at a time; also about the size of the blocks of a plain text
# Installed packages and caches are not the standard library, and tests are half of its text.
STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Cursor = dict[str, int]  # place of a document: number of its `file`, and of its `text` in that file


class Document(NamedTuple):
    """A document, or one block of a plain text, which may be too long to read in one piece."""

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

    def documents(self, cursor: Cursor | None, part: Part = FULL_DATASET) -> Iterator[Document]:
        """Yield the documents of a part, starting at `cursor`; None = at the start of the part."""
        files = self.open_files()
        numbers = part.file_numbers(len(files))
        start = (cursor["file"], cursor["text"]) if cursor else (numbers.start, 0)
        for number in range(start[0], numbers.stop):
            file = files[number]
            for i, text in enumerate(file.read()):
                if (number, i) >= start:
                    starts_document = i == 0 or not file.is_document
                    yield Document(text, {"file": number, "text": i}, starts_document)


def file_source(
    paths: list[Path], identity: dict[str, Any] | None = None, field: str = "text"
) -> Source:
    """Return a source of local files, in order; files of unknown type are read as plain text."""
    if identity is None:
        identity = {"kind": "files", "files": [describe_file(path) for path in paths]}
    return Source(identity, lambda: [local_file(path, field) for path in paths])


def local_file(path: Path, field: str) -> SourceFile:
    """Return a local file, which is a single document if it is plain text."""
    return SourceFile(partial(read_file, path, field), READERS[file_type(path)] is read_plain)


def describe_file(path: Path) -> dict[str, str | int]:
    """Return a file's name, size and hash of both ends, which change with nearly every edit."""
    size = path.stat().st_size
    with path.open("rb") as file:
        ends = file.read(HASHED_BYTES)
        file.seek(max(0, size - HASHED_BYTES))
        ends += file.read()
    digest = hashlib.sha256(ends).hexdigest()
    return {"name": path.name, "bytes": size, "sha256 of head and tail": digest}


def stdlib_source() -> Source:
    """Return the built-in corpus: the running Python's standard library, one document per file.

    The files are sorted by a hash of their names, so that validation is a fair sample.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("[!.]*.py")
        if not STDLIB_EXCLUDED.intersection(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfigdata")  # contains paths of this machine
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
    """Return a key that sorts files in a random but fixed order, for a fair validation split."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def file_type(path: Path | str) -> str:
    """Return the end of a file's name that selects its reader in `READERS`, or an empty string."""
    return next(kind for kind in READERS if str(path).endswith(kind))


def local_paths(pattern: str) -> list[Path]:
    """Return the files and folders that match a path or glob, sorted."""
    return [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]


def local_files(patterns: tuple[str, ...], field: str = "text") -> list[Path]:
    """Return the files of paths, folders and globs, each once; a glob's matches are sorted."""
    paths = []
    for pattern in patterns:
        matches = local_paths(pattern)
        if not matches:
            raise FileNotFoundError(f"--source {pattern}: no such file or folder")
        for path in matches:
            paths += folder_files(path, field) if path.is_dir() else [path]
    return [*{path.resolve(): path for path in paths}.values()]  # a link may lead to another file


def folder_files(folder: Path, field: str) -> list[Path]:
    """Return the text files in and below a folder; print how many files are skipped, and why.

    The files are sorted by a hash of their names, so that validation, which comes first, has files
    of all kinds.
    """
    paths = local_paths(f"{glob.escape(str(folder))}/**")  # without hidden files
    found = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    texts, reasons = [], []
    for name in sorted(found, key=hash_of_name):
        try:
            next(iter(read_file(found[name], field)), None)
            texts.append(found[name])
        except (ValueError, OSError) as error:
            reasons.append(str(error))
    if reasons:
        count = f"{len(reasons):,} of {len(found):,} files skipped"
        print(f"--source {folder}: {count}, for example {min(reasons)}")
    if not texts:
        raise ValueError(f"--source {folder} and its subfolders have no text files")
    return texts


def read_file(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a local file."""
    try:
        yield from READERS[file_type(path)](path, field)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: {NOT_UTF8}") from None


def read_parquet(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the texts in a column of a Parquet file."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check_text_field(file.schema_arrow.names, field, str(path))
            tables = file.iter_batches(TABLE_ROWS, columns=[field])
            yield from _column_texts(tables, field, str(path))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from None


def read_jsonl(path: Path, field: str = "text") -> Iterator[str]:
    """Yield a field of each line of a JSON Lines file; blank lines are skipped."""
    import pyarrow

    try:
        decompressed = pyarrow.input_stream(path)  # according to the suffix
        with io.BufferedReader(decompressed, BLOCK_BYTES) as lines:
            if lines.peek(9).lstrip().startswith(b"["):
                raise ValueError(f"{path}: {JSON_ARRAY}")
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse_line(line, field, f"{path}, line {number}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}): check that it is complete") from None


def _parse_line(line: bytes, field: str, where: str) -> str:
    content = line.decode("utf-8-sig")
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from None
    _check_text_field(value if isinstance(value, dict) else (), field, where)
    text = _string(value[field], field, where)
    return text.encode(errors="replace").decode()  # JSON can have half of a surrogate pair


def read_csv(path: Path, field: str = "text") -> Iterator[str]:
    """Yield a column of a table whose first line has the column names.

    The delimiter is the comma, semicolon or tab, whichever the first line has most often.
    """
    csv.field_size_limit(2**31 - 1)  # the default, 131,072 characters, is too small for documents
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            names = next(rows, [])
            _check_text_field(names, field, str(path))
            column = names.index(field)
            for row in rows:
                if len(row) > len(names):
                    raise csv.Error(f"{len(row)} fields, but the table has {len(names)}")
                yield row[column] if column < len(row) else ""
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {rows.line_num}: {error}: put quotes around texts with {delimiter!r}"
            ) from None


def read_plain(path: Path, _: str = "") -> Iterator[str]:
    """Yield a plain text in blocks, whose token ids together are the ids of the full text.

    Each block ends at a match of `tokenizer.CUT`.
    """
    # utf-8-sig removes a byte-order mark. open() would decode only 8 KB at a time.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES):
            text += decoder.decode(data)
            while cut := CUT.search(text, BLOCK_BYTES):
                yield text[: cut.start()]
                text = text[cut.start() :]
    yield text + decoder.decode(b"", final=True)


# Readers of local files by the end of the file's name; "" is for any other name. A reader gets the
# path and the field that holds the text, and yields documents or, as `read_plain`, parts of one.
READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    **dict.fromkeys(JSON_LINES, read_jsonl),
    ".parquet": read_parquet,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".txt": read_plain,
    "": read_plain,
}


def _check_text_field(names: Collection[str], field: str, where: str) -> None:
    if field not in names:
        found = f"{', '.join(names)}: choose one with --text-field" if names else "no fields at all"
        raise ValueError(f"{where}: expected a field `{field}` with the text, found {found}")


def _string(value: object, field: str, where: str) -> str:
    if not isinstance(value, str | None):
        raise ValueError(f"{where}: `{field}` is {type(value).__name__}, not a string")
    return value or ""  # null is an empty document


def _column_texts(tables: Iterable[Any], field: str, origin: str) -> Iterator[str]:
    """Yield the strings in a column of Arrow tables; errors count the rows from 1."""
    row = 0
    for table in tables:
        _check_text_field(table.schema.names, field, origin)
        for value in table.column(field):
            row += 1
            yield _string(value.as_py(), field, f"{origin}, row {row}")


def hub_source(
    dataset: str, name: str | None, revision: str | None, known_revision: str | None, field: str
) -> Source:
    """Return a source that streams a dataset (OWNER/NAME, configuration) from the hub.

    The default `revision` is `known_revision`, the commit that an earlier run read; without one, it
    is the newest commit.
    """
    commit = known_revision
    if known_revision is None or revision not in (None, known_revision):
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
    return Source(identity, open_files)


def read_stream(stream: Any, number: int, field: str, origin: str) -> Iterator[str]:  # noqa: ANN401
    """Yield a column of one file of a streamed `IterableDataset`, called `origin` in errors."""

    def tables() -> Iterator[Any]:
        with explain_hub_errors(f"reading {origin} failed"):
            file = stream.shard(stream.num_shards, number, contiguous=True)
            yield from file.with_format("arrow").iter(batch_size=TABLE_ROWS)

    return _column_texts(tables(), field, origin)


# Sources by their `--source NAME`. To add one, write a generator function that yields the text of
# each document, always the same ones in the same order. Then add a line here: its NAME and
# `lambda: Source({"kind": "NAME"}, lambda: [SourceFile(the_function)])`.
SOURCES: dict[str, Callable[[], Source]] = {
    "stdlib": stdlib_source,
}
