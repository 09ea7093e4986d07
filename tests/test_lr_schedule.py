from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from lr_schedule import SCHEDULES, learning_rate


def rates_of(name, steps, **run):
    config = SimpleNamespace(lr_schedule=name, **run)
    return [learning_rate(config, step) for step in range(steps)]


RATES = [(6e-4, 6e-5), (1.8e-3, 0.0), (3e-4, 3e-4)]  # max_lr, min_lr


@pytest.mark.parametrize(("max_lr", "min_lr"), RATES)
@pytest.mark.parametrize(("warmup_steps", "max_steps"), [(10, 50), (1, 20), (7, 8)])
def test_cosine_lr_equals_torch_linear_then_cosine(max_lr, min_lr, warmup_steps, max_steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=max_lr)
    # LinearLR reaches its end after total_iters steps, so update w - 1 is the first at max_lr.
    warmup = LinearLR(optimizer, 1 / warmup_steps, total_iters=max(warmup_steps - 1, 1))
    decay = CosineAnnealingLR(optimizer, T_max=max_steps - warmup_steps, eta_min=min_lr)
    scheduler = SequentialLR(optimizer, [warmup, decay], [warmup_steps])
    run = {"max_lr": max_lr, "min_lr": min_lr, "warmup": warmup_steps, "max_steps": max_steps}
    for rate in rates_of("cosine", max_steps + 1, **run):
        expected = optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(expected, rel=1e-9, abs=1e-15)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("name", "warmup_steps", "expected"),
    [
        ("wsd", 2, [5.0, *[10.0] * 8, 6.0, 2.0, 2.0]),
        ("wsd", 9, [*[10.0 * step / 9 for step in range(1, 10)], 10.0, 2.0, 2.0]),  # no stable part
        ("wsd-long", 2, [5.0, *[10.0] * 3, *[10.0 - step * 8 / 6 for step in range(6)], 2.0, 2.0]),
    ],
)
def test_wsd_lr_worked_by_hand(name, warmup_steps, expected):
    run = {"max_lr": 10.0, "min_lr": 2.0, "warmup": warmup_steps, "max_steps": 10}
    assert rates_of(name, 12, **run) == pytest.approx(expected)


@pytest.mark.parametrize("name", SCHEDULES)
@given(
    max_lr=st.floats(1e-6, 1.0),
    min_share=st.floats(0.0, 1.0),
    warmup_steps=st.integers(0, 60),
    max_steps=st.integers(1, 60),
)
def test_every_schedule_rises_to_the_peak_in_warmup_and_then_never(
    name, max_lr, min_share, warmup_steps, max_steps
):
    run = {"max_lr": max_lr, "min_lr": max_lr * min_share}
    rates = rates_of(name, 130, warmup=warmup_steps, max_steps=max_steps, **run)
    rise, rest = rates[:warmup_steps], rates[max(warmup_steps - 1, 0) :]
    assert rise == pytest.approx(
        [max_lr * (step + 1) / warmup_steps for step in range(warmup_steps)]
    )
    assert rest[0] == pytest.approx(max_lr)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(rest))
    assert set(rates[max(warmup_steps, max_steps) :]) == {run["min_lr"]}
