"""GPT-2's tokenizer: the published ids, and what a token says of its text."""

import pytest
import tiktoken_ext.openai_public

import tokenizer
from tokenizer import END_OF_TEXT, VOCAB_SIZE, gpt2_encoding, token_bytes


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
    with pytest.raises(ValueError, match=r"vocab\.bpe has changed: delete it"):
        gpt2_encoding()
