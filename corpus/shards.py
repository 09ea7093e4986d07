"""The on-disk token format: a folder of 1-D uint16 `.npy` shards and a manifest.

    data/fineweb-edu-10BT/
        val_000000.npy      the first shard is the validation split
        train_000001.npy    100M tokens each, the last one shorter
        ...
        manifest.json       where the tokens came from; tokens and SHA-256 of each shard

A folder without a manifest opens too: each `.npy` file whose name has the word `train` or `val` is
a shard of that split, and so is each `.bin` file of llm.c or nanoGPT. No shard is ever written to.
"""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from runtime.files import atomic_write, check_types, is_plain_name, read_json, sha256_of, write_json

Split = Literal["train", "val"]
TokenArray = npt.NDArray[np.uint16]

SHARD_DTYPE = np.dtype("<u2")
SHARD_MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
PARTS_FOLDER = "parts"  # in a data folder: the parts that several machines have tokenised
SMALL_VAL_FRACTION = 0.1  # validation's share of a corpus of fewer than two full shards
LLM_C_MAGIC = (20240520).to_bytes(4, "little")  # no GPT-2 tokens: as uint16, one id is too large
LLM_C_VERSION = 1
LLM_C_HEADER_BYTES = 1024  # 256 int32: magic, version, tokens, zeros
NANOGPT_VOCABULARY = "meta.pkl"  # next to nanoGPT's .bin files if their tokens are not GPT-2's
SCAN_BLOCK_TOKENS = 1 << 24
OPEN_FILES = 1 << 14  # asked of the system; sample-350BT has 3,620 shards
SPLIT_WORDS: dict[Split, re.Pattern[str]] = {
    "train": re.compile(r"(?<![A-Za-z])train(ing)?(?![A-Za-z])"),  # not in `constrained`
    "val": re.compile(r"(?<![A-Za-z])val(id|idation)?(?![A-Za-z])"),
}
HOW_TO_MAKE_DATA = (
    "python fineweb.py --source stdlib makes data/stdlib (11 MB, seconds, no network), "
    "python fineweb.py makes data/fineweb-edu-10BT (20 GB)"
)
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
    progress: dict[str, Any] | None = None
    """Where an interrupted run resumes, see `PROGRESS_TYPES`; None once complete."""
    format: int = MANIFEST_FORMAT

    def __post_init__(self) -> None:
        check_types(vars(self), MANIFEST_TYPES)
        if self.progress is not None:
            check_types(vars(self), {"progress": dict})
            check_types(self.progress, PROGRESS_TYPES)

    def save(self, folder: Path) -> None:
        """Write `manifest.json`, atomically."""
        write_json(folder / SHARD_MANIFEST, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Manifest | None":
        """Read a folder's manifest; None if it has none.

        Raises:
            ValueError: the file is not a manifest of this format.
        """
        path = folder / SHARD_MANIFEST
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


def check_same_dataset(folder: Path, found: Manifest, expected: Manifest) -> None:
    """Refuse to mix two data sets in one folder.

    Raises:
        ValueError: naming the first difference.
    """
    files_read = None if found.progress is None else found.progress["cursor"].get("file")
    was, asked = _fixed_values(found, files_read), _fixed_values(expected, files_read)
    for name in was | asked:
        if was.get(name) != asked.get(name):
            raise ValueError(
                f"{folder} holds other data, {name} {was.get(name)} instead of "
                f"{asked.get(name)}: choose another --data-dir, or delete it"
            )


def _fixed_values(manifest: Manifest, files_read: int | None) -> dict[str, Any]:
    """The values, by name, that must be the same when a run is resumed."""
    # After the first `files_read` files, a size may change: the user may have repaired a bad row.
    values = {key: value for key, value in manifest.source.items() if key != "files"}
    for i, file in enumerate(manifest.source.get("files", [])):
        size = "" if files_read is not None and i >= files_read else f" of {file['bytes']} bytes"
        values[f"file {i + 1}"] = file["name"] + size
    return values | {"shard size": manifest.shard_size, "tokenizer": manifest.tokenizer_sha256}


@contextmanager
def _naming_full_disk(folder: Path) -> Iterator[None]:
    """Name the folder that cannot be written: the error of a full disk names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{folder} cannot be written ({error.strerror or error}), perhaps its disk is full; "
            "finished shards stay: give the same command again to resume"
        ) from None


class ShardWriter:
    """Cut a stream of tokens into shard files, and record each finished shard in the manifest.

    The first shard is the validation split. Nothing is written before there are two full shards,
    so that a smaller corpus can be split into `SMALL_VAL_FRACTION` validation and the rest
    training. At most two shards of tokens are in memory.

    Args:
        folder: gets the shards and the manifest.
        manifest: of a new data set, or of an unfinished one, whose next tokens are then added.
        splits: False for a part of a data set: all shards are training, and there may be none.

    Raises:
        OSError: (of every method) the disk is full; finished shards stay.
    """

    def __init__(self, folder: Path, manifest: Manifest, splits: bool = True) -> None:
        self.folder = folder
        self.manifest = manifest
        self.splits = splits
        shards_held = 1 if manifest.shards or not splits else 2
        self._buffer = np.empty(shards_held * manifest.shard_size, SHARD_DTYPE)
        self._filled = 0
        self._save()

    @property
    def tokens_written(self) -> int:
        """Tokens in finished shards; later ones are still in memory."""
        return sum(shard.tokens for shard in self.manifest.shards)

    def add(self, tokens: TokenArray, **progress: Any) -> None:  # noqa: ANN401 - fields' values
        """Append tokens and write every shard that they fill.

        Args:
            tokens: (tokens,) uint16.
            progress: values for the manifest that records a shard of these tokens.
        """
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

    def close(self, documents: int = 0, skipped: int = 0) -> Manifest:
        """Write the remaining tokens and the manifest of the finished data set.

        Raises:
            ValueError: there are not two tokens to make two splits of.
        """
        if self.splits and not self.manifest.shards and self._filled < 2:
            raise ValueError(f"the corpus has {self._filled} tokens: too few for two splits")
        self._write_buffer()
        self._save(documents=documents, skipped=skipped, complete=True, progress=None)
        return self.manifest

    def _write_buffer(self) -> None:
        size = self.manifest.shard_size
        tokens = self._buffer[: self._filled]
        if self.splits and not self.manifest.shards:
            is_full = self._filled == 2 * size
            count = size if is_full else max(1, round(self._filled * SMALL_VAL_FRACTION))
            self._write("val", tokens[:count])
            tokens = tokens[count:]
        for start in range(0, len(tokens), size):
            self._write("train", tokens[start : start + size])
        self._buffer = self._buffer[:size]
        self._filled = 0

    def _write(self, split: Split, tokens: TokenArray) -> None:
        path = self.folder / f"{split}_{len(self.manifest.shards):06d}.npy"
        with _naming_full_disk(self.folder), atomic_write(path) as file:
            # Not np.save: it ignores an error of its last write, which a full disk causes.
            header = np.lib.format.header_data_from_array_1_0(tokens)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(tokens.data)
        info = ShardInfo(path.name, split, len(tokens), sha256_of(path))
        self.manifest = replace(self.manifest, shards=(*self.manifest.shards, info))

    def _save(self, **values: Any) -> None:  # noqa: ANN401 - fields' values
        self.manifest = replace(self.manifest, **values)
        with _naming_full_disk(self.folder):
            self.manifest.save(self.folder)


class TokenShards:
    """All shards of one split, memory-mapped, read as one long array of tokens.

    A mapped file keeps a descriptor, of which a process may have few: of more shards than that,
    those that were read last stay mapped. Threads may share the object.

    Args:
        paths: the shard files, in order; each must be a 1-D uint16 `.npy` array, or a `.bin` file
            of llm.c or nanoGPT.
        fingerprint: a hash that changes when the tokens do; without a manifest, when the files'
            names, sizes or first 64 KiB do.

    Raises:
        ValueError: (of every method) a file is not such an array, or no longer the one that it
            was; the message names it.
    """

    def __init__(self, paths: list[Path], fingerprint: str) -> None:
        self.paths = paths
        self.fingerprint = fingerprint
        sizes: dict[Path, int] = {}

        @lru_cache(_max_open_shards())
        def open_shard(path: Path) -> TokenArray:
            array = _open_shard(path)
            if len(array) != sizes.setdefault(path, len(array)):
                raise ValueError(
                    f"{path} has changed since the run began: put it back, then resume the run"
                )
            return array

        self._open_shard = open_shard
        self.lengths = [len(open_shard(path)) for path in paths]
        self.offsets = np.cumsum([0, *self.lengths])

    @property
    def total_tokens(self) -> int:
        """Tokens in all shards of the split."""
        return int(self.offsets[-1])

    def describe(self) -> list[str]:
        """One line for each shard and one for the fingerprint, to compare over ranks."""
        shards = zip(self.paths, self.lengths, strict=True)
        lines = [f"{path} of {length:,} tokens" for path, length in shards]
        return [*lines, f"fingerprint {self.fingerprint}"]

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
            piece = self._open_shard(self.paths[shard])[begin : begin + count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return tokens

    def check_file(self, path: Path, vocab_size: int) -> None:
        """Refuse a shard with an id >= `vocab_size`; the message gives the id's offset."""
        shard = self.paths.index(path)
        end = int(self.offsets[shard + 1])
        for start in range(int(self.offsets[shard]), end, SCAN_BLOCK_TOKENS):
            tokens = self.read(start, min(SCAN_BLOCK_TOKENS, end - start))
            self.check_tokens(tokens, start, vocab_size)

    def check_tokens(self, tokens: TokenArray, start: int, vocab_size: int) -> None:
        """Refuse ids >= `vocab_size` in `tokens`, which were read from position `start`.

        Raises:
            ValueError: an id is too large; the message gives its shard and offset.
        """
        if int(tokens.max()) < vocab_size:
            return
        first = int(np.argmax(tokens >= vocab_size))
        shard = int(np.searchsorted(self.offsets, start + first, side="right")) - 1
        raise ValueError(
            f"{self.paths[shard]}, offset {start + first - int(self.offsets[shard])}: "
            f"token id {tokens[first]} is not below {vocab_size}; "
            f"these are not GPT-2 tokens, or the file is damaged"
        )


def open_shards(folder: Path | str, split: Split, vocab_size: int = 50257) -> TokenShards:
    """Open one split of a data folder and check what can be checked quickly.

    Every file's dtype, shape and, where there is a manifest, size are checked, and the hash of each
    file that is newer than the manifest; without a manifest, all ids. A file is read for this once:
    the result is remembered. A shard may be a link to another disk: its content is checked.

    Raises:
        FileNotFoundError: the folder or the split is missing; the message names other data folders.
        ValueError: the data set is unfinished, or a shard is damaged.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    if manifest is not None and not manifest.complete:
        raise ValueError(f"{folder} is not finished: run the same python fineweb.py again")
    infos = [shard for shard in manifest.shards if shard.split == split] if manifest else []
    paths = [folder / info.file for info in infos]
    if manifest is None:
        paths = _shards_by_name(folder, split)
    if not paths:
        raise FileNotFoundError(_explain_missing(folder, split))
    shards = TokenShards(paths, _fingerprint(infos, paths))
    if manifest is None:
        with _unchecked(folder, split, dict.fromkeys(paths, vocab_size)) as unchecked:
            for path in unchecked:
                shards.check_file(path, vocab_size)
        return shards
    finished_ns = (folder / SHARD_MANIFEST).stat().st_mtime_ns
    for info, path, length in zip(infos, paths, shards.lengths, strict=True):
        if length != info.tokens:
            raise ValueError(
                f"{path} has {length:,} tokens, the manifest says {info.tokens:,}: "
                f"delete {folder} and run python fineweb.py again"
            )
    newer = {  # copied or changed after the manifest
        path: info.sha256
        for info, path in zip(infos, paths, strict=True)
        if path.stat().st_mtime_ns >= finished_ns
    }
    with _unchecked(folder, split, newer) as unchecked:
        verify_shards(folder, [info for info in infos if folder / info.file in unchecked])
    return shards


def _shards_by_name(folder: Path, split: Split) -> list[Path]:
    """The shards of a folder whose names have the split as a word: `train-0.npy`, `a_train000.bin`.

    A `.bin` file that was converted, so that a `.npy` file has its name, is left out.

    Raises:
        ValueError: a name has both splits, or the folder does not hold GPT-2 tokens of one format.
    """
    files = sorted(folder.glob("*.npy"))
    files += sorted(path for path in folder.glob("*.bin") if path.with_suffix(".npy") not in files)
    splits = {
        path: {name for name, word in SPLIT_WORDS.items() if word.search(path.name)}
        for path in files
    }
    if both := [path for path, names in splits.items() if len(names) > 1]:
        raise ValueError(f"{both[0]} names both splits, train and val: rename it")
    shards = [path for path, names in splits.items() if names]
    if folders := [path for path in shards if path.is_dir()]:
        raise ValueError(f"{folders[0]} is a folder, not a shard: move it elsewhere")
    if len({path.suffix for path in shards}) > 1:
        raise ValueError(
            f"{folder} mixes formats ({shards[0].name}, {shards[-1].name}): move the .npy or the "
            f".bin files elsewhere"
        )
    if shards and shards[0].suffix == ".bin" and (folder / NANOGPT_VOCABULARY).exists():
        raise ValueError(
            f"{folder / NANOGPT_VOCABULARY} says that the .bin files have a vocabulary of their "
            f"own: only GPT-2's tokens can be read, make them of the text by python fineweb.py"
        )
    return [path for path in shards if split in splits[path]]


@contextmanager
def _unchecked(folder: Path, split: Split, files: Mapping[Path, int | str]) -> Iterator[list[Path]]:
    """The files that are not as they were at the last check; after the body, all are checked.

    Args:
        folder: the data folder.
        split: that the files are of.
        files: each with what it is checked for: the size of the vocabulary, or its hash.
    """
    current = {}
    for path, expected in files.items():
        stat = path.stat()
        times = stat.st_mtime_ns, stat.st_ctime_ns  # a file moved here keeps the first
        current[path.name] = [stat.st_size, *times, expected]
    records = _check_records(folder, split)
    unknown = current
    for record in records:
        with suppress(OSError, ValueError, AttributeError):  # there is none, or it is damaged
            seen = read_json(record).get
            unknown = {name: file for name, file in unknown.items() if seen(name) != file}
    yield [path for path in files if path.name in unknown]
    for record in records if unknown else ():
        with suppress(OSError):  # a read-only folder, or a full disk
            write_json(record, current)
            break


def _check_records(folder: Path, split: Split) -> list[Path]:
    """Where checks are remembered: in the data folder or, if that is read-only, in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    of_folder = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    records = [folder / f".{split}_scan.json", cache / "gpt2_scans" / f"{of_folder}_{split}.json"]
    return [record for record in records if record.parts[0] != "~"]  # of a user without a home


def _explain_missing(folder: Path, split: Split) -> str:
    """Why `folder` has no shards of a split, and what to do."""
    if (folder / PARTS_FOLDER).exists():
        return f"{folder} has no {split} shards: merge its parts by fineweb.py --parts N"
    missing = f"no data folder {folder}"
    if folder.is_dir():
        missing = f"{folder} has no {split} shards (such as {split}_000000.npy)"
    patterns = ("*/*train*.npy", "*/*train*.bin")
    shards = [path for at in (folder, folder.parent) for each in patterns for path in at.glob(each)]
    others = [str(path) for path in {shard.parent for shard in shards} - {folder}]
    others.sort(key=lambda path: difflib.SequenceMatcher(None, path, str(folder)).ratio())
    found = f"; found {', '.join(others[:-6:-1])}" if others else ""
    return f"{missing}{found}; {HOW_TO_MAKE_DATA}"


def verify_shards(folder: Path, infos: Iterable[ShardInfo]) -> None:
    """Check shards of a data folder against their entries in the manifest, byte for byte.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: a shard's hash is not the manifest's.
    """
    for info in infos:
        path = folder / info.file
        remedy = f"delete {folder} and run python fineweb.py again"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: {remedy}")
        if sha256_of(path) != info.sha256:
            raise ValueError(f"{path} has changed since it was written: {remedy}")


def _max_open_shards() -> int:
    """How many files one split may keep open: a quarter of the process's limit, which is raised."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if 0 <= soft < most:  # -1: unlimited
        with suppress(OSError, ValueError):  # macOS has one more limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return (soft if 0 <= soft < OPEN_FILES else OPEN_FILES) // 4


def _open_shard(path: Path) -> TokenArray:
    if path.suffix == ".bin":
        return _open_bin(path)
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # refuses objects, which are pickled
    except Exception as error:  # a damaged header brings errors of many kinds
        raise ValueError(f"{path} cannot be read as a token shard: {error}") from None
    if array.dtype != SHARD_DTYPE or array.ndim != 1 or not len(array):
        raise ValueError(
            f"{path} is not a token shard: expected 1-D uint16 with at least one token, "
            f"found {array.dtype} of shape {array.shape}"
        )
    return array


def _open_bin(path: Path) -> TokenArray:
    """Map the tokens of llm.c, which follow a header, or of nanoGPT, which have none."""
    size, offset = path.stat().st_size, 0
    with path.open("rb") as file:
        header = file.read(LLM_C_HEADER_BYTES)
    if header.startswith(LLM_C_MAGIC):
        offset = LLM_C_HEADER_BYTES
        _, version, tokens = np.frombuffer(header.ljust(offset, b"\0"), "<i4", 3).tolist()
        if version != LLM_C_VERSION:
            raise ValueError(
                f"{path} has version {version} of llm.c's format: only {LLM_C_VERSION} is read"
            )
        expected = offset + SHARD_DTYPE.itemsize * tokens
        if size != expected:
            raise ValueError(
                f"{path} has {size:,} bytes, its header says {expected:,}: copy it again"
            )
    if size <= offset or size % SHARD_DTYPE.itemsize:
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
