import math
import statistics

from runtime.metrics import LEAST_NORMS, NORM_WINDOW, RecentNorms


def filled(norms, zscore=3.0):
    recent = RecentNorms(zscore)
    recent.extend(norms)
    return recent


def test_limit_is_the_mean_and_so_many_standard_deviations():
    norms = [1.0 + 0.01 * i for i in range(LEAST_NORMS)]
    expected = statistics.mean(norms) + 3 * statistics.pstdev(norms)
    assert math.isclose(filled(norms).limit(), expected)


def test_limit_is_infinite_while_there_are_too_few_norms_or_no_zscore():
    assert filled([1.0] * (LEAST_NORMS - 1)).limit() == math.inf
    assert filled([1.0] * LEAST_NORMS).limit() == 1.0
    assert filled([1.0] * NORM_WINDOW, zscore=0).limit() == math.inf


def test_limit_forgets_what_is_older_than_the_window_and_follows_a_lasting_change():
    recent = filled([1.0] * NORM_WINDOW)
    assert recent.limit() < 5
    recent.extend([5.0] * NORM_WINDOW)
    assert recent.limit() == 5.0
    assert recent.as_list() == [5.0] * NORM_WINDOW


def test_norms_that_are_not_finite_do_not_count():
    recent = filled([1.0] * LEAST_NORMS)
    recent.extend([math.inf, math.nan])
    assert recent.as_list() == [1.0] * LEAST_NORMS
