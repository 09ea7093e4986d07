"""Where documents come from: local files, Python's own library, or a data set of the hub.

Every document carries a cursor: the place, as JSON, from which its source goes on reading to give
it again. Several machines may share a source, each with a part: contiguous whole files.
"""

import bisect
import glob
import hashlib
import itertools
import json
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.files import redact_secrets

if TYPE_CHECKING:
    from datasets import IterableDataset

FINEWEB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
FILE_TYPES = (".parquet", ".jsonl", ".txt")
NO_NETWORK = (
    "without network, use --source stdlib (Python's own sources) "
    "or --source FILES (.parquet, .jsonl, .txt)"
)
HUB_TIMEOUT_S = 10.0

TABLE_ROWS = 256  # read together
BLOCK_BYTES = 1 << 20  # of a plain text, read together
# `tokenizer.CUT` for UTF-8 bytes: a space or newline before a byte that begins no whitespace.
BLOCK_END = re.compile(rb"[ \n](?=[!-~\xc3-\xe0\xe4-\xf4])")

# Left out of the stdlib corpus: what is not the library, and tests, which are half of its text.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Cursor = dict[str, Any]  # a place in a source, as JSON


@dataclass(frozen=True)
class Part:
    """One of `count` runs of whole files that, one after another, are all files of a source.

    It depends on the files and `count` alone, so that machines need not talk to each other.
    """

    index: int
    count: int


WHOLE = Part(0, 1)


class Document(NamedTuple):
    """A document, or a block of one that is too long to be read whole."""

    text: str
    cursor: Cursor
    """Where its source goes on reading to give it again."""
    fraction: float | None = None
    """How much of the source comes before it, in [0, 1]; None if unknown."""
    begins: bool = True
    """False if it goes on with the document before it."""


# Sources: the standard library and local files


class FileSource:
    """Local files, in order.

    Args:
        paths: .parquet and .jsonl files with a `text` in each row; any other is one plain text.
        identity: for the manifest; by default the files' names and sizes.
        errors: what to do with invalid UTF-8 in plain texts: `strict` or `replace`.
    """

    tokens = None

    def __init__(
        self, paths: list[Path], identity: dict[str, Any] | None = None, errors: str = "strict"
    ) -> None:
        self.paths = paths
        self.sizes = [path.stat().st_size for path in paths]
        self.errors = errors
        self.identity = identity or {
            "kind": "files",
            "files": [
                {"name": path.name, "bytes": size}
                for path, size in zip(paths, self.sizes, strict=True)
            ],
        }

    def documents(self, cursor: Cursor | None, part: Part = WHOLE) -> Iterator[Document]:
        """Read a part from `cursor` (file, row and byte in it), or from its start.

        Raises:
            ValueError: the cursor is not a place in these files, there are fewer files than parts,
                or a row has no text; the message names file and row.
        """
        files = self.files_of(part)
        place = {"file": files.start, "row": 0, "byte": 0} if cursor is None else cursor
        if cursor is not None and not self._has(place, files):
            raise ValueError(
                f"the manifest goes on from {place}, which is no place in these files: "
                f"choose another --data-dir, or delete it"
            )
        first = place["file"]
        total = max(1, sum(self.sizes[files.start : files.stop]))
        for i in range(first, files.stop):
            row, byte = (place["row"], place["byte"]) if i == first else (0, 0)
            before = sum(self.sizes[files.start : i])
            for document in self._read(self.paths[i], row, byte):
                read = before + (document.fraction or 0.0) * self.sizes[i]
                yield document._replace(
                    cursor={"file": i, **document.cursor}, fraction=read / total
                )

    def files_of(self, part: Part) -> range:
        """The files of a part: those whose middle byte lies in its share of all bytes.

        Raises:
            ValueError: there are fewer files than parts.
        """
        _require_files(len(self.paths), part)
        weights = [size + 1 for size in self.sizes]  # an empty file is somewhere, too
        ends = list(itertools.accumulate(weights))
        middles = [end - weight / 2 for end, weight in zip(ends, weights, strict=True)]
        bounds = (ends[-1] * index / part.count for index in (part.index, part.index + 1))
        return range(*(bisect.bisect_left(middles, bound) for bound in bounds))

    def _has(self, place: Cursor, files: range) -> bool:
        return (
            place.keys() == {"file", "row", "byte"}
            and all(type(value) is int and value >= 0 for value in place.values())
            and place["file"] in files
            and place["byte"] <= self.sizes[place["file"]]
        )

    def _read(self, path: Path, row: int, byte: int) -> Iterator[Document]:
        if path.suffix == ".parquet":
            return read_parquet(path, row)
        if path.suffix == ".jsonl":
            return read_jsonl(path, row, byte)
        return read_plain(path, row, byte, self.errors)


def local_files(patterns: tuple[str, ...]) -> list[Path]:
    """The files of paths and globs, those of a glob sorted.

    Raises:
        FileNotFoundError: nothing matches.
        ValueError: a file is of no type that can be read.
    """
    paths = []
    for pattern in patterns:
        matches = (
            [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        )
        if not matches:
            raise FileNotFoundError(f"--source {pattern}: no such file")
        paths += [Path(match) for match in matches]
    for path in paths:
        if path.suffix not in FILE_TYPES or not path.is_file():
            raise ValueError(f"--source {path} is not a {', '.join(FILE_TYPES)} file")
    return paths


def stdlib_source() -> FileSource:
    """The built-in corpus: the running Python's standard library, one document a file.

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


def read_parquet(path: Path, row: int) -> Iterator[Document]:
    """The `text` column of a Parquet file, from a row on.

    Raises:
        ValueError: it cannot be read; the message names file and row (from 1).
    """
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _require_text(file.schema_arrow.names, f"{path}, row 1")
            here = 0
            for group in range(file.num_row_groups):
                if here + file.metadata.row_group(group).num_rows <= row:
                    here += file.metadata.row_group(group).num_rows
                    continue
                for table in file.iter_batches(TABLE_ROWS, [group], columns=["text"]):
                    for text in _strings(table.column("text"), str(path), here):
                        if here >= row:
                            fraction = here / file.metadata.num_rows
                            yield Document(text, {"row": here, "byte": 0}, fraction)
                        here += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from None


def read_jsonl(path: Path, row: int, byte: int) -> Iterator[Document]:
    """The `text` of every line of a JSON Lines file, from a place on; blank lines do not count.

    Raises:
        ValueError: a line is not as it should be; the message names file and line (from 1).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(byte)
        for number, line in enumerate(file, row + 1):
            where = f"{path}, line {number}"
            if line.strip():
                value = _parse_json(line, path, number)
                _require_text(value if isinstance(value, dict) else (), where)
                cursor = {"row": number - 1, "byte": byte}
                yield Document(_string(value["text"], where), cursor, byte / size)
            byte += len(line)


def read_plain(path: Path, row: int, byte: int, errors: str) -> Iterator[Document]:
    """A plain text as one document, in blocks whose tokens join up; from a place on.

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
            found = BLOCK_END.search(block, max(BLOCK_BYTES, len(block) - len(more)))
            if more and not found:
                continue
            end = found.start() if found else len(block)
            text = _decode(block[:end], path, row, errors)
            yield Document(text, {"row": row, "byte": byte}, byte / max(size, 1), begins=byte == 0)
            if not more:
                return
            row += block.count(b"\n", 0, end)
            byte += end
            block = block[end:]


def _require_files(files: int, part: Part) -> None:
    if part.count > files:
        raise ValueError(
            f"{part.count} parts of {files} files: a part takes whole files, "
            f"so {files} parts are the most that work"
        )


def _require_text(names: Iterable[str], where: str) -> None:
    found = list(names)
    if "text" not in found:
        has = f"it has {', '.join(found)}" if found else "it has no fields"
        raise ValueError(f"{where}: no `text`, the field that documents are read from; {has}")


def _parse_json(line: bytes, path: Path, number: int) -> Any:  # noqa: ANN401 - any JSON value
    where = f"{path}, line {number}"
    try:
        return json.loads(_decode(line, path, number - 1))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError(f"{where}: JSON nested too deeply") from None


def _decode(data: bytes, path: Path, row: int, errors: str = "strict") -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        line = row + data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: invalid UTF-8 ({error.reason})") from None


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


# Sources: the Hugging Face hub


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
            ConnectionError: the network is gone.
            ValueError: there are fewer files than parts, or a row has no text; the message names
                its number.
        """
        import datasets

        try:
            stream = datasets.load_dataset(
                self.dataset,
                self.identity["name"],
                split="train",
                streaming=True,
                revision=self.identity["revision"],
            )
            origin = self.dataset
            if part != WHOLE:
                _require_files(stream.num_shards, part)
                stream = stream.shard(part.count, part.index, contiguous=True)
                origin += f" (part {part.index} of {part.count})"
            yield from stream_documents(stream, cursor, origin)
        except (ValueError, OSError):
            raise
        except Exception as error:  # of whichever HTTP library the hub's client uses
            raise ConnectionError(
                f"reading {self.dataset} failed ({type(error).__name__}: "
                f"{redact_secrets(str(error))}): give the same command again to go on"
            ) from None


def stream_documents(
    dataset: "IterableDataset", cursor: Cursor | None, origin: str
) -> Iterator[Document]:
    """The `text` column of a streamed data set, from `cursor` on or from the start.

    Args:
        dataset: of the `datasets` library.
        cursor: the state of the data set before a table of rows, that table's first row and the
            row in it to begin with.
        origin: what to call the data set in messages.

    Raises:
        ValueError: a row has no text.
    """
    dataset = dataset.with_format("arrow")
    if cursor is not None:
        dataset.load_state_dict(cursor["state"])
    state = dataset.state_dict()
    first, begin = (cursor["first"], cursor["row"]) if cursor else (0, 0)
    for table in dataset.iter(batch_size=TABLE_ROWS):
        _require_text(table.column_names, f"{origin}, row {first + 1}")
        for row, text in enumerate(_strings(table["text"], origin, first)):
            if row >= begin:
                yield Document(text, {"state": state, "first": first, "row": row})
        first, begin = first + len(table), 0
        state = dataset.state_dict()


def resolve_revision(dataset: str, revision: str | None) -> str:
    """The commit that a branch or tag of a hub data set stands at; by default the main branch's.

    Raises:
        ConnectionError: the hub cannot be reached.
        ValueError: there is no such data set or revision.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return str(HfApi().dataset_info(dataset, revision=revision, timeout=HUB_TIMEOUT_S).sha)
    except RepositoryNotFoundError:
        raise ValueError(f"--source {dataset}: the hub has no such data set") from None
    except RevisionNotFoundError:
        raise ValueError(f"--revision {revision}: {dataset} has no such revision") from None
    except HFValidationError as error:
        raise ValueError(f"--source {dataset}: {error}") from None
    except Exception as error:  # of whichever HTTP library the hub's client uses
        raise ConnectionError(
            f"the Hugging Face hub cannot be reached ({type(error).__name__}); {NO_NETWORK}"
        ) from None


Source = FileSource | HubSource
