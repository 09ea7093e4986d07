"""GPT-2's byte-level BPE, offline: `assets/vocab.bpe` in, token ids out.

tiktoken is the reference. Bulk encoding goes through gigatoken, many times faster, in a thread of
its own, and the beginning of every batch is compared with tiktoken.
"""

import base64
import functools
import hashlib
import itertools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
import tiktoken

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

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
DOCUMENT_MARK = "\ufdd0"  # gigatoken's END_OF_TEXT: Unicode promises that this is no character
RELOAD_TOKENS = 1 << 26  # gigatoken remembers every word that it has seen, up to a GB in these
BATCHES_AHEAD = 4  # wait for gigatoken, so that it need not wait while a shard is written
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


@functools.cache
def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes → id: the 256 single bytes, then one token for each merge, in order."""
    merges = path.read_bytes()
    if hashlib.sha256(merges).hexdigest() != VOCAB_SHA256:
        raise ValueError(f"{path} is not GPT-2's vocab.bpe (its SHA-256 differs): restore it")
    # The file writes each byte as a visible character: itself, or the next one from U+0100.
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {byte: byte for byte in visible}
    byte_of |= {256 + i: byte for i, byte in enumerate(hidden)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in merges.decode().splitlines()[1:]:
        token = line.replace(" ", "").translate(byte_of).encode("latin-1")
        ranks[token] = len(ranks)
    return ranks


def encode_documents(batches: Iterable[Sequence[str]], workers: int = 1) -> Iterator[TokenIds]:
    """Encode batches of documents, each document with `END_OF_TEXT` first.

    `<|endoftext|>` inside a text is ordinary text, and lone surrogates become U+FFFD, as in
    tiktoken. The ids depend on the texts alone: not on the encoder, the workers or the batches.

    Args:
        batches: lists of documents; only as many as are being encoded are held at a time.
        workers: threads among which gigatoken shares texts of megabytes (set once for the process,
            by its first batch) or, without gigatoken, processes of tiktoken.

    Yields:
        For each batch, in order, the (tokens,) uint16 of its documents one after another.

    Raises:
        ChildProcessError: a worker process died.
        OSError: there is no room for a temporary file.
    """
    ahead, remaining = itertools.tee(batches)
    try:
        gigatoken = _Gigatoken(workers)
    except ImportError:
        _warn("gigatoken is not installed")
        yield from _encode_in_processes(remaining, workers)
        return
    with ThreadPoolExecutor(1) as thread:
        encoded = _encode_ahead(thread, gigatoken.encode, ahead, in_flight=BATCHES_AHEAD)
        for texts, tokens in zip(remaining, encoded, strict=True):
            if not _starts_as_tiktoken(tokens, texts):
                break
            yield tokens
        else:
            return
    _warn("gigatoken disagrees with tiktoken")
    yield from _encode_in_processes(itertools.chain([texts], remaining), workers)


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


class _Gigatoken:
    """gigatoken with GPT-2's vocabulary, loaded anew before its memory of words fills ours.

    Args:
        workers: threads that encode.

    Raises:
        ImportError: it is not installed.
    """

    def __init__(self, workers: int) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when its thread pool starts
        # Each call looks whether its input is an array of this package, which takes 0.2 s to load.
        sys.modules.setdefault("awkward", None)  # type: ignore[arg-type] # None: not to be found
        import gigatoken

        self._from_tiktoken = gigatoken.Tokenizer.from_tiktoken
        self._tokens_since_load = RELOAD_TOKENS

    def encode(self, texts: Sequence[str]) -> TokenIds:
        """Encode documents, each with `END_OF_TEXT` first."""
        if self._tokens_since_load >= RELOAD_TOKENS:
            self._load()
        # All in one text, so in one row: many rows would come as an array of another library.
        # Unlike `Tokenizer.encode`, this lets the thread that reads go on meanwhile.
        data = b"".join([DOCUMENT_MARK.encode() + _utf8(text) for text in texts])
        ids, _ = self._tokenizer.encode_batch_padded([data], pad_id=0)
        self._tokens_since_load += ids.size
        if np.count_nonzero(ids == END_OF_TEXT) > len(texts):  # a text has the mark, too
            return _encode_with_tiktoken(texts)
        return ids.ravel().astype(np.uint16)

    def _load(self) -> None:
        ranks = _read_ranks(VOCAB_PATH)
        lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gpt2.tiktoken"
            try:
                path.write_bytes(b"".join(lines))
            except OSError as error:
                raise OSError(f"{path}: {error.strerror}; make room there, or set TMPDIR") from None
            special_tokens = {DOCUMENT_MARK: END_OF_TEXT}
            self._tokenizer = self._from_tiktoken(path, "gpt2", special_tokens)
        self._tokens_since_load = 0


def _encode_with_tiktoken(texts: Sequence[str]) -> TokenIds:
    encoding = gpt2_encoding()
    mark = np.array([END_OF_TEXT], np.uint32)
    ids = [np.empty(0, np.uint32)]
    for text in texts:
        pieces = cut_text(_utf8(text).decode())
        ids += [mark, *(encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces)]
    return np.concatenate(ids).astype(np.uint16)


def _utf8(text: str) -> bytes:
    """UTF-8 of a text as tiktoken reads it: paired surrogates joined, lone ones U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _starts_as_tiktoken(tokens: TokenIds, texts: Sequence[str]) -> bool:
    """Whether a batch begins with the ids that tiktoken gives for its beginning."""
    if not texts:
        return not len(tokens)
    found = CUT.search(texts[0], CHECK_CHARS)
    expected = _encode_with_tiktoken([texts[0][: found.start()] if found else texts[0]])
    return np.array_equal(tokens[: len(expected)], expected)


def _encode_in_processes(batches: Iterable[Sequence[str]], workers: int) -> Iterator[TokenIds]:
    """Encode with tiktoken in processes that take turns, a batch each; results in order."""
    if workers == 1:
        yield from map(_encode_with_tiktoken, batches)
        return
    _read_ranks(VOCAB_PATH)  # if the file is missing or damaged, say so here and once
    batches = iter(batches)
    first = list(itertools.islice(batches, workers))
    with ExitStack() as stack:
        with _interrupts_held():
            processes = [stack.enter_context(_Worker()) for _ in first]
        for texts, process in zip(first, processes, strict=True):
            process.send(texts)
        turns = itertools.cycle(processes)
        for texts, process in zip(batches, turns, strict=False):
            yield process.receive()
            process.send(texts)
        for process in itertools.islice(turns, len(processes)):
            yield process.receive()


class _Worker:
    """A process that encodes with tiktoken, one batch at a time; a context manager.

    Its pipe is all that we share with it: it ends when we do, however abruptly, and if it dies we
    see the end of the pipe. A pool of processes promises neither.

    Raises:
        ChildProcessError: (of `send` and `receive`) the process died.
    """

    def __init__(self) -> None:
        # A fork would copy the locks of other threads (the progress bar's) as they are.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, texts: Sequence[str]) -> None:
        """Give it a batch, once it has none."""
        with self._death_named():
            self._pipe.send(texts)

    def receive(self) -> TokenIds:
        """Wait for the ids of its batch."""
        with self._death_named():
            return self._pipe.recv()

    @contextmanager
    def _death_named(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            raise ChildProcessError(
                "a tokenizer process died, perhaps for want of memory: try a smaller --workers"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def _work(pipe: "Connection[TokenIds, Sequence[str]]") -> None:
    """Encode what comes through a pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows, nothing is inherited
    with suppress(EOFError, OSError):
        while True:
            pipe.send(_encode_with_tiktoken(pipe.recv()))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while processes start. They inherit that: what to do then is up to us."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # first: in Python 3.11 its start would let them through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _encode_ahead(
    pool: Executor,
    encode: Callable[[Sequence[str]], TokenIds],
    batches: Iterable[Sequence[str]],
    in_flight: int,
) -> Iterator[TokenIds]:
    """Encode in a pool, results in order; one batch more than are in flight may be waiting."""
    futures: deque[Future[TokenIds]] = deque()
    try:
        for texts in batches:
            futures.append(pool.submit(encode, texts))
            if len(futures) > in_flight:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
