"""Two-level designs: runs that each change about half of the factors, so all serve every effect.

Source: Box, Hunter and Hunter 2005, Statistics for Experimenters, chapters 5 to 7. It needs scipy.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.statistics import CONFIDENCE, load_stats, spread
from runtime.errors import UserError

MAX_FACTORS = {16: 8, 24: 12, 32: 12}  # by number of runs
PLACKETT_BURMAN = "++-+++---+-"  # first row of the design with 12 runs
Floats = NDArray[np.float64]


def folded_design(n_factors: int, runs: int) -> Floats:
    """Return the levels, -1 or 1, of each factor in each run: (runs, factors).

    The second half of the runs is the negative of the first, so that no effect of one factor is
    mixed with an interaction of two. Raise UserError if the factors do not fit in the runs.
    """
    from scipy.linalg import circulant, hadamard

    if not 0 < n_factors <= MAX_FACTORS.get(runs, 0):
        sizes = ", ".join(f"{most} in {size} runs" for size, most in MAX_FACTORS.items())
        fix = f"use --runs and --factors for at most {sizes}"
        raise UserError(f"no design has {n_factors} factors in {runs} runs: {fix}")
    if runs == 24:
        rows = circulant([1 if sign == "+" else -1 for sign in PLACKETT_BURMAN]).T
        half = np.pad(rows, ((0, 1), (1, 0)), constant_values=-1)
        half[:, 0] = 1
    else:
        # Columns that generate all others come first: few factors have few mixed interactions.
        order = sorted(range(runs // 2), key=lambda column: (column.bit_count() > 1, -column))
        half = hadamard(runs // 2)[:, order]
    return np.vstack([half, -half])[:, :n_factors].astype(float)


def effects(
    design: Floats, values: Floats, base_values: Sequence[float], sums: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return the effects and half the widths of their 95 % intervals, by least squares.

    An effect is the difference between a factor's upper and lower level. The noise is the standard
    deviation of the base's runs. Interactions of two factors are equal in a run and in its mirrored
    run, and cancel. Where one of the two is missing, they widen the interval: the means of the
    complete pairs show how large they are.

    Args:
        design: folded design, (runs, factors).
        values: result of each run, (runs,); NaN if it is missing.
        base_values: results of at least two runs of the base.
        sums: weights of the effects in each sum to estimate, (sums, factors); default: each effect.

    Returns:
        Two arrays, (sums,): NaN and infinity if the runs that are left do not show all effects.
    """
    n_factors, is_done = design.shape[1], ~np.isnan(values)
    sums = np.eye(n_factors) if sums is None else sums
    model = np.column_stack([np.ones(len(design)), design])[is_done]
    if np.linalg.matrix_rank(model) <= n_factors:
        return np.full(len(sums), np.nan), np.full(len(sums), np.inf)
    weights = np.zeros((len(sums), len(values)))
    weights[:, is_done] = 2 * sums @ np.linalg.pinv(model)[1:]
    noise = spread(base_values) ** 2
    pairs = values.reshape(2, -1).mean(0)
    interactions = max(0.0, np.var(pairs[~np.isnan(pairs)], ddof=1) - noise / 2)
    not_cancelled = weights.reshape(len(sums), 2, -1).sum(1)
    variance = noise * (weights**2).sum(1) + interactions * (not_cancelled**2).sum(1)
    quantile = load_stats().t.ppf((1 + CONFIDENCE) / 2, len(base_values) - 1)
    return weights[:, is_done] @ values[is_done], quantile * np.sqrt(variance)
