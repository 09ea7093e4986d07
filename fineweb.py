"""Turn text into token shards: FineWeb-Edu from the hub, local files, or Python's own sources.

    python fineweb.py                                # 10B tokens of FineWeb-Edu
    python fineweb.py --source stdlib                # no network: the standard library's sources
    python fineweb.py --source texts/*.jsonl a.txt   # your own .parquet, .jsonl and .txt
    python fineweb.py --source hub:OWNER/NAME        # shards that --push-to-hub has uploaded
    torchrun --nproc_per_node=4 fineweb.py           # a part of the files for every process
    python fineweb.py --part 0 --parts 2             # such a part alone, on one of two machines

The same documents in the same number of parts give byte-identical shards. The same command resumes
a run that was stopped or killed after its last finished shard. To add a source of your own, see
`SOURCES` in `corpus/sources.py`.
"""

if __name__ == "__main__":
    from runtime.startup import prepare_process

    prepare_process()  # the imports below take seconds

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import filelock
from tqdm import tqdm

from corpus import published, shards, sources
from corpus.shards import WHOLE, Manifest, Part, ShardWriter, check_same_dataset
from corpus.sources import Cursor, Document, Source
from runtime.cli import parse_flags, run_command
from runtime.files import lock_folder
from runtime.hub import REPO_NAME, check_repo_name, resolve_revision
from runtime.startup import usable_cores
from tokenizer import VOCAB_SHA256, TokenIds, encode_documents

BATCH_CHARS = 1 << 20  # encoded together; a longer document makes a longer batch
PUBLISHED = "hub:"  # of --source: a repository that holds shards, not texts
OpenSource = Callable[[Manifest | None], Source]  # the manifest of an earlier run, if there is one


@dataclass(frozen=True)
class FineWebConfig:
    """Turn text into shards of GPT-2 tokens, the first of them for validation."""

    source: tuple[str, ...] = ("fineweb-edu",)
    """`fineweb-edu`, `fineweb` or another hub data set (OWNER/NAME); `hub:OWNER/NAME`, shards that
    --push-to-hub uploaded; `stdlib`, the running Python's standard library, which needs no network;
    or .parquet, .jsonl (also .gz and .zst) and .txt files, or globs of them. A .txt file is one
    document; a row's `text` is one in the others."""
    name: str | None = None
    """Configuration of the hub data set; `sample-10BT` of fineweb and fineweb-edu."""
    data_dir: Path | None = None
    """Where the shards go; by default a folder in data/ named after the source."""
    shard_size: int = 100_000_000
    """Tokens in a full shard."""
    workers: int = field(default_factory=usable_cores)
    """Threads that tokenise."""
    revision: str | None = None
    """Commit, branch or tag of the hub data set; by default its newest or, in a rerun, the same."""
    part: int | None = None
    """Tokenise only this one of `--parts`, counted from 0."""
    parts: int | None = None
    """Processes that share the work, a `--part` each. The last to end writes the data set's
    manifest; without `--part`, that alone is done, such as for parts copied from elsewhere."""
    push_to_hub: str | None = None
    """OWNER/NAME of a hub data set: upload the finished shards and their manifest."""

    def __post_init__(self) -> None:
        for flag in ("shard_size", "workers", "parts"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, not {value}")
        if self.part is not None:
            if self.parts is None:
                raise ValueError(f"--part {self.part} of how many? Add --parts")
            if not 0 <= self.part < self.parts:
                last = self.parts - 1
                raise ValueError(f"--part {self.part}: parts of {self.parts} are 0 to {last}")
        if self.push_to_hub is not None:
            check_repo_name("--push-to-hub", self.push_to_hub)
            if self.part is not None and self.parts != 1:
                raise ValueError(
                    f"--push-to-hub with --part {self.part}: give it once all parts are finished, "
                    f"with --parts {self.parts} alone"
                )


def main() -> None:
    """Make a data set, resume it, or verify one that is finished."""
    config = parse_flags(FineWebConfig)
    part = find_part(config)
    if config.source[:1] and config.source[0].startswith(PUBLISHED):
        folder = download_shards(config, part)
    else:
        name, open_source = find_source(config)
        folder = config.data_dir or Path("data") / name
        print(make_shards(config, open_source, folder, part))
    if config.push_to_hub is not None:
        print(f"uploaded to {published.push_shards(folder, config.push_to_hub)}")


def find_part(config: FineWebConfig) -> Part:
    """The part that the flags or `torchrun`'s rank assign to this process."""
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    if world_size == 1:
        return WHOLE if config.part is None else Part(config.part, config.parts or 1)
    if config.parts is not None:
        raise ValueError(
            f"torchrun gives each of its {world_size} processes a part: leave out --part, --parts"
        )
    if config.push_to_hub is not None:
        raise ValueError(
            f"--push-to-hub is for one process: give it after torchrun, with --parts {world_size}"
        )
    return Part(rank, world_size)


def make_shards(config: FineWebConfig, open_source: OpenSource, folder: Path, part: Part) -> str:
    """Make or resume a data set, or a part of it, and return what to print."""
    start = time.perf_counter()
    count = config.parts or part.count
    with folder_lock(folder, part):
        found = find_manifests(folder)
        source = open_source(next(iter(found.values()), None))
        expected = Manifest(source.identity, VOCAB_SHA256, config.shard_size)
        for each, manifest in found.items():
            asked = expected if each == WHOLE else expected.of_part(Part(each.index, count))
            check_same_dataset(folder, manifest, asked)
        if part != WHOLE and WHOLE in found:
            if not found[WHOLE].complete:
                raise ValueError(f"one process has begun {folder}: finish it without --part")
            return f"{folder} is finished: part {part.index} of {count} has nothing to do"
        earlier = found.get(part)
        if part == WHOLE and count > 1 and earlier is None:
            earlier = shards.join_parts(folder, expected, count)
        manifest = expected.of_part(part)
        if earlier is not None:
            shards.verify_shards(folder, earlier.shards)
            manifest = replace(earlier, source=manifest.source)
        if not manifest.complete:
            manifest = write_shards(source, manifest, folder, config.workers, part)
    seconds = time.perf_counter() - start
    if part == WHOLE:
        return summary(str(folder), manifest, earlier, seconds)
    line = summary(f"{folder}, part {part.index} of {count}", manifest, earlier, seconds)
    if left := shards.unfinished_parts(folder, count):
        return f"{line}\n{folder}: part {', '.join(map(str, left))} of {count} not finished yet"
    tokens = shards.join_parts(folder, expected, count).tokens
    return f"{line}\n{folder}: all {count} parts are finished, {tokens:,} tokens"


def download_shards(config: FineWebConfig, part: Part) -> Path:
    """Download a tokenised data set, or resume that; print what its folder holds, and return it."""
    start = time.perf_counter()
    repo = config.source[0].removeprefix(PUBLISHED)
    if not REPO_NAME.fullmatch(repo):
        raise ValueError(f"--source {PUBLISHED}{repo} is not {PUBLISHED}OWNER/NAME")
    if len(config.source) > 1 or part != WHOLE:
        raise ValueError(f"--source {PUBLISHED}{repo} is downloaded alone, and by one process")
    for flag in ("name", "shard_size", "workers"):
        if getattr(config, flag) != getattr(FineWebConfig(), flag):
            flag = flag.replace("_", "-")
            raise ValueError(f"--source {PUBLISHED}{repo} is downloaded as it is: drop --{flag}")
    folder = config.data_dir or Path("data") / repo.split("/")[1]
    with folder_lock(folder):
        earlier = find_manifests(folder).get(WHOLE)
        manifest = published.fetch_shards(repo, config.revision, folder, earlier)
    unchanged = earlier if manifest is earlier else None
    print(summary(str(folder), manifest, unchanged, time.perf_counter() - start))
    return folder


@contextmanager
def folder_lock(folder: Path, part: Part = WHOLE) -> Iterator[None]:
    """Keep other processes from the data set in a folder, or from one part of it."""
    try:
        with lock_folder(folder, f".{part.manifest_name}.lock"):
            for name in (f"*_{part.prefix}[0-9]*.npy", part.manifest_name):
                for leftover in folder.glob(f".{name}.*.tmp"):  # of a killed run
                    leftover.unlink()
            yield
    except filelock.Timeout:
        raise ValueError(f"another fineweb.py is writing to {folder}: wait for it") from None


def find_manifests(folder: Path) -> dict[Part, Manifest]:
    """The manifest of the data set in a folder; without it, those of the parts that were begun."""
    whole = Manifest.load(folder)
    found = {WHOLE: whole} if whole else shards.load_parts(folder)
    if not found:
        for kind in ("npy", "bin"):
            if any(folder.glob(f"*.{kind}")):
                raise ValueError(
                    f"{folder} holds .{kind} files that fineweb.py did not make: "
                    f"choose another --data-dir"
                )
    return found


class Progress(NamedTuple):
    """A batch's first document, and what precedes it."""

    cursor: Cursor | None = None
    tokens: int = 0
    documents: int = 0
    skipped: int = 0


def write_shards(
    source: Source, manifest: Manifest, folder: Path, workers: int, part: Part = WHOLE
) -> Manifest:
    """Write all shards that `manifest` does not have yet, and return the finished manifest."""
    progress = Progress(**(manifest.progress or {}))
    writer = ShardWriter(folder, manifest, part)
    written = manifest.tokens - progress.tokens  # of the first batch, in finished shards
    total = source.tokens and source.tokens // part.count
    # A bar only on a terminal, and one for all of torchrun's processes.
    hidden = True if os.environ.get("RANK", "0") != "0" else None
    bar = tqdm(unit="tok", unit_scale=True, initial=progress.tokens, total=total, disable=hidden)
    with bar:
        documents = source.documents(progress.cursor, part)
        for batch, tokens in tokenize_documents(documents, workers):
            progress = progress._replace(cursor=batch[0].cursor)
            writer.add(
                tokens[written:],
                documents=progress.documents,
                skipped=progress.skipped,
                progress=progress._asdict(),
            )
            written = max(0, written - len(tokens))
            bar.update(len(tokens))
            progress = Progress(
                None,  # the next batch has its own
                progress.tokens + len(tokens),
                progress.documents + sum(bool(item.text) for item in batch if item.begins),
                progress.skipped + sum(not item.text for item in batch),
            )
        bar.total = progress.tokens
    return writer.close(progress.documents, progress.skipped)


def tokenize_documents(
    documents: Iterable[Document], workers: int
) -> Iterator[tuple[list[Document], TokenIds]]:
    """Encode documents in batches, each document with `END_OF_TEXT` first.

    Yields:
        Each batch of documents with its (tokens,) uint16; empty documents have no tokens.
    """
    in_flight: deque[list[Document]] = deque()

    def texts() -> Iterator[list[str]]:
        for batch in _batches(documents):
            in_flight.append(batch)
            yield [document.text for document in batch if document.text]

    for tokens in encode_documents(texts(), workers):
        batch = in_flight.popleft()
        yield batch, tokens if batch[0].begins else tokens[1:]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents; a block that continues a document is the first of its batch."""
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


def summary(what: str, manifest: Manifest, earlier: Manifest | None, seconds: float) -> str:
    """The last line: what the folder, or a part, holds, and what this run did."""
    tokens = manifest.tokens
    speed = f"{(tokens - (earlier.tokens if earlier else 0)) / seconds:,.0f} tokens/s"
    if earlier is not None and earlier.complete:
        speed = "finished earlier, and unchanged"
    empty = f" ({manifest.skipped:,} empty left out)" if manifest.skipped else ""
    return (
        f"{what}: {_count(manifest.documents, 'document')}{empty}, {_count(tokens, 'token')}, "
        f"{_count(len(manifest.shards), 'shard')}; {seconds:.1f} s, {speed}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def find_source(config: FineWebConfig) -> tuple[str, OpenSource]:
    """What `--source` means: the name of its folder in data/, and the function that opens it."""
    if not config.source:
        raise ValueError("--source needs a value, such as fineweb-edu or stdlib")
    first = config.source[0]
    if kind := sources.file_type(first):
        paths = sources.local_files(config.source)
        one = paths[0].name.removesuffix(kind)
        name = one if len(paths) == 1 else paths[0].resolve().parent.name
        return name, lambda _: sources.file_source(paths)
    if len(config.source) > 1:
        raise ValueError(f"--source {' '.join(config.source)}: only files may be several")
    if first in sources.SOURCES:
        return first, lambda _: sources.SOURCES[first]()
    if first not in sources.FINEWEB and Path(first).is_dir():
        raise ValueError(f"--source {first} is a folder: name its files, as in {first}/*.jsonl")
    dataset = sources.FINEWEB.get(first, first)
    if not REPO_NAME.fullmatch(dataset):
        raise ValueError(
            f"--source {first} is not fineweb-edu, fineweb, {', '.join(sources.SOURCES)}, "
            f"a hub data set (OWNER/NAME), or files that end in {', '.join(sources.FILE_TYPES)}"
        )
    subset = config.name or ("sample-10BT" if first in sources.FINEWEB else None)
    name = dataset.split("/")[1] + (f"-{subset.removeprefix('sample-')}" if subset else "")
    return name, lambda earlier: open_hub(dataset, subset, config.revision, earlier)


def open_hub(
    dataset: str, name: str | None, revision: str | None, earlier: Manifest | None
) -> Source:
    """A hub data set at `revision`, by default that of the earlier run, or else the newest."""
    known = earlier.source.get("revision") if earlier else None
    revision = revision or known
    if earlier is None or not earlier.complete or revision != known:
        revision = resolve_revision(dataset, revision)
    return sources.hub_source(dataset, name, str(revision))


if __name__ == "__main__":
    run_command(main)
