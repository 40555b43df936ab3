"""Histograms and recent maxima."""

import pytest

from octavo.protocol.measures import Histogram, RecentMaximum
from octavo.protocol.messages import HistogramCounts


def test_a_bucket_includes_its_upper_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.read() == HistogramCounts((2, 2, 1), 7.5)


def test_one_value_can_be_observed_several_times():
    histogram = Histogram((1.0,))
    histogram.observe(0.25, 4)
    assert histogram.read() == HistogramCounts((4, 0), 1.0)


def test_a_reading_does_not_change():
    histogram = Histogram((1.0,))
    before = histogram.read()
    histogram.observe(3.0)
    assert (before, histogram.read()) == (HistogramCounts((0, 0), 0.0), HistogramCounts((0, 1), 3.0))


@pytest.mark.parametrize(
    ("now_s", "expected"), [(100.0, 5.0), (109.9, 5.0), (110.0, 5.0), (119.9, 5.0), (120.0, 0.0), (1e6, 0.0)]
)
def test_a_maximum_is_remembered_for_its_window_and_no_longer_than_two(now_s, expected):
    maximum = RecentMaximum(10.0)
    assert maximum.read(0.0) == 0.0
    for value in (2.0, 5.0, 3.0):
        maximum.observe(value, 100.0)
    assert maximum.read(now_s) == expected


def test_a_later_maximum_takes_over():
    maximum = RecentMaximum(10.0)
    maximum.observe(5.0, 100.0)
    maximum.observe(1.0, 111.0)
    assert maximum.read(112.0) == 5.0
    maximum.observe(2.0, 121.0)
    assert maximum.read(121.0) == 2.0
    assert maximum.read(131.0) == 2.0
