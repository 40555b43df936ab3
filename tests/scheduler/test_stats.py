"""What is measured, and what follows from it."""

import pytest

from protocol.messages import SequenceStep, Stats, pack_ids
from scheduler.finish_rate import FinishRate
from scheduler.predictor import StepPredictor, StepSize, step_size
from scheduler.reports import StepMeter, StepTimes, describe

DECODE = StepSize(8, 8)
PREFILL = StepSize(8, 300, num_prompt_seqs=1)


def share(num_known_tokens: int, *, sample: bool = True) -> SequenceStep:
    return SequenceStep(1, 0, pack_ids(range(num_known_tokens)), b"", sample)


def test_sizes_of_steps():
    assert step_size([share(0), share(1)], follows_idleness=False) == StepSize(2, 2)
    assert step_size([share(0), share(30)], follows_idleness=True) == StepSize(2, 31, 1, 30, follows_idleness=True)
    assert step_size([share(0), share(7), share(1), share(5)], follows_idleness=False).num_generating_seqs == 2
    last_but_one = step_size([share(0), share(1, sample=False)], follows_idleness=False)  # tokens of a prompt
    assert (last_but_one.has_prompt, last_but_one.num_prompt_tokens, last_but_one.num_generating_seqs) == (True, 1, 1)


def test_an_unknown_kind_of_step_is_planned_on_at_once():
    predictor = StepPredictor()
    predictor.observe_step(PREFILL, 1.0)
    assert predictor.plan_after_s(DECODE) == 0.0


def test_the_plan_comes_before_the_end_and_not_much():
    predictor = StepPredictor()
    for _ in range(100):
        predictor.observe_step(DECODE, 0.1)
        predictor.observe_step(PREFILL, 0.5)
        predictor.observe_planning(0.001)
    assert 0.09 < predictor.plan_after_s(DECODE) < 0.098
    assert 0.49 < predictor.plan_after_s(PREFILL) < 0.498


def test_the_plan_comes_before_the_launch_on_a_device_that_computes_later():
    predictor = StepPredictor()
    for _ in range(100):
        predictor.observe_step(DECODE, 0.1)
    before_s = predictor.plan_after_s(DECODE)
    for _ in range(100):
        predictor.observe_launch(0.01)
    assert predictor.plan_after_s(DECODE) == pytest.approx(before_s - 0.02)
    for _ in range(100):
        predictor.observe_launch(0.1)
    assert predictor.plan_after_s(DECODE) == 0.0


def test_the_plan_comes_earlier_when_times_vary():
    steady, varying = StepPredictor(), StepPredictor()
    for number in range(100):
        steady.observe_step(DECODE, 0.1)
        varying.observe_step(DECODE, 0.08 if number % 2 else 0.12)
    assert varying.plan_after_s(DECODE) < steady.plan_after_s(DECODE) - 0.03


def test_the_plan_comes_earlier_while_the_executor_waits():
    predictor = StepPredictor()
    for _ in range(100):
        predictor.observe_step(DECODE, 0.1)
    before_s = predictor.plan_after_s(DECODE)
    for _ in range(10):
        predictor.observe_wait(DECODE, 0.002, lead_s=0.0)
    assert predictor.plan_after_s(DECODE) == pytest.approx(before_s - 10 * 0.002 / 4)
    for _ in range(1000):
        predictor.observe_wait(DECODE, 1.0, lead_s=-1.0)
        assert predictor.plan_after_s(DECODE) > 0.07  # never much too early
    for _ in range(1000):
        predictor.observe_wait(DECODE, 0.0, lead_s=0.002)
    assert predictor.plan_after_s(DECODE) == pytest.approx(before_s)


def test_a_wait_that_no_earlier_plan_would_shorten_changes_nothing():
    predictor = StepPredictor()
    for _ in range(100):
        predictor.observe_step(DECODE, 0.1)
    before_s = predictor.plan_after_s(DECODE)
    for _ in range(100):
        predictor.observe_wait(DECODE, 0.002, lead_s=0.01)
    assert predictor.plan_after_s(DECODE) == before_s


def test_short_steps_are_planned_on_at_once():
    predictor = StepPredictor()
    for _ in range(100):
        predictor.observe_step(DECODE, 0.001)
    assert predictor.plan_after_s(DECODE) == 0.0


def test_what_a_step_without_prompts_takes():
    predictor = StepPredictor()
    assert predictor.decode_s(8) == 0.0
    predictor.observe_step(PREFILL, 0.5)
    assert predictor.decode_s(8) == 0.0
    predictor.observe_step(DECODE, 0.1)
    predictor.observe_step(StepSize(64, 64), 0.3)
    assert [predictor.decode_s(num_seqs) for num_seqs in (0, 1, 8, 15, 16, 32, 64, 200)] == [0.1] * 5 + [0.3] * 3


def test_the_meter_takes_medians_and_starts_again():
    meter = StepMeter()
    for busy_s in (0.1, 0.2, 0.9):
        meter.add(DECODE, busy_s, waited_s=0.3)
    meter.add(PREFILL, 0.8, waited_s=0.1)
    meter.add(StepSize(1, 1, follows_idleness=True), 0.2, waited_s=99.0)
    times = meter.take()
    assert (times.decode_step_s, times.prefill_step_s) == (pytest.approx(0.2), 0.8)
    assert times.executor_wait_fraction == pytest.approx(1.0 / (1.0 + 2.2))  # idleness is nobody's fault
    assert meter.take() == StepTimes()


def test_retry_after():
    rate = FinishRate()
    assert rate.retry_after_s(100) == 5.0  # nothing has ended yet: nothing is known
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


def test_the_operators_line():
    before = Stats("s", 0, 0, 0, 100, 50, 100, 0, 1, 5, 0, 0)
    now = Stats("s", 3, 2, 25, 1100, 250, 1100, 250, 4, 50, 0, 0)
    assert describe(before, now, StepTimes(0.02, 0.15, 0.031), 10.0, num_blocks=50) == (
        "prompt 100 tokens/s, output 20 tokens/s, running 3, waiting 2, KV use 50%, prefix hits 25%, preemptions 3,"
        " prefill step 150.0 ms, decode step 20.0 ms, executor waited 3.1%"
    )
