"""After what time a refused request should be sent again."""

import pytest

from octavo.scheduler.finish_rate import FinishRate


def test_retry_after():
    rate = FinishRate()
    assert rate.retry_after_s(100) == 5.0  # no request has ended yet
    for second in range(1, 200):
        rate.observe(4 * second, 1.0, is_busy=True)
    for _ in range(1000):
        rate.observe(4 * 199, 1.0, is_busy=False)
    assert rate.retry_after_s(100) == pytest.approx(25.0, rel=0.01)
    assert rate.retry_after_s(1) == 1.0
    assert rate.retry_after_s(10_000) == 60.0
    for _ in range(1000):
        rate.observe(4 * 199, 1.0, is_busy=True)
    assert rate.retry_after_s(1) == 60.0
