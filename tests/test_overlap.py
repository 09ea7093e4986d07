"""Passages that two texts share, next to a search that compares every window with every other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import overlap
from corpus.overlap import PASSAGE_TOKENS, Passage, find_passages, find_places, in_passages, quote
from corpus.shards import open_shards
from tokenizer import END_OF_TEXT, gpt2_encoding


def shards_of(folder, *pieces):
    """Open tokens as the shards of a training split."""
    for file in folder.glob("*.npy"):
        file.unlink()
    for number, piece in enumerate(pieces):
        np.save(folder / f"train_{number:06}.npy", np.array(piece, np.uint16))
    return open_shards(folder, "train")


def first_places(text, other):
    """The first place in the other text of each window, by comparison."""
    size, other = PASSAGE_TOKENS, list(other)
    windows = [other[i : i + size] for i in range(len(other) - size + 1)]
    ours = [list(text[i : i + size]) for i in range(len(text))]
    return [windows.index(window) if window in windows else -1 for window in ours]


def copied(text, other, folder, **options):
    places = find_places(np.array(text, np.uint16), shards_of(folder, other), **options)
    return places, int(in_passages(places).sum())


@st.composite
def texts_with_copies(draw):
    """Two texts with pieces of the same few texts, some of which repeat themselves."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    sources = [rng.integers(0, 3, 50), np.tile(rng.integers(0, 3, 3), 20), np.zeros(60, int)]

    def text():
        pieces = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), min_size=1))
        return np.concatenate([sources[which][:length] for which, length in pieces])

    return text(), text()


@settings(max_examples=60)
@given(texts=texts_with_copies(), hash_bits=st.sampled_from([2, 6, 64]), cut=st.integers(1, 60))
def test_find_places_agrees_with_a_comparison_of_all_windows(
    texts, hash_bits, cut, tmp_path_factory
):
    """With few bits, different windows have the same hash. The larger text is read in blocks."""
    (text, other), folder = texts, tmp_path_factory.mktemp("shards")
    if not len(other):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "BLOCK_TOKENS", 7)
        shards = shards_of(folder, *filter(len, (other[:cut], other[cut:])))
        places = find_places(text.astype(np.uint16), shards, hash_bits).tolist()
    expected = first_places(text, other)
    if len(text) <= len(other):
        assert places == expected
    assert [place >= 0 for place in places] == [place >= 0 for place in expected]
    for start, place in enumerate(places):
        if place >= 0:
            window = other[place : place + PASSAGE_TOKENS]
            assert (text[start : start + PASSAGE_TOKENS] == window).all()


def test_in_passages_counts_each_token_of_a_copy_once(tmp_path):
    """The copy spans two shards. A copy of 31 tokens is none."""
    rng = np.random.default_rng(0)
    other, text = rng.integers(0, 50_000, 500), rng.integers(0, 50_000, 300)
    text[20:90], text[150:181] = other[190:260], other[400:431]
    other[250:282] = text[20:52]  # a later copy of its start
    text[80:90] = 0
    shards = shards_of(tmp_path, other[:200], other[200:])
    places = find_places(text.astype(np.uint16), shards)
    assert np.flatnonzero(in_passages(places)).tolist() == [*range(20, 80)]
    assert find_passages(places) == [Passage(20, 60, 190)]
    assert find_passages(find_places(text[100:].astype(np.uint16), shards)) == []


@pytest.mark.parametrize(
    ("n_text", "n_other", "expected"), [(31, 90, 0), (90, 31, 0), (32, 32, 32)]
)
def test_find_places_of_few_tokens(tmp_path, n_text, n_other, expected):
    assert copied(np.arange(n_text), np.arange(n_other), tmp_path)[1] == expected
    assert find_passages(np.full(0, -1)) == []


def test_find_places_of_a_text_that_repeats_itself(tmp_path):
    """Memory and time do not grow with the number of equal windows in both texts."""
    places, count = copied([7] * 100_000, [7] * 300_000, tmp_path)
    assert count == 100_000
    assert set(places[: -PASSAGE_TOKENS + 1].tolist()) == {0}
    assert copied([7] * 300_000, [7] * 100_000, tmp_path)[1] == 300_000


def test_quote_has_twenty_words_around_a_passage(tmp_path):
    text = " ".join(f"word{i}" for i in range(100))
    ids = [END_OF_TEXT, *gpt2_encoding().encode_ordinary(text)]
    words = gpt2_encoding().encode_ordinary("".join(f" word{i}" for i in range(40, 60)))
    place = next(i for i in range(len(ids)) if ids[i : i + len(words)] == words)
    shards = shards_of(tmp_path, ids)
    before, inside, after = quote(shards, Passage(0, len(words), place))
    assert before.split() == [f"word{i}" for i in range(20, 40)]
    assert inside == gpt2_encoding().decode(words)
    assert after.split() == [f"word{i}" for i in range(60, 80)]
    assert before + inside + after in text
    at_the_start = quote(shards, Passage(0, 40, 0))
    assert at_the_start[0] == ""
    assert quote(shards, Passage(0, 40, len(ids) - 40))[2] == ""
