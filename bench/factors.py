"""Factors of a design: settings with two levels each, the runs that vary them, and the answer."""

import math
import operator
import re
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from bench.design import Floats, effects, folded_design
from bench.statistics import BETTER_BY_CHANCE, spread
from bench.variants import BASE, PLACES, Variant, content_hash, read_variants
from runtime.cli import as_flags
from runtime.errors import UserError

FACTOR = re.compile(r"(?:--)?([\w-]+)(=[^,]+,[^,]+|\*\d*\.?\d+,\d*\.?\d+)?")
KINDS = "a switch (rotary), two values (mlp=gelu,relu2) or two multiples (max_lr*0.7,1.4)"
MAX_DIVERGED = 1 / 8  # fraction of the runs


class Factor(NamedTuple):
    """Two levels of a setting."""

    text: str
    setting: str
    levels: Sequence[dict[str, Any]]
    """Settings at the lower and at the upper level."""


class Design(NamedTuple):
    """Factors and the runs that vary them."""

    factors: Sequence[Factor]
    levels: Floats
    """Level of each factor in each run, -1 or 1: (runs, factors)."""
    variants: Sequence[Variant]
    """Variant of each run."""

    def values(self, j: int) -> list[Any]:
        """Return what the code has read at the lower and at the upper level of factor `j`."""
        runs = [int(np.argmax(self.levels[:, j] == level)) for level in (-1, 1)]
        return [self.variants[run].settings[self.factors[j].setting] for run in runs]


def parse_factor(text: str, base: Variant) -> Factor:
    """Return the factor that a text means: a switch, two values, or two multiples of a value."""
    match = FACTOR.fullmatch(text.strip())
    setting, levels = (match[1].replace("-", "_"), match[2]) if match else ("", None)
    is_switch = isinstance(base.settings.get(setting, True), bool)
    if match is None or setting in PLACES or not (levels or is_switch):
        raise UserError(f"--factors {text} is not two levels of a setting: use {KINDS}")
    values: Sequence[Any] = (False, True) if levels is None else levels[1:].split(",")
    if levels and levels[0] == "*":
        return Factor(text, setting, [base.multiple(setting, float(value)) for value in values])
    return Factor(text, setting, [{setting: value} for value in values])


def plan_design(texts: Sequence[str], n_runs: int, base: Variant) -> Design:
    """Return the design of factors; raise UserError if the base's code cannot train a run of it."""
    factors, variants = [parse_factor(text, base) for text in texts], list[Variant]()
    changed = [setting for factor in factors for setting in factor.levels[0]]
    if twice := {setting for setting in changed if changed.count(setting) > 1}:
        fix = "keep one factor with two levels, and try the others in another design"
        raise UserError(f"--factors changes {twice.pop()} more than once: {fix}")
    levels = folded_design(len(factors), n_runs)
    for row in levels > 0:
        settings = dict[str, Any]()
        for factor, level in zip(factors, row, strict=True):
            settings |= factor.levels[int(level)]
        variants.append(base.changed(**settings)._replace(name="factors"))
    try:
        design = Design(factors, levels, read_variants(variants, cache(content_hash)))
    except UserError as error:
        fix = "leave a factor out; if two exclude each other, make one factor of two values"
        raise UserError(f"--factors: a run is not valid ({error}): {fix}") from None
    for j, factor in enumerate(factors):
        if operator.eq(*design.values(j)):
            raise UserError(f"--factors {factor.text}: both levels are equal: use two others")
    return design


def as_word(value: object) -> str:
    """Return a setting's value in words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def problem_of(results: Floats, noise: float, halves: Floats) -> str:
    """Return why the results of a design have no answer, or an empty text if they have one."""
    if (n_diverged := int(np.isnan(results).sum())) > MAX_DIVERGED * len(results):
        fix = "leave out the factor that diverges, or use a lower --max-lr"
        return f"{n_diverged} runs diverged, more than an eighth: {fix}"
    if math.isinf(noise):
        return "the runs of the base are equal, so the noise is unknown: use another --metric"
    unknown = "the runs that are left do not tell the factors apart: use more --runs"
    return unknown if np.isinf(halves).any() else ""


def describe_effects(
    design: Design, base: Variant, results: Floats, base_results: Sequence[float], higher: bool
) -> dict[str, Any]:
    """Return what the results of a design's runs show; NaN is the result of a diverged run.

    If a single factor has the same level in all diverged runs, its answer is that it diverges. The
    best combination changes factors whose interval excludes 0. It leaves a factor unchanged if the
    base has neither of its levels: the design does not show what is between them.

    Returns:
        The `lines` to print. If there is an answer, also the `effects` with half the widths of
        their intervals, the settings of the `best` combination, and the difference from the base
        that is `predicted` for it.
    """
    factors, values = design.factors, [design.values(j) for j in range(len(design.factors))]
    words = [[as_word(value) for value in pair] for pair in values]
    names = [f"{f.setting}, {' → '.join(pair)}" for f, pair in zip(factors, words, strict=True)]
    diverged, noise = design.levels[np.isnan(results)], spread(base_results)
    is_common = (np.abs(diverged.sum(0)) == len(diverged)) & (len(diverged) > 0)
    causes = np.flatnonzero(is_common) if is_common.sum() == 1 else np.array([], int)
    lines = [
        f"{names[j]}: diverges at {words[j][int(diverged[0, j] > 0)]}, in {len(diverged)} of its "
        f"{len(results) // 2} runs"
        for j in causes
    ]
    sizes, halves = effects(design.levels, results, base_results)
    if problem := problem_of(results, noise, halves):
        return {"lines": [*lines, f"no answer: {problem}"]}
    best, weights = dict[str, Any](), np.zeros(len(factors))
    order = [int(j) for j in np.argsort(-sizes if higher else sizes) if j not in causes]
    shown = {j for j in order if abs(sizes[j]) > halves[j]}
    for j in order:
        better, value = int(higher == (sizes[j] > 0)), base.settings[factors[j].setting]
        mark = "" if j in shown else " (not shown)"
        if value not in values[j]:
            mark += f"; the best combination keeps the base's {as_word(value)}"
        elif j in shown and value != values[j][better]:
            best |= factors[j].levels[better]
            weights[j] = 2 * better - 1
        lines.append(f"{names[j]}: {sizes[j]:+.2g} ± {halves[j]:.2g}{mark}")
    pairs = [pair for pair in combinations(order, 2) if shown & {*pair}]
    gaps = [np.eye(len(factors))[a] - np.eye(len(factors))[b] for a, b in pairs]
    sums, widths = effects(design.levels, results, base_results, np.array([*gaps, weights]))
    near = [pair for pair, is_near in zip(pairs, np.abs(sums) <= widths, strict=False) if is_near]
    named = "; ".join(f"{factors[a].setting} and {factors[b].setting}" for a, b in near)
    by_chance = f"{2 * BETTER_BY_CHANCE * len(order):.2g} of {len(order)} effects by chance"
    lines += [
        f"pairs that cannot be told apart: {named or 'none'}",
        f"± is 95 %, from {len(base_results)} runs of the base with a standard deviation of "
        f"{noise:.2g}: if no factor acts, it shows {by_chance}",
        "interactions of two factors do not change an effect, and are not measured",
        f"predicted best combination: {' '.join((BASE, *as_flags(best)))}: {sums[-1]:+.2g} ± "
        f"{widths[-1]:.2g}",
    ]
    found = zip([factor.text for factor in factors], sizes.tolist(), halves.tolist(), strict=True)
    answer = {"lines": lines, "effects": [*found], "best": best}
    return answer | {"predicted": (float(sums[-1]), float(widths[-1]))}
