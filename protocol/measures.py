"""Measures that one process takes and another shows. They are exact: no observation is left out."""

from bisect import bisect_left
from collections.abc import Sequence

from octavo.protocol.messages import HistogramCounts

# Upper bounds. A metric that vLLM has too has vLLM's bounds, so that dashboards for vLLM fit.
FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_BOUNDS_TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
STEP_BOUNDS_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
STEP_BOUNDS_SEQS = tuple(float(2**power) for power in range(11))
CHOICES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """The number of observations in each bucket, and their sum. A bucket includes its upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)  # the last bucket is beyond all bounds
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`."""
        self._counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count

    def read(self) -> HistogramCounts:
        return HistogramCounts(tuple(self._counts), self._sum)


class RecentMaximum:
    """The largest value of the last one to two windows of `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._since_s = -float("inf")
        self._newest = self._before = 0.0

    def observe(self, value: float, now_s: float) -> None:
        self._roll(now_s)
        self._newest = max(self._newest, value)

    def read(self, now_s: float) -> float:
        """Return the maximum; 0 if nothing was observed."""
        self._roll(now_s)
        return max(self._newest, self._before)

    def _roll(self, now_s: float) -> None:
        elapsed_s = now_s - self._since_s
        if elapsed_s >= self._window_s:
            self._before = self._newest if elapsed_s < 2 * self._window_s else 0.0
            self._newest, self._since_s = 0.0, now_s
