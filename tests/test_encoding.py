"""Ids of many documents equal tiktoken's, with any encoder and number of threads."""

import operator
import random
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import encoding
from corpus.encoding import GigatokenEncoder, encode_documents
from tokenizer import END_OF_TEXT, gpt2_encoding

# Any text, and text made of what tokenizers get wrong.
SPACES = [*" \n\t\x00\x1c\x85\xa0\u2003\u3000\ufeff", "  ", "\r\n"]
WORDS = ["a", "It's", "'ll", "I'LL", "9", "½", "!?", "日本", "é", "e\u0301", "🦄", "👩\u200d👧"]
OTHERS = ["\ufdd1", "<|endoftext|>", "<|", "endoftext", "\u0627"]
# Noncharacters, of which one is the mark between documents, letters of Unicode 17, and surrogates.
RARE = [*"\ufdd0\ufdef\uffff\U0010ffff\u088f\U000323b0\ud800\udc00", "\ud83e\udd84"]
TEXTS = st.one_of(
    st.text(st.characters()),
    st.lists(st.sampled_from(RARE + WORDS), max_size=10).map("".join),
    st.lists(st.sampled_from(SPACES + WORDS + OTHERS), max_size=30).map("".join),
)


def reference(texts):
    """What tiktoken returns, one document at a time."""
    encode = gpt2_encoding().encode_ordinary
    return [id for text in texts for id in [END_OF_TEXT, *encode(text)]]


@pytest.fixture(params=["gigatoken", "tiktoken"])
def encoder(request, monkeypatch):
    """Each encoder in turn."""
    if request.param == "tiktoken":
        monkeypatch.setitem(sys.modules, "gigatoken", None)
    return request.param


@pytest.fixture(scope="module")
def gigatoken():
    return GigatokenEncoder(workers=2)  # loading it takes 0.1 s


@pytest.mark.filterwarnings("ignore:gigatoken disagrees")
@settings(max_examples=300)
@given(texts=st.lists(TEXTS, max_size=5))
def test_gigatoken_encoder_ids_are_tiktokens(gigatoken, texts):
    tokens = gigatoken.encode(texts)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == reference(texts)


@pytest.mark.parametrize("character", RARE)
def test_gigatoken_encoder_checks_characters_beyond_the_sample(gigatoken, character, monkeypatch):
    """They are checked in each batch: the ids are right again after a batch without them."""
    monkeypatch.setattr(encoding, "CHECK_CHARS", 20)
    words = "the cat sat on the mat. " * 3
    for _ in range(2):
        for texts in ([words, f"{words}a{character}'s, {words}", words], [words]):
            with warnings.catch_warnings(record=True):
                assert gigatoken.encode(texts).tolist() == reference(texts)


@pytest.mark.filterwarnings("ignore:gigatoken is not installed")
def test_encode_documents_of_any_length_has_tiktokens_ids(encoder):
    rng = random.Random(0)
    pieces = SPACES + WORDS + OTHERS
    texts = ["".join(rng.choices(pieces, k=size)) for size in (500_000, 10, 1_000)]
    texts += pieces
    (tokens,) = encode_documents([texts], workers=2)
    assert np.array_equal(tokens, np.array(reference(texts), np.uint16))


def test_encode_documents_allows_longer_runs_of_space_than_tiktoken():
    text = "a" + "\u3000" * 1_500_000 + "b"
    (tokens,) = encode_documents([[text]])
    assert gpt2_encoding().decode(tokens[1:].tolist()) == text


def test_encode_documents_in_threads_keeps_order_and_reads_only_a_few_batches_ahead(monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    texts = [[f"document {i} of batch {n}" for i in range(n % 5)] for n in range(50)]
    read = iter(texts)
    with pytest.warns(UserWarning, match="gigatoken is not installed"):
        results = [
            (ids.tolist(), len(texts) - operator.length_hint(read))
            for ids in encode_documents(read, workers=3)
        ]
    assert [ids for ids, _ in results] == [reference(batch) for batch in texts]
    ahead = [taken - number for number, (_, taken) in enumerate(results)]
    assert max(ahead) == 1 + encoding.BATCHES_AHEAD


def test_encode_documents_reencodes_a_batch_that_gigatoken_got_wrong(monkeypatch):
    """Also across a reload of its tokenizer, which has an empty cache."""
    right = GigatokenEncoder._encode

    def wrong(self, texts):
        return right(self, texts)["batch 3" in texts[0] :]

    monkeypatch.setattr(GigatokenEncoder, "_encode", wrong)
    monkeypatch.setattr(encoding, "RELOAD_TOKENS", 40)
    texts = [[f"batch {n}" + " word" * 9, "one two"] for n in range(5)]
    with pytest.warns(UserWarning, match="disagrees"):
        ids = [tokens.tolist() for tokens in encode_documents(texts, workers=2)]
    assert ids == [reference(batch) for batch in texts]
