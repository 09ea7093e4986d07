import pytest
import torch

from parallel import SINGLE_PROCESS
from spelling import share_by_spelling, spelling_features
from tokenizer import END_OF_TEXT, VOCAB_SIZE, gpt2_encoding


def test_spelling_features_are_shared_by_the_forms_of_a_word():
    pairs, weights = spelling_features()
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


def test_words_that_are_spelled_alike_learn_from_each_other():
    rare, common, plural, other = map(
        gpt2_encoding().encode_single_token, ("House", " house", " houses", "Sun")
    )
    embedding = torch.nn.Parameter(torch.zeros(VOCAB_SIZE, 2))
    optimizer = torch.optim.SGD([embedding], lr=1.0)
    optimizer.register_step_pre_hook(share_by_spelling(embedding, 0.5, SINGLE_PROCESS))
    optimizer.step()  # without a gradient
    embedding.grad = torch.zeros_like(embedding)
    embedding.grad[common] = torch.tensor([-8.0, 4.0])
    optimizer.step()
    assert embedding[common].tolist() == pytest.approx([12.0, -6.0])  # its own, and half of it
    assert embedding[rare].tolist() == pytest.approx([4.0, -2.0], rel=0.05)  # a capital, no space
    assert 0 < embedding[plural][0] < 1
    assert not embedding[other].any()
    with pytest.raises(ValueError, match=r"100 ids are not GPT-2's: leave out --spelling-share"):
        share_by_spelling(torch.nn.Parameter(torch.zeros(100, 2)), 0.5, SINGLE_PROCESS)
