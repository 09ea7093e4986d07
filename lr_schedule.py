"""The learning rate as a pure function of the step.

`step` counts updates done, so step 0 is the first update. Warm-up raises the rate linearly, by
max_lr / warmup_steps an update: the first update already learns, and update `warmup_steps - 1`
is the first at max_lr.
"""

import math


def cosine_lr(
    step: int, *, max_lr: float, min_lr: float, warmup_steps: int, max_steps: int
) -> float:
    """Linear warm-up, half a cosine from `max_lr` down to `min_lr`, then constant.

    Source: GPT-3 paper (Brown et al. 2020), appendix B; SGDR (Loshchilov & Hutter 2017), eq. 5.

    Args:
        step: updates done before this one, >= 0.
        max_lr: the peak rate, reached at the end of warm-up.
        min_lr: the rate at `max_steps` and after.
        warmup_steps: updates of warm-up; 0 starts at `max_lr`.
        max_steps: where the cosine ends. With `warmup_steps >= max_steps` there is no cosine:
            warm-up is followed by `min_lr`.

    Returns:
        The learning rate of the update after `step`.
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
    """Warm-up, stable, decay: linear up, constant `max_lr`, linear down to `min_lr`.

    Source: MiniCPM (Hu et al. 2024), section 4; the trapezoid of Hägele et al. 2024.

    Args:
        step: updates done before this one, >= 0.
        max_lr: the rate of the constant part.
        min_lr: the rate at `max_steps` and after.
        warmup_steps: updates of warm-up; 0 starts at `max_lr`.
        max_steps: where the decay ends. With `warmup_steps >= max_steps` warm-up is followed by
            `min_lr`.
        decay_fraction: the share of `max_steps` spent decaying, at the end, in [0, 1]; it gives
            way to warm-up where the two overlap.

    Returns:
        The learning rate of the update after `step`.
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
