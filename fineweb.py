"""Turn text into token shards: FineWeb-Edu from the hub, local files, or the standard library.

    python fineweb.py                                # 10B tokens of FineWeb-Edu
    python fineweb.py --max-tokens 500M              # the first 500M; raise the number to add more
    python fineweb.py --source stdlib                # source code of the standard library, offline
    python fineweb.py --source texts/ a.py b.jsonl   # your own folders, text files and tables

The same documents always make byte-identical shards. To resume after a stop or a kill, rerun the
same command: it continues after the last finished shard. To add a source, see `SOURCES` in
`corpus/sources.py`. To split the work among many machines, see `corpus/parts.py`.
"""

import hashlib
import itertools
import math
import os
import shlex
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from runtime.threads import usable_cores

import numpy as np
from tqdm import tqdm

from corpus import shards, sources
from corpus.encoding import encode_documents
from corpus.overlap import PASSAGE_TOKENS, find_passages, find_places, in_passages
from corpus.parts import FULL_DATASET, Part
from corpus.shards import Manifest, ShardWriter, TokenArray
from corpus.sources import Cursor, Document, Source
from corpus.unigram import unigram_baseline
from formats.hub import REPO_NAME
from runtime.cli import PathOrName, check_settings, parse_flags, run_command
from runtime.errors import UserError
from runtime.files import lock_folder
from tokenizer import END_OF_TEXT, VOCAB_SHA256, gpt2_encoding

BATCH_CHARS = 1 << 20  # encoded together; a batch ends with the document that reaches this
MAX_SEARCHED_TOKENS = 100_000_000  # for passages in both splits, without --overlap
HIGH_OVERLAP = 0.01  # fraction of the validation tokens
QUOTED_CHARS = 80  # at the start of the longest passage
# Strings in texts that are probably mistakes, and how to fix them.
NOTES = {
    "<|endoftext|>": "<|endoftext|> is in the texts, as text; if it is between documents, use "
    "--separator '<|endoftext|>' and another --data-dir",
    "\r\n": "a line ends with CRLF; for fewer tokens, use tr -d '\\r' < FILE > NEW_FILE",
}
Batch = tuple[list[Document], TokenArray]  # documents and their ids
OpenSource = Callable[[dict[str, Any]], Source]  # the argument is what an earlier run recorded


@dataclass(frozen=True)
class FineWebConfig:
    """Turn text into shards of GPT-2 tokens, in a training and a validation split."""

    OTHER_NAMES: ClassVar = {"FILE": "--source"}

    source: tuple[PathOrName, ...] = ("fineweb-edu",)
    """Source of the text: `fineweb-edu`, `fineweb` or another hub dataset (OWNER/NAME); `stdlib`,
    the running Python's standard library, offline; or files, folders and globs. Each row of a
    .parquet, .csv, .tsv, .jsonl, .ndjson or .json file is a document. Any other UTF-8 file is one
    document. Files may be compressed (.gz, .zst, .bz2, .lz4). In a folder whose README.md begins
    with `---`, or that otherwise has only tables and .txt files named train, test and so on, the
    train files are read, and the validation or else the test files are the validation text."""
    text_field: str = "text"
    """Column of tables, or field of JSON lines, that holds the text; for the field `text` in an
    object `doc`, it is `doc.text`."""
    separator: str = ""
    """Text between the documents of a file, such as '<|endoftext|>', or '\\n' for a document per
    line."""
    val_source: tuple[PathOrName, ...] = ()
    """Files, folders and globs of a separate validation text; replaces a validation split."""
    val_share: float | None = None
    """Fraction of the text to keep for validation, at most 0.5: raise it if a short text leaves too
    few validation tokens, lower it to train on more; default: the validation split of a folder, the
    first shard of a hub dataset, or 0.1. It is rounded down to 1/2, 1/3
    and so on, of at most two shards' tokens."""
    name: str | None = None
    """Configuration of the hub dataset; default: `sample-10BT` for fineweb and fineweb-edu."""
    data_dir: Path | None = None
    """Folder to write the shards to; default: a folder in data/ named after the source."""
    drop_repeated: bool = False
    """Leave out documents equal to an earlier one; plain text is compared in blocks of 1 MB."""
    overlap: bool = False
    """Look for passages of the validation text in the training text also if there are more than
    100M tokens, or if they are from the hub; less than a minute per 100M."""
    propose: bool = True
    """At the end, print a training command that suits the text."""
    shard_size: int = 100_000_000
    """Number of tokens in a full shard."""
    max_tokens: int | None = None
    """Keep at most this many tokens, such as 1e9 or 500M; rerun with a larger number to add more.
    Validation tokens count. With `--part`, each part has an equal number."""
    workers: int = field(default_factory=usable_cores)
    """Number of threads that tokenize."""
    revision: str | None = None
    """Commit, branch or tag of the hub dataset; default: the newest commit or, in a rerun, the
    commit of the first run."""
    part: str | None = None
    """Make only one part of the dataset, such as 0/32 to 31/32 on 32 machines. Each part has some
    files of the source."""

    def __post_init__(self) -> None:
        problems = list[str]()
        if self.val_share is not None and not 0 < self.val_share <= 0.5:
            problems.append(f"--val-share must be above 0 and at most 0.5, not {self.val_share}")
        if self.val_source and self.val_share:
            problems.append("--val-share cannot be combined with --val-source: use one of them")
        if not (self.source and all(self.source)):  # "" would mean the current folder
            problems.append("--source needs a value, such as fineweb-edu or stdlib")
        if "RANK" in os.environ:
            problems.append("torchrun is not supported: use python, and --part on many machines")
        check_settings(self, ("shard_size", "max_tokens", "workers"), *problems)
        if Part.parse(self.part) != FULL_DATASET and self.drop_repeated:
            raise UserError("--drop-repeated cannot be combined with --part: leave one of them out")


def main() -> None:
    """Make a dataset, resume an unfinished one, or verify a finished one."""
    config = parse_flags(FineWebConfig)
    name, open_source = find_source(config)
    folder = config.data_dir or Path("data") / name
    found = Manifest.load(folder, part := Part.parse(config.part))
    lock = lock_folder(folder, f".{part.manifest_name}.lock", "use another --data-dir")
    # A finished dataset on a read-only disk is only verified.
    needs_lock = not (found and found.complete) or os.access(folder, os.W_OK)
    with lock if needs_lock else nullcontext():
        print(make_shards(config, open_source, folder))
        manifest = Manifest.load(folder)
        if manifest and manifest.complete:
            report_overlap(config, manifest, folder)
    if manifest and manifest.complete:
        from training.propose import OTHER_RECIPE, propose_training  # imports torch: takes seconds

        train, val = (shards.open_shards(folder, split) for split in ("train", "val"))
        loss, bits = unigram_baseline(train, val)
        baseline = f"loss {loss:.2f} nats per token, {bits:.2f} bits per byte"
        print(f"unigram baseline (token frequencies only): {baseline}")
        # An installed package has no recipes.
        if config.propose and (Path(__file__).parent / "recipes").is_dir():
            try:
                print("next:", command := shlex.join(propose_training(folder, manifest)))
                if "gpt2-124m.json" in command:
                    print(OTHER_RECIPE)
            except UserError as error:  # the dataset may still be of use
                print(error)
    else:
        print("other parts are not finished yet")


def make_shards(config: FineWebConfig, open_source: OpenSource, folder: Path) -> str:
    """Make, resume or verify a dataset, or a part of it; return a summary to print."""
    part = Part.parse(config.part)
    found = Manifest.load(folder)
    if not found and any(folder.glob("[!.]*.npy")):
        raise UserError(f"{folder} has .npy files of other programs: choose another --data-dir")
    separator = config.separator.replace(r"\n", "\n").replace(r"\t", "\t")
    own = Manifest.load(folder, part)
    earlier = own.source if own else found.source if found else {}
    source = replace(open_source(earlier), separator=separator)
    known = earlier.get("contents", {})
    val_paths = sources.local_files(config.val_source, config.text_field, known)
    val_paths = val_paths or ([] if config.val_share else [*source.val_paths])
    val_source = sources.file_source(val_paths, config.text_field, known)
    val_source = replace(val_source, separator=separator)
    val_files = val_source.identity["files"]
    if any(file in source.identity.get("files", ()) for file in val_files):
        raise UserError("--source and --val-source have a file in common: move one of them")
    options: dict[str, Any] = {"separator": config.separator, "val share": config.val_share}
    options["drop repeated"] = config.drop_repeated
    text_field = config.text_field if config.text_field != "text" else None
    contents = source.identity.get("contents", {}) | val_source.identity["contents"]
    options |= {"text field": text_field, "val files": val_files, "contents": contents}
    identity = source.identity | part.identity | {k: v for k, v in options.items() if v}
    expected = Manifest(identity, VOCAB_SHA256, config.shard_size, max_tokens=config.max_tokens)
    manifest = own or expected
    for each in (found or expected, manifest):
        shards.check_same_dataset(folder, each, expected)
    shards.verify_shards(folder, manifest.shards)
    note = "; finished earlier, and unchanged"
    limit = manifest.max_tokens or math.inf
    if not manifest.complete or limit < (config.max_tokens or math.inf):
        note = ""
        manifest = replace(manifest.without_changing_shards(), max_tokens=config.max_tokens)
        seen = Counter[bytes]() if config.drop_repeated else None
        validation = read_documents(val_source, None, FULL_DATASET, seen)
        if val_files and part.index == 0 and not manifest.shards:
            batches = tokenize_documents(validation, config.workers)
            manifest = ShardWriter(folder, manifest).add_validation(ids for _, ids in batches)
        if seen is not None and val_files:
            deque(validation, maxlen=0)  # after a stop, the text was written earlier
        manifest = write_shards(source, manifest, folder, config.workers, seen)
    name = folder if part == FULL_DATASET else f"{folder}, part {config.part}"
    documents = f"{manifest.documents:,} document{'s' * (manifest.documents != 1)}"
    n_val = sum(shard.tokens for shard in manifest.shards if shard.split == "val")
    tokens = f"{manifest.tokens:,} tokens, {n_val:,} of them for validation"
    return f"{name}: {documents}, {tokens}, {len(manifest.shards)} shards{note}"


def report_overlap(config: FineWebConfig, manifest: Manifest, folder: Path) -> None:
    """Record the fraction of validation tokens in passages of the training text; print a high one.

    Without `--overlap`, only texts other than hub datasets of at most `MAX_SEARCHED_TOKENS` are
    searched. A low fraction that is recorded is not measured again.
    """
    is_own = manifest.source.get("kind") != "hub" and manifest.tokens <= MAX_SEARCHED_TOKENS
    is_known = manifest.overlap is not None and manifest.overlap <= HIGH_OVERLAP
    if is_known or not (is_own or config.overlap):
        return
    train, val = (shards.open_shards(folder, split) for split in ("train", "val"))
    places = find_places(ids := val.read(0, val.total_tokens), train)
    fraction = float(in_passages(places).mean())
    if (folder / FULL_DATASET.manifest_name).is_file() and os.access(folder, os.W_OK):
        replace(manifest, overlap=fraction).save(folder)  # parts of a dataset have no such file
    found = f"{100 * fraction:.1f} % of the validation tokens are in passages of {PASSAGE_TOKENS} "
    found += "tokens or more that the training text also has"
    if fraction > HIGH_OVERLAP:
        start, n_tokens, _ = find_passages(places)[0]
        text = gpt2_encoding().decode(ids[start : start + n_tokens].tolist())[:QUOTED_CHARS]
        found = f"warning: {found}, so the validation loss is too low; the longest one has "
        found += f"{n_tokens:,} tokens and begins {text!r}: use "
        found += "" if config.drop_repeated else "--drop-repeated or "
        found += "--val-source with another text, and another --data-dir"
    if config.overlap or fraction > HIGH_OVERLAP:
        print(found)


def write_shards(
    source: Source,
    manifest: Manifest,
    folder: Path,
    workers: int,
    seen: Counter[bytes] | None = None,
) -> Manifest:
    """Write all shards that `manifest` does not list yet; return the finished manifest.

    With `seen`, documents equal to an earlier one are left out: see `read_documents`.
    """
    # Place from which to resume, and the numbers of tokens and documents before it.
    progress = manifest.progress or {"cursor": None, "tokens": 0, "documents": 0}
    n_tokens, n_documents = progress["tokens"], progress["documents"]
    writer = ShardWriter(folder, manifest)
    limit = (manifest.max_tokens or math.inf) / manifest.part.count
    is_cut = False
    notes = Counter[str]()
    documents = read_documents(source, progress["cursor"], manifest.part, seen)
    # disable=None draws the bar only on a terminal.
    with tqdm(initial=n_tokens, total=limit, unit="tok", unit_scale=True, disable=None) as bar:
        for batch, tokens in tokenize_documents(documents, workers):
            if is_cut := n_tokens + len(tokens) > limit:
                tokens = tokens[: max(0, int(limit) - n_tokens)]
            progress = {"cursor": batch[0].cursor, "tokens": n_tokens, "documents": n_documents}
            writer.add(tokens, progress)
            notes += Counter({text: sum(d.text.count(text) for d in batch) for text in NOTES})
            bar.update(len(tokens))
            n_tokens += len(tokens)
            n_documents += int(np.count_nonzero(tokens == END_OF_TEXT))
            if is_cut:
                break
    for text, count in notes.items():
        print(f"note: {count:,} times {NOTES[text]}")
    if seen is not None:
        print(f"left out {seen.total() - len(seen):,} documents equal to an earlier one")
    is_cut |= manifest.part != FULL_DATASET  # parts that differ in it are not one dataset
    return writer.close(n_documents, manifest.max_tokens if is_cut else None)


def read_documents(
    source: Source, cursor: Cursor | None, part: Part, seen: Counter[bytes] | None
) -> Iterator[Document]:
    """Yield the documents of a part of a source, starting at `cursor`; None = at the start.

    With `seen`, which counts documents by their hashes, leave out the documents that it has, and
    read the source from the start. The blocks of a long plain text count as documents. The block
    after one that is left out starts a document.
    """
    if seen is None:
        yield from source.documents(cursor, part)
        return
    first = (cursor["file"], cursor["text"]) if cursor else (0, 0)
    is_new = True
    for document in source.documents(None, part):
        starts_document = document.starts_document or not is_new
        digest = hashlib.blake2b(document.text.encode(errors="surrogatepass"), digest_size=16)
        seen[digest.digest()] += 1
        is_new = seen[digest.digest()] == 1
        if is_new and (document.cursor["file"], document.cursor["text"]) >= first:
            yield document._replace(starts_document=starts_document)


def tokenize_documents(documents: Iterable[Document], workers: int) -> Iterator[Batch]:
    """Yield batches of documents, each with its ids, (tokens,) uint16."""
    batches, copy = itertools.tee(_batches(documents))
    texts = ([document.text for document in batch] for batch in copy)
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


def find_source(config: FineWebConfig) -> tuple[str, OpenSource]:
    """Return a name for the data folder of `--source`, and a function that opens the source."""
    first = config.source[0]
    has_name = first in sources.SOURCES or first in sources.FINEWEB
    matches = [] if has_name else sources.local_paths(first)
    if not matches and Path(first).suffix.lower() in (*sources.READERS, *sources.CODECS):
        raise UserError(f"{first}: no such file or folder")
    if matches:
        is_pattern = matches[0].is_file() and not Path(first).exists()
        base = (matches[0].parent if is_pattern else matches[0]).resolve()
        name = sources.decompressed_name(base).stem if base.is_file() else base.name
        return name, partial(open_files, config)
    if len(config.source) > 1:
        raise UserError(f"--source {' '.join(config.source)}: pass a single name, or only files")
    if first in sources.SOURCES:
        return first, lambda _: sources.SOURCES[first]()
    dataset = sources.FINEWEB.get(first, first)
    if not REPO_NAME.fullmatch(dataset):
        names = ", ".join(["fineweb-edu", "fineweb", *sources.SOURCES])
        kinds = "a hub dataset (OWNER/NAME), or an existing file or folder"
        raise UserError(f"--source {first} is not {names}, {kinds}")
    subset = config.name or ("sample-10BT" if first in sources.FINEWEB else None)
    name = dataset.split("/")[1] + (f"-{subset.removeprefix('sample-')}" if subset else "")
    return name, partial(sources.hub_source, dataset, subset, config.revision, config.text_field)


def open_files(config: FineWebConfig, earlier: dict[str, Any]) -> Source:
    """Return the source of local files; unchanged files of an earlier identity are not read."""
    known = earlier.get("contents", {})
    files = sources.local_files(config.source, config.text_field, known)
    paths, val_paths = sources.choose_splits(config.source, files)
    return replace(sources.file_source(paths, config.text_field, known), val_paths=val_paths)


if __name__ == "__main__":
    run_command(main)
