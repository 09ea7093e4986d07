import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distributed import DistributedContext
from model import GPT, GPT2_SIZES, GPTConfig
from plan import BatchPlan, describe_plan, fit_batch, plan_batch, probe_step
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


@pytest.mark.parametrize(("start", "found"), [(1, 1), (4, 2), (3, 3), (24, 3), (96, 3)])
def test_fit_batch_halves_until_the_memory_is_there(start, found):
    tried = []

    def attempt(sequences):
        tried.append(sequences)
        torch.empty(2**10 if sequences <= 3 else 2**52, dtype=torch.uint8)  # no machine has that

    plan = fit_batch(BatchPlan(start, 5), attempt, DistributedContext(CPU))

    assert plan == BatchPlan(found, start * 5 // found)
    assert tried[-1] == found
    assert all(later <= earlier // 2 for earlier, later in itertools.pairwise(tried))


def test_fit_batch_without_memory_for_one_sequence_says_so():
    with pytest.raises(ValueError, match="not enough memory for a single sequence"):
        fit_batch(BatchPlan(4, 1), lambda _: torch.empty(2**52), DistributedContext(CPU))


def test_fit_batch_does_not_hide_other_errors():
    with pytest.raises(RuntimeError, match="must match"):
        fit_batch(BatchPlan(4, 1), lambda _: torch.ones(2) + torch.ones(3), DistributedContext(CPU))


def test_probe_step_takes_the_memory_of_a_step_and_leaves_nothing_behind():
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    before = [parameter.clone() for parameter in model.parameters()]
    probed = []
    model.register_forward_hook(lambda _, args, output: probed.append((args[0].shape, output)))

    probe_step(model, 3, 8, torch.float32, DistributedContext(CPU))

    assert probed[0][0] == (3, 8)
    assert probed[0][1].loss.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def test_describe_plan_of_the_reproduction():
    config = TrainConfig(dtype="float32")
    batch = plan_batch(config, GPTConfig(), CPU, 8)
    text = describe_plan(config, GPTConfig(), batch, CPU, 8)
    for fact in ("124,475,904", "19,073", "9,999,745,024", "8.6e+18", "1.39 GiB", "8 x cpu"):
        assert fact in text
