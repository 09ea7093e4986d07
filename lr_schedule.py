"""The settings of a step: learning rate and batch size, as pure functions of the step.

`step` is the number of updates done, so step 0 is the first update. During warmup, the learning
rate grows linearly, by max_lr / warmup_steps per update: it is above 0 for the first update, and
update `warmup_steps - 1` is the first at max_lr. The schedules differ after warmup. From
`max_steps` on, the learning rate stays at `min_lr`.

To add a schedule, write a function and add it to `SCHEDULES` under a name, which the flag
`--lr-schedule` then accepts.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def cosine_lr(
    step: int, *, max_lr: float, min_lr: float, warmup_steps: int, max_steps: int
) -> float:
    """Warm up linearly, then follow half a cosine from `max_lr` down to `min_lr`.

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
    decay_fraction: float = 0.2,
) -> float:
    """Warm up linearly, stay at `max_lr`, then decay linearly to `min_lr` (warmup-stable-decay).

    The decay takes the last `decay_fraction` of all steps, or fewer if the warmup leaves fewer.
    Source: MiniCPM (Hu et al. 2024), section 4; the trapezoid of Hägele et al. 2024.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    if step >= max_steps:
        return min_lr
    decay_start = max(warmup_steps, max_steps - round(decay_fraction * max_steps))
    if step < decay_start:
        return max_lr
    remaining = (max_steps - step) / (max_steps - decay_start)
    return min_lr + (max_lr - min_lr) * remaining


SCHEDULES: Mapping[str, Callable[..., float]] = {
    "cosine": cosine_lr,
    "wsd": wsd_lr,
    "wsd-long": partial(wsd_lr, decay_fraction=0.6),
}


def learning_rate(config: Any, step: int) -> float:  # noqa: ANN401 - a TrainConfig
    """Return the learning rate of the update after `step` updates."""
    return SCHEDULES[config.lr_schedule](
        step,
        max_lr=config.max_lr,
        min_lr=config.min_lr,
        warmup_steps=config.warmup,
        max_steps=config.max_steps,
    )


def settings_at(config: Any, step: int) -> dict[str, float]:  # noqa: ANN401 - a TrainConfig
    """Return factors for the optimizers' settings in the update after `step` updates.

    Each factor multiplies the number that a parameter group was built with under its name: `lr`,
    `weight_decay`, `momentum`, … A group without that name ignores it.
    """
    return {"lr": learning_rate(config, step) / config.max_lr}


def windows_at(config: Any, step: int) -> int:  # noqa: ANN401 - a TrainConfig
    """Return the number of windows of `block_size` tokens in the update after `step` updates."""
    return config.total_batch_size // config.block_size


def position_at(config: Any, step: int) -> int:  # noqa: ANN401 - a TrainConfig
    """Return the number of windows that the first `step` updates consume: the loader's position."""
    return sum(windows_at(config, earlier) for earlier in range(step))
