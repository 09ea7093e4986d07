"""Turn text into token shards: FineWeb-Edu from the hub, local files, or the standard library.

    python fineweb.py                                # 10B tokens of FineWeb-Edu
    python fineweb.py --max-tokens 500M              # the first 500M; raise the number to add more
    python fineweb.py --source stdlib                # source code of the standard library, offline
    python fineweb.py --source texts/ a.py b.jsonl   # your own folders, text files and tables
    torchrun --nproc_per_node=4 fineweb.py           # split the source's files over 4 processes
    python fineweb.py --part 0 --parts 2             # the first half of the files, on one machine

The same documents, split into the same number of parts, always make byte-identical shards. To
resume after a stop or a kill, rerun the same command: it continues after the last finished shard.
To add a source, see `SOURCES` in `corpus/sources.py`.
"""

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from runtime.threads import usable_cores

import filelock
import numpy as np
from tqdm import tqdm

from corpus import shards, sources
from corpus.encoding import TokenIds, encode_documents
from corpus.shards import FULL_DATASET, Manifest, Part, ShardWriter
from corpus.sources import Cursor, Document, Source
from corpus.unigram import unigram_baseline
from formats.hub import REPO_NAME
from runtime.cli import bad_numbers, format_count, parse_flags, run_command
from runtime.files import lock_folder
from tokenizer import END_OF_TEXT, VOCAB_SHA256

BATCH_CHARS = 1 << 20  # encoded together; a batch ends with the document that reaches this
OpenSource = Callable[[str | None], Source]  # the argument is the commit that an earlier run read


@dataclass(frozen=True)
class FineWebConfig:
    """Turn text into shards of GPT-2 tokens; the first shard is for validation."""

    OTHER_NAMES: ClassVar = {"FILE": "--source"}

    source: tuple[str, ...] = ("fineweb-edu",)
    """Source of the text: `fineweb-edu`, `fineweb` or another hub dataset (OWNER/NAME); `stdlib`,
    the running Python's standard library, offline; or files, folders and globs. Each row of a
    .parquet, .csv, .tsv, .jsonl or .json file (JSON also as .gz or .zst) is a document. Any other
    UTF-8 file is one document."""
    text_field: str = "text"
    """Column of tables, or field of JSON lines, that holds the text."""
    name: str | None = None
    """Configuration of the hub dataset; default: `sample-10BT` for fineweb and fineweb-edu."""
    data_dir: Path | None = None
    """Folder to write the shards to; default: a folder in data/ named after the source."""
    shard_size: int = 100_000_000
    """Number of tokens in a full shard."""
    max_tokens: int | None = None
    """Keep at most this many tokens, such as 1e9 or 500M; rerun with a larger number to add more.
    Validation tokens count. Documents are kept whole, except for a first document or a plain text
    over 1 MB. With `--parts`, each part gets an equal share."""
    workers: int = field(default_factory=usable_cores)
    """Number of threads that tokenize."""
    revision: str | None = None
    """Commit, branch or tag of the hub dataset; default: the newest commit or, in a rerun, the
    commit of the first run."""
    part: int | None = None
    """Tokenize only this part of `--parts`; the first part is 0."""
    parts: int | None = None
    """Split the source's files into this many parts, one `--part` per process; the process that
    finishes last writes the manifest."""

    def __post_init__(self) -> None:
        problems = bad_numbers(self, ("shard_size", "max_tokens", "workers", "parts"))
        if not (self.source and all(self.source)):  # "" would mean the current folder
            problems.append("--source needs a value, such as fineweb-edu or stdlib")
        if problems:
            raise ValueError("; ".join(problems))
        if (self.part, self.parts) != (None, None) and self.part not in range(self.parts or 0):
            raise ValueError(
                f"--part {self.part} --parts {self.parts}: pass both; --part must be from 0 to "
                f"--parts - 1"
            )


def main() -> None:
    """Make a dataset, resume an unfinished one, or verify a finished one."""
    config = assign_rank(parse_flags(FineWebConfig))
    name, open_source = find_source(config)
    folder = config.data_dir or Path("data") / name
    print(make_shards(config, open_source, folder))
    if manifest := Manifest.load(folder):  # it exists once all parts are finished
        from training.propose import propose_training  # imports torch, which takes seconds

        print(f"{describe_baseline(folder)}\n{propose_training(folder, manifest)}")


def assign_rank(config: FineWebConfig) -> FineWebConfig:
    """Under `torchrun`, use each process's rank as its part."""
    if "RANK" not in os.environ:
        return config
    if config.parts is not None:
        raise ValueError("torchrun assigns a part to each process: leave out --part and --parts")
    return replace(config, part=int(os.environ["RANK"]), parts=int(os.environ["WORLD_SIZE"]))


def make_shards(config: FineWebConfig, open_source: OpenSource, folder: Path) -> str:
    """Make, resume or verify a dataset, or a part of it; return a summary to print."""
    part = Part(config.part or 0, config.parts or 1)
    with folder_lock(folder, part):
        found = shards.find_manifests(folder, config.max_tokens)
        if not found and any(folder.glob("[!.]*.npy")):
            raise ValueError(
                f"{folder} has .npy files that fineweb.py did not make: choose another --data-dir"
            )
        source = open_source(found[0].source.get("revision") if found else None)
        tokens = min(filter(None, (config.max_tokens, source.tokens)), default=None)
        source, identity = replace(source, tokens=tokens), source.identity
        if config.text_field != "text":
            identity = identity | {"text field": config.text_field}
        expected = Manifest(identity, VOCAB_SHA256, config.shard_size, max_tokens=config.max_tokens)
        if found and found[0].part == FULL_DATASET and found[0].covers(config.max_tokens):
            shards.check_same_dataset(folder, found[0], expected)
            shards.verify_shards(folder, found[0].shards[part.index :: part.count])
            return summary(folder, found[0], found[0])
        for each in found:
            shards.check_same_dataset(folder, each, expected.for_part(each.part.index, part.count))
        earlier = Manifest.load(folder, part.manifest_name)
        manifest = earlier or expected.for_part(part.index, part.count)
        shards.verify_shards(folder, manifest.shards)
        if not manifest.covers(config.max_tokens):
            if tokens and part.index == 0:
                print(describe_size(folder, tokens, identity["kind"] == "hub"))
            size = config.shard_size  # only full shards are kept when tokens are added
            full = tuple(itertools.takewhile(lambda shard: shard.tokens == size, manifest.shards))
            manifest = replace(manifest, shards=full, complete=False, max_tokens=config.max_tokens)
            manifest = write_shards(source, manifest, folder, config.workers)
    line = summary(folder, manifest, earlier)
    if part == FULL_DATASET:
        return line
    state = "all parts are finished"
    if unfinished := shards.join_parts(folder, expected, part.count):
        *others, last = map(str, unfinished)
        names = f"parts {', '.join(others)} and {last}" if others else f"part {last}"
        state = f"{names} of {part.count} not finished yet"
    return f"{line}\n{folder}: {state}"


@contextmanager
def folder_lock(folder: Path, part: Part = FULL_DATASET) -> Iterator[None]:
    """Lock the dataset in a folder, or one part of it, while the body runs."""
    try:
        with lock_folder(folder, f".{part.manifest_name}.lock"):
            for name in (f"*_{part.prefix}[0-9]*.npy", part.manifest_name):
                for leftover in folder.glob(f".{name}.*.tmp"):  # left by a killed run
                    leftover.unlink()
            yield
    except filelock.Timeout:
        raise ValueError(
            f"another fineweb.py is writing to {folder}: wait for the other process to end"
        ) from None


class Progress(NamedTuple):
    """Position of a batch's first document, and counts of everything before it."""

    cursor: Cursor | None = None
    tokens: int = 0
    documents: int = 0
    skipped: int = 0


def write_shards(source: Source, manifest: Manifest, folder: Path, workers: int) -> Manifest:
    """Write all shards that `manifest` does not list yet; return the finished manifest."""
    progress = Progress(**(manifest.progress or {}))
    limit, is_cut = (manifest.max_tokens or math.inf) / manifest.part.count, False
    writer = ShardWriter(folder, manifest)
    written = manifest.tokens - progress.tokens  # tokens of the first batch in finished shards
    total = source.tokens and source.tokens // manifest.part.count
    # Show a progress bar only on a terminal, and under torchrun only for rank 0.
    hidden = True if os.environ.get("RANK", "0") != "0" else None
    bar = tqdm(unit="tok", unit_scale=True, initial=progress.tokens, total=total, disable=hidden)
    with bar:
        documents = source.documents(progress.cursor, manifest.part)
        for batch, tokens in tokenize_documents(documents, workers):
            progress = progress._replace(cursor=batch[0].cursor)
            if is_cut := progress.tokens + len(tokens) > limit:
                # End before the document that exceeds the limit. Cut only in the first document or
                # in a later block of a plain text.
                room = max(0, int(limit - progress.tokens))
                begins = np.flatnonzero(tokens[: room + 1] == END_OF_TEXT)[not progress.tokens :]
                tokens = tokens[: begins[-1] if len(begins) else room]
            writer.add(
                tokens[written:],
                documents=progress.documents,
                skipped=progress.skipped,
                progress=progress._asdict(),
            )
            written = max(0, written - len(tokens))
            bar.update(len(tokens))
            progress = Progress(
                None,  # set when the next batch arrives
                progress.tokens + len(tokens),
                progress.documents + int(np.count_nonzero(tokens == END_OF_TEXT)),
                progress.skipped + sum(not item.text for item in batch),
            )
            if is_cut:
                break
        bar.total = progress.tokens
    end = {"documents": progress.documents, "skipped": progress.skipped}
    return writer.close(**end, max_tokens=manifest.max_tokens if is_cut else None)


def tokenize_documents(
    documents: Iterable[Document], workers: int
) -> Iterator[tuple[list[Document], TokenIds]]:
    """Yield batches of documents, each with its ids, (tokens,) uint16; empty ones have no ids."""
    batches, copy = itertools.tee(_batches(documents))
    texts = ([document.text for document in batch if document.text] for batch in copy)
    for batch, tokens in zip(batches, encode_documents(texts, workers), strict=True):
        yield batch, tokens if batch[0].starts_document else tokens[1:]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches; a block that continues a document starts a new batch."""
    batch: list[Document] = []
    chars = 0
    for document in documents:
        if batch and (chars >= BATCH_CHARS or not document.starts_document):
            yield batch
            batch, chars = [], 0
        batch.append(document)
        chars += len(document.text) + 1
    if batch:
        yield batch


def describe_size(folder: Path, tokens: int, is_download: bool) -> str:
    """Describe the disk space and the download that `tokens` tokens need."""
    line = f"{folder}: at most {format_count(tokens)} tokens, {2 * tokens / 1e9:.2g} GB on disk"
    line += f" ({shutil.disk_usage(folder).free / 1e9:,.0f} GB free)"
    download = f"about {2.8 * tokens / 1e9:.2g} GB to download"  # as FineWeb's Parquet files
    return f"{line}, {download}" if is_download else line


def summary(folder: Path, manifest: Manifest, earlier: Manifest | None) -> str:
    """Describe in one line what the dataset, or a part of it, contains."""
    part = manifest.part
    name = str(folder) if part == FULL_DATASET else f"{folder}, part {part.index} of {part.count}"
    documents = f"{manifest.documents:,} document{'s' * (manifest.documents != 1)}"
    if manifest.skipped:
        documents += f" ({manifest.skipped:,} empty skipped)"
    line = f"{name}: {documents}, {manifest.tokens:,} tokens, {len(manifest.shards)} shards"
    return f"{line}; finished earlier, and unchanged" if manifest == earlier else line


def describe_baseline(folder: Path) -> str:
    """Describe the unigram baseline of a finished dataset."""
    train, val = (shards.open_shards(folder, split) for split in ("train", "val"))
    loss, bits = unigram_baseline(train, val)
    line = "unigram baseline (token frequencies only)"
    return f"{line}: loss {loss:.2f} nats per token, {bits:.2f} bits per byte"


def find_source(config: FineWebConfig) -> tuple[str, OpenSource]:
    """Return a name for the data folder of `--source`, and a function that opens the source."""
    first = config.source[0]
    has_name = first in sources.SOURCES or first in sources.FINEWEB
    if not has_name and (sources.file_type(first) or sources.local_paths(first)):
        paths = sources.local_files(config.source, config.text_field)
        folder = Path(first) if Path(first).is_dir() else paths[0].parent
        name = folder.resolve().name
        if len(paths) == 1 and folder != Path(first):
            name = paths[0].name.removesuffix(sources.file_type(paths[0]) or paths[0].suffix)
        return name, lambda _: sources.file_source(paths, None, config.text_field)
    if len(config.source) > 1:
        raise ValueError(f"--source {' '.join(config.source)}: pass a single name, or only files")
    if first in sources.SOURCES:
        return first, lambda _: sources.SOURCES[first]()
    dataset = sources.FINEWEB.get(first, first)
    if not REPO_NAME.fullmatch(dataset):
        raise ValueError(
            f"--source {first} is not fineweb-edu, fineweb, {', '.join(sources.SOURCES)}, "
            f"a hub dataset (OWNER/NAME), or an existing file or folder"
        )
    subset = config.name or ("sample-10BT" if first in sources.FINEWEB else None)
    name = dataset.split("/")[1] + (f"-{subset.removeprefix('sample-')}" if subset else "")
    return name, lambda known_revision: sources.hub_source(
        dataset, subset, config.revision, known_revision, config.text_field
    )


if __name__ == "__main__":
    run_command(main)
