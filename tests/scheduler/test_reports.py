"""What the scheduler reports of its steps."""

import pytest

from octavo.protocol.messages import Stats
from octavo.scheduler.predictor import StepSize
from octavo.scheduler.reports import StepMeter, StepTimes, describe
from tests.scheduler.test_predictor import DECODE, PREFILL


def test_the_meter_takes_medians_and_starts_again():
    meter = StepMeter()
    for busy_s in (0.1, 0.2, 0.9):
        meter.add(DECODE, busy_s, waited_s=0.3)
    meter.add(PREFILL, 0.8, waited_s=0.1)
    meter.add(StepSize(1, 1, follows_idleness=True), 0.2, waited_s=99.0)
    times = meter.take()
    assert (times.decode_step_s, times.prefill_step_s) == (pytest.approx(0.2), 0.8)
    assert times.executor_wait_fraction == pytest.approx(1.0 / (1.0 + 2.2))  # waits after idleness do not count
    assert meter.take() == StepTimes()


def test_the_operators_line():
    before = Stats("s", 0, 0, 0, 100, 50, 100, 0, 1, 5, 0, 0)
    now = Stats("s", 3, 2, 25, 1100, 250, 1100, 250, 4, 50, 0, 0)
    assert describe(before, now, StepTimes(0.02, 0.15, 0.031), 10.0, num_blocks=50) == (
        "prompt 100 tokens/s, output 20 tokens/s, running 3, waiting 2, KV use 50%, prefix hits 25%, preemptions 3,"
        " prefill step 150.0 ms, decode step 20.0 ms, executor waited 3.1%"
    )
