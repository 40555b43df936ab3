"""Aborts in every state, shares that sat out, lost states, lost executors, requests that kill executors."""

from collections.abc import Callable

import pytest

from octavo.protocol.messages import SequenceResult, StepResult
from tests.fakes.scheduler_driver import SchedulerDriver


def waiting(driver: SchedulerDriver) -> None:
    pass


def in_flight(driver: SchedulerDriver) -> None:
    driver.send()


def two_in_flight(driver: SchedulerDriver) -> None:
    driver.send()
    driver.send()


def decoding(driver: SchedulerDriver) -> None:
    driver.step()
    driver.step()


def decoding_ahead(driver: SchedulerDriver) -> None:
    driver.step()
    driver.send()
    driver.send()


def preempted_in_flight(driver: SchedulerDriver) -> None:
    driver.start(1, range(9), max_tokens=20, priority=-1)
    driver.send()
    while not driver.scheduler.counters.num_preemptions:
        if len(driver.sent) > 1:
            driver.receive()
        driver.send()
    assert [sequence.seq_id for sequence in driver.scheduler.waiting] == [0]
    assert driver.scheduler.num_held_blocks > 0


STATES = [waiting, in_flight, two_in_flight, decoding, decoding_ahead, preempted_in_flight]


@pytest.mark.parametrize("reach", STATES)
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_sequence_ends_once_from_any_state(reach: Callable[[SchedulerDriver], None], reason: str) -> None:
    driver = SchedulerDriver(8)
    driver.start(0, range(9), max_tokens=20)
    reach(driver)
    for _ in range(2):
        if reason == "abort":
            driver.scheduler.abort(0)
        else:
            driver.may_fail = True
            driver.scheduler.fail(0, "because")
    driver.settle()
    assert driver.reasons() == {0: reason}
    assert driver.finished[0].error == (None if reason == "abort" else "because")
    driver.run(ahead=True)
    driver.assert_complete()


def test_blocks_of_an_aborted_sequence_are_free_within_two_steps() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(9), max_tokens=20)
    decoding_ahead(driver)
    driver.scheduler.abort(0)
    driver.settle()
    assert driver.scheduler.num_used_blocks == 3
    driver.receive()
    assert driver.scheduler.num_used_blocks == 3
    driver.receive()
    assert driver.scheduler.num_used_blocks == 0


def test_an_unknown_sequence_is_ignored() -> None:
    driver = SchedulerDriver()
    driver.scheduler.abort(7)
    driver.scheduler.fail(7, "because")
    assert driver.scheduler.take_updates() == []


def test_a_result_without_a_token_ends_the_sequence_with_an_error() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(3))
    step = driver.send()
    assert step is not None
    driver.scheduler.apply(StepResult("", "", step.step_id, [SequenceResult([])]))
    driver.settle()
    assert driver.reasons() == {0: "error"}


@pytest.mark.parametrize("computes_void", [False, True])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_share_that_sat_out_is_planned_again(num_steps: int, computes_void: bool) -> None:
    driver = SchedulerDriver()
    for seq_id in range(2):
        driver.start(seq_id, range(seq_id + 3), max_tokens=9)
    for _ in range(num_steps):
        driver.step(ahead=True)
    while len(driver.sent) < 2:
        assert driver.send()
    num_outputs = len(driver.outputs[0])
    driver.receive([0])
    driver.receive(computes_void=computes_void)  # planned on top of the share that sat out
    assert len(driver.outputs[0]) == num_outputs
    assert len(driver.outputs[1]) == num_outputs + 2
    driver.run(ahead=True)
    driver.assert_complete()


def test_a_first_share_that_sat_out_is_introduced_again() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(3), max_tokens=9)
    driver.send()
    driver.receive([0])
    step = driver.send()
    assert step is not None
    assert step.sequences[0].init is not None
    driver.run()
    driver.assert_complete()


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_need_init_cancels_and_introduces_again(num_in_flight: int) -> None:
    driver = SchedulerDriver()
    for seq_id in range(2):
        driver.start(seq_id, range(seq_id + 3), max_tokens=9)
    for _ in range(3):
        driver.step()
    while len(driver.sent) < num_in_flight:
        driver.send()
    cancelled = [step.step_id for step in driver.sent]
    driver.executor.lose([1])
    driver.receive()
    assert driver.scheduler.num_in_flight == 0
    assert driver.scheduler.next_step_id == cancelled[-1] + 1
    step = driver.send()
    assert step is not None
    assert step.step_id == cancelled[-1] + 1
    assert [share.init is not None for share in step.sequences] == [False, True]
    assert all(share.token_ids for share in step.sequences)
    driver.run(ahead=True)
    driver.assert_complete()


def test_need_init_of_the_second_step_drains_the_first() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(3), max_tokens=9)
    two_in_flight(driver)
    driver.scheduler.need_init(2, [0])
    driver.sent.pop()
    driver.settle()
    assert driver.send() is None
    driver.receive()
    step = driver.send()
    assert step is not None
    assert step.step_id == 3
    assert step.sequences[0].init is not None
    driver.run(ahead=True)
    driver.assert_complete()


def test_need_init_of_a_step_planned_on_a_share_that_sat_out() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(3), max_tokens=9)
    driver.step()
    two_in_flight(driver)
    driver.receive([0])
    driver.need_init([0])
    driver.run(ahead=True)
    driver.assert_complete()


def test_need_init_said_twice_counts_once() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(3), max_tokens=9)
    driver.send()
    driver.executor.lose([0])
    driver.need_init([0])
    assert driver.send() is not None
    driver.scheduler.need_init(1, [0])
    assert driver.scheduler.num_in_flight == 1
    driver.run(ahead=True)
    driver.assert_complete()


def test_the_next_step_forgets_what_a_cancelled_step_would_have_forgotten() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(3), max_tokens=1)
    driver.start(1, range(3), max_tokens=9)
    driver.step()
    step = driver.send()
    assert step is not None
    assert step.forget == [0]
    driver.executor.lose([1])
    driver.receive()
    step = driver.send()
    assert step is not None
    assert step.forget == [0]
    driver.run()
    driver.assert_complete()


def test_another_executor_goes_on_with_the_known_tokens() -> None:
    driver = SchedulerDriver()
    for seq_id in range(4):
        driver.start(seq_id, range(seq_id + 3), max_tokens=9, num_prompt_logprobs=0)
    for _ in range(5):
        driver.step(ahead=True)
    late = driver.sent[0]
    driver.reset(20)
    assert driver.scheduler.num_in_flight == 0
    assert driver.scheduler.num_free_blocks == 20
    driver.scheduler.apply(StepResult("", "", late.step_id, [SequenceResult([1]) for _ in late.sequences]))
    step = driver.send()
    assert step is not None
    assert step.forget == []
    assert all(share.init and share.num_computed_tokens == 0 for share in step.sequences)
    driver.run(ahead=True)
    driver.assert_complete()
    for seq_id in range(4):
        driver.assert_prompt_logprobs(seq_id)


def test_a_sequence_that_no_longer_fits_ends_with_an_error_that_says_so() -> None:
    driver = SchedulerDriver(32)
    driver.start(0, range(20), max_tokens=20)
    driver.start(1, range(3), max_tokens=6)
    driver.step()
    driver.reset(4)
    assert driver.reasons() == {0: "error"}
    assert driver.finished[0].error == "39 tokens need 10 KV blocks; the pool has 4"
    driver.run()
    driver.assert_complete()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])  # that the killing request gets before it kills
def test_a_request_that_kills_executors_ends_and_the_others_live(num_tokens: int, ahead: bool) -> None:
    driver = SchedulerDriver(64)
    for seq_id in range(8):
        driver.start(seq_id, range(seq_id + 3), max_tokens=9)
    num_deaths = 0
    while driver.scheduler.has_work:
        driver.send()
        if ahead:
            driver.send()
        poisoned = any(share.seq_id == 5 for share in driver.sent[0].sequences)
        if poisoned and len(driver.outputs[5]) == num_tokens:
            num_deaths += 1
            driver.reset(64)
        else:
            driver.receive()
    driver.run()
    assert driver.reasons() == dict.fromkeys(range(8), "length") | {5: "error"}
    assert num_deaths <= 6
    driver.assert_complete()


def test_one_death_accuses_nobody() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(3))
    driver.send()
    driver.reset(32)
    driver.run()
    assert driver.reasons() == {0: "length"}


def test_a_suspect_that_gets_a_new_token_holds_nobody_up() -> None:
    driver = SchedulerDriver(enable_prefix_caching=False)
    for seq_id in range(2):
        driver.start(seq_id, range(3))
    for _ in range(2):
        driver.send()
        driver.reset(32)
    driver.start(2, range(3))
    groups = []
    for _ in range(3):
        step = driver.send()
        assert step is not None
        groups.append([share.seq_id for share in step.sequences])
        driver.receive()
    assert groups == [[0], [0, 1], [0, 1, 2]]
    driver.run()
    driver.assert_complete()


def test_a_suspect_that_was_aborted_holds_nobody_up() -> None:
    driver = SchedulerDriver()
    for seq_id in range(2):
        driver.start(seq_id, range(3))
    driver.send()
    driver.reset(32)
    driver.send()
    driver.scheduler.abort(0)
    driver.reset(32)
    driver.start(2, range(3))
    driver.run()
    assert driver.reasons() == {0: "abort", 1: "length", 2: "length"}


def test_blocks_that_a_cancelled_step_held_wait_for_the_step_before_it() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(3), max_tokens=9)
    two_in_flight(driver)
    driver.scheduler.abort(0)
    driver.scheduler.need_init(2, [0])
    driver.sent.pop()
    driver.settle()
    assert driver.scheduler.num_used_blocks == 1
    driver.receive()
    driver.assert_complete()
