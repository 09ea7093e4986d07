"""Encode large amounts of text with gigatoken, which is many times faster than tiktoken.

The ids are tiktoken's: the first ids of each batch are compared, and a batch that differs is
encoded with tiktoken. Letters that are new in Unicode 17, which only gigatoken knows, and U+FDD0,
which is not a character, may get other ids beyond this sample.
"""

import base64
import os
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenizer import CUT, END_OF_TEXT, gpt2_encoding

TokenIds = npt.NDArray[np.uint16]

DOCUMENT_MARK = "\ufdd0"  # stands for END_OF_TEXT; Unicode guarantees that it is never a character
RELOAD_TOKENS = 1 << 26  # gigatoken caches every word: up to 1 GB after this many tokens
BATCHES_AHEAD = 4  # batches to encode in advance while a shard is written
CHECK_CHARS = 10_000  # characters of each batch that are also encoded with tiktoken


def encode_documents(batches: Iterable[Sequence[str]], workers: int = 1) -> Iterator[TokenIds]:
    """Encode batches of documents, with `END_OF_TEXT` before each document.

    As in tiktoken, `<|endoftext|>` inside a text is ordinary text. A lone surrogate becomes `?`.
    The ids do not depend on the threads or the batches.

    `workers` is a number of threads. gigatoken splits texts of megabytes among them; the first
    batch fixes their number for the process. tiktoken, the fallback, encodes one batch per thread.

    Yields:
        The ids of each batch, in order: (tokens,) uint16. A few batches are in memory at a time.
    """
    os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when gigatoken's thread pool starts
    gpt2_encoding()  # fill the cache, or each thread would build an encoding
    encode = _encode_with_tiktoken
    try:
        encode = GigatokenEncoder().encode
    except ImportError:
        warnings.warn("gigatoken is not installed: encoding with tiktoken, slowly", stacklevel=1)
    in_flight: deque[Future[TokenIds]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for texts in batches:
            in_flight.append(pool.submit(encode, texts))
            if len(in_flight) > max(workers, BATCHES_AHEAD):
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class GigatokenEncoder:
    """Encoder that uses gigatoken, or tiktoken for a batch in which the two disagree."""

    def __init__(self) -> None:
        import gigatoken

        self._from_tiktoken = gigatoken.Tokenizer.from_tiktoken
        self._lock = threading.Lock()  # one batch at a time: gigatoken starts threads itself
        self._tokens_since_load = RELOAD_TOKENS

    def encode(self, texts: Sequence[str]) -> TokenIds:
        """Encode documents, with `END_OF_TEXT` before each; thread-safe."""
        tokens = self._encode(texts)
        if not _matches_tiktoken(tokens, texts):
            warnings.warn("gigatoken disagrees with tiktoken, whose ids are used", stacklevel=1)
            return _encode_with_tiktoken(texts)
        return tokens

    def _encode(self, texts: Sequence[str]) -> TokenIds:
        # Join the texts into one: several would be returned as an awkward array. Unlike
        # `Tokenizer.encode`, `encode_batch_padded` releases the GIL for the thread that reads.
        data = b"".join([(DOCUMENT_MARK + text).encode(errors="replace") for text in texts])
        with self._lock:
            if self._tokens_since_load >= RELOAD_TOKENS:
                self._load()
            ids, _ = self._tokenizer.encode_batch_padded([data], pad_id=0)
            self._tokens_since_load += ids.size
        return ids.ravel().astype(np.uint16)

    def _load(self) -> None:
        """Create a tokenizer with an empty cache; gigatoken can only read the ranks from a file."""
        tokens = map(gpt2_encoding().decode_single_token_bytes, range(END_OF_TEXT))
        lines = [b"%s %d\n" % (base64.b64encode(token), id) for id, token in enumerate(tokens)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gpt2.tiktoken"
            path.write_bytes(b"".join(lines))
            self._tokenizer = self._from_tiktoken(path, "gpt2", {DOCUMENT_MARK: END_OF_TEXT})
        self._tokens_since_load = 0


def _encode_with_tiktoken(texts: Sequence[str]) -> TokenIds:
    encoding = gpt2_encoding()
    ids = [np.empty(0, np.uint32)]
    for text in texts:
        valid = text.encode(errors="replace").decode()
        # encode_to_numpy releases the GIL, so several threads encode at the same time.
        text_ids = encoding.encode_to_numpy(valid, disallowed_special=())
        ids += [np.array([END_OF_TEXT], np.uint32), text_ids]
    return np.concatenate(ids).astype(np.uint16)


def _matches_tiktoken(tokens: TokenIds, texts: Sequence[str]) -> bool:
    """Return whether the ids of a batch start with tiktoken's ids of its first characters."""
    start = texts[0] if texts else ""
    if len(start) > CHECK_CHARS:
        cuts = [0, *(cut.start() for cut in CUT.finditer(start, 0, CHECK_CHARS))]
        start = start[: cuts[-1]]
    expected = _encode_with_tiktoken([start] if texts else [])
    return np.array_equal(tokens[: len(expected)], expected)
