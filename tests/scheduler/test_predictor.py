"""How long steps take, and when the next one is planned."""

import pytest

from octavo.protocol.messages import SequenceStep, pack_ids
from octavo.scheduler.predictor import StepPredictor, StepSize, step_size

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


def test_the_plan_comes_shortly_before_the_end():
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
        assert predictor.plan_after_s(DECODE) > 0.07  # never far too early
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


def test_the_time_of_a_step_without_prompts():
    predictor = StepPredictor()
    assert predictor.decode_s(8) == 0.0
    predictor.observe_step(PREFILL, 0.5)
    assert predictor.decode_s(8) == 0.0
    predictor.observe_step(DECODE, 0.1)
    predictor.observe_step(StepSize(64, 64), 0.3)
    assert [predictor.decode_s(num_seqs) for num_seqs in (0, 1, 8, 15, 16, 32, 64, 200)] == [0.1] * 5 + [0.3] * 3
