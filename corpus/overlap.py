"""Find passages of 32 tokens or more that two texts share.

`fineweb.py` looks for validation text in the training text, and `sample.py` for samples.

Five doublings hash all windows of 32 tokens. Each window of the larger text is looked up among the
hashes of the smaller text, and windows with the same hash are compared token by token. The larger
text is read in blocks, so memory grows with the smaller text: about 60 bytes per token. A passage
may contain `<|endoftext|>`, because short documents in the same order are also repeated text.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from corpus.shards import TokenArray, TokenShards, open_shards
from formats.checkpoint import Checkpoint
from runtime.errors import UserError
from tokenizer import gpt2_encoding

PASSAGE_TOKENS = 32
BLOCK_TOKENS = 1 << 18  # looked up at a time
QUOTED_WORDS = 20  # before a passage, and after it
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, as in Fibonacci hashing
NO_TOKEN = (1 << 16) - 1  # between rows: an id that no text has
Places = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
Read = Callable[[int, int], TokenArray]  # returns the tokens [start, start + count), or fewer


class Passage(NamedTuple):
    """Consecutive tokens of a text that are also consecutive in another text."""

    start: int
    n_tokens: int
    place: int
    """Index of the first token in the other text."""


def find_places(text: TokenArray, other: TokenShards, hash_bits: int = 64) -> Places:
    """Return, for each token, where the window that it starts is in the other text; -1: nowhere.

    If the text is the smaller one, this is the first such place.
    """
    is_smaller = len(text) <= other.total_tokens
    small = text if is_smaller else other.read(0, other.total_tokens)
    read: Read = other.read if is_smaller else lambda start, n: text[start : start + n]
    starts = range(0, max(len(text), other.total_tokens) - PASSAGE_TOKENS + 1, BLOCK_TOKENS)
    places = np.full(len(text), -1)
    hashes = hash_windows(small, hash_bits)
    windows = np.arange(len(hashes))
    while len(windows):
        keys, firsts, groups = np.unique(hashes[windows], return_index=True, return_inverse=True)
        firsts = windows[firsts]  # the first window with each hash
        is_equal = same_windows(small, windows, small, firsts[groups])
        mask = np.uint64((1 << max(20, len(keys).bit_length() + 3)) - 1)
        is_key = np.zeros(int(mask) + 1, bool)  # filters most windows of the larger text
        is_key[keys & mask] = True
        for start in starts:
            block = read(start, BLOCK_TOKENS + PASSAGE_TOKENS - 1)
            hashed = hash_windows(block, hash_bits)
            there = np.flatnonzero(is_key[hashed & mask])
            numbers = np.minimum(np.searchsorted(keys, hashed[there]), len(keys) - 1)
            is_found = keys[numbers] == hashed[there]
            there, found = there[is_found], firsts[numbers[is_found]]
            is_match = same_windows(small, found, block, there)
            there, found = start + there[is_match], found[is_match]
            if is_smaller:
                is_new = places[found] < 0
                # NumPy keeps the last of several values for an index.
                places[found[is_new][::-1]] = there[is_new][::-1]
            else:
                places[there] = found
        if is_smaller:
            places[windows[is_equal]] = places[firsts[groups[is_equal]]]
        windows = windows[~is_equal]  # nearly never any: windows with the hash of another one
    return places


def hash_windows(tokens: TokenArray, bits: int) -> Hashes:
    """Return a hash of each window of `PASSAGE_TOKENS` tokens."""
    hashes = tokens.astype(np.uint64)
    width = 1
    while width < PASSAGE_TOKENS:  # from the hashes of both halves
        halves, hashes = hashes, hashes[:-width] * MULTIPLIER
        hashes += halves[width:]
        hashes ^= hashes >> np.uint64(32)
        width *= 2
    return hashes & np.uint64((1 << bits) - 1)


def same_windows(a: TokenArray, starts: Places, b: TokenArray, others: Places) -> Flags:
    """Return which windows of `a` have the same tokens as windows of `b`."""
    is_same = np.ones(len(starts), bool)
    for offset in range(PASSAGE_TOKENS):
        is_same &= a[starts + offset] == b[others + offset]
    return is_same


def in_passages(places: Places) -> Flags:
    """Return which tokens lie in a window that the other text has."""
    changes = np.zeros(len(places) + PASSAGE_TOKENS, np.int8)
    changes[: len(places)] += places >= 0
    changes[PASSAGE_TOKENS:] -= places >= 0
    return changes.cumsum(dtype=np.int8)[: len(places)] > 0


def find_passages(places: Places) -> list[Passage]:
    """Return the passages, longest first. A passage ends where the next places differ."""
    starts = np.flatnonzero(places >= 0)
    if not len(starts):
        return []
    is_next = (np.diff(starts) == 1) & (np.diff(places[starts]) == 1)
    edges = np.array([0, *np.flatnonzero(~is_next) + 1, len(starts)])
    lengths = np.diff(edges) + PASSAGE_TOKENS - 1
    columns = starts[edges[:-1]], lengths, places[starts[edges[:-1]]]
    rows = np.stack(columns, axis=1)[np.argsort(-lengths, kind="stable")]
    return [Passage(*row) for row in rows.tolist()]


def find_copies(
    rows: Sequence[Sequence[int]], n_prompt: int, other: TokenShards
) -> tuple[float, list[Passage]]:
    """Find the sampled tokens in rows of tokens that are in passages of the other text.

    The first `n_prompt` tokens of a row are a prompt: a passage may begin there, but only sampled
    tokens count.

    Returns:
        The copied fraction of the sampled tokens; the passages without the prompt, longest first.
        `start` counts through the rows, and one more token after each row.
    """
    lengths = [len(row) + 1 for row in rows]
    text = np.array([id for row in rows for id in (*row, NO_TOKEN)], np.uint16)
    firsts = np.repeat(np.cumsum(lengths) - lengths + n_prompt, lengths)  # each row's first sampled
    places = find_places(text, other)
    is_copied = in_passages(places) & (np.arange(len(text)) >= firsts)
    passages = []
    for start, n_tokens, place in find_passages(places):
        if (cut := max(0, int(firsts[start]) - start)) < n_tokens:
            passages.append(Passage(start + cut, n_tokens - cut, place + cut))
    passages.sort(key=lambda passage: -passage.n_tokens)
    n_sampled = sum(length - n_prompt - 1 for length in lengths)
    return int(is_copied.sum()) / max(1, n_sampled), passages


def quote(other: TokenShards, passage: Passage) -> tuple[str, str, str]:
    """Return a passage in the other text: the words before it, its text, and the words after."""
    start, stop, margin = passage.place, passage.place + passage.n_tokens, 5 * QUOTED_WORDS
    edges = max(0, start - margin), start, stop, min(stop + margin, other.total_tokens)
    spans = (other.read(a, b - a).tolist() for a, b in pairwise(edges))
    before, text, after = map(gpt2_encoding().decode, spans)
    words, more = re.findall(r"\S+\s*", before), re.findall(r"\s*\S+", after)
    return "".join(words[-QUOTED_WORDS:]), text, "".join(more[:QUOTED_WORDS])


def open_training_text(checkpoint: Checkpoint | None) -> TokenShards:
    """Open the training split of a checkpoint's run; raise if it has changed."""
    if checkpoint is None:
        raise UserError("only a run's training text is known: use a run or one of its checkpoints")
    folder = Path(checkpoint.state.train_config["data_dir"])
    shards = open_shards(folder, "train")
    if shards.fingerprint != checkpoint.state.data_fingerprint:
        raise UserError(f"the data in {folder} changed since the run began: restore it")
    return shards
