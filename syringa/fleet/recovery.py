"""Time to recover: from the loss of a replica until the minimum of its model is ready again."""

from __future__ import annotations

import bisect

from syringa.types import HistogramCounts

BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RecoveryTimes:
    """A histogram of recovery times in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def counts(self) -> HistogramCounts:
        return HistogramCounts(BOUNDS, tuple(self._counts), self._sum)
