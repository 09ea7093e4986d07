"""GPT-2's byte-level BPE tokenizer: tiktoken's, built offline from `assets/vocab.bpe`."""

import functools
import hashlib
import math
import re
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken

from runtime.errors import UserError

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
# In texts without whitespace, a word ends between a letter or digit and these characters.
PUNCTUATION = r"!-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
WORD_END = re.compile(rf"(?<=[^\W_])(?=[{PUNCTUATION}])|\Z")


@functools.cache
def gpt2_encoding(vocab_size: int = VOCAB_SIZE) -> tiktoken.Encoding:
    """Return GPT-2's tokenizer, built from the merges file without network access.

    With a smaller `vocab_size`, it has only the first merges and, as the last id, <|endoftext|>.
    """
    return tiktoken.Encoding(
        "gpt2",
        pat_str=WORD_PATTERN,
        mergeable_ranks=dict(islice(_read_ranks().items(), vocab_size - 1)),
        special_tokens={"<|endoftext|>": vocab_size - 1},
        explicit_n_vocab=vocab_size,
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
        raise UserError(f"{VOCAB_PATH} has changed: delete it, then restore it with git checkout")
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


def bits_per_byte(loss: float, ids: list[int]) -> float:
    """Convert the mean loss of all tokens but the first, which has none, to bits per byte."""
    n_bytes = len(gpt2_encoding().decode_bytes(ids[1:]))
    return loss * (len(ids) - 1) / math.log(2) / n_bytes
