"""GPT-2's byte-level BPE, offline: `assets/vocab.bpe` in, token ids out.

tiktoken is the reference. Bulk encoding goes through gigatoken, which is many times faster and
runs in a thread; the first ids of every batch are compared with tiktoken's.
"""

import base64
import functools
import hashlib
import math
import os
import re
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken

TokenIds = npt.NDArray[np.uint16]

END_OF_TEXT = 50256
VOCAB_SIZE = 50257  # 256 bytes, 50,000 merges, <|endoftext|>
VOCAB_PATH = Path(__file__).parent / "assets" / "vocab.bpe"
VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# How GPT-2 splits text into words before it merges bytes, in tiktoken's spelling.
WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

DOCUMENT_MARK = "\ufdd0"  # stands for END_OF_TEXT: Unicode guarantees that it is no character
RELOAD_TOKENS = 1 << 26  # gigatoken caches every word that it sees, up to 1 GB in so many tokens
BATCHES_AHEAD = 4  # batches that may wait, encoded, while a shard is written
CHECK_CHARS = 10_000  # of every batch, compared with tiktoken
# First and end of the ranges of letters and digits new in Unicode 17, which gigatoken knows;
# tiktoken is of Unicode 16, and takes them for symbols.
UNICODE_17 = (
    *(0x88F, 0x890, 0xC5C, 0xC5D, 0xCDC, 0xCDD, 0xA7CE, 0xA7D5, 0xA7F1, 0xA7F2, 0x10940, 0x1095A),
    *(0x10EC5, 0x10EC8, 0x11DB0, 0x11DEA, 0x16EA0, 0x16ED4, 0x16FF2, 0x16FF7, 0x187F8, 0x18800),
    *(0x18D09, 0x18DF3, 0x1E6C0, 0x1E700, 0x2B73A, 0x2B740, 0x2CEA2, 0x2CEAE, 0x323B0, 0x3347A),
)
# A text may be cut before whitespace that something else follows, and its ids stay the same: in
# WORD_PATTERN a word always starts there, and the whitespace before it is a word of its own.
# Whitespace is Unicode's White_Space, as in the pattern; Python's own `\s` matches more.
WHITESPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CUT = re.compile(f"[{WHITESPACE}](?=[^{WHITESPACE}])")


@functools.cache
def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's tokenizer, built from the merges file without network."""
    return tiktoken.Encoding(
        "gpt2",
        pat_str=WORD_PATTERN,
        mergeable_ranks=_read_ranks(),
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def byte_characters() -> dict[str, int]:
    """The bytes in the order of their ids, by the visible characters that GPT-2's files write.

    A byte is written as the character of the same number, or as the next one from U+0100.
    """
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


@functools.cache
def _read_ranks() -> dict[bytes, int]:
    """Token bytes → id: the 256 single bytes, then one token for each merge, in order."""
    merges = VOCAB_PATH.read_bytes()
    if hashlib.sha256(merges).hexdigest() != VOCAB_SHA256:
        raise ValueError(f"{VOCAB_PATH} is not GPT-2's vocab.bpe (its SHA-256 differs): restore it")
    byte_of = byte_characters()
    translation = str.maketrans(byte_of)
    tokens = [bytes([byte]) for byte in byte_of.values()]
    for line in merges.decode().splitlines()[1:]:
        tokens.append(line.replace(" ", "").translate(translation).encode("latin-1"))
    return {token: rank for rank, token in enumerate(tokens)}


def token_bytes(vocab_size: int) -> npt.NDArray[np.int64]:
    """How many bytes of text each id stands for: (vocab_size,).

    None for `END_OF_TEXT`, for ids beyond GPT-2's, and for all of a smaller vocabulary, which is
    another tokenizer's.
    """
    lengths = np.zeros(vocab_size, np.int64)
    for token, id in _read_ranks().items() if vocab_size >= VOCAB_SIZE else ():
        lengths[id] = len(token)
    return lengths


def spelling_parts(vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """What tokens have in common: letters, beginnings, ends; a space, a capital; length, frequency.

    Merges are in the order of frequency, so that is an id's power of two. See `token_bytes`.

    Returns:
        (2, n) ids and their parts' numbers, and (n,) weights; the squares of an id's add up to 1.
    """
    numbers = dict[str, int]()
    pairs, weights = list[tuple[int, int]](), list[float]()
    for token, id in _read_ranks().items() if vocab_size >= VOCAB_SIZE else ():
        text = token.decode(errors="surrogateescape")
        word = text.strip().lower() or text
        starts = [f"{word[:n]} " for n in (3, 4) if n < len(word)]
        ends = [f" {word[-n:]}" for n in (2, 3) if n < len(word)]
        forms = (" " in text, text != text.lower(), len(word), word[0], word[-1], id.bit_length())
        parts = {word: 2.0} | dict.fromkeys(starts + ends, 0.7)
        parts |= {f"form {n} {form}": 0.3 for n, form in enumerate(forms)}
        pairs += [(id, numbers.setdefault(part, len(numbers))) for part in parts]
        weights += [weight / math.hypot(*parts.values()) for weight in parts.values()]
    return np.array(pairs, np.int64).reshape(-1, 2).T, np.array(weights, np.float32)


def encode_documents(batches: Iterable[Sequence[str]], workers: int = 1) -> Iterator[TokenIds]:
    """Encode batches of documents, with `END_OF_TEXT` before each document.

    `<|endoftext|>` inside a text is ordinary text, and lone surrogates become U+FFFD, as in
    tiktoken. The ids depend on the texts alone, not on the encoder, the threads or the batches.

    gigatoken splits texts of megabytes among the `workers`, which are threads (its first batch
    fixes their number for the process); tiktoken, its replacement, encodes a batch in each.

    Yields the ids of each batch, in order: (tokens,) uint16. A few batches are in memory at a time.
    """
    encoder = _Encoder(workers)
    in_flight: deque[Future[TokenIds]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for texts in batches:
            in_flight.append(pool.submit(encoder.encode, texts))
            if len(in_flight) > max(workers, BATCHES_AHEAD):
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Encoder:
    """gigatoken; tiktoken instead where it is missing, and once the two have disagreed."""

    def __init__(self, workers: int) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when its thread pool starts
        gpt2_encoding()  # cached here, or each thread would build its own
        self._lock = threading.Lock()  # gigatoken has threads of its own: one batch at a time
        self._tokens_since_load = RELOAD_TOKENS
        self._uses_gigatoken = True
        try:
            import gigatoken

            self._from_tiktoken = gigatoken.Tokenizer.from_tiktoken
        except ImportError:
            self._fall_back("gigatoken is not installed")

    def encode(self, texts: Sequence[str]) -> TokenIds:
        """Encode documents, with `END_OF_TEXT` before each; several threads may call this."""
        if self._uses_gigatoken:
            tokens = self._encode_with_gigatoken(texts)
            if _starts_as_tiktoken(tokens, texts):
                return tokens
            self._fall_back("gigatoken disagrees with tiktoken")
        return _encode_with_tiktoken(texts)

    def _fall_back(self, reason: str) -> None:
        warnings.warn(f"{reason}: encoding with tiktoken, which is slower", stacklevel=1)
        self._uses_gigatoken = False

    def _encode_with_gigatoken(self, texts: Sequence[str]) -> TokenIds:
        # One text, so one row: several rows would come back as an awkward array. This call, unlike
        # `Tokenizer.encode`, releases the interpreter's lock for the thread that reads.
        data = b"".join([DOCUMENT_MARK.encode() + _utf8(text) for text in texts])
        characters = np.frombuffer(data.decode().encode("utf-32-le"), "<u4")
        characters = characters[characters >= UNICODE_17[0]]  # few, and the search takes time
        if (np.searchsorted(UNICODE_17, characters, "right") % 2).any():
            return _encode_with_tiktoken(texts)
        with self._lock:
            if self._tokens_since_load >= RELOAD_TOKENS:
                self._load()
            ids, _ = self._tokenizer.encode_batch_padded([data], pad_id=0)
            self._tokens_since_load += ids.size
        if np.count_nonzero(ids == END_OF_TEXT) > len(texts):  # a text contains the mark
            return _encode_with_tiktoken(texts)
        return ids.ravel().astype(np.uint16)

    def _load(self) -> None:
        """Start with an empty cache; gigatoken reads the ranks from a file."""
        lines = [b"%s %d\n" % (base64.b64encode(token), id) for token, id in _read_ranks().items()]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gpt2.tiktoken"
            path.write_bytes(b"".join(lines))
            self._tokenizer = self._from_tiktoken(path, "gpt2", {DOCUMENT_MARK: END_OF_TEXT})
        self._tokens_since_load = 0


def _encode_with_tiktoken(texts: Sequence[str]) -> TokenIds:
    encoding = gpt2_encoding()
    ids = [np.empty(0, np.uint32)]
    for text in texts:
        # This releases the interpreter's lock, so that threads encode at the same time.
        own = encoding.encode_to_numpy(_utf8(text).decode(), disallowed_special=())
        ids += [np.array([END_OF_TEXT], np.uint32), own]
    return np.concatenate(ids).astype(np.uint16)


def _utf8(text: str) -> bytes:
    """UTF-8 of a text as tiktoken reads it: paired surrogates joined, lone ones U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _starts_as_tiktoken(tokens: TokenIds, texts: Sequence[str]) -> bool:
    """Whether a batch's ids begin with those that tiktoken gives for its first characters."""
    start = texts[0] if texts else ""
    if len(start) > CHECK_CHARS:
        cuts = [0, *(cut.start() for cut in CUT.finditer(start, 0, CHECK_CHARS))]
        start = start[: cuts[-1]]
    expected = _encode_with_tiktoken([start] if texts else [])
    return np.array_equal(tokens[: len(expected)], expected)
