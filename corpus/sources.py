"""Where documents come from: local files, a function of `SOURCES`, or a data set of the hub.

Every document has a cursor: JSON from which its source resumes with that document. Several
machines can share a source; each reads a part of it.
"""

import bisect
import glob
import hashlib
import io
import itertools
import json
import os
import platform
import re
import shlex
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from runtime.hub import explain_hub_errors

if TYPE_CHECKING:
    import pyarrow
    from datasets import IterableDataset

FINEWEB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
FILE_TYPES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}  # by suffix: the name that pyarrow has for it
STREAM_REMEDY = (
    "finished shards stay, and the same command resumes; if that fails again, the file is damaged "
    "or gone: choose another --name or --revision, with another --data-dir"
)
STREAM_CURSOR = ("state", "first", "row")  # see `stream_documents`

TABLE_ROWS = 256  # rows that are read together
BLOCK_BYTES = 1 << 20  # of a plain text, read together
# `tokenizer.CUT` for UTF-8 bytes: a space or newline before a byte that begins no whitespace.
BLOCK_END = re.compile(rb"[ \n](?=[!-~\xc3-\xe0\xe4-\xf4])")

# Folders of the standard library that are not its own code, and tests, which are half of its text.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Cursor = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Part `index` of `count`. The parts of a source, concatenated, are the whole source.

    What a part holds depends on the source and `count` alone, so machines need not communicate.
    """

    index: int
    count: int


WHOLE = Part(0, 1)


class Document(NamedTuple):
    """A document, or a block of a plain text that is too long to be read at once."""

    text: str
    cursor: Cursor
    """Where its source resumes with this document."""
    fraction: float | None = None
    """How much of the source precedes it, in [0, 1]; None if unknown."""
    begins: bool = True
    """False for a block that continues the previous one's document."""


class FileSource:
    """Local files, in order.

    Args:
        paths: .parquet, .jsonl, .jsonl.gz and .jsonl.zst files with a `text` in each row; any other
            is one plain text.
        identity: for the manifest; by default the files' names and sizes.
        errors: what to do with invalid UTF-8 in plain texts: `strict` or `replace`.
    """

    tokens = None

    def __init__(
        self, paths: list[Path], identity: dict[str, Any] | None = None, errors: str = "strict"
    ) -> None:
        self.paths = paths
        self.stats = [path.stat() for path in paths]
        self.sizes = [stat.st_size for stat in self.stats]
        self.errors = errors
        files = [
            {"name": path.name, "bytes": size} for path, size in zip(paths, self.sizes, strict=True)
        ]
        self.identity = identity or {"kind": "files", "files": files}

    def documents(self, cursor: Cursor | None, part: Part = WHOLE) -> Iterator[Document]:
        """Read a part from `cursor` (file, row and byte in it), or from its start.

        Raises:
            ValueError: the cursor does not fit these files, there are fewer files than parts, a
                row has no text, or a file changes before it is read to its end.
        """
        files = self.files_of(part)
        if cursor is not None and not self._has(cursor, files):
            raise _wrong_cursor(cursor)
        place = cursor or {"file": files.start, "row": 0, "byte": 0}
        total = max(1, sum(self.sizes[files.start : files.stop]))
        for i in range(place["file"], files.stop):
            row, byte = (place["row"], place["byte"]) if i == place["file"] else (0, 0)
            before = sum(self.sizes[files.start : i])
            with _refusing_changes(self.paths[i], self.stats[i]):
                for document in self._read(self.paths[i], row, byte):
                    fraction = (before + (document.fraction or 0.0) * self.sizes[i]) / total
                    here = {"file": i, **document.cursor}
                    yield document._replace(cursor=here, fraction=fraction)

    def files_of(self, part: Part) -> range:
        """The files of a part: those whose middle byte lies in its share of all bytes.

        Raises:
            ValueError: there are fewer files than parts.
        """
        _check_parts(part, len(self.paths), "files")
        weights = [size + 1 for size in self.sizes]  # + 1: an empty file has a middle, too
        ends = list(itertools.accumulate(weights))
        middles = [end - weight / 2 for end, weight in zip(ends, weights, strict=True)]
        bounds = (ends[-1] * index / part.count for index in (part.index, part.index + 1))
        return range(*(bisect.bisect_left(middles, bound) for bound in bounds))

    def _has(self, place: Cursor, files: range) -> bool:
        return (
            place.keys() == {"file", "row", "byte"}
            and all(type(value) is int and value >= 0 for value in place.values())
            and place["file"] in files
            and (
                place["byte"] <= self.sizes[place["file"]]
                or self.paths[place["file"]].suffix in COMPRESSION
            )
        )

    def _read(self, path: Path, row: int, byte: int) -> Iterator[Document]:
        if path.suffix == ".parquet":
            return read_parquet(path, row)
        if file_type(path).startswith(".jsonl"):
            return read_jsonl(path, row, byte)
        return read_plain(path, row, byte, self.errors)


@contextmanager
def _refusing_changes(path: Path, opened: os.stat_result) -> Iterator[None]:
    """After the body, which reads a file, refuse it if it is no longer as it was when `opened`.

    The file's last document is encoded only after this, so text that is added at the end of a file
    makes no finished shard wrong.
    """
    error = None
    try:
        yield
    except ValueError as caught:  # a line may be half written
        error = caught
    now = path.stat()
    if (now.st_size, now.st_mtime_ns) != (opened.st_size, opened.st_mtime_ns):
        sizes = f"{opened.st_size:,} bytes before, {now.st_size:,} now"
        raise ValueError(
            f"{path} was changed while it was read ({sizes}): wait until it is finished; then, if "
            f"text was only added at its end, the same command resumes, otherwise choose another "
            f"--data-dir, or delete it"
        )
    if error is not None:
        raise error


class TextSource:
    """The texts that a function yields, counted so that any of them can be resumed from.

    Args:
        name: of `--source`, and in the manifest.
        texts: called, it gives the documents' texts, always the same ones in the same order.
    """

    tokens = None

    def __init__(self, name: str, texts: Callable[[], Iterable[str]]) -> None:
        self.name, self.texts = name, texts
        self.identity = {"kind": name}

    def documents(self, cursor: Cursor | None, part: Part = WHOLE) -> Iterator[Document]:
        """Call `texts`; skip to `cursor`, or to the start of the part.

        Raises:
            ValueError: the texts before `cursor` have changed, there are fewer documents than
                parts, or one is no string.
        """
        start, stop = 0, None
        if part != WHOLE:
            total = sum(1 for _ in self.texts())
            _check_parts(part, total, "documents")
            start, stop = (total * index // part.count for index in (part.index, part.index + 1))
        digest = hashlib.sha256()  # of all texts before this one
        for number, text in enumerate(itertools.islice(self.texts(), stop)):
            data = _string(text, f"{self.name}, document {number + 1}").encode("utf-8", "replace")
            place = {"document": number, "sha256": digest.hexdigest()}
            if cursor == place:
                cursor = None  # reached
            if cursor is None and number >= start:
                yield Document(text, place)
            digest.update(data + b"\xff")  # a byte that UTF-8 has not: it separates documents
        if cursor is not None:
            raise _wrong_cursor(cursor)


def stdlib_source() -> FileSource:
    """The built-in corpus: the running Python's standard library, one document per file.

    Files come in the order of a hash of their names, so that validation is a fair sample.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not STDLIB_LEFT_OUT.intersection(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfigdata")  # holds this machine's paths
    ]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0{(root / name).stat().st_size}\0".encode())
    identity = {
        "kind": "stdlib",
        "python": platform.python_version(),
        "modules": len(names),
        "sha256 of names and sizes": digest.hexdigest(),
    }
    return FileSource([root / name for name in names], identity, errors="replace")


def file_type(path: Path | str) -> str:
    """The end of a file's name that says how it is read, one of `FILE_TYPES`; else empty."""
    return next((kind for kind in FILE_TYPES if str(path).endswith(kind)), "")


def local_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files of paths and globs, those of a glob sorted.

    Raises:
        FileNotFoundError: nothing matches.
        ValueError: a file is of no type that can be read.
    """
    paths = []
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, recursive=True))
        if Path(pattern).exists():  # a file name may have brackets
            matches = [pattern]
        if not matches:
            raise FileNotFoundError(f"--source {pattern}: no such file")
        paths += [Path(match) for match in matches]
    for path in paths:
        if not file_type(path) or not path.is_file():
            raise ValueError(f"--source {path} is not a {', '.join(FILE_TYPES)} file")
    return paths


def read_parquet(path: Path, row: int) -> Iterator[Document]:
    """The `text` column of a Parquet file, from a row on.

    Raises:
        ValueError: it cannot be read; the message names file and row (from 1).
    """
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check_text_field(file.schema_arrow.names, f"{path}, row 1")
            current = 0
            for group in range(file.num_row_groups):
                group_rows = file.metadata.row_group(group).num_rows
                if current + group_rows <= row:
                    current += group_rows
                    continue
                for table in file.iter_batches(TABLE_ROWS, [group], columns=["text"]):
                    for text in _strings(table.column("text"), str(path), current):
                        if current >= row:
                            fraction = current / file.metadata.num_rows
                            yield Document(text, {"row": current, "byte": 0}, fraction)
                        current += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from None


def read_jsonl(path: Path, row: int, byte: int) -> Iterator[Document]:
    """The `text` of every line of a JSON Lines file, from a place on; blank lines are skipped.

    Args:
        path: the file, which may be compressed by gzip or zstd.
        row: lines before the place.
        byte: bytes before the place; of a compressed file, those that it decompresses to.

    Raises:
        ValueError: a line is no JSON object with a `text`, or the file cannot be decompressed; the
            message names file and line.
    """
    size = path.stat().st_size
    with _open_lines(path, byte) as (lines, bytes_read):
        for number, line in enumerate(lines, row + 1):
            where = f"{path}, line {number}"
            if line.strip():
                text = _decode(line, path, number - 1, byte)
                try:
                    value = json.loads(text)
                except json.JSONDecodeError as error:
                    reason = f"{error.msg} at character {error.pos + 1}"
                    raise ValueError(f"{where}: not JSON ({reason})") from None
                except RecursionError:
                    raise ValueError(f"{where}: JSON nested too deeply") from None
                except ValueError:
                    raise ValueError(f"{where}: a number has too many digits") from None
                _check_text_field(value if isinstance(value, dict) else (), where)
                cursor = {"row": number - 1, "byte": byte}
                yield Document(_string(value["text"], where), cursor, bytes_read(byte) / size)
            byte += len(line)


@contextmanager
def _open_lines(path: Path, byte: int) -> Iterator[tuple[Iterator[bytes], Callable[[int], int]]]:
    """A file's lines from a place on, and how much of the file itself precedes a place."""
    with path.open("rb") as file:
        if path.suffix not in COMPRESSION:
            file.seek(byte)
            yield file, lambda place: place
            return
        import pyarrow

        with io.BufferedReader(
            pyarrow.CompressedInputStream(file, COMPRESSION[path.suffix]), BLOCK_BYTES
        ) as text:
            yield _decompressed_lines(path, text, byte), lambda _: file.tell()


def _decompressed_lines(path: Path, text: IO[bytes], byte: int) -> Iterator[bytes]:
    """The lines of a decompressed text after its first `byte` bytes, which are read, too.

    Raises:
        ValueError: the file is damaged or cut off, or has fewer bytes.
    """
    left = byte
    try:
        while left:
            block = text.read(min(left, BLOCK_BYTES))
            if not block:
                raise _wrong_cursor({"byte": byte})
            left -= len(block)
        yield from text
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be decompressed ({error}): is it complete?") from None


def read_plain(path: Path, row: int, byte: int, errors: str) -> Iterator[Document]:
    """A plain text as one document, from a place on, in blocks that are tokenised one by one.

    Raises:
        ValueError: it is not UTF-8 and `errors` is `strict`; the message names file and line.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(byte)
        block = b""
        while True:
            more = file.read(BLOCK_BYTES)
            block += more
            # One byte back: a space at the end was not known to be the last of its run.
            found = BLOCK_END.search(block, max(BLOCK_BYTES, len(block) - len(more) - 1))
            if more and not found:
                continue
            end = found.start() if found else len(block)
            text = _decode(block[:end], path, row, byte, errors)
            yield Document(text, {"row": row, "byte": byte}, byte / max(size, 1), begins=byte == 0)
            if not more:
                return
            row += block.count(b"\n", 0, end)
            byte += end
            block = block[end:]


def _wrong_cursor(cursor: Cursor) -> ValueError:
    return ValueError(
        f"the manifest resumes at {cursor}, which is no place in this source: "
        f"choose another --data-dir, or delete it"
    )


def _check_parts(part: Part, count: int, unit: str) -> None:
    if part.count > count:
        raise ValueError(
            f"{part.count} parts of {count} {unit}: a part takes whole {unit}, "
            f"so {count} parts are the most that work"
        )


def _check_text_field(names: Iterable[str], where: str) -> None:
    found = list(names)
    if "text" not in found:
        has = f"it has {', '.join(found)}" if found else "it has no fields"
        raise ValueError(f"{where}: no `text`, the field that documents are read from; {has}")


def _decode(data: bytes, path: Path, row: int, byte: int, errors: str = "strict") -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        line = row + data.count(b"\n", 0, error.start) + 1
        first = "decompress it, and " if path.suffix in COMPRESSION else ""
        plain = path.with_suffix("") if first else path
        source, target = shlex.quote(str(plain)), plain.with_suffix(".utf8" + plain.suffix)
        raise ValueError(
            f"{path}, line {line}: invalid UTF-8 ({error.reason}) at byte {byte + error.start}; "
            f"if it is Latin-1, {first}convert it: "
            f"iconv -f latin1 -t utf-8 {source} > {shlex.quote(str(target))}"
        ) from None


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: `text` is {type(value).__name__}, not a string")
    return value


def _strings(column: Iterable[Any], origin: str, row: int) -> Iterator[str]:
    """The strings of an Arrow column whose first value is row `row` (from 0) of `origin`."""
    for number, value in enumerate(column, row + 1):
        where = f"{origin}, row {number}"
        try:
            yield _string(value.as_py(), where)
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: invalid UTF-8 ({error.reason})") from None


class HubSource:
    """A data set of the Hugging Face hub at one commit, streamed.

    Args:
        dataset: OWNER/NAME.
        name: its configuration.
        revision: a commit.
    """

    def __init__(self, dataset: str, name: str | None, revision: str) -> None:
        self.dataset = dataset
        self.identity = {"kind": "hub", "dataset": dataset, "name": name, "revision": revision}
        billions = re.fullmatch(r"sample-(\d+)BT", name or "")
        self.tokens = int(billions[1]) * 10**9 if billions and dataset in FINEWEB.values() else None

    def documents(self, cursor: Cursor | None, part: Part = WHOLE) -> Iterator[Document]:
        """Read a part from `cursor`, or from its start.

        Raises:
            OSError: the hub, the network or a file there fails.
            ValueError: there are fewer files than parts, or a row has no text.
        """
        import datasets

        with explain_hub_errors(f"reading {self.dataset} failed", STREAM_REMEDY):
            stream = datasets.load_dataset(
                self.dataset,
                self.identity["name"],
                split="train",
                streaming=True,
                revision=self.identity["revision"],
            )
        origin = self.dataset
        if part != WHOLE:
            _check_parts(part, stream.num_shards, "files")
            stream = stream.shard(part.count, part.index, contiguous=True)
            origin += f" (part {part.index} of {part.count})"
        yield from stream_documents(stream, cursor, origin)


def stream_documents(
    dataset: "IterableDataset", cursor: Cursor | None, origin: str
) -> Iterator[Document]:
    """The `text` column of a streamed data set, from `cursor` or from the start.

    Args:
        dataset: of the `datasets` library.
        cursor: the data set's state before a table of rows, the number of that table's first row,
            and the row in the table to begin with.
        origin: the data set's name in messages.

    Raises:
        OSError: the data set cannot be read.
        ValueError: a row has no text, or the cursor is of another source.
    """
    if cursor is not None and [type(cursor.get(key)) for key in STREAM_CURSOR] != [dict, int, int]:
        raise _wrong_cursor(cursor)
    begin_state, first, begin = (cursor[key] for key in STREAM_CURSOR) if cursor else (None, 0, 0)
    for state, table in _tables(dataset, begin_state, origin):
        _check_text_field(table.column_names, f"{origin}, row {first + 1}")
        for row, text in enumerate(_strings(table["text"], origin, first)):
            if row >= begin:
                yield Document(text, {"state": state, "first": first, "row": row})
        first, begin = first + len(table), 0


def _tables(
    dataset: "IterableDataset", state: Cursor | None, origin: str
) -> Iterator[tuple[Cursor, "pyarrow.Table"]]:
    """A stream's tables of `TABLE_ROWS` rows, from a state on; each with the state before it."""
    with explain_hub_errors(f"reading {origin} failed", STREAM_REMEDY):
        dataset = dataset.with_format("arrow")
        if state is not None:
            dataset.load_state_dict(state)
        state = dataset.state_dict()
        for table in dataset.iter(batch_size=TABLE_ROWS):
            yield state, table
            state = dataset.state_dict()


Source = FileSource | TextSource | HubSource

# What `--source NAME` opens. To add a source, write a generator function that yields the texts of
# its documents, always the same ones in the same order, and add a line here: its NAME and
# `lambda: TextSource("NAME", the_function)`.
SOURCES: dict[str, Callable[[], Source]] = {
    "stdlib": stdlib_source,
}
