"""Token ids equal tiktoken's, with any encoder and number of threads."""

import operator
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer
from tokenizer import (
    END_OF_TEXT,
    UNICODE_17,
    VOCAB_SIZE,
    encode_documents,
    gpt2_encoding,
    token_bytes,
)

ROOT = Path(tokenizer.__file__).parent

# Any text, and text made of what tokenizers get wrong.
SPACES = [*" \n\t\x00\x1c\x85\xa0\u2003\u3000\ufeff", "  ", "\r\n"]
WORDS = ["a", "It's", "'ll", "I'LL", "9", "½", "!?", "日本", "é", "e\u0301", "🦄", "👩\u200d👧"]
OTHERS = [tokenizer.DOCUMENT_MARK, "\ufdd1", "\ud800", "\udcff", "\ud83e\udd84"]
OTHERS += ["<|endoftext|>", "<|", "endoftext", "\u0627"]
AWKWARD = st.sampled_from(SPACES + WORDS + OTHERS)
TEXTS = st.one_of(
    st.text(),
    st.text(st.characters(exclude_categories=[])),
    st.lists(AWKWARD, max_size=30).map("".join),
)


def reference(texts):
    """What tiktoken gives, one document at a time."""
    encoding = gpt2_encoding()
    return [id for text in texts for id in [END_OF_TEXT, *encoding.encode_ordinary(text)]]


def without_gigatoken(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)


def test_gpt2_encoding_ids_are_the_published_ones():
    encoding = gpt2_encoding()
    assert encoding.encode("Hello, I'm a language model,") == [
        15496, 11, 314, 1101, 257, 3303, 2746, 11,
    ]  # fmt: skip
    assert encoding.n_vocab == VOCAB_SIZE
    assert encoding.eot_token == END_OF_TEXT
    assert encoding.decode([END_OF_TEXT]) == "<|endoftext|>"
    assert tiktoken_ext.openai_public.r50k_pat_str == tokenizer.WORD_PATTERN


def test_token_bytes_are_the_bytes_of_a_text():
    text = "naïve 日本語 🙂\n\n  x = 1"
    ids = gpt2_encoding().encode_ordinary(text)
    assert token_bytes(50304)[ids].sum() == len(text.encode())
    assert (token_bytes(50304)[50256:] == 0).all()
    assert not token_bytes(100).any()


def test_gpt2_encoding_of_a_changed_file_is_refused(tmp_path, monkeypatch):
    changed = tmp_path / "vocab.bpe"
    changed.write_bytes(tokenizer.VOCAB_PATH.read_bytes()[:-1])
    monkeypatch.setattr(tokenizer, "VOCAB_PATH", changed)
    gpt2_encoding.cache_clear()
    tokenizer._read_ranks.cache_clear()
    with pytest.raises(ValueError, match=r"vocab\.bpe is not GPT-2's"):
        gpt2_encoding()


@pytest.fixture(scope="module")
def encoder():
    return tokenizer._Encoder(workers=2)


@settings(max_examples=300)
@given(texts=st.lists(TEXTS, max_size=5))
def test_encode_documents_ids_are_tiktokens(encoder, texts):
    with pytest.MonkeyPatch.context() as monkeypatch:  # loading gigatoken takes 0.1 s
        monkeypatch.setattr(tokenizer, "_Encoder", lambda workers: encoder)
        (tokens,) = encode_documents([texts])
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == reference(texts)


def test_encode_documents_of_every_character_has_tiktokens_ids(encoder):
    """Before `'s`, which is a word of its own after a letter only; of planes that have any."""
    newer = {c for i in range(0, len(UNICODE_17), 2) for c in range(*UNICODE_17[i : i + 2])}
    others = {*range(0x40000)} - {*range(0xD800, 0xE000), ord(tokenizer.DOCUMENT_MARK)} - newer
    text = "".join(f"a {chr(c)}'s\n" for c in sorted(others))
    assert np.array_equal(encoder._encode_with_gigatoken([text]), reference([text]))
    for i in range(0, len(UNICODE_17), 2):
        for c in (UNICODE_17[i], UNICODE_17[i + 1] - 1):
            texts = ["one" * 10_000, f"a {chr(c)}'s"]
            assert encoder.encode(texts).tolist() == reference(texts)


def test_encode_documents_of_megabytes_has_tiktokens_ids():
    rng = random.Random(0)
    pieces = [piece for piece in SPACES + WORDS if piece.isprintable()]
    texts = ["".join(rng.choices(pieces, k=size)) for size in (2_000_000, 10, 1_000_000)]
    (tokens,) = encode_documents([texts], workers=2)  # gigatoken shares such among its threads
    assert np.array_equal(tokens, np.array(reference(texts), np.uint16))


def test_encode_documents_without_gigatoken_gives_the_same_ids(monkeypatch):
    without_gigatoken(monkeypatch)
    texts = [*SPACES, *WORDS, *OTHERS, "".join(SPACES + WORDS + OTHERS)]
    with pytest.warns(UserWarning, match="gigatoken is not installed"):
        (tokens,) = encode_documents([texts])
    assert tokens.tolist() == reference(texts)


@pytest.mark.parametrize("space", [" ", "\n", "\u3000"])
def test_encode_documents_takes_longer_runs_of_space_than_tiktoken(space):
    text = "a" + space * 1_500_000 + "b"
    (ids,) = encode_documents([[text]])
    assert gpt2_encoding().decode(ids[1:].tolist()) == text


def test_encode_documents_in_threads_keeps_order_and_reads_only_a_few_batches_ahead(monkeypatch):
    without_gigatoken(monkeypatch)
    texts = [[f"document {i} of batch {n}" for i in range(n % 5)] for n in range(50)]
    read = iter(texts)
    with pytest.warns(UserWarning, match="gigatoken is not installed"):
        results = [
            (ids.tolist(), len(texts) - operator.length_hint(read))
            for ids in encode_documents(read, workers=3)
        ]
    assert [ids for ids, _ in results] == [reference(batch) for batch in texts]
    ahead = [taken - number for number, (_, taken) in enumerate(results)]
    assert max(ahead) == 1 + tokenizer.BATCHES_AHEAD


def test_encode_documents_reencodes_a_batch_that_gigatoken_got_wrong(monkeypatch):
    class Wrong(tokenizer._Encoder):
        """From the third batch on, gigatoken leaves the first token out."""

        calls = 0

        def _encode_with_gigatoken(self, texts):
            self.calls += 1
            return super()._encode_with_gigatoken(texts)[self.calls >= 3 :]

    monkeypatch.setattr(tokenizer, "_Encoder", Wrong)
    texts = [[f"batch {n}", "one two"] for n in range(50)]
    with pytest.warns(UserWarning, match="disagrees"):
        ids = [tokens.tolist() for tokens in encode_documents(texts, workers=2)]
    assert ids == [reference(batch) for batch in texts]


def test_encode_documents_reloads_gigatoken_without_a_seam(monkeypatch):
    monkeypatch.setattr(tokenizer, "RELOAD_TOKENS", 5)
    batches = [[f"The batch of number {n}"] for n in range(4)]
    encoded = [tokens.tolist() for tokens in encode_documents(batches)]
    assert encoded == [reference(texts) for texts in batches]
