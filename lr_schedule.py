"""The learning rate as a pure function of the step.

`step` counts updates done, so step 0 is the first update. Warm-up raises the rate linearly, by
max_lr / warmup_steps per update: the first update already learns, and update `warmup_steps - 1`
is the first at max_lr. After warm-up comes the schedule's own shape, and from `max_steps` on the
rate stays at `min_lr`.

To add a schedule, write a function and give it a name in `SCHEDULES`: the flag `--lr-schedule`
takes that name.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def cosine_lr(
    step: int, *, max_lr: float, min_lr: float, warmup_steps: int, max_steps: int
) -> float:
    """Linear warm-up, then half a cosine from `max_lr` down to `min_lr`.

    Source: GPT-3 paper (Brown et al. 2020), appendix B; SGDR (Loshchilov & Hutter 2017), eq. 5.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    if step >= max_steps:
        return min_lr
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return min_lr + 0.5 * (max_lr - min_lr) * (1.0 + math.cos(math.pi * progress))


def wsd_lr(
    step: int,
    *,
    max_lr: float,
    min_lr: float,
    warmup_steps: int,
    max_steps: int,
    decay_share: float = 0.2,
) -> float:
    """Warm-up, stable, decay: linear up, constant `max_lr`, linear down.

    The decay takes the last `decay_share` of all steps, or what the warm-up leaves of them.
    Source: MiniCPM (Hu et al. 2024), section 4; the trapezoid of Hägele et al. 2024.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    if step >= max_steps:
        return min_lr
    decay_start = max(warmup_steps, max_steps - round(decay_share * max_steps))
    if step < decay_start:
        return max_lr
    remaining = (max_steps - step) / (max_steps - decay_start)
    return min_lr + (max_lr - min_lr) * remaining


SCHEDULES: Mapping[str, Callable[..., float]] = {
    "cosine": cosine_lr,
    "wsd": wsd_lr,
    "wsd-long": partial(wsd_lr, decay_share=0.6),
}


def learning_rate(config: Any, step: int) -> float:  # noqa: ANN401 - a TrainConfig
    """The learning rate of the update after `step`: the training loop asks for it each time."""
    return SCHEDULES[config.lr_schedule](
        step,
        max_lr=config.max_lr,
        min_lr=config.min_lr,
        warmup_steps=config.warmup,
        max_steps=config.max_steps,
    )
