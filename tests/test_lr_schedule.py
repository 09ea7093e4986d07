import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from lr_schedule import cosine_lr, wsd_lr

RATES = [
    pytest.param(6e-4, 6e-5, id="decays to a tenth"),
    pytest.param(1.8e-3, 0.0, id="decays to zero"),
    pytest.param(3e-4, 3e-4, id="stays"),
]
SHAPES = [(10, 50), (1, 20), (7, 8), (2, 100)]  # warmup_steps, max_steps


def torch_rates(make_schedulers, milestones, max_lr, steps):
    """The first `steps` rates of torch's own schedulers, one after the other."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=max_lr)
    scheduler = SequentialLR(optimizer, make_schedulers(optimizer), milestones)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def torch_warmup(optimizer, warmup_steps):
    # LinearLR reaches its end after total_iters steps, so update w - 1 is the first at max_lr.
    start = 1 / warmup_steps
    return LinearLR(optimizer, start_factor=start, total_iters=max(warmup_steps - 1, 1))


@st.composite
def schedules(draw):
    """Keyword arguments of a schedule, warm-up and end in any order."""
    max_lr = draw(st.floats(min_value=1e-6, max_value=1.0))
    return {
        "max_lr": max_lr,
        "min_lr": max_lr * draw(st.floats(min_value=0.0, max_value=1.0)),
        "warmup_steps": draw(st.integers(min_value=0, max_value=60)),
        "max_steps": draw(st.integers(min_value=1, max_value=60)),
    }


@pytest.mark.parametrize(("max_lr", "min_lr"), RATES)
@pytest.mark.parametrize(("warmup_steps", "max_steps"), SHAPES)
def test_cosine_lr_equals_torch_linear_then_cosine(max_lr, min_lr, warmup_steps, max_steps):
    expected = torch_rates(
        lambda optimizer: [
            torch_warmup(optimizer, warmup_steps),
            CosineAnnealingLR(optimizer, T_max=max_steps - warmup_steps, eta_min=min_lr),
        ],
        [warmup_steps],
        max_lr,
        max_steps + 1,
    )

    ours = [
        cosine_lr(
            step, max_lr=max_lr, min_lr=min_lr, warmup_steps=warmup_steps, max_steps=max_steps
        )
        for step in range(max_steps + 1)
    ]

    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("max_lr", "min_lr"), RATES)
@pytest.mark.parametrize(("warmup_steps", "max_steps", "decay_steps"), [(10, 50, 10), (1, 40, 20)])
def test_wsd_lr_equals_torch_linear_constant_linear(
    max_lr, min_lr, warmup_steps, max_steps, decay_steps
):
    expected = torch_rates(
        lambda optimizer: [
            torch_warmup(optimizer, warmup_steps),
            ConstantLR(optimizer, factor=1.0),
            LinearLR(optimizer, 1.0, end_factor=min_lr / max_lr, total_iters=decay_steps),
        ],
        [warmup_steps, max_steps - decay_steps],
        max_lr,
        max_steps + 10,
    )

    ours = [
        wsd_lr(
            step,
            max_lr=max_lr,
            min_lr=min_lr,
            warmup_steps=warmup_steps,
            max_steps=max_steps,
            decay_fraction=decay_steps / max_steps,
        )
        for step in range(max_steps + 10)
    ]

    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_cosine_lr_of_the_gpt2_reproduction_worked_by_hand():
    rate = {
        step: cosine_lr(step, max_lr=6e-4, min_lr=6e-5, warmup_steps=715, max_steps=19073)
        for step in (0, 714, 715, 715 + 9179, 19073, 1_000_000)
    }

    assert rate[0] == pytest.approx(6e-4 / 715)
    assert rate[714] == rate[715] == 6e-4
    assert rate[715 + 9179] == pytest.approx((6e-4 + 6e-5) / 2)  # halfway down the cosine
    assert rate[19073] == rate[1_000_000] == 6e-5


def test_wsd_lr_worked_by_hand():
    rates = [
        wsd_lr(step, max_lr=8.0, min_lr=0.0, warmup_steps=2, max_steps=10, decay_fraction=0.4)
        for step in range(12)
    ]

    assert rates == [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("schedule", [cosine_lr, wsd_lr])
def test_schedule_without_warmup_starts_at_the_peak(schedule):
    assert schedule(0, max_lr=1.0, min_lr=0.1, warmup_steps=0, max_steps=10) == 1.0


@pytest.mark.parametrize("schedule", [cosine_lr, wsd_lr])
@pytest.mark.parametrize("warmup_steps", [10, 15])
def test_schedule_with_warmup_to_the_end_or_beyond_goes_from_warmup_to_the_minimum(
    schedule, warmup_steps
):
    rates = [
        schedule(step, max_lr=1.0, min_lr=0.1, warmup_steps=warmup_steps, max_steps=10)
        for step in range(warmup_steps + 5)
    ]

    assert rates[:warmup_steps] == pytest.approx(
        [(s + 1) / warmup_steps for s in range(warmup_steps)]
    )
    assert rates[warmup_steps:] == [0.1] * 5


def test_wsd_lr_decay_gives_way_to_warmup():
    rates = [
        wsd_lr(step, max_lr=1.0, min_lr=0.0, warmup_steps=5, max_steps=10, decay_fraction=1.0)
        for step in range(11)
    ]

    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_wsd_lr_without_decay_drops_only_at_the_end():
    rates = [
        wsd_lr(step, max_lr=1.0, min_lr=0.1, warmup_steps=0, max_steps=5, decay_fraction=0.0)
        for step in range(7)
    ]

    assert rates == [1.0] * 5 + [0.1] * 2


@pytest.mark.parametrize("schedule", [cosine_lr, wsd_lr])
@settings(deadline=None)
@given(arguments=schedules(), step=st.integers(min_value=0, max_value=200))
def test_schedule_stays_in_bounds(schedule, arguments, step):
    rate = schedule(step, **arguments)

    assert 0.0 <= rate <= arguments["max_lr"] * (1 + 1e-12)
    if step >= arguments["warmup_steps"]:
        assert rate >= arguments["min_lr"] * (1 - 1e-12)


@pytest.mark.parametrize("schedule", [cosine_lr, wsd_lr])
@settings(deadline=None)
@given(arguments=schedules())
def test_schedule_rises_during_warmup_and_never_after(schedule, arguments):
    warmup_steps = arguments["warmup_steps"]
    rates = [schedule(step, **arguments) for step in range(130)]
    rise, rest = rates[:warmup_steps], rates[max(warmup_steps - 1, 0) :]

    assert all(later > earlier for earlier, later in pairwise(rise))
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(rest))


@settings(deadline=None)
@given(arguments=schedules())
def test_cosine_lr_has_no_jump(arguments):
    if arguments["warmup_steps"] >= arguments["max_steps"]:
        return  # there, warm-up is followed by the minimum
    length = arguments["max_steps"] - arguments["warmup_steps"]
    steepest = max(
        arguments["max_lr"] / max(arguments["warmup_steps"], 1),
        math.pi / 2 * (arguments["max_lr"] - arguments["min_lr"]) / length,
    )
    rates = [cosine_lr(step, **arguments) for step in range(130)]

    for earlier, later in pairwise(rates):
        assert abs(later - earlier) <= steepest * (1 + 1e-9)
