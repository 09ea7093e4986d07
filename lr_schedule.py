"""The settings of a step: learning rate and batch size, as pure functions of the step.

`step` is the number of updates done, so step 0 is the first update. During warmup, the learning
rate grows linearly, by max_lr / warmup_steps per update: it is above 0 for the first update, and
update `warmup_steps - 1` is the first at max_lr. The schedules differ after warmup. From
`max_steps` on, the learning rate stays at `min_lr`.

To add a schedule, write a function and add it to `SCHEDULES` under a name, which the flag
`--lr-schedule` then accepts. It gets a step from `warmup_steps` to `max_steps - 1`, and returns 1
for max_lr, 0 for min_lr, or a number between them.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

MAX_DEFAULT_WARMUP_STEPS = 715  # GPT-3's 375M tokens in steps of 524,288 tokens


def cosine(step: int, warmup_steps: int, max_steps: int) -> float:
    """Follow half a cosine from 1 down to 0.

    Source: GPT-3 paper (Brown et al. 2020), appendix B; SGDR (Loshchilov & Hutter 2017), eq. 5.
    """
    progress = (step - warmup_steps) / (max_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def wsd(step: int, warmup_steps: int, max_steps: int, decay_fraction: float = 0.2) -> float:
    """Stay at 1, then decay linearly to 0 (warmup-stable-decay).

    The decay takes the last `decay_fraction` of all steps, or fewer if the warmup leaves fewer.
    Source: MiniCPM (Hu et al. 2024), section 4; the trapezoid of Hägele et al. 2024.
    """
    decay_start = max(warmup_steps, max_steps - round(decay_fraction * max_steps))
    return min(1.0, (max_steps - step) / max(1, max_steps - decay_start))


SCHEDULES: Mapping[str, Callable[[int, int, int], float]] = {
    "cosine": cosine,
    "wsd": wsd,
    "wsd-long": partial(wsd, decay_fraction=0.6),
}


def default_warmup_steps(max_steps: int) -> int:
    """Return the number of warm-up steps of a run whose settings do not have one."""
    return min(MAX_DEFAULT_WARMUP_STEPS, max_steps // 10)


def learning_rate(config: Any, step: int) -> float:  # noqa: ANN401 - a TrainConfig
    """Return the learning rate of the update after `step` updates."""
    if step < config.warmup:
        return config.max_lr * (step + 1) / config.warmup
    if step >= config.max_steps:
        return config.min_lr
    fraction = SCHEDULES[config.lr_schedule](step, config.warmup, config.max_steps)
    return config.min_lr + (config.max_lr - config.min_lr) * fraction


def settings_at(config: Any, step: int) -> dict[str, float]:  # noqa: ANN401 - a TrainConfig
    """Return factors for the optimizers' settings in the update after `step` updates.

    Each factor multiplies the number that a parameter group was built with under its name: `lr`,
    `weight_decay`, `momentum`, … A group without that name ignores it; if no group has it, an error
    is raised. (`momentum` is Muon's, so check `config.optimizer` first.)
    """
    return {"lr": learning_rate(config, step) / config.max_lr}


def windows_at(config: Any, step: int) -> int:  # noqa: ANN401 - a TrainConfig
    """Return the number of windows of `block_size` tokens in the update after `step` updates."""
    return config.total_batch_size // config.block_size


def position_at(config: Any, step: int) -> int:  # noqa: ANN401 - a TrainConfig
    """Return the number of windows that the first `step` updates consume: the loader's position."""
    return sum(windows_at(config, earlier) for earlier in range(step))
