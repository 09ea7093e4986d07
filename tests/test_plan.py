import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model import GPT2_SIZES, GPTConfig
from plan import describe_plan, plan_batch
from train_config import TrainConfig

CPU = torch.device("cpu")


@given(
    micro=st.integers(1, 64),
    accum=st.integers(1, 64),
    world_size=st.integers(1, 64),
    block_size=st.sampled_from([1, 100, 1024]),
)
def test_plan_batch_shares_out_every_token(micro, accum, world_size, block_size):
    total = micro * accum * world_size * block_size
    model = GPTConfig(block_size=block_size)
    plan = plan_batch(
        TrainConfig(total_batch_size=total, micro_batch_size=micro), model, CPU, world_size
    )
    assert (plan.micro_batch_size, plan.grad_accum_steps) == (micro, accum)
    chosen = plan_batch(TrainConfig(total_batch_size=total), model, CPU, world_size)
    assert chosen.micro_batch_size * chosen.grad_accum_steps * world_size * block_size == total


@given(total=st.integers(1, 10**6), micro=st.integers(1, 20), world_size=st.integers(1, 9))
def test_plan_batch_names_nearest_sizes_that_do_divide(total, micro, world_size):
    model = GPTConfig(block_size=64)

    def plan(size):
        config = TrainConfig(total_batch_size=size, micro_batch_size=micro)
        return plan_batch(config, model, CPU, world_size)

    unit = micro * 64 * world_size
    if total % unit == 0:
        assert plan(total).micro_batch_size == micro
        return
    with pytest.raises(ValueError, match="is not a multiple of") as error:
        plan(total)
    suggested = [int(size) for size in str(error.value).split("use ")[1].split(" or ")]
    assert all(abs(size - total) < unit for size in suggested)
    assert len([plan(size) for size in suggested]) == (2 if total > unit else 1)


def test_plan_batch_takes_less_of_a_larger_model():
    sizes = [
        plan_batch(TrainConfig(), GPTConfig(**GPT2_SIZES[size]), CPU, 1).micro_batch_size
        for size in ("gpt2", "gpt2-xl")
    ]
    assert sizes[0] >= sizes[1] >= 1


def test_describe_plan_of_the_reproduction():
    text = describe_plan(TrainConfig(dtype="float32"), GPTConfig(), CPU, 8)
    for fact in ("124,475,904", "19,073", "9,999,745,024", "8.6e+18", "1.39 GiB", "8 x cpu"):
        assert fact in text
