"""The on-disk token format: a folder of 1-D uint16 `.npy` shards and a manifest.

    data/fineweb-edu-10BT/
        val_000000.npy      the first shard is the validation split
        train_000001.npy    100M tokens each, the last one shorter
        ...
        manifest.json       where the tokens came from; tokens and SHA-256 of each shard

A folder of `*train*.npy` and `*val*.npy` files without a manifest opens too.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from runtime.files import atomic_write, check_types, is_plain_name, read_json, sha256_of, write_json

Split = Literal["train", "val"]
TokenArray = npt.NDArray[np.uint16]

SHARD_DTYPE = np.dtype("<u2")
MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = 1
PARTS_FOLDER = "parts"  # in a data folder: what several machines have tokenised of it
SMALL_VAL_FRACTION = 0.1  # validation's share of a corpus that has not two full shards
SCAN_BLOCK_TOKENS = 1 << 24
MANIFEST_TYPES = {
    "source": dict,
    "tokenizer_sha256": str,
    "shard_size": int,
    "documents": int,
    "skipped": int,
    "complete": bool,
}
PROGRESS_TYPES = {"cursor": dict, "tokens": int, "documents": int, "skipped": int}


@dataclass(frozen=True)
class ShardInfo:
    """One shard's entry in the manifest: file name, split, tokens, SHA-256 of the file."""

    file: str
    split: Split
    tokens: int
    sha256: str

    def __post_init__(self) -> None:
        if not is_plain_name(self.file):
            raise ValueError(f"{self.file!r} is not the plain name of a file")
        if self.split not in ("train", "val"):
            raise ValueError(f"{self.file}: split is {self.split!r}, not 'train' or 'val'")
        check_types(vars(self), {"tokens": int, "sha256": str})


@dataclass(frozen=True)
class Manifest:
    """What a data folder holds and where it came from."""

    source: dict[str, Any]
    """What the tokens were made from, with its revision; see `fineweb.py`."""
    tokenizer_sha256: str
    """Hash of the merges file that made the ids."""
    shard_size: int
    """Tokens in a full shard."""
    shards: tuple[ShardInfo, ...] = ()
    documents: int = 0
    """Documents with tokens; of an unfinished data set, those before `progress`."""
    skipped: int = 0
    """Documents left out because they were empty."""
    complete: bool = False
    progress: dict[str, Any] | None = None
    """Where an interrupted run goes on, see `PROGRESS_TYPES`; None once complete."""
    format: int = field(default=MANIFEST_FORMAT)

    def __post_init__(self) -> None:
        check_types(vars(self), MANIFEST_TYPES)
        if self.progress is not None:
            check_types(vars(self), {"progress": dict})
            check_types(self.progress, PROGRESS_TYPES)

    def save(self, folder: Path) -> None:
        """Write `manifest.json`, atomically."""
        write_json(folder / MANIFEST_NAME, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Manifest | None":
        """Read a folder's manifest; None if it has none.

        Raises:
            ValueError: the file is not a manifest of this format.
        """
        path = folder / MANIFEST_NAME
        if not path.is_file():
            return None
        values = read_json(path)
        try:
            if values["format"] != MANIFEST_FORMAT:
                raise ValueError(f"format {values['format']} is not {MANIFEST_FORMAT}")
            values["shards"] = tuple(ShardInfo(**shard) for shard in values["shards"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a shard manifest: {error}") from None


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a finished data set, by its manifest."""
    manifest = Manifest.load(folder)
    return manifest is not None and manifest.complete


def check_same_dataset(folder: Path, earlier: Manifest, asked: Manifest) -> None:
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


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Name the folder that cannot be written: the error of a full disk names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{folder} cannot be written ({error.strerror or error}), perhaps for want of room; "
            "what was finished stays: give the same command again to go on"
        ) from None


class ShardWriter:
    """Cut a stream of tokens into shard files, the first of them the validation split.

    Nothing is written before two full shards are there, so that a smaller corpus can be split
    into `SMALL_VAL_FRACTION` validation and the rest training. At most two shards of tokens are
    held in memory.

    Args:
        folder: where the shards go.
        shard_size: tokens in a full shard.
        finished: the shards that an earlier, interrupted run already wrote.
        splits: whether to make both; else all is training, and there may be nothing.
    """

    def __init__(
        self,
        folder: Path,
        shard_size: int,
        finished: tuple[ShardInfo, ...] = (),
        splits: bool = True,
    ) -> None:
        self.folder = folder
        self.shard_size = shard_size
        self.splits = splits
        self.shards = list(finished)
        one_at_a_time = finished or not splits
        self._buffer = np.empty(shard_size if one_at_a_time else 2 * shard_size, SHARD_DTYPE)
        self._filled = 0

    @property
    def tokens_written(self) -> int:
        """Tokens in finished shards; what was added beyond them is still in memory."""
        return sum(shard.tokens for shard in self.shards)

    def add(self, tokens: TokenArray) -> None:
        """Append tokens, writing every shard that they fill."""
        while len(tokens):
            taken = tokens[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            tokens = tokens[len(taken) :]
            if self._filled == len(self._buffer):
                self._flush()

    def close(self) -> None:
        """Write what is left: the last training shard or, of a small corpus, both splits.

        Raises:
            ValueError: there are not two tokens to make two splits of.
        """
        rest = self._buffer[: self._filled]
        if self.shards or not self.splits:
            if len(rest):
                self._write("train", rest)
            return
        if len(rest) < 2:
            raise ValueError(f"the corpus has {len(rest)} tokens: too few for two splits")
        val_tokens = max(1, min(self.shard_size, round(len(rest) * SMALL_VAL_FRACTION)))
        self._write("val", rest[:val_tokens])
        for start in range(val_tokens, len(rest), self.shard_size):
            self._write("train", rest[start : start + self.shard_size])

    def _flush(self) -> None:
        """Write the full buffer: the first two shards together, then one at a time."""
        for start in range(0, self._filled, self.shard_size):
            split: Split = "train" if self.shards or not self.splits else "val"
            self._write(split, self._buffer[start : start + self.shard_size])
        self._buffer = self._buffer[: self.shard_size]
        self._filled = 0

    def _write(self, split: Split, tokens: TokenArray) -> None:
        path = self.folder / f"{split}_{len(self.shards):06d}.npy"
        with atomic_write(path) as file:
            # Not np.save: it ignores the error of its last write, which a full disk makes.
            header = np.lib.format.header_data_from_array_1_0(tokens)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(tokens.data)
        self.shards.append(ShardInfo(path.name, split, len(tokens), sha256_of(path)))


class TokenShards:
    """All shards of one split, memory-mapped, read as one long array of tokens.

    Args:
        paths: the shard files, in order; each must be a 1-D uint16 `.npy` array.
        fingerprint: a hash that changes when the tokens do.

    Raises:
        ValueError: a file is not such an array; the message names it.
    """

    def __init__(self, paths: list[Path], fingerprint: str) -> None:
        self.paths = paths
        self.fingerprint = fingerprint
        self.arrays = [_open_shard(path) for path in paths]
        self.offsets = np.cumsum([0] + [len(array) for array in self.arrays])

    @property
    def total_tokens(self) -> int:
        """Tokens in all shards of the split."""
        return int(self.offsets[-1])

    def read(self, start: int, count: int) -> TokenArray:
        """Copy tokens [start, start + count), across shard edges where need be.

        Returns:
            (count,) uint16.
        """
        tokens = np.empty(count, SHARD_DTYPE)
        filled = 0
        shard = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while filled < count:
            begin = start + filled - int(self.offsets[shard])
            piece = self.arrays[shard][begin : begin + count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return tokens

    def locate(self, position: int) -> str:
        """The shard and the offset in it of a position in the split, for messages."""
        shard = int(np.searchsorted(self.offsets, position, side="right")) - 1
        return f"{self.paths[shard]}, offset {position - int(self.offsets[shard])}"

    def check_ids(self, vocab_size: int) -> None:
        """Read every token and refuse ids that no tokenizer of `vocab_size` ids makes.

        Raises:
            ValueError: an id is too large; the message gives its shard and offset.
        """
        for start in range(0, self.total_tokens, SCAN_BLOCK_TOKENS):
            count = min(SCAN_BLOCK_TOKENS, self.total_tokens - start)
            self.check_tokens(self.read(start, count), start, vocab_size)

    def check_tokens(self, tokens: TokenArray, start: int, vocab_size: int) -> None:
        """Refuse ids >= `vocab_size` in `tokens`, which were read from position `start`.

        Raises:
            ValueError: as `check_ids`.
        """
        if int(tokens.max()) < vocab_size:
            return
        first = int(np.argmax(tokens >= vocab_size))
        raise ValueError(
            f"{self.locate(start + first)}: token id {tokens[first]} is not below "
            f"{vocab_size}; these are not GPT-2 tokens, or the file is damaged"
        )


def open_shards(folder: Path, split: Split, vocab_size: int = 50257) -> TokenShards:
    """Open one split of a data folder and check what can be checked quickly.

    Every file's type, shape and, where there is a manifest, size are checked, and the hash of each
    that is newer than the manifest. A folder without a manifest has its ids read through once,
    since nothing vouches for them. A shard may be a link to another disk: it is its content that
    is checked.

    Args:
        folder: the data folder.
        split: `train` or `val`.
        vocab_size: ids must be below this.

    Raises:
        FileNotFoundError: the folder or the split is missing.
        ValueError: the data set is unfinished, or a shard is not as it should be.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no data folder {folder}: make it with python fineweb.py --data-dir {folder}"
        )
    manifest = Manifest.load(folder)
    if manifest is not None and not manifest.complete:
        raise ValueError(f"{folder} is not finished: run the same python fineweb.py again")
    if manifest is None:
        paths = sorted(folder.glob(f"*{split}*.npy"))
        infos = []
    else:
        infos = [shard for shard in manifest.shards if shard.split == split]
        paths = [folder / info.file for info in infos]
    if not paths:
        unmerged = (folder / PARTS_FOLDER).exists()
        advice = ": merge its parts by fineweb.py --parts N" if unmerged else ""
        raise FileNotFoundError(f"{folder} has no {split} shards (*{split}*.npy){advice}")
    shards = TokenShards(paths, _fingerprint(infos, paths))
    if manifest is None:
        shards.check_ids(vocab_size)
        return shards
    finished_ns = (folder / MANIFEST_NAME).stat().st_mtime_ns
    for info, path, array in zip(infos, paths, shards.arrays, strict=True):
        if len(array) != info.tokens:
            raise ValueError(
                f"{path} has {len(array):,} tokens, the manifest says {info.tokens:,}: "
                f"delete {folder} and run python fineweb.py again"
            )
        if path.stat().st_mtime_ns >= finished_ns:  # copied after it, or changed
            _check_hash(path, info)
    return shards


def verify_shards(folder: Path) -> Manifest:
    """Check every shard of a data folder against its manifest, byte for byte.

    Raises:
        FileNotFoundError: a shard, or the manifest itself, is missing.
        ValueError: a shard's hash is not the manifest's.
    """
    manifest = Manifest.load(folder)
    if manifest is None:
        raise FileNotFoundError(f"{folder} has no {MANIFEST_NAME}")
    for shard in manifest.shards:
        verify_shard(folder / shard.file, shard)
    return manifest


def verify_shard(path: Path, info: ShardInfo) -> None:
    """Check one shard against its entry in the manifest, byte for byte.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: its hash is not the manifest's.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: delete {path.parent} and run python fineweb.py again"
        )
    _check_hash(path, info)


def _check_hash(path: Path, info: ShardInfo) -> None:
    if sha256_of(path) != info.sha256:
        raise ValueError(
            f"{path} has changed since it was written: "
            f"delete {path.parent} and run python fineweb.py again"
        )


def _open_shard(path: Path) -> TokenArray:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # refuses objects, which are pickled
    except Exception as error:  # a damaged header brings errors of many kinds
        raise ValueError(f"{path} cannot be read as a token shard: {error}") from None
    if array.dtype != SHARD_DTYPE or array.ndim != 1 or not len(array):
        raise ValueError(
            f"{path} is not a token shard: want 1-D uint16 with at least one token, "
            f"found {array.dtype} of shape {array.shape}"
        )
    return array


def _fingerprint(infos: list[ShardInfo], paths: list[Path]) -> str:
    """A hash of the split's content: of the manifest's hashes, else of sizes and file heads."""
    if infos:
        parts: list[Any] = [[info.tokens, info.sha256] for info in infos]
    else:
        parts = [[path.name, path.stat().st_size, _head_sha256(path)] for path in paths]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _head_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(1 << 16)).hexdigest()
