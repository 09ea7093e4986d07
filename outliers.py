"""Which gradient norms are outliers among the last ones, so that their updates can be skipped."""

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 128
LEAST = WINDOW // 2  # norms to judge by; the first of a run vary too much


class RecentNorms:
    """The last `WINDOW` gradient norms, outliers too, so that a lasting change is soon normal.

    Args:
        zscore: standard deviations above the mean from which a norm is an outlier; 0 = none is.
    """

    def __init__(self, zscore: float) -> None:
        self._zscore = zscore
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def limit(self) -> float:
        """The largest norm that is no outlier; infinite while there are too few to judge by."""
        if not self._zscore or len(self._norms) < LEAST:
            return math.inf
        return statistics.fmean(self._norms) + self._zscore * statistics.pstdev(self._norms)

    def extend(self, norms: Iterable[float]) -> None:
        """Add norms; those that are not finite do not count."""
        self._norms.extend(norm for norm in norms if math.isfinite(norm))

    def as_list(self) -> list[float]:
        """The norms, for a checkpoint."""
        return list(self._norms)
