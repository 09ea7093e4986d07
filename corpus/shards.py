"""The on-disk token format: a folder of 1-D uint16 `.npy` shards and a manifest.

    data/fineweb-edu-10BT/
        val_000000.npy      the validation split
        train_000001.npy    100M tokens each, the last one shorter
        ...
        manifest.json       where the tokens came from; tokens and SHA-256 of each shard

The first shard is the validation split in datasets from the hub, for scores that others measure.
Elsewhere, and if there are fewer than two full shards, validation is the first tenth of each of 20
equal pieces of the tokens, or of the first two shards' tokens.

A dataset that is made in parts (`corpus/parts.py`) has a manifest of each part instead, and the
names of its shards have the part's number.

A folder without a manifest can also be opened: each `.npy` file whose name contains the word
`train` or `val` is a shard of that split. If no `.npy` file does, `.bin` files from llm.c or
nanoGPT are found in the same way.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from corpus.parts import FULL_DATASET, Part, of_all_parts, read_parts
from runtime.cli import shell_line
from runtime.errors import UserError
from runtime.files import atomic_write, check_downloaded, read_json, sha256_of, write_json
from tokenizer import VOCAB_SHA256

Split = Literal["train", "val"]
TokenArray = npt.NDArray[np.uint16]

SHARD_DTYPE = np.dtype("<u2")
VAL_BLOCKS = 20  # blocks of a validation split that is a fraction of the tokens
LLM_C_MAGIC = 20240520
LLM_C_HEADER_BYTES = 1024  # 256 int32: magic, version, tokens, zeros
NANOGPT_VOCABULARY = "meta.pkl"  # nanoGPT writes it if the tokens of its .bin files are not GPT-2's
MAX_MAPPED_SHARDS = 128  # per split; each mapped file holds a descriptor, and macOS allows 256
TRAIN_WORD = re.compile(r"(?<![A-Za-z])train(ing)?(?![A-Za-z])")  # does not match `constrained`
VAL_WORD = re.compile(r"(?<![A-Za-z])val(id|idation)?(?![A-Za-z])")


@dataclass(frozen=True)
class ShardInfo:
    """A shard's entry in the manifest: file name, split, number of tokens, SHA-256 of the file."""

    file: str
    split: Split
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents and origin of a dataset, or of one part of it."""

    source: dict[str, Any]
    """The `identity` of the source and, for a part of a dataset, `part` and `parts`."""
    tokenizer_sha256: str
    """SHA-256 of the tokenizer's merges file."""
    shard_size: int
    """Number of tokens in a full shard."""
    shards: tuple[ShardInfo, ...] = ()
    documents: int = 0
    """Number of documents with tokens; known when the dataset is finished."""
    complete: bool = False
    max_tokens: int | None = None
    """The `--max-tokens` of the parts, or of a dataset that it ends; None if the source ends it."""
    progress: dict[str, Any] | None = None
    """Place in the source to resume from (see `fineweb.write_shards`); None = the start."""
    val_span: int = 0
    """Number of first tokens of the source of which validation is a fraction; 0: of none."""
    overlap: float | None = None
    """Fraction of the validation tokens in passages that the training text also has: see
    `corpus/overlap.py`; None: not measured."""
    format: int = 1

    @property
    def tokens(self) -> int:
        """Number of tokens in finished shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def part(self) -> Part:
        """The part of a dataset that the manifest describes; usually, the full dataset."""
        return Part(self.source.get("part", 0), self.source.get("parts", 1))

    @property
    def identity(self) -> dict[str, Any]:
        """The values that must not change when a dataset is resumed."""
        contents = [*self.source.get("contents", {}).values()]
        values = {"shard size": self.shard_size, "tokenizer": self.tokenizer_sha256}
        return of_all_parts(self.source) | {"contents of files": contents} | values

    def without_changing_shards(self) -> "Manifest":
        """Return an unfinished manifest without the shards that change when tokens are added."""
        span = self.val_span
        if self.complete and not self.progress and self.part.index == 0:
            span = span or self.tokens  # datasets of earlier versions have no span
        kept = [s for s in self.shards if s.split == "val" or s.tokens == self.shard_size]
        return replace(self, shards=tuple(kept), complete=False, val_span=span, overlap=None)

    def save(self, folder: Path) -> None:
        """Write the manifest atomically."""
        write_json(folder / self.part.manifest_name, asdict(self))

    @classmethod
    def load(cls, folder: Path, part: Part | None = None) -> "Manifest | None":
        """Read the manifest of a dataset, or of one part of it; return None if there is none."""
        if (path := folder / (part or FULL_DATASET).manifest_name).is_file():
            values = read_json(path)
        elif part or not (values := read_parts(folder)):
            return None
        try:
            values.pop("skipped", None)  # counted by earlier versions
            values["shards"] = tuple(ShardInfo(**shard) for shard in values["shards"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not a shard manifest: {error}") from None


def check_same_dataset(folder: Path, found: Manifest, expected: Manifest) -> None:
    """Raise if the dataset in `folder` is not the expected one."""
    for name in found.identity | expected.identity:
        old, new = found.identity.get(name), expected.identity.get(name)
        if old != new and old != []:  # earlier versions did not hash the contents
            change = f"other {name}" if "files" in name else f"{name} {old} instead of {new}"
            fix = f"use the flags that made it, choose another --data-dir, or delete {folder}"
            raise UserError(f"{folder} holds another dataset ({change}): {fix}")


class ShardWriter:
    """Writer that cuts a stream of tokens into shard files and lists them in the manifest.

    Writing starts once two shards are full. The validation split is a tenth of their tokens, or the
    fraction in the manifest, as `VAL_BLOCKS` equally spaced blocks. In a dataset from the hub, it
    is the first shard. Adding tokens does not change it. Memory holds the tokens of at most two
    shards, twice while they are written.

    Only the first part of a dataset has a validation split; the other parts may be empty. If
    `manifest` already lists shards, the tokens added here start at its `progress`.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._needs_val = manifest.part.index == 0 and not manifest.shards
        self._buffer = [np.empty(0, SHARD_DTYPE)]  # tokens that do not fill a shard yet
        # Number of the source's tokens before the buffer; the buffer may repeat finished shards.
        self._start = (manifest.progress or {}).get("tokens", 0)
        for name in (f"*_{manifest.part.prefix}[0-9]*.npy", manifest.part.manifest_name):
            for leftover in folder.glob(f".{name}.*.tmp"):  # left by a killed run
                leftover.unlink()

    def add(self, tokens: TokenArray, progress: dict[str, Any] | None = None) -> None:
        """Append tokens; if they fill shards, write these and the manifest, with `progress`."""
        self._buffer.append(tokens)
        end = self._start + sum(map(len, self._buffer))
        if end >= self.manifest.tokens + self.manifest.shard_size * (2 if self._needs_val else 1):
            self._write_buffer()
            if self.manifest.tokens >= self.manifest.val_span:  # otherwise, resume from the start
                self._save(progress=progress)

    def add_validation(self, batches: Iterable[TokenArray]) -> Manifest:
        """Write a separate validation text; the tokens added later are for training."""
        tokens = np.concatenate([*self._buffer, *batches])
        if len(tokens) < 2:
            raise UserError("--val-source has no text: pass other files")
        self._write("val", tokens)
        self._save(progress={"cursor": None, "tokens": len(tokens), "documents": 0})
        return self.manifest

    def close(self, documents: int = 0, max_tokens: int | None = None) -> Manifest:
        """Write the remaining tokens and the finished manifest, with these values."""
        n_tokens = sum(map(len, self._buffer))
        if self._needs_val and n_tokens < 2:
            raise UserError(f"the corpus is too small for two splits ({n_tokens} tokens): add text")
        self._write_buffer(is_last=True)
        self._save(documents=documents, max_tokens=max_tokens, complete=True)
        return self.manifest

    def _write_buffer(self, is_last: bool = False) -> None:
        """Write full shards; also the last shard, if it is not full."""
        size, tokens, n_val = self.manifest.shard_size, np.concatenate(self._buffer), 0
        self._buffer.clear()
        if self._start == 0:
            n_val, tokens = self._move_validation(tokens)
        tokens = tokens[self.manifest.tokens - self._start :]
        self._save()  # first, or a killed run would leave shards that contradict the manifest
        if self._needs_val:
            self._write("val", tokens[:n_val])
            tokens = tokens[n_val:]
        count = len(tokens) if is_last else len(tokens) // size * size
        self._write("train", tokens[:count])
        self._buffer = [tokens[count:].copy()]
        self._start, self._needs_val = self.manifest.tokens, False

    def _move_validation(self, tokens: TokenArray) -> tuple[int, TokenArray]:
        """Move the validation tokens to the front; return their number and all tokens."""
        source, size, span = self.manifest.source, self.manifest.shard_size, self.manifest.val_span
        is_first_shard = source.get("kind") == "hub" and "val share" not in source
        if self._needs_val and not (is_first_shard and len(tokens) >= 2 * size):
            span = min(len(tokens), 2 * size)
            self.manifest = replace(self.manifest, val_span=span)
        every = math.ceil(1 / source.get("val share", 0.1))
        pieces = np.array_split(tokens[:span], every * VAL_BLOCKS)
        val = pieces[::every]
        del pieces[::every]
        return sum(map(len, val)) or size, np.concatenate([*val, *pieces, tokens[span:]])

    def _write(self, split: Split, tokens: TokenArray) -> None:
        """Write tokens as shards, of which the last one may not be full."""
        for start in range(0, len(tokens), self.manifest.shard_size):
            piece = tokens[start : start + self.manifest.shard_size]
            number = len(self.manifest.shards)
            path = self.folder / f"{split}_{self.manifest.part.prefix}{number:06}.npy"
            with atomic_write(path) as file:
                # np.save does not report an error in its last write, such as on a full disk.
                header = np.lib.format.header_data_from_array_1_0(piece)
                np.lib.format.write_array_header_1_0(file, header)
                file.write(piece.data)
            info = ShardInfo(path.name, split, len(piece), sha256_of(path))
            self.manifest = replace(self.manifest, shards=(*self.manifest.shards, info))

    def _save(self, **values: Any) -> None:  # noqa: ANN401 - fields' values
        self.manifest = replace(self.manifest, **values)
        self.manifest.save(self.folder)


class TokenShards:
    """All shards of one split, memory-mapped and read as one long array of tokens.

    The fingerprint changes when the tokens change. Without a manifest, it changes when the files'
    names, sizes or first 64 KiB change.
    """

    def __init__(self, paths: list[Path], fingerprint: str) -> None:
        self.paths = paths
        self.fingerprint = fingerprint
        # Read the headers here, once. NumPy parses them, which two threads cannot do at the same
        # time in Python 3.11 (cpython#106905), and the loader's thread maps the shards.
        headers = {path: _check_shard(path) for path in paths}
        self.offsets = np.cumsum([0, *(length for _, length in headers.values())])

        @lru_cache(MAX_MAPPED_SHARDS)
        def map_tokens(path: Path) -> TokenArray:
            return np.memmap(path, SHARD_DTYPE, "r", *headers[path])

        self._map = map_tokens

    @property
    def total_tokens(self) -> int:
        """Number of tokens in all shards of the split."""
        return int(self.offsets[-1])

    def locate(self, index: int) -> tuple[Path, int]:
        """Return the shard file that holds the token at `index`, and the token's index in it."""
        shard = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return self.paths[shard], index - int(self.offsets[shard])

    def read(self, start: int, count: int) -> TokenArray:
        """Copy the uint16 tokens [start, start + count), or fewer at the end of the split."""
        tokens = np.empty(count := min(count, self.total_tokens - start), SHARD_DTYPE)
        filled = 0
        while filled < count:
            path, begin = self.locate(start + filled)
            piece = self._map(path)[begin : begin + count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
        return tokens


def open_shards(
    folder: Path | str, split: Split | Literal["all"], is_optional: bool = False
) -> TokenShards:
    """Open one split of a data folder, or all of it; check each file's dtype and shape.

    A split without shards is an error, or empty if it `is_optional`.
    The hashes are checked by `verify_shards`, the token ids by the data loader as it reads them.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    if manifest and not manifest.complete:
        raise UserError(f"{folder} is incomplete: rerun the fineweb.py command that created it")
    splits = ("val", "train") if split == "all" else (split,)
    infos = [info for info in manifest.shards if info.split in splits] if manifest else []
    paths = [folder / info.file for info in infos] if manifest else _find_shards(folder, splits)
    if manifest and manifest.tokenizer_sha256 != VOCAB_SHA256:
        raise UserError(f"{folder} has the tokens of another tokenizer: make it with fineweb.py")
    if folder.is_file():
        command = shell_line("python", "fineweb.py", "--source", folder)
        raise UserError(f"{folder} is a file, not a folder of shards: make shards with {command}")
    if not paths and is_optional:
        return TokenShards([], "none")
    if not paths:
        purpose = " or ".join({"train": "training", "val": "validation"}[name] for name in splits)
        fix = "try python fineweb.py --source stdlib, then the command that it prints"
        hub = f"hf download OWNER/NAME --repo-type dataset --local-dir {folder}"
        others = f"use --data-dir if the data was moved, or download shards with {hub}"
        raise UserError(f"{folder} has no tokens for {purpose}: {fix}; {others}")
    return TokenShards(paths, _fingerprint(infos, paths))


def verify_shards(folder: Path, infos: Iterable[ShardInfo]) -> None:
    """Raise if a shard's file is missing or does not have the hash in its manifest entry."""
    for info in infos:
        if not (path := folder / info.file).is_file() or sha256_of(path) != info.sha256:
            fix = "if you downloaded it, delete it and rerun hf download"
            other_fix = f"otherwise delete {folder} and rerun python fineweb.py"
            raise UserError(f"{path} is missing or does not match its hash: {fix}; {other_fix}")


def _find_shards(folder: Path, splits: Collection[str]) -> list[Path]:
    """Return the shards of a folder without a manifest, by name, such as `a_train000.bin`."""
    for kind in ("npy", "bin"):
        files = sorted(folder.glob(f"[!.]*.{kind}"))  # skip hidden files
        val = [path for path in files if VAL_WORD.search(path.name)]
        train = [path for path in files if TRAIN_WORD.search(path.name) and path not in val]
        if (train or val) and kind == "bin" and (folder / NANOGPT_VOCABULARY).exists():
            shown = f"as {folder / NANOGPT_VOCABULARY} shows"
            fix = "make shards from the text with python fineweb.py --source FILE"
            raise UserError(f"the tokens of the .bin files are not GPT-2's, {shown}: {fix}")
        if train or val:
            return [*(val if "val" in splits else ()), *(train if "train" in splits else ())]
    return []


def _check_shard(path: Path) -> tuple[int, int]:
    """Return where a shard's tokens start in its file, and their number."""
    check_downloaded(path)
    try:
        # `open_memmap` is np.load with mmap_mode, for .npy files only. It rejects pickled objects.
        open_memmap = np.lib.format.open_memmap
        array = _map_bin(path) if path.suffix == ".bin" else open_memmap(path, mode="r")
        if array.dtype != SHARD_DTYPE or array.ndim != 1 or not len(array):
            found = f"{array.dtype} of shape {array.shape}"
            raise UserError(f"expected a 1-D uint16 array with at least one token, found {found}")
    except Exception as error:  # a damaged header raises many kinds of errors
        problem = f"{path} cannot be read as a token shard ({error})"
        raise UserError(f"{problem}: make or download the file again") from None
    return array.offset, len(array)


def _map_bin(path: Path) -> np.memmap:
    """Map the tokens of an llm.c file, which has a header, or a nanoGPT file, which has none.

    The magic numbers of llm.c's headers are dates of 2024, which are not two GPT-2 ids.
    """
    head = np.fromfile(path, "<i4", 2048)
    if len(head) and 20240000 <= head[0] < 20250000:
        tokens = np.memmap(path, SHARD_DTYPE, "r", LLM_C_HEADER_BYTES)
        if (found := head[:3].tolist()) != (expected := [LLM_C_MAGIC, 1, len(tokens)]):
            raise UserError(f"its header begins with {found} instead of {expected}")
        return tokens
    if len(head) > 8 and head.any() and not (head >> 16).any():  # GPT-2's ids have 16 bits
        dtype = "int32" if head[1::2].any() else "int64"
        raise UserError(f"its tokens look like {dtype}, not uint16")
    return np.memmap(path, SHARD_DTYPE, "r")


def _fingerprint(infos: list[ShardInfo], paths: list[Path]) -> str:
    """Hash a split's content: the manifest's hashes, or else file names, sizes and heads."""
    values: list[Any] = [[info.tokens, info.sha256] for info in infos]
    for path in paths if not infos else ():
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(1 << 16)).hexdigest()
        values.append([path.name, path.stat().st_size, head])
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
