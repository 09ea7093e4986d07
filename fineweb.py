"""Turn text into token shards: FineWeb-Edu from the hub, local files, or Python's own sources.

    python fineweb.py                                # 10B tokens of FineWeb-Edu
    python fineweb.py --source stdlib                # no network: the standard library's sources
    python fineweb.py --source texts/*.jsonl a.txt   # your own .parquet, .jsonl and .txt

The same documents give byte-identical shards, on any machine. A run that was stopped, however
abruptly, goes on after its last finished shard when the same command is given again.
"""

import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import filelock
from tqdm import tqdm

from cli import parse_flags, run_command
from shards import MANIFEST_NAME, Manifest, ShardWriter, verify_shards
from sources import (
    FILE_TYPES,
    FINEWEB,
    Cursor,
    Document,
    FileSource,
    HubSource,
    Source,
    local_files,
    resolve_revision,
    stdlib_source,
)
from tokenizer import VOCAB_SHA256, TokenIds, encode_documents

BATCH_CHARS = 1 << 20  # encoded together; a longer document makes a longer batch


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
    """Threads that share texts of megabytes (processes that encode, where gigatoken is missing)."""
    revision: str | None = None
    """Commit, branch or tag of the hub data set; by default its newest or, in a rerun, the same."""

    def __post_init__(self) -> None:
        for flag, value in (("--shard-size", self.shard_size), ("--workers", self.workers)):
            if value < 1:
                raise ValueError(f"{flag} must be at least 1, not {value}")


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
    had_manifest = (folder / MANIFEST_NAME).exists()
    try:
        with filelock.FileLock(lock, timeout=0):
            try:
                for kind in (".*.npy.*.tmp", f".{MANIFEST_NAME}.*.tmp"):  # of a killed run
                    for leftover in folder.glob(kind):
                        leftover.unlink()
                yield
            finally:
                if not had_manifest and not any(folder.glob("*.npy")):
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


def write_shards(source: Source, manifest: Manifest, folder: Path, workers: int) -> Manifest:
    """Write all shards that `manifest` does not have yet.

    Args:
        source: the documents.
        manifest: of an unfinished data set, or of a new one.
        folder: where the shards and the manifest go.
        workers: as `encode_documents`.

    Returns:
        The manifest of the finished data set.

    Raises:
        OSError: the disk is full; finished shards stay.
        ValueError: a document cannot be read; finished shards stay.
    """
    progress = Progress(**(manifest.progress or {}))
    writer = ShardWriter(folder, manifest.shard_size, manifest.shards)
    written = writer.tokens_written - progress.tokens  # of the first batch, in finished shards
    with _writing_to(folder):
        manifest.save(folder)
    documents = source.documents(progress.cursor)
    with tqdm(unit="tok", unit_scale=True, initial=progress.tokens, total=source.tokens) as bar:
        for batch, tokens in tokenize_documents(documents, workers):
            progress = progress._replace(cursor=batch[0].cursor)
            with _writing_to(folder):
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
    with _writing_to(folder):
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


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Name the folder that cannot be written: the error of a full disk names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{folder} cannot be written ({error.strerror or error}), perhaps for want of room; "
            "what was finished stays: give the same command again to go on"
        ) from None


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


def source_kind(config: FineWebConfig) -> Literal["hub", "stdlib", "files"]:
    """What `--source` means.

    Raises:
        ValueError: it means nothing, or several things.
    """
    if not config.source:
        raise ValueError("--source needs a value, such as fineweb-edu or stdlib")
    first = config.source[0]
    if Path(first).suffix in FILE_TYPES:
        return "files"
    if len(config.source) > 1:
        raise ValueError(f"--source {' '.join(config.source)}: only files may be several")
    if first == "stdlib":
        return "stdlib"
    if first in FINEWEB:
        return "hub"
    if Path(first).is_dir():
        raise ValueError(f"--source {first} is a folder: name its files, as in {first}/*.jsonl")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", first):
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
