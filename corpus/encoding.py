"""Encode large amounts of text with gigatoken, which is many times faster than tiktoken.

The ids are tiktoken's: the start of each batch, and each character that is new in it, are encoded
with both. If the ids differ, the batch is encoded with tiktoken. They differ for letters that are
new in Unicode 17, which only gigatoken knows, and for `DOCUMENT_MARK`.
"""

import base64
import os
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from corpus.shards import TokenArray
from tokenizer import END_OF_TEXT, gpt2_encoding

DOCUMENT_MARK = "\ufdd0"  # gigatoken's END_OF_TEXT; Unicode reserves it for such internal use
RELOAD_TOKENS = 1 << 26  # gigatoken caches every word: up to 1 GB after this many tokens
BATCHES_AHEAD = 4  # batches to encode in advance while a shard is written
ASCII = bytes(range(128))
CHECK_CHARS = 10_000  # characters of each batch that are also encoded with tiktoken


def encode_documents(batches: Iterable[Sequence[str]], workers: int = 1) -> Iterator[TokenArray]:
    """Encode batches of documents, with `END_OF_TEXT` before each document.

    As in tiktoken, `<|endoftext|>` inside a text is ordinary text. The ids do not depend on the
    threads or the batches.

    `workers` is a number of threads. gigatoken splits texts of megabytes among them; the first
    batch fixes their number for the process. tiktoken, the fallback, encodes one text per thread.

    Yields:
        The ids of each batch, in order: (tokens,) uint16. A few batches are in memory at a time.
    """
    encode: Callable[[Sequence[str]], TokenArray] = partial(encode_with_tiktoken, workers=workers)
    try:
        encode = GigatokenEncoder(workers).encode
    except ImportError:
        warnings.warn("gigatoken is not installed: encoding with tiktoken, slowly", stacklevel=1)
    in_flight: deque[Future[TokenArray]] = deque()
    with ThreadPoolExecutor(1) as pool:  # the encoders start threads themselves
        for texts in batches:
            in_flight.append(pool.submit(encode, texts))
            if len(in_flight) > BATCHES_AHEAD:
                yield in_flight.popleft().result()
        yield from (future.result() for future in in_flight)


def encode_with_tiktoken(texts: Sequence[str], workers: int) -> TokenArray:
    """Encode documents, with `END_OF_TEXT` before each."""
    documents = gpt2_encoding().encode_ordinary_batch(list(texts), num_threads=workers)
    return np.array([id for ids in documents for id in (END_OF_TEXT, *ids)], np.uint16)


class GigatokenEncoder:
    """Encoder that uses gigatoken, or tiktoken for a batch in which the two disagree."""

    def __init__(self, workers: int) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when gigatoken's thread pool starts
        self._load()
        self.workers = workers
        self._checked = set[str]()  # characters beyond ASCII

    def encode(self, texts: Sequence[str]) -> TokenArray:
        """Encode documents, with `END_OF_TEXT` before each."""
        tokens, text = self._encode(texts), "".join(texts)
        others = text.encode(errors="surrogatepass").translate(None, ASCII)
        new = {*others.decode(errors="surrogatepass")} - self._checked
        # The ids of `'s` show whether the character before it is a letter.
        sample = [text[:CHECK_CHARS], "".join(f"{character}'s" for character in new)]
        if np.array_equal(self._encode(sample), encode_with_tiktoken(sample, workers=1)):
            self._checked |= new
            return tokens
        warnings.warn("gigatoken disagrees with tiktoken, whose ids are used", stacklevel=1)
        return encode_with_tiktoken(texts, self.workers)

    def _encode(self, texts: Sequence[str]) -> TokenArray:
        if self._tokens_since_load >= RELOAD_TOKENS:
            self._load()
        # Join the texts into one: several would be returned as an awkward array. Unlike
        # `Tokenizer.encode`, `encode_batch_padded` releases the GIL for the thread that reads.
        # tiktoken replaces lone surrogates: let them pass here, so that `encode` sees a difference.
        data = "".join([DOCUMENT_MARK + text for text in texts]).encode(errors="surrogatepass")
        ids, _ = self._tokenizer.encode_batch_padded([data], pad_id=0)
        self._tokens_since_load += ids.size
        return ids.ravel().astype(np.uint16)

    def _load(self) -> None:
        """Create a tokenizer with an empty cache; gigatoken can only read the ranks from a file."""
        import gigatoken

        tokens = map(gpt2_encoding().decode_single_token_bytes, range(END_OF_TEXT))
        lines = [b"%s %d\n" % (base64.b64encode(token), id) for id, token in enumerate(tokens)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gpt2.tiktoken"
            path.write_bytes(b"".join(lines))
            mark = {DOCUMENT_MARK: END_OF_TEXT}
            self._tokenizer = gigatoken.Tokenizer.from_tiktoken(path, "gpt2", mark)
        self._tokens_since_load = 0
