"""GPT-2's byte-level BPE, offline: `assets/vocab.bpe` in, token ids out.

tiktoken is the reference. Bulk encoding goes through gigatoken, many times faster, and every
batch of it is compared with tiktoken.
"""

import base64
import functools
import hashlib
import itertools
import multiprocessing
import os
import re
import tempfile
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken

TokenIds = npt.NDArray[np.uint16]

END_OF_TEXT = 50256
VOCAB_SIZE = 50257  # 256 bytes, 50,000 merges, <|endoftext|>
VOCAB_PATH = Path(__file__).parent / "assets" / "vocab.bpe"
VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# How GPT-2 cuts text into words before merging bytes; tiktoken's spelling of the original.
WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# Where a long text may be cut without changing its ids: before a whitespace character that a
# non-whitespace one follows. In WORD_PATTERN words of letters, digits or signs hold no whitespace
# but one space in front, and `\s+(?!\S)` gives the last character of a run back, so a word always
# starts there. The rest of the run, now at the end of its text, is one word by `\s++$` as it was
# by `\s+(?!\S)`. Nothing in the pattern looks behind, so the second part does not notice the cut.
# Whitespace is Unicode's White_Space, as in `\s` of the pattern; Python's own `\s` has more.
WHITESPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CUT = re.compile(f"[{WHITESPACE}](?=[^{WHITESPACE}])")

PIECE_CHARS = 1 << 18  # longer texts are cut: tiktoken fails on runs of 1M spaces
RELOAD_TOKENS = 1 << 26  # gigatoken remembers every word that it has seen, up to a GB in these
CHECK_CHARS = 10_000  # of every batch, compared with tiktoken


@functools.cache
def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's tokenizer, built from the merges file without network.

    Raises:
        FileNotFoundError: the merges file is missing.
        ValueError: it is not the file that GPT-2 was trained with.
    """
    return tiktoken.Encoding(
        "gpt2",
        pat_str=WORD_PATTERN,
        mergeable_ranks=_read_ranks(VOCAB_PATH),
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes → id: the 256 single bytes, then one token for each merge, in order."""
    merges = path.read_bytes()
    if hashlib.sha256(merges).hexdigest() != VOCAB_SHA256:
        raise ValueError(f"{path} is not GPT-2's vocab.bpe (its SHA-256 differs): restore it")
    # The file writes each byte as a visible character: itself, or the next one from U+0100.
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(hidden)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in merges.decode().splitlines()[1:]:
        token = bytes(byte_of[character] for character in line if character != " ")
        ranks[token] = len(ranks)
    return ranks


def encode_documents(batches: Iterable[Sequence[str]], workers: int = 1) -> Iterator[TokenIds]:
    """Encode batches of documents, each document with `END_OF_TEXT` first.

    `<|endoftext|>` inside a text is ordinary text, and lone surrogates become U+FFFD, as in
    tiktoken. The ids depend on the texts alone: not on the encoder, the workers or the batches.

    Args:
        batches: lists of documents; only as many as are being encoded are held at a time.
        workers: threads of gigatoken (set once for the process, by its first batch) or, without
            gigatoken, processes of tiktoken.

    Yields:
        For each batch, in order, the (tokens,) uint16 of its documents one after another.

    Raises:
        ChildProcessError: a worker process died.
    """
    remaining = iter(batches)
    gigatoken = _load_gigatoken(workers)
    since_load = 0
    if gigatoken is None:
        _warn("gigatoken is not installed")
    else:
        for texts in remaining:
            tokens = _encode_with_gigatoken(gigatoken, texts)
            if not _starts_as_tiktoken(tokens, texts):
                _warn("gigatoken disagrees with tiktoken")
                remaining = itertools.chain([texts], remaining)
                break
            yield tokens
            since_load += len(tokens)
            if since_load > RELOAD_TOKENS:
                gigatoken, since_load = _load_gigatoken(workers), 0
    yield from _encode_in_processes(remaining, workers)


def cut_text(text: str, min_chars: int = PIECE_CHARS) -> list[str]:
    """Cut a long text into pieces whose ids, one after another, are the ids of the text.

    Args:
        text: any text.
        min_chars: the least length of a piece (but the last); it ends at the next place that
            allows it, so that a text without whitespace stays whole.

    Returns:
        The pieces; joined they are `text`.
    """
    pieces = []
    start = 0
    while found := CUT.search(text, start + min_chars):
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


def _warn(reason: str) -> None:
    warnings.warn(f"{reason}: encoding with tiktoken, which is slower", stacklevel=3)


def _load_gigatoken(workers: int) -> Any | None:  # noqa: ANN401 - it may not be installed
    """A gigatoken.Tokenizer of GPT-2's vocabulary; None without the package."""
    os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when its thread pool starts
    try:
        import gigatoken
    except ImportError:
        return None
    ranks = _read_ranks(VOCAB_PATH)
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.tiktoken"
        path.write_bytes(b"".join(lines))
        return gigatoken.Tokenizer.from_tiktoken(str(path), pretokenizer="gpt2")


def _encode_with_gigatoken(tokenizer: Any, texts: Sequence[str]) -> TokenIds:  # noqa: ANN401
    import awkward

    pieces = [[_replace_surrogates(piece) for piece in cut_text(text)] for text in texts]
    ids = tokenizer.encode_batch(list(itertools.chain.from_iterable(pieces)))
    counts = awkward.num(ids).to_numpy()
    return _mark_documents(pieces, counts, awkward.flatten(ids).to_numpy())


def _encode_with_tiktoken(texts: Sequence[str]) -> TokenIds:
    encode = functools.partial(gpt2_encoding().encode_to_numpy, disallowed_special=())
    pieces = [[_replace_surrogates(piece) for piece in cut_text(text)] for text in texts]
    ids = [encode(piece) for piece in itertools.chain.from_iterable(pieces)]
    counts = np.array([len(tokens) for tokens in ids], dtype=np.int64)
    return _mark_documents(pieces, counts, np.concatenate(ids or [np.empty(0, np.uint32)]))


def _replace_surrogates(text: str) -> str:
    """`text` as tiktoken reads it: paired surrogates joined, lone ones U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _mark_documents(
    pieces: list[list[str]], counts: npt.NDArray[np.int64], ids: npt.NDArray[np.uint32]
) -> TokenIds:
    """Put `END_OF_TEXT` before every document.

    Args:
        pieces: the pieces of each document.
        counts: (all pieces,) int64, tokens of each piece.
        ids: (tokens,) uint32, of all pieces one after another.
    """
    first_tokens = np.cumsum(counts) - counts
    first_pieces = np.cumsum([0] + [len(document) for document in pieces])[:-1]
    return np.insert(ids.astype(np.uint16), first_tokens[first_pieces], END_OF_TEXT)


def _starts_as_tiktoken(tokens: TokenIds, texts: Sequence[str]) -> bool:
    """Whether a batch begins with the ids that tiktoken gives for its beginning."""
    if not texts:
        return not len(tokens)
    found = CUT.search(texts[0], CHECK_CHARS)
    expected = _encode_with_tiktoken([texts[0][: found.start()] if found else texts[0]])
    return np.array_equal(tokens[: len(expected)], expected)


def _encode_in_processes(batches: Iterable[Sequence[str]], workers: int) -> Iterator[TokenIds]:
    """Encode with tiktoken, batches in parallel, results in order."""
    if workers == 1:
        yield from map(_encode_with_tiktoken, batches)
        return
    # A fork would copy the locks of other threads (the progress bar's, gigatoken's) as they are.
    method = multiprocessing.get_start_method(allow_none=True)
    context = multiprocessing.get_context("spawn" if method in (None, "fork") else method)
    in_flight: deque[Future[TokenIds]] = deque()
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            for texts in batches:
                in_flight.append(pool.submit(_encode_with_tiktoken, texts))
                if len(in_flight) > workers:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        except BrokenProcessPool:
            raise ChildProcessError(
                "a tokenizer process died, perhaps for want of memory: try a smaller --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
