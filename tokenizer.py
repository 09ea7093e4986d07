"""GPT-2's byte-level BPE tokenizer, built offline from `assets/vocab.bpe`.

tiktoken is the reference. Large amounts of text are encoded with gigatoken, which is many times
faster and runs in a thread; the first ids of each batch are compared with tiktoken's.
"""

import base64
import functools
import hashlib
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

# GPT-2 splits text into words with this pattern before it merges bytes; as written in tiktoken.
WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

DOCUMENT_MARK = "\ufdd0"  # stands for END_OF_TEXT; Unicode guarantees that it is never a character
RELOAD_TOKENS = 1 << 26  # gigatoken caches every word: up to 1 GB after this many tokens
BATCHES_AHEAD = 4  # batches to encode in advance while a shard is written
CHECK_CHARS = 10_000  # characters of each batch that are also encoded with tiktoken
# Start and end of each range of letters and digits that is new in Unicode 17, which gigatoken uses.
# tiktoken uses Unicode 16 and treats these characters as symbols.
UNICODE_17 = (
    *(0x88F, 0x890, 0xC5C, 0xC5D, 0xCDC, 0xCDD, 0xA7CE, 0xA7D5, 0xA7F1, 0xA7F2, 0x10940, 0x1095A),
    *(0x10EC5, 0x10EC8, 0x11DB0, 0x11DEA, 0x16EA0, 0x16ED4, 0x16FF2, 0x16FF7, 0x187F8, 0x18800),
    *(0x18D09, 0x18DF3, 0x1E6C0, 0x1E700, 0x2B73A, 0x2B740, 0x2CEA2, 0x2CEAE, 0x323B0, 0x3347A),
)
# Text can be cut before a whitespace character that is followed by something else, and its ids stay
# the same: in WORD_PATTERN a word always starts there, and any whitespace before it is a separate
# word. As in that pattern, whitespace is Unicode's White_Space; `\s` in Python matches more.
WHITESPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CUT = re.compile(f"[{WHITESPACE}](?=[^{WHITESPACE}])")


@functools.cache
def gpt2_encoding() -> tiktoken.Encoding:
    """Return GPT-2's tokenizer, built from the merges file without network access."""
    return tiktoken.Encoding(
        "gpt2",
        pat_str=WORD_PATTERN,
        mergeable_ranks=_read_ranks(),
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def byte_characters() -> dict[str, int]:
    """Map the visible characters that stand for bytes in GPT-2's files to the bytes, in id order.

    A visible byte is written as the character with the same number; each other byte as the next
    character from U+0100 on.
    """
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


@functools.cache
def _read_ranks() -> dict[bytes, int]:
    """Map token bytes to ids: the 256 single bytes, then one token per merge, in order."""
    merges = VOCAB_PATH.read_bytes()
    if hashlib.sha256(merges).hexdigest() != VOCAB_SHA256:
        raise ValueError(f"{VOCAB_PATH} is not GPT-2's vocab.bpe (its SHA-256 differs): restore it")
    byte_of = byte_characters()
    translation = str.maketrans(byte_of)
    tokens = [bytes([byte]) for byte in byte_of.values()]
    for line in merges.decode().splitlines()[1:]:
        tokens.append(line.replace(" ", "").translate(translation).encode("latin-1"))
    return {token: rank for rank, token in enumerate(tokens)}


def prompt_ids(text: str) -> list[int]:
    """Return the ids of a prompt; an empty prompt starts a new document."""
    return gpt2_encoding().encode_ordinary(text) or [END_OF_TEXT]


def token_bytes(vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the number of text bytes of each token id: (vocab_size,) int64.

    It is 0 for `END_OF_TEXT`, for ids beyond GPT-2's, and for every id of a smaller vocabulary,
    which belongs to another tokenizer.
    """
    lengths = np.zeros(vocab_size, np.int64)
    for token, id in _read_ranks().items() if vocab_size >= VOCAB_SIZE else ():
        lengths[id] = len(token)
    return lengths


def encode_documents(batches: Iterable[Sequence[str]], workers: int = 1) -> Iterator[TokenIds]:
    """Encode batches of documents, with `END_OF_TEXT` before each document.

    As in tiktoken, `<|endoftext|>` inside a text is ordinary text, and lone surrogates become
    U+FFFD. The ids depend only on the texts, not on the encoder, the threads or the batches.

    `workers` is a number of threads. gigatoken splits texts of megabytes among them; the first
    batch fixes their number for the process. tiktoken, the fallback, encodes one batch per thread.

    Yields:
        The ids of each batch, in order: (tokens,) uint16. A few batches are in memory at a time.
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
    """Encoder that uses gigatoken, or tiktoken if gigatoken is missing or once the two disagree."""

    def __init__(self, workers: int) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when gigatoken's thread pool starts
        gpt2_encoding()  # fill the cache, or each thread would build an encoding
        self._lock = threading.Lock()  # one batch at a time: gigatoken starts threads itself
        self._tokens_since_load = RELOAD_TOKENS
        self._uses_gigatoken = True
        try:
            import gigatoken

            self._from_tiktoken = gigatoken.Tokenizer.from_tiktoken
        except ImportError:
            self._fall_back("gigatoken is not installed")

    def encode(self, texts: Sequence[str]) -> TokenIds:
        """Encode documents, with `END_OF_TEXT` before each; thread-safe."""
        if self._uses_gigatoken:
            tokens = self._encode_with_gigatoken(texts)
            if _matches_tiktoken(tokens, texts):
                return tokens
            self._fall_back("gigatoken disagrees with tiktoken")
        return _encode_with_tiktoken(texts)

    def _fall_back(self, reason: str) -> None:
        warnings.warn(f"{reason}: encoding with tiktoken, which is slower", stacklevel=1)
        self._uses_gigatoken = False

    def _encode_with_gigatoken(self, texts: Sequence[str]) -> TokenIds:
        # Join the texts into one: several would be returned as an awkward array. Unlike
        # `Tokenizer.encode`, `encode_batch_padded` releases the GIL for the thread that reads.
        data = b"".join([DOCUMENT_MARK.encode() + _utf8(text) for text in texts])
        characters = np.frombuffer(data.decode().encode("utf-32-le"), "<u4")
        characters = characters[characters >= UNICODE_17[0]]  # only a few: the search below is slow
        if (np.searchsorted(UNICODE_17, characters, "right") % 2).any():
            return _encode_with_tiktoken(texts)
        with self._lock:
            if self._tokens_since_load >= RELOAD_TOKENS:
                self._load()
            ids, _ = self._tokenizer.encode_batch_padded([data], pad_id=0)
            self._tokens_since_load += ids.size
        if np.count_nonzero(ids == END_OF_TEXT) > len(texts):  # a text contains DOCUMENT_MARK
            return _encode_with_tiktoken(texts)
        return ids.ravel().astype(np.uint16)

    def _load(self) -> None:
        """Create a tokenizer with an empty cache; gigatoken can only read the ranks from a file."""
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
        # encode_to_numpy releases the GIL, so several threads encode at the same time.
        text_ids = encoding.encode_to_numpy(_utf8(text).decode(), disallowed_special=())
        ids += [np.array([END_OF_TEXT], np.uint32), text_ids]
    return np.concatenate(ids).astype(np.uint16)


def _utf8(text: str) -> bytes:
    """Encode a text as tiktoken does: join surrogate pairs, replace lone surrogates by U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _matches_tiktoken(tokens: TokenIds, texts: Sequence[str]) -> bool:
    """Return whether the ids of a batch start with tiktoken's ids of its first characters."""
    start = texts[0] if texts else ""
    if len(start) > CHECK_CHARS:
        cuts = [0, *(cut.start() for cut in CUT.finditer(start, 0, CHECK_CHARS))]
        start = start[: cuts[-1]]
    expected = _encode_with_tiktoken([start] if texts else [])
    return np.array_equal(tokens[: len(expected)], expected)
