"""Turns histogram counts into prometheus_client's metric families."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from octavo.protocol.messages import HistogramCounts

PREFIX = "octavo:"


def add_histogram(
    family: HistogramMetricFamily, labels: Mapping[str, str], bounds: Sequence[float], histogram: HistogramCounts
) -> None:
    """Add one histogram to `family`. A histogram with other bounds is left out."""
    if len(histogram.counts) != len(bounds) + 1:
        return
    names = [*map(floatToGoString, bounds), "+Inf"]
    buckets = list(zip(names, map(float, accumulate(histogram.counts)), strict=True))
    family.add_metric(list(labels.values()), buckets, histogram.sum)
