"""GPT-2's tokenizer: the published ids, and what a token says of its text."""

import pytest
import tiktoken_ext.openai_public

import tokenizer
from tokenizer import END_OF_TEXT, VOCAB_SIZE, gpt2_encoding, spelling_features, token_bytes


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


def test_spelling_features_are_shared_by_the_forms_of_a_word():
    pairs, weights = spelling_features(VOCAB_SIZE + 47)
    parts = dict[int, dict[int, float]]()
    for id, part, weight in zip(*pairs.tolist(), weights.tolist(), strict=True):
        parts.setdefault(id, {})[part] = weight
    assert len(weights) == sum(map(len, parts.values()))  # each once
    assert sorted(parts) == list(range(END_OF_TEXT))

    def alike(first, second):
        first, second = (parts[gpt2_encoding().encode_single_token(t)] for t in (first, second))
        return sum(weight * second.get(part, 0.0) for part, weight in first.items())

    squares = 4 + 4 * 0.49 + 6 * 0.09
    assert alike(" house", "House") == pytest.approx((4 + 4 * 0.49 + 3 * 0.09) / squares)
    assert alike(" houses", " house") == pytest.approx((2 * 0.49 + 3 * 0.09) / squares)  # hous-
    assert alike(" running", " walking") == pytest.approx((2 * 0.49 + 4 * 0.09) / squares)  # -ing
    assert alike("House", " simple") == pytest.approx(0.09 / squares)  # -e
    assert alike("House", "Water") == pytest.approx(4 * 0.09 / squares)  # all but the letters
    assert alike("1984", "1985") == pytest.approx((0.49 + 5 * 0.09) / (squares - 0.49))  # 198-
    # Bytes of another script's letters; as "\N{REPLACEMENT CHARACTER}" they would all be one word.
    assert alike(b"\x82", b"\xe3") < 0.1
    assert spelling_features(2048)[0].shape == (2, 0)


def test_gpt2_encoding_of_a_changed_file_is_refused(tmp_path, monkeypatch):
    changed = tmp_path / "vocab.bpe"
    changed.write_bytes(tokenizer.VOCAB_PATH.read_bytes()[:-1])
    monkeypatch.setattr(tokenizer, "VOCAB_PATH", changed)
    gpt2_encoding.cache_clear()
    tokenizer._read_ranks.cache_clear()
    with pytest.raises(ValueError, match=r"vocab\.bpe is not GPT-2's"):
        gpt2_encoding()
