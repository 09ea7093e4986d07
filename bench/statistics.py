"""The statistics of a trial: what paired runs show about an edit. It needs scipy."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from runtime.errors import UserError

CONFIDENCE, POWER = 0.95, 0.8
BETTER_BY_CHANCE = (1 - CONFIDENCE) / 2  # equal versions whose interval is on the better side of 0
MAX_PAIRS = 1000
MIN_RUNS = 4  # runs of the base that are needed to judge its noise
HARDLY = 0.1  # an edit whose differences are a smaller part of the base's deviation hardly acts
ROUNDING = 1e-6  # values whose standard deviation is a smaller part of their mean are equal


def load_stats() -> Any:  # noqa: ANN401 - a module
    """Return `scipy.stats`; raise UserError if scipy is missing."""
    try:
        from scipy import stats
    except ImportError:
        fix = "install it with python -m pip install scipy"
        raise UserError(f"trials require scipy: {fix}") from None
    return stats


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation, or infinity if the values do not show one.

    A single value does not, nor do equal values: a metric of few values, such as an accuracy on few
    examples, is often equal by chance.
    """
    deviation = stdev(values) if len(values) > 1 else 0.0
    return deviation if deviation > ROUNDING * abs(fmean(values)) else math.inf


def interval(differences: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean of paired differences.

    It is t s / sqrt(n), with Student's t for n - 1 degrees of freedom and the standard deviation s;
    infinity if that is unknown. Source: NIST/SEMATECH e-Handbook of Statistical Methods, 7.3.1.1.
    """
    n = len(differences)
    quantile = load_stats().t.ppf((1 + CONFIDENCE) / 2, max(1, n - 1))
    return float(quantile * spread(differences) / math.sqrt(n))


def noise_of(base_values: Sequence[float]) -> float:
    """Return the standard deviation of the base's runs, or infinity if there are too few."""
    return spread(base_values) if len(base_values) >= MIN_RUNS else math.inf


def noise_interval(base_values: Sequence[float], n: int) -> float:
    """Return half the width of the 95 % interval of the mean of n differences, from the base alone.

    Infinity if the base has too few runs.
    """
    quantile = load_stats().t.ppf((1 + CONFIDENCE) / 2, max(1, len(base_values) - 1))
    return float(quantile * noise_of(base_values) * math.sqrt(2 / n))


def pairs_needed(deviation: float, least: float) -> int:
    """Return the number of pairs that show a true difference of `least` in 80 % of trials.

    Differences get twice the variance of the base's runs, whose standard deviation is `deviation`,
    as if the runs of a pair were independent; equal seeds usually lower it. `MAX_PAIRS` means that
    number or more. The noncentral t distribution gives the power: Cohen 1988, Statistical Power
    Analysis for the Behavioral Sciences, chapter 2.
    """
    stats, n = load_stats(), np.arange(2, MAX_PAIRS + 1)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    shift = np.sqrt(n) * least / (math.sqrt(2) * deviation)
    enough = stats.nct.sf(quantile, n - 1, np.minimum(shift, 30)) >= POWER
    return int(n[enough][0]) if enough.any() else MAX_PAIRS


def plan(base_values: Sequence[float], least: float) -> str:
    """Return a line on the pairs to confirm with, from the runs of the base.

    The range is from the 95 % interval of their standard deviation. Source: NIST/SEMATECH
    e-Handbook of Statistical Methods, 7.2.3.1.
    """
    if math.isinf(deviation := noise_of(base_values)):
        known = f"{len(base_values)} runs of the base do not show its noise"
        return f"{known}: use --seeds {MIN_RUNS} to plan a confirmation"
    n = len(base_values) - 1
    limits = load_stats().chi2.ppf([(1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2], n)
    pairs, low, high = (pairs_needed(deviation * math.sqrt(n / x), least) for x in (n, *limits))
    shown = f"{n + 1} runs of the base have a standard deviation of {deviation:.2g}"
    number = f"--confirm {pairs}{' or more' * (pairs == MAX_PAIRS)} ({low} to {high})"
    return f"{shown}: {number} shows a difference of {least:g} with a probability of 80 %"


def hardly_acts(differences: Sequence[float], base_values: Sequence[float]) -> bool:
    """Return whether all differences are far below the noise of the base."""
    return max(map(abs, differences)) < HARDLY * noise_of(base_values) < math.inf


def verdict(differences: Sequence[float], least: float, higher: bool) -> str:
    """Return what confirmed differences show, in words.

    An interval within ± `least` is equivalence, whether or not it excludes 0: two one-sided tests
    (Schuirmann 1987), here at 2.5 % each.
    """
    mean, half = fmean(differences), interval(differences)
    if abs(mean) + half <= least:
        return f"equivalent within {least:g}"
    return "not shown" if half >= abs(mean) else "better" if higher == (mean > 0) else "worse"
