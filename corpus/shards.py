"""The on-disk token format: a folder of 1-D uint16 `.npy` shards and a manifest.

    data/fineweb-edu-10BT/
        val_000000.npy      the first shard is the validation split
        train_000001.npy    100M tokens each, the last one shorter
        ...
        manifest.json       where the tokens came from; tokens and SHA-256 of each shard

Of less than two full shards, validation is the first tenth of each of 20 equal pieces.

Processes that share the work each write shards of their own, such as `train_p00003_000001.npy`,
and a manifest of these, `part_00003_of_00032.json`. `manifest.json` then lists all shards, by part
and number.

A folder without a manifest opens too: each `.npy` file whose name has the word `train` or `val` is
a shard of that split; where no `.npy` file has, each such `.bin` file of llm.c or nanoGPT is.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from runtime.cli import shell_line
from runtime.files import atomic_write, read_json, sha256_of, write_json
from tokenizer import VOCAB_SIZE, token_bytes

Split = Literal["train", "val"]
TokenArray = npt.NDArray[np.uint16]

SHARD_DTYPE = np.dtype("<u2")
SHARD_MANIFEST = "manifest.json"
VAL_BLOCKS = 20  # of validation, a tenth of a corpus of fewer than two full shards
COUNTED_TOKENS = 10_485_760  # at most, of a split, by `unigram_loss`
LLM_C_MAGIC = (20240520).to_bytes(4, "little")
LLM_C_HEADER_BYTES = 1024  # 256 int32: magic, version, tokens, zeros
NANOGPT_VOCABULARY = "meta.pkl"  # next to nanoGPT's .bin files if their tokens are not GPT-2's
MAPPED_SHARDS = 128  # of a split; each mapped file keeps a descriptor, and macOS allows 256
TRAIN_WORD = re.compile(r"(?<![A-Za-z])train(ing)?(?![A-Za-z])")  # not in `constrained`
VAL_WORD = re.compile(r"(?<![A-Za-z])val(id|idation)?(?![A-Za-z])")


@dataclass(frozen=True)
class Part:
    """Part `index` of `count`: a process's share of a source, with files of its own names."""

    index: int = 0
    count: int = 1

    @property
    def manifest_name(self) -> str:
        """Of the manifest that lists the part's shards."""
        if self.count == 1:
            return SHARD_MANIFEST
        return f"part_{self.index:05}_of_{self.count:05}.json"

    @property
    def prefix(self) -> str:
        """Of the numbers of its shards, so that names sort by part and number."""
        return "" if self.count == 1 else f"p{self.index:05}_"


WHOLE = Part()


@dataclass(frozen=True)
class ShardInfo:
    """One shard's entry in the manifest: file name, split, tokens, SHA-256 of the file."""

    file: str
    split: Split
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a data folder holds, or a part of it, and where it came from."""

    source: dict[str, Any]
    """The `identity` of the source; a part's has `part` and `parts`, too."""
    tokenizer_sha256: str
    """Hash of the merges file that made the ids."""
    shard_size: int
    """Tokens in a full shard."""
    shards: tuple[ShardInfo, ...] = ()
    documents: int = 0
    """Documents with tokens; of an unfinished data set, those before `progress`."""
    skipped: int = 0
    """Empty documents, which have no tokens."""
    complete: bool = False
    max_tokens: int | None = None
    """Of the whole data set, the `--max-tokens` at which it ends; None if the source ends first."""
    progress: dict[str, Any] | None = None
    """Where the tokens after the full shards are, see `fineweb.Progress`; None is the start."""
    format: int = 1

    @property
    def tokens(self) -> int:
        """Tokens in finished shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def part(self) -> Part:
        """The part that it lists, or `WHOLE`."""
        return Part(self.source.get("part", 0), self.source.get("parts", 1))

    def has(self, max_tokens: int | None) -> bool:
        """Whether it is finished, with what `max_tokens` keeps of the source; None keeps all."""
        return self.complete and (self.max_tokens or math.inf) >= (max_tokens or math.inf)

    def of_part(self, index: int, count: int) -> "Manifest":
        """The same data set's manifest of a part."""
        if count == 1:
            return self
        return replace(self, source={**self.source, "part": index, "parts": count})

    def save(self, folder: Path) -> None:
        """Write the data set's manifest, or a part's, atomically."""
        write_json(folder / self.part.manifest_name, asdict(self))

    @classmethod
    def load(cls, folder: Path, name: str = SHARD_MANIFEST) -> "Manifest | None":
        """Read the data set's manifest, or a part's; None if there is none."""
        path = folder / name
        if not path.is_file():
            return None
        values = read_json(path)
        try:
            values["shards"] = tuple(ShardInfo(**shard) for shard in values["shards"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a shard manifest: {error}") from None


def find_manifests(folder: Path, max_tokens: int | None = 1) -> list[Manifest]:
    """The data set's manifest; without one that has `max_tokens`, those of the parts begun."""
    whole = Manifest.load(folder)
    names = sorted(path.name for path in folder.glob("part_*_of_*.json"))
    if not names or (whole is not None and whole.has(max_tokens)):
        names = [SHARD_MANIFEST]
    return [manifest for name in names if (manifest := Manifest.load(folder, name))]


def join_parts(folder: Path, manifest: Manifest, count: int) -> list[int]:
    """Write a data set's manifest once its `count` parts are finished; returns those that are not.

    The shards stay where they are. `manifest` says what the data set is, and has no shards.
    """
    parts = [Manifest.load(folder, Part(i, count).manifest_name) for i in range(count)]
    done = [part for part in parts if part is not None and part.has(manifest.max_tokens)]
    if len(done) == count:
        replace(
            manifest,
            shards=tuple(shard for part in done for shard in part.shards),
            documents=sum(part.documents for part in done),
            skipped=sum(part.skipped for part in done),
            complete=True,
            max_tokens=min((part.max_tokens for part in done if part.max_tokens), default=None),
        ).save(folder)
    return sorted({*range(count)} - {part.part.index for part in done})


def check_same_dataset(folder: Path, found: Manifest, expected: Manifest) -> None:
    """Refuse to mix two data sets in one folder."""
    was, asked = _fixed_values(found), _fixed_values(expected)
    for name in was | asked:
        if (old := was.get(name)) != (new := asked.get(name)):
            if name.startswith("file "):  # without their hashes
                old, new = (file and file["name"] for file in (old, new))
            change = f"{name} {old} instead of {new}" if old != new else f"{old} before an edit"
            raise ValueError(
                f"{folder} holds other data, {change}: choose another --data-dir, or delete it"
            )


def _fixed_values(manifest: Manifest) -> dict[str, Any]:
    """The values, by name, that must be the same when a run is resumed."""
    source = {name: value for name, value in manifest.source.items() if name != "files"}
    files = {f"file {i}": file for i, file in enumerate(manifest.source.get("files", ()), 1)}
    settings = {"shard size": manifest.shard_size, "tokenizer": manifest.tokenizer_sha256}
    return source | files | settings


class ShardWriter:
    """Cut a stream of tokens into shard files, and record each finished shard in the manifest.

    The first shard is the validation split. Nothing is written before there are two full shards:
    of a smaller corpus, validation is `VAL_BLOCKS` equally spaced blocks, a tenth in all. At most
    two shards of tokens are in memory, of a smaller corpus twice. Of the parts of a data set, only
    the first has a validation split; the others may have no tokens at all. If `manifest` has shards
    already, the tokens after theirs are to be added.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._kept = len(manifest.shards)
        self._splits = manifest.part.index == 0 and not manifest.shards
        self._buffer = np.empty((2 if self._splits else 1) * manifest.shard_size, SHARD_DTYPE)
        self._filled = 0

    def add(self, tokens: TokenArray, **progress: Any) -> None:  # noqa: ANN401 - fields' values
        """Append tokens and write every shard that they fill; the manifest then has `progress`."""
        finished = len(self.manifest.shards)
        while len(tokens):
            taken = tokens[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            tokens = tokens[len(taken) :]
            if self._filled == len(self._buffer):
                self._write_buffer()
        if len(self.manifest.shards) > finished:
            self._save(**progress)

    def close(self, **end: Any) -> Manifest:  # noqa: ANN401 - fields' values
        """Write the remaining tokens and the manifest of the finished data set, with `end`."""
        if self._splits and self._filled < 2:
            raise ValueError(f"the corpus has {self._filled} tokens: too few for two splits")
        self._write_buffer()
        self._save(**end, complete=True)
        return self.manifest

    def _write_buffer(self) -> None:
        size = self.manifest.shard_size
        tokens = self._buffer[: self._filled]
        if len(self.manifest.shards) == self._kept:  # shards of no or another manifest are refused
            self._save()
        if self._splits:
            if self._filled == 2 * size:
                val, tokens = np.split(tokens, [size])
            else:
                pieces = np.array_split(tokens, 10 * VAL_BLOCKS)
                val = np.concatenate(pieces[::10])
                del pieces[::10]
                tokens = np.concatenate(pieces)
            self._write("val", val)
            self._splits = False
        for start in range(0, len(tokens), size):
            self._write("train", tokens[start : start + size])
        self._buffer = self._buffer[:size]
        self._filled = 0

    def _write(self, split: Split, tokens: TokenArray) -> None:
        number = len(self.manifest.shards)
        path = self.folder / f"{split}_{self.manifest.part.prefix}{number:06}.npy"
        with atomic_write(path) as file:
            # Not np.save: it ignores an error of its last write, which a full disk causes.
            header = np.lib.format.header_data_from_array_1_0(tokens)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(tokens.data)
        info = ShardInfo(path.name, split, len(tokens), sha256_of(path))
        self.manifest = replace(self.manifest, shards=(*self.manifest.shards, info))

    def _save(self, **values: Any) -> None:  # noqa: ANN401 - fields' values
        if self.manifest.part != WHOLE:  # whose manifest may list shards that change
            (self.folder / SHARD_MANIFEST).unlink(missing_ok=True)
        self.manifest = replace(self.manifest, **values)
        self.manifest.save(self.folder)


class TokenShards:
    """All shards of one split, memory-mapped, read as one long array of tokens.

    The fingerprint changes when the tokens do; without a manifest, when the files' names, sizes or
    first 64 KiB do.
    """

    def __init__(self, paths: list[Path], fingerprint: str) -> None:
        self.paths = paths
        self.fingerprint = fingerprint
        # Headers are read here, once: NumPy parses them, which two threads of Python 3.11 cannot do
        # at the same time (cpython#106905), and the loader's thread maps the shards.
        headers = [(len(tokens), tokens.offset) for tokens in map(_map_shard, paths)]
        self.lengths = [length for length, _ in headers]
        self.offsets = np.cumsum([0, *self.lengths])

        @lru_cache(MAPPED_SHARDS)
        def map_tokens(shard: int) -> TokenArray:
            length, offset = headers[shard]
            return np.memmap(paths[shard], SHARD_DTYPE, "r", offset, shape=(length,))

        self._map = map_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens in all shards of the split."""
        return int(self.offsets[-1])

    def locate(self, index: int) -> tuple[Path, int]:
        """The shard that has a token, and where it is in there."""
        shard = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return self.paths[shard], index - int(self.offsets[shard])

    def read(self, start: int, count: int) -> TokenArray:
        """Copy tokens [start, start + count) or, at the end, fewer, from as many shards: uint16."""
        tokens = np.empty(count := min(count, self.total_tokens - start), SHARD_DTYPE)
        filled = 0
        shard = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while filled < count:
            begin = start + filled - int(self.offsets[shard])
            piece = self._map(shard)[begin : begin + count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return tokens


def open_shards(folder: Path | str, split: Split) -> TokenShards:
    """Open one split of a data folder, and check each file's dtype, shape and size.

    `verify_shards` compares the hashes, and the loader checks every id that it reads.
    """
    folder = Path(folder)
    manifests = find_manifests(folder)
    if manifests and not (manifests[0].part == WHOLE and manifests[0].complete):
        raise ValueError(f"{folder} is not finished: run the same python fineweb.py again")
    infos = [info for found in manifests for info in found.shards if info.split == split]
    paths = [folder / info.file for info in infos] if manifests else _find_shards(folder, split)
    if folder.is_file():
        make = shell_line("python", "fineweb.py", "--source", folder)
        raise ValueError(f"{folder} is a file: {make} makes a folder of shards, and names it")
    if not paths:
        is_there = folder.is_dir()
        missing = f"{folder} has no {split} shards" if is_there else f"no data folder {folder}"
        raise FileNotFoundError(
            f"{missing}; python fineweb.py --source stdlib makes data/stdlib (11 MB, seconds, no "
            f"network), python fineweb.py makes data/fineweb-edu-10BT (20 GB), and shards of the "
            f"hub come by hf download OWNER/NAME --repo-type dataset --local-dir {folder}"
        )
    shards = TokenShards(paths, _fingerprint(infos, paths))
    for info, length in zip(infos, shards.lengths, strict=False):  # no infos without a manifest
        if length != info.tokens:
            raise ValueError(
                f"{folder / info.file} has {length:,} tokens, the manifest says {info.tokens:,}: "
                f"delete {folder} and run python fineweb.py again"
            )
    return shards


def unigram_loss(train: TokenShards, val: TokenShards) -> tuple[float, float]:
    """Return the loss of a unigram model on validation tokens: nats per token, bits per byte.

    The model is the counts of training tokens, with add-one smoothing.
    """
    counts = 1 + np.bincount(train.read(0, COUNTED_TOKENS), minlength=1 << 16)  # of every uint16
    losses = np.log(counts[:VOCAB_SIZE].sum()) - np.log(counts)
    ids = val.read(0, COUNTED_TOKENS)
    bits = losses[ids].sum() / math.log(2)
    return float(losses[ids].mean()), float(bits / max(1, token_bytes(len(counts))[ids].sum()))


def verify_shards(folder: Path, infos: Iterable[ShardInfo]) -> None:
    """Check shards of a data folder against their entries in the manifest, byte for byte."""
    for info in infos:
        path = folder / info.file
        if not path.is_file() or sha256_of(path) != info.sha256:
            raise ValueError(
                f"{path} has changed since it was written, or is gone: if it was downloaded, "
                f"delete it and run hf download again; else delete {folder} and run python "
                f"fineweb.py again"
            )


def _find_shards(folder: Path, split: Split) -> list[Path]:
    """The shards of a folder without a manifest, by their names, such as `a_train000.bin`."""
    for kind in ("npy", "bin"):
        files = sorted(folder.glob(f"[!.]*.{kind}"))  # hidden ones are nobody's
        val = [path for path in files if VAL_WORD.search(path.name)]
        train = [path for path in files if TRAIN_WORD.search(path.name) and path not in val]
        if (train or val) and kind == "bin" and (folder / NANOGPT_VOCABULARY).exists():
            raise ValueError(
                f"{folder / NANOGPT_VOCABULARY} gives the .bin files a vocabulary of their own, "
                f"not GPT-2's: make shards of the text by python fineweb.py"
            )
        if train or val:
            return train if split == "train" else val
    return []


def _map_shard(path: Path) -> np.memmap:
    if path.suffix == ".bin":
        return _map_bin(path)
    try:
        # What np.load does with mmap_mode, for .npy files only. It refuses pickled objects.
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header brings errors of many kinds
        raise ValueError(
            f"{path} cannot be read as a token shard, make or download it again: {error}"
        ) from None
    if array.dtype != SHARD_DTYPE or array.ndim != 1 or not len(array):
        raise ValueError(
            f"{path} is not a token shard: expected 1-D uint16 with at least one token, "
            f"found {array.dtype} of shape {array.shape}"
        )
    return array


def _map_bin(path: Path) -> np.memmap:
    """Map the tokens of llm.c, which follow a header, or of nanoGPT, which have none."""
    size, offset = path.stat().st_size, 0
    with path.open("rb") as file:
        header = file.read(LLM_C_HEADER_BYTES)
    expected = size // SHARD_DTYPE.itemsize
    if header.startswith(LLM_C_MAGIC):
        offset, expected = LLM_C_HEADER_BYTES, int.from_bytes(header[8:12], "little")
    if not expected or size != offset + expected * SHARD_DTYPE.itemsize:
        raise ValueError(f"{path} has {size:,} bytes, which are no uint16 tokens: copy it again")
    return np.memmap(path, SHARD_DTYPE, "r", offset)


def _fingerprint(infos: list[ShardInfo], paths: list[Path]) -> str:
    """A hash of the split's content: of the manifest's hashes, else of sizes and file heads."""
    values: list[Any] = [[info.tokens, info.sha256] for info in infos]
    for path in paths if not infos else ():
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(1 << 16)).hexdigest()
        values.append([path.name, path.stat().st_size, head])
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
