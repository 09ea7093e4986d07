"""Turn text into token shards: FineWeb-Edu from the hub, local files, or Python's own sources.

    python fineweb.py                                # 10B tokens of FineWeb-Edu
    python fineweb.py --max-tokens 500M              # the first of them; a larger number goes on
    python fineweb.py --source stdlib                # no network: the standard library's sources
    python fineweb.py --source texts/ a.py b.jsonl   # your own: folders, text, tables with text
    torchrun --nproc_per_node=4 fineweb.py           # a part of the files for every process
    python fineweb.py --part 0 --parts 2             # such a part alone, on one of two machines

The same documents in the same number of parts give byte-identical shards. The same command resumes
a run that was stopped or killed after its last finished shard. To add a source of your own, see
`SOURCES` in `corpus/sources.py`.
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
from corpus.shards import WHOLE, Manifest, Part, ShardWriter
from corpus.sources import Cursor, Document, Source
from formats.hub import REPO_NAME
from runtime.cli import bad_numbers, format_count, parse_flags, run_command, shell_line
from runtime.files import lock_folder, read_json
from tokenizer import END_OF_TEXT, VOCAB_SHA256, TokenIds, encode_documents, gpt2_encoding

BATCH_CHARS = 1 << 20  # encoded together; a longer document makes a longer batch
RECIPES = Path(__file__).parent / "recipes"
LEAST_TOKENS = 2_570  # a tenth, which is validation, holds a window of the smallest recipe
DECAYED = 6  # rate x decay x steps, of the embeddings, which learn a small text by heart first
FILLING_TOKENS = 32_768  # of a micro-batch that keeps a GPU busy
MOST_PASSES = 5  # of a proposed run over the training split; ten spoil some small texts
OpenSource = Callable[[str | None], Source]  # of the commit that an earlier run read, if any


@dataclass(frozen=True)
class FineWebConfig:
    """Turn text into shards of GPT-2 tokens, the first of them for validation."""

    OTHER_NAMES: ClassVar = {"FILE": "--source"}

    source: tuple[str, ...] = ("fineweb-edu",)
    """`fineweb-edu`, `fineweb` or another hub data set (OWNER/NAME); `stdlib`, the running Python's
    standard library, which needs no network; or files, folders and globs. A row of .parquet, .csv,
    .tsv, .jsonl or .json (.gz, .zst) is a document; any other file is one, if it is UTF-8."""
    text_field: str = "text"
    """Column of tables and field of JSON lines that has the text, such as `content`."""
    name: str | None = None
    """Configuration of the hub data set; `sample-10BT` of fineweb and fineweb-edu."""
    data_dir: Path | None = None
    """Where the shards go; by default a folder in data/ named after the source."""
    shard_size: int = 100_000_000
    """Tokens in a full shard."""
    max_tokens: int | None = None
    """Keep at most this many tokens, such as 1e9 or 500M; a larger number later goes on from there.
    They are whole documents, validation included. Of `--parts`, each takes an equal share."""
    workers: int = field(default_factory=usable_cores)
    """Threads that tokenise."""
    revision: str | None = None
    """Commit, branch or tag of the hub data set; by default its newest or, in a rerun, the same."""
    part: int | None = None
    """Tokenise only this one of `--parts`, counted from 0."""
    parts: int | None = None
    """Processes that share the work, a `--part` each; the last to end writes the manifest."""

    def __post_init__(self) -> None:
        problems = bad_numbers(self, ("shard_size", "max_tokens", "workers", "parts"))
        if not (self.source and all(self.source)):  # "" would be the current folder
            problems.append("--source needs a value, such as fineweb-edu or stdlib")
        if problems:
            raise ValueError("; ".join(problems))
        if (self.part, self.parts) != (None, None) and self.part not in range(self.parts or 0):
            raise ValueError(f"--part {self.part} of --parts {self.parts}: give both, from 0 on")


def main() -> None:
    """Make a data set, resume it, or verify one that is finished."""
    config = assign_rank(parse_flags(FineWebConfig))
    name, open_source = find_source(config)
    folder = config.data_dir or Path("data") / name
    print(make_shards(config, open_source, folder))
    # Not before all parts are finished; an installed package has no recipes.
    if RECIPES.is_dir() and (manifest := Manifest.load(folder)):
        print(f"{describe_text(folder)}\n{propose_training(folder, manifest)}")


def assign_rank(config: FineWebConfig) -> FineWebConfig:
    """Under `torchrun`, a process's part is its rank."""
    if "RANK" not in os.environ:
        return config
    if config.parts is not None:
        raise ValueError("torchrun gives each of its processes a part: leave out --part, --parts")
    return replace(config, part=int(os.environ["RANK"]), parts=int(os.environ["WORLD_SIZE"]))


def make_shards(config: FineWebConfig, open_source: OpenSource, folder: Path) -> str:
    """Make or resume a data set, or a part of it, and return what to print."""
    part = Part(config.part or 0, config.parts or 1)
    with folder_lock(folder, part):
        found = shards.find_manifests(folder, config.max_tokens)
        if not found and any(folder.glob("[!.]*.npy")):
            raise ValueError(
                f"{folder} holds .npy files that fineweb.py did not make: choose another --data-dir"
            )
        source = open_source(found[0].source.get("revision") if found else None)
        tokens = min(filter(None, (config.max_tokens, source.tokens)), default=None)
        source, identity = replace(source, tokens=tokens), source.identity
        if config.text_field != "text":
            identity = identity | {"text field": config.text_field}
        expected = Manifest(identity, VOCAB_SHA256, config.shard_size, max_tokens=config.max_tokens)
        if found and found[0].part == WHOLE and found[0].has(config.max_tokens):
            shards.check_same_dataset(folder, found[0], expected)
            shards.verify_shards(folder, found[0].shards[part.index :: part.count])
            return summary(folder, found[0], found[0])
        for each in found:
            shards.check_same_dataset(folder, each, expected.of_part(each.part.index, part.count))
        earlier = Manifest.load(folder, part.manifest_name)
        manifest = earlier or expected.of_part(part.index, part.count)
        shards.verify_shards(folder, manifest.shards)
        if not manifest.has(config.max_tokens):
            if tokens and part.index == 0:
                print(describe_size(folder, tokens, identity["kind"] == "hub"))
            size = config.shard_size  # of shards that more tokens leave as they are
            full = tuple(itertools.takewhile(lambda shard: shard.tokens == size, manifest.shards))
            manifest = replace(manifest, shards=full, complete=False, max_tokens=config.max_tokens)
            manifest = write_shards(source, manifest, folder, config.workers)
    line = summary(folder, manifest, earlier)
    if part == WHOLE:
        return line
    left = shards.join_parts(folder, expected, part.count)
    state = f"part {left} of {part.count} not finished yet" if left else "all parts are finished"
    return f"{line}\n{folder}: {state}"


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


class Progress(NamedTuple):
    """A batch's first document, and what precedes it."""

    cursor: Cursor | None = None
    tokens: int = 0
    documents: int = 0
    skipped: int = 0


def write_shards(source: Source, manifest: Manifest, folder: Path, workers: int) -> Manifest:
    """Write all shards that `manifest` does not have yet, and return the finished manifest."""
    progress = Progress(**(manifest.progress or {}))
    limit, is_cut = (manifest.max_tokens or math.inf) / manifest.part.count, False
    writer = ShardWriter(folder, manifest)
    written = manifest.tokens - progress.tokens  # of the first batch, in finished shards
    total = source.tokens and source.tokens // manifest.part.count
    # A bar only on a terminal, and one for all of torchrun's processes.
    hidden = True if os.environ.get("RANK", "0") != "0" else None
    bar = tqdm(unit="tok", unit_scale=True, initial=progress.tokens, total=total, disable=hidden)
    with bar:
        documents = source.documents(progress.cursor, manifest.part)
        for batch, tokens in tokenize_documents(documents, workers):
            progress = progress._replace(cursor=batch[0].cursor)
            if is_cut := progress.tokens + len(tokens) > limit:
                # Only a first document, or a plain text after its first block, is cut in itself.
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
                None,  # the next batch has its own
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
    """Each batch of documents with its ids, (tokens,) uint16; empty documents have none."""
    batches, again = itertools.tee(_batches(documents))
    texts = ([document.text for document in batch if document.text] for batch in again)
    for batch, tokens in zip(batches, encode_documents(texts, workers), strict=True):
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


def describe_size(folder: Path, tokens: int, is_loaded: bool) -> str:
    """What so many tokens take in all."""
    line = f"{folder}: at most {format_count(tokens)} tokens, {2 * tokens / 1e9:.2g} GB on disk"
    line += f" ({shutil.disk_usage(folder).free / 1e9:,.0f} GB are free)"
    load = f"about {2.8 * tokens / 1e9:.2g} GB to download"  # FineWeb's Parquet files
    return f"{line}, {load}" if is_loaded else line


def summary(folder: Path, manifest: Manifest, earlier: Manifest | None) -> str:
    """The last line: what the folder, or a part, holds."""
    part = manifest.part
    what = str(folder) if part == WHOLE else f"{folder}, part {part.index} of {part.count}"
    documents = f"{manifest.documents:,} document{'s' * (manifest.documents != 1)}"
    if manifest.skipped:
        documents += f" ({manifest.skipped:,} empty left out)"
    line = f"{what}: {documents}, {manifest.tokens:,} tokens, {len(manifest.shards)} shards"
    return f"{line}; finished earlier, and unchanged" if manifest == earlier else line


def propose_training(folder: Path, manifest: Manifest) -> str:
    """The training that suits a data set and this machine, as a command, and how long it takes.

    It is by the largest recipe that makes few enough passes. The smallest one is shortened for less
    text, with half the batch that suits one pass over D tokens, 0.58 D^0.571 (Li et al. 2025).
    """
    if manifest.tokens < LEAST_TOKENS:
        few = f"warning: {manifest.tokens:,} tokens are too few to train on"
        return f"{few}: delete {folder}, and give {LEAST_TOKENS:,}, about 10 KB of English"

    import torch  # here, as these imports take seconds, which tokenising does without

    from runtime.distributed import DistInfo
    from training.config import TrainConfig, read_recipe
    from training.plan import describe_time, find_device

    max_tokens = MOST_PASSES * sum(s.tokens for s in manifest.shards if s.split == "train")
    recipes = dict[int, Path]()  # by the tokens of their runs
    for path in sorted(RECIPES.glob("gpt2-[0-9]*.json"), reverse=True):  # of two, -fast is later
        settings = read_json(path)
        recipes[settings["max_steps"] * settings["total_batch_size"]] = path
    path = recipes[max((n for n in recipes if n <= max_tokens), default=min(recipes))]
    recipe = read_recipe(path)
    shorter = list[str]()
    if max_tokens < min(recipes):
        batch = max(256, 2 ** round(math.log2(0.29 * max_tokens**0.571)))  # a sequence at least
        steps = max_tokens // batch
        shorter = ["--total-batch-size", str(batch), "--max-steps", str(steps)]
        shorter += ["--embedding-decay", f"{DECAYED / (recipe.max_lr * steps):.2g}"]
        shorter += ["--spelling-share", "0.3"]  # the rare words' gradients are few
        if (every := max(1, steps // 5)) < recipe.val_every:
            names = ("--val-every", "--sample-every", "--checkpoint-every")
            shorter += [each for name in names for each in (name, str(every))]
    config = parse_flags(TrainConfig, shorter, recipe)

    launcher, world_size = ["python"], torch.cuda.device_count() or 1
    while world_size > 1 and config.total_batch_size % (world_size * FILLING_TOKENS):
        world_size -= 1
    if world_size > 1:
        launcher = ["torchrun", "--standalone", f"--nproc_per_node={world_size}"]
    root = Path() if RECIPES.parent.samefile(Path()) else RECIPES.parent
    command = [*launcher, root / "train_gpt2.py", "--config", root / "recipes" / path.name]
    command += ["--data-dir", folder, "--run-name", folder.resolve().name, *shorter]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dist_info = DistInfo(device, world_size=world_size, local_world_size=world_size)
    planned = find_device(config, dist_info)
    duration = describe_time(config, config.model_config(), planned, dist_info)["time"]
    return f"next: {shell_line(*command)}\ntime: {duration}"


def describe_text(folder: Path) -> str:
    """What the losses of a finished data set compare with."""
    train, val = (shards.open_shards(folder, split) for split in ("train", "val"))
    (loss, bits), encoding = shards.unigram_loss(train, val), gpt2_encoding()
    line = f"loss: a model of token frequencies alone has {loss:.2f} nats per token, "
    line += f"{bits:.2f} bits per byte"
    sample = encoding.decode(val.read(0, 1 << 16).tolist()).replace("<|endoftext|>", " ")
    text = " ".join(sample.split())  # without the indents of code
    if (ratio := len(encoding.encode_ordinary(text)) / max(1, len(text))) > 0.5:
        line += f"\nwarning: {ratio:.2f} tokens per character, English has 0.25: GPT-2's tokenizer "
        line += "is made for English, and losses do not compare"
    return line


def find_source(config: FineWebConfig) -> tuple[str, OpenSource]:
    """What `--source` means: the name of its folder in data/, and the function that opens it."""
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
        raise ValueError(f"--source {' '.join(config.source)}: only files may be several")
    if first in sources.SOURCES:
        return first, lambda _: sources.SOURCES[first]()
    dataset = sources.FINEWEB.get(first, first)
    if not REPO_NAME.fullmatch(dataset):
        raise ValueError(
            f"--source {first} is not fineweb-edu, fineweb, {', '.join(sources.SOURCES)}, "
            f"a hub data set (OWNER/NAME), or a file or folder that is there"
        )
    subset = config.name or ("sample-10BT" if first in sources.FINEWEB else None)
    name = dataset.split("/")[1] + (f"-{subset.removeprefix('sample-')}" if subset else "")
    return name, lambda known: sources.hub_source(
        dataset, subset, config.revision, known, config.text_field
    )


if __name__ == "__main__":
    run_command(main)
