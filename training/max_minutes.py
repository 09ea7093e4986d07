"""Find how many steps fit into `--max-minutes`, by timing a step and the evaluations."""

from collections.abc import Callable, Sequence
from time import perf_counter

from runtime.device import synchronize
from runtime.distributed import DistInfo, all_reduce_max, print0

MAX_TIMED_SECONDS = 5.0
TIMED_FRACTION = 0.01  # of `--max-minutes`, for each thing that is timed


def steps_that_fit(
    max_minutes: float,
    dist_info: DistInfo,
    train_step: Callable[[], object],
    evaluations: Sequence[tuple[int, float, Callable[[], object]]],
) -> int:
    """Return the number of steps that fit into `--max-minutes`; every process must call this.

    `evaluations` have the steps between two of them, a part to time, and how many times longer the
    whole takes.
    """
    start, budget = perf_counter(), 60 * max_minutes
    timed_seconds = min(MAX_TIMED_SECONDS, TIMED_FRACTION * budget)
    step_seconds = time_call(train_step, timed_seconds, dist_info)
    seconds_per_step, fixed_seconds = step_seconds, 0.0
    for every, times, part in evaluations:
        seconds = times * time_call(part, timed_seconds, dist_info)
        seconds_per_step += seconds / every
        fixed_seconds += 1.5 * seconds  # they also run at the start and at the end
    left = budget - (perf_counter() - start) - fixed_seconds
    steps = -all_reduce_max(-max(1, int(left / seconds_per_step)))
    print0(f"--max-minutes {max_minutes:g}: --max-steps {steps}, {step_seconds:.3g} s each")
    return steps


def time_call(work: Callable[[], object], timed_seconds: float, dist_info: DistInfo) -> float:
    """Return the seconds that a compiled call takes; every process must call this."""
    calls = 1
    for _ in range(3):  # compile, estimate the number of calls, measure
        begun = perf_counter()
        for _ in range(calls):
            work()
        synchronize(dist_info.device)
        seconds = (perf_counter() - begun) / calls
        calls = all_reduce_max(int(min(100, 1 + timed_seconds / seconds)))
    return seconds
