"""Turn text into token shards: FineWeb-Edu from the hub, local files, or Python's own sources.

    python fineweb.py                                # 10B tokens of FineWeb-Edu
    python fineweb.py --source stdlib                # no network: the standard library's sources
    python fineweb.py --source texts/*.jsonl a.txt   # your own .parquet, .jsonl and .txt

The same documents give byte-identical shards, on any machine. A run that was stopped, however
abruptly, goes on after its last finished shard when the same command is given again.
"""

import glob
import hashlib
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import filelock
from tqdm import tqdm

from cli import parse_flags, run_command
from shards import MANIFEST_NAME, Manifest, ShardWriter, verify_shards
from tokenizer import VOCAB_SHA256, TokenIds, encode_documents

if TYPE_CHECKING:
    from datasets import IterableDataset

FINEWEB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
FILE_TYPES = (".parquet", ".jsonl", ".txt")
NO_NETWORK = (
    "without network, use --source stdlib (Python's own sources) "
    "or --source FILES (.parquet, .jsonl, .txt)"
)
HUB_TIMEOUT_S = 10.0

BATCH_CHARS = 1 << 20  # encoded together; a longer document makes a longer batch
TABLE_ROWS = 256  # read together
BLOCK_BYTES = 1 << 20  # of a plain text, read together
# `tokenizer.CUT` for UTF-8 bytes: a space or newline before a byte that begins no whitespace.
BLOCK_END = re.compile(rb"[ \n](?=[!-~\xc3-\xe0\xe4-\xf4])")

# Left out of the stdlib corpus: what is not the library, and tests, which are half of its text.
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Cursor = dict[str, Any]  # a place in a source, as JSON


def _cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@dataclass(frozen=True)
class FineWebConfig:
    """Turn text into shards of GPT-2 tokens, the first of them for validation.

    Raises:
        ValueError: a number is not positive.
    """

    source: tuple[str, ...] = ("fineweb-edu",)
    """`fineweb-edu`, `fineweb` or another hub data set (OWNER/NAME); `stdlib`, the running
    Python's standard library, which needs no network; or .parquet, .jsonl and .txt files, or
    globs of them. A .txt file is one document, the others have one in each row's `text`."""
    name: str | None = None
    """Configuration of the hub data set; `sample-10BT` of fineweb and fineweb-edu."""
    data_dir: Path | None = None
    """Where the shards go; by default a folder in data/ named after the source."""
    shard_size: int = 100_000_000
    """Tokens in a full shard."""
    workers: int = field(default_factory=_cpu_count)
    """Threads that encode (processes, where gigatoken is missing)."""
    revision: str | None = None
    """Commit, branch or tag of the hub data set; by default its newest or, in a rerun, the same."""

    def __post_init__(self) -> None:
        for flag, value in (("--shard-size", self.shard_size), ("--workers", self.workers)):
            if value < 1:
                raise ValueError(f"{flag} must be at least 1, not {value}")


class Document(NamedTuple):
    """A document, or a block of one that is too long to be read whole."""

    text: str
    cursor: Cursor
    """Where its source goes on reading to give it again."""
    fraction: float | None = None
    """How much of the source comes before it, in [0, 1]; None if unknown."""
    begins: bool = True
    """False if it goes on with the document before it."""


class Progress(NamedTuple):
    """A place in the stream of tokens: the beginning of a batch."""

    cursor: Cursor | None = None
    tokens: int = 0
    documents: int = 0
    skipped: int = 0

    def after(self, batch: list[Document], tokens: TokenIds) -> "Progress":
        """The place after a batch, but for its cursor, which only the next batch knows."""
        return Progress(
            None,
            self.tokens + len(tokens),
            self.documents + sum(bool(document.text) for document in batch if document.begins),
            self.skipped + sum(not document.text for document in batch),
        )


def main() -> None:
    """Make a data set, or go on with it, or check that it is as it was made."""
    config = parse_flags(FineWebConfig)
    folder = config.data_dir or default_folder(config)
    start = time.perf_counter()
    with only_writer(folder):
        earlier = find_earlier(folder)
        source = open_source(config, earlier)
        manifest = Manifest(source.identity, VOCAB_SHA256, config.shard_size)
        if earlier is not None:
            refuse_other_data(folder, earlier, manifest)
            verify_shards(folder)
            manifest = replace(earlier, source=source.identity)
        if not manifest.complete:
            manifest = write_shards(source, manifest, folder, config.workers)
    print(summary(folder, manifest, earlier, time.perf_counter() - start))


def default_folder(config: FineWebConfig) -> Path:
    """`data/fineweb-edu-10BT`, `data/stdlib`, `data/<file stem>`: named after the source."""
    kind = source_kind(config)
    if kind == "stdlib":
        return Path("data") / kind
    if kind == "hub":
        dataset, name = hub_name(config)
        parts = [dataset.split("/")[-1], *([name.removeprefix("sample-")] if name else [])]
        return Path("data") / "-".join(parts)
    paths = local_files(config.source)
    return Path("data") / (paths[0].stem if len(paths) == 1 else paths[0].resolve().parent.name)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; leave nothing behind if not even one shard was finished.

    Raises:
        ValueError: another process holds it.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".fineweb.lock"
    try:
        with filelock.FileLock(lock, timeout=0):
            try:
                for leftover in folder.glob(".*.tmp"):  # of a killed run; see files.atomic_write
                    leftover.unlink()
                yield
            finally:
                if not any(folder.glob("*.npy")):
                    (folder / MANIFEST_NAME).unlink(missing_ok=True)
                if os.name == "posix":  # elsewhere an open file cannot be removed
                    lock.unlink()
    except filelock.Timeout:
        raise ValueError(f"another fineweb.py is writing to {folder}: wait for it") from None
    finally:
        for path in made:
            with suppress(OSError):  # it is not empty
                path.rmdir()


def find_earlier(folder: Path) -> Manifest | None:
    """The manifest of an earlier run that finished at least one shard.

    Raises:
        ValueError: the folder holds shards that are not this script's.
    """
    manifest = Manifest.load(folder)
    if manifest is None and any(folder.glob("*.npy")):
        raise ValueError(
            f"{folder} holds .npy files that fineweb.py did not make: choose another --data-dir"
        )
    return manifest if manifest is not None and manifest.shards else None


def refuse_other_data(folder: Path, earlier: Manifest, asked: Manifest) -> None:
    """Refuse to mix two data sets in one folder.

    Raises:
        ValueError: naming the first difference.
    """
    read = None if earlier.progress is None else earlier.progress["cursor"].get("file")
    there, wanted = _traits(earlier, read), _traits(asked, read)
    for trait in there | wanted:
        if there.get(trait) != wanted.get(trait):
            raise ValueError(
                f"{folder} holds other data, {trait} {there.get(trait)} instead of "
                f"{wanted.get(trait)}: choose another --data-dir, or delete it"
            )


def _traits(manifest: Manifest, read: int | None) -> dict[str, Any]:
    """What must not change between runs.

    Args:
        manifest: of one of the runs.
        read: files that an unfinished run has read to their end. Those after may change in size,
            since mending a bad row is a reason for a rerun.
    """
    traits = {key: value for key, value in manifest.source.items() if key != "files"}
    for i, file in enumerate(manifest.source.get("files", [])):
        size = "" if read is not None and i >= read else f" of {file['bytes']} bytes"
        traits[f"file {i + 1}"] = file["name"] + size
    return traits | {
        "shard size": manifest.shard_size,
        "tokenizer": manifest.tokenizer_sha256,
    }


def write_shards(source: "Source", manifest: Manifest, folder: Path, workers: int) -> Manifest:
    """Write all shards that `manifest` does not have yet.

    Args:
        source: the documents.
        manifest: of an unfinished data set, or of a new one.
        folder: where the shards and the manifest go.
        workers: as `encode_documents`.

    Returns:
        The manifest of the finished data set.

    Raises:
        ValueError: a document cannot be read; finished shards stay.
    """
    progress = Progress(**(manifest.progress or {}))
    writer = ShardWriter(folder, manifest.shard_size, manifest.shards)
    written = writer.tokens_written - progress.tokens  # of the first batch, in finished shards
    manifest.save(folder)
    documents = source.documents(progress.cursor)
    with tqdm(unit="tok", unit_scale=True, initial=progress.tokens, total=source.tokens) as bar:
        for batch, tokens in tokenize_documents(documents, workers):
            progress = progress._replace(cursor=batch[0].cursor)
            writer.add(tokens[written:])
            written = max(0, written - len(tokens))
            if len(writer.shards) > len(manifest.shards):
                manifest = replace(
                    manifest,
                    shards=tuple(writer.shards),
                    documents=progress.documents,
                    skipped=progress.skipped,
                    progress=progress._asdict(),
                )
                manifest.save(folder)
            if batch[0].fraction:
                bar.total = round(progress.tokens / batch[0].fraction)
            bar.update(len(tokens))
            progress = progress.after(batch, tokens)
        bar.total = progress.tokens
    writer.close()
    manifest = replace(
        manifest,
        shards=tuple(writer.shards),
        documents=progress.documents,
        skipped=progress.skipped,
        complete=True,
        progress=None,
    )
    manifest.save(folder)
    return manifest


def tokenize_documents(
    documents: Iterable[Document], workers: int
) -> Iterator[tuple[list[Document], TokenIds]]:
    """Encode documents in batches, `END_OF_TEXT` first in each; empty ones have no tokens.

    Args:
        documents: read only as far ahead as encoding needs.
        workers: as `encode_documents`.

    Yields:
        Each batch of documents with its (tokens,) uint16.
    """
    batches, ahead = itertools.tee(_batches(documents))
    texts = ([document.text for document in batch if document.text] for batch in ahead)
    for tokens, batch in zip(encode_documents(texts, workers), batches, strict=True):
        yield batch, tokens if batch[0].begins else tokens[1:]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents; one that goes on with the last is the first of its batch."""
    batch: list[Document] = []
    chars = 0
    for document in documents:
        if batch and (chars >= BATCH_CHARS or not document.begins):
            yield batch
            batch, chars = [], 0
        batch.append(document)
        chars += len(document.text) + 1
    if batch:
        yield batch


def summary(folder: Path, manifest: Manifest, earlier: Manifest | None, seconds: float) -> str:
    """The last line: what the folder holds, and what this run did."""
    tokens = sum(shard.tokens for shard in manifest.shards)
    before = sum(shard.tokens for shard in earlier.shards) if earlier else 0
    speed = f"{(tokens - before) / seconds:,.0f} tokens/s"
    if earlier is not None and earlier.complete:
        speed = "finished earlier, and unchanged"
    empty = f" ({manifest.skipped:,} empty ones left out)" if manifest.skipped else ""
    return (
        f"{folder}: {manifest.documents:,} documents{empty}, {tokens:,} tokens, "
        f"{len(manifest.shards)} shards; {seconds:.1f} s, {speed}"
    )


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

    def documents(self, cursor: Cursor | None) -> Iterator[Document]:
        """Read from `cursor` (file, row and byte in it), or from the start.

        Raises:
            ValueError: a row has no text; the message names file and row.
        """
        place = cursor or {"file": 0, "row": 0, "byte": 0}
        first = place["file"]
        for i in range(first, len(self.paths)):
            row, byte = (place["row"], place["byte"]) if i == first else (0, 0)
            for document in self._read(self.paths[i], row, byte):
                read = sum(self.sizes[:i]) + (document.fraction or 0.0) * self.sizes[i]
                yield document._replace(
                    cursor={"file": i, **document.cursor}, fraction=read / sum(self.sizes)
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

    def documents(self, cursor: Cursor | None) -> Iterator[Document]:
        """Read from `cursor`, or from the start.

        Raises:
            ConnectionError: the network is gone.
            ValueError: a row has no text; the message names its number.
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
            yield from stream_documents(stream, cursor, self.dataset)
        except (ValueError, OSError):
            raise
        except Exception as error:  # of whichever HTTP library the hub's client uses
            raise ConnectionError(
                f"reading {self.dataset} failed ({type(error).__name__}: {error}): "
                "give the same command again to go on"
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


def source_kind(config: FineWebConfig) -> Literal["hub", "stdlib", "files"]:
    """What `--source` means.

    Raises:
        ValueError: it means nothing, or several things.
    """
    first = config.source[0]
    if Path(first).suffix in FILE_TYPES:
        return "files"
    if len(config.source) > 1:
        raise ValueError(f"--source {' '.join(config.source)}: only files may be several")
    if first == "stdlib":
        return "stdlib"
    if first in FINEWEB or re.fullmatch(r"[\w.-]+/[\w.-]+", first):
        return "hub"
    raise ValueError(
        f"--source {first} is not fineweb-edu, fineweb, stdlib, a hub data set (OWNER/NAME), "
        f"or files that end in {', '.join(FILE_TYPES)}"
    )


def hub_name(config: FineWebConfig) -> tuple[str, str | None]:
    """The hub's names of a data set and of its configuration."""
    source = config.source[0]
    default_name = "sample-10BT" if source in FINEWEB else None
    return FINEWEB.get(source, source), config.name or default_name


def open_source(config: FineWebConfig, earlier: Manifest | None) -> Source:
    """The source that the flags name, a hub data set at the revision of the earlier run.

    Raises:
        ConnectionError: the hub cannot be reached.
        FileNotFoundError: a file is missing.
        ValueError: there is no such source.
    """
    kind = source_kind(config)
    if kind == "stdlib":
        return stdlib_source()
    if kind == "files":
        return FileSource(local_files(config.source))
    dataset, name = hub_name(config)
    known = earlier.source.get("revision") if earlier else None
    revision = config.revision or known
    if earlier is None or not earlier.complete or revision != known:
        revision = resolve_revision(dataset, revision)
    return HubSource(dataset, name, str(revision))


if __name__ == "__main__":
    run_command(main)
