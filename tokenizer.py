"""GPT-2's byte-level BPE tokenizer: tiktoken's, built offline from `assets/vocab.bpe`."""

import functools
import hashlib
import math
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken

END_OF_TEXT = 50256
VOCAB_SIZE = 50257  # 256 bytes, 50,000 merges, <|endoftext|>
VOCAB_PATH = Path(__file__).parent / "assets" / "vocab.bpe"
VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# GPT-2 splits text into words with this pattern before it merges bytes; as written in tiktoken.
WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

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


def spelling_features(vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the spelling features of each token id, with weights.

    The features are the token's letters, its first three and four and last two and three letters
    and, with less weight, a space, a capital, its length, first and last letter and frequency.
    Merges are sorted by frequency, so `id.bit_length()` stands for it. Ids without text have no
    features (see `token_bytes`).

    Returns:
        (2, n) int64 ids and feature numbers, and (n,) float32 weights. The squared weights of each
        id add up to 1.
    """
    numbers = dict[str, int]()
    pairs, weights = list[tuple[int, int]](), list[float]()
    for token, id in _read_ranks().items() if vocab_size >= VOCAB_SIZE else ():
        text = token.decode(errors="surrogateescape")
        word = text.strip().lower() or text
        starts = [f"{word[:n]} " for n in (3, 4) if n < len(word)]
        ends = [f" {word[-n:]}" for n in (2, 3) if n < len(word)]
        forms = (" " in text, text != text.lower(), len(word), word[0], word[-1], id.bit_length())
        features = {word: 2.0} | dict.fromkeys(starts + ends, 0.7)
        features |= {f"form {n} {form}": 0.3 for n, form in enumerate(forms)}
        pairs += [(id, numbers.setdefault(name, len(numbers))) for name in features]
        weights += [weight / math.hypot(*features.values()) for weight in features.values()]
    return np.array(pairs, np.int64).reshape(-1, 2).T, np.array(weights, np.float32)
