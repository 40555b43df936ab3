"""Out of blocks: who is preempted, which results in flight count, and that every sequence ends."""

import pytest

from octavo.scheduler.tenants import TenantUsage
from tests.fakes.scheduler_driver import SchedulerDriver


def preempted(driver: SchedulerDriver) -> list[int]:
    """The waiting sequences that have run before."""
    return [sequence.seq_id for sequence in driver.scheduler.waiting if sequence.was_admitted]


def until_preemption(driver: SchedulerDriver, *, ahead: bool = False) -> None:
    """Stop right after the plan that preempted, with the step before it in flight if `ahead`."""
    driver.send()
    while not driver.scheduler.counters.num_preemptions:
        if len(driver.sent) > ahead:
            driver.receive()
        driver.send()


def test_the_youngest_gives_way_and_resumes_with_its_tokens() -> None:
    driver = SchedulerDriver(8, enable_prefix_caching=False)
    for seq_id in range(2):
        driver.start(seq_id, range(6 + seq_id), max_tokens=20)
    until_preemption(driver)
    assert preempted(driver) == [1]
    num_outputs = len(driver.outputs[1])
    assert num_outputs > 0
    driver.run()
    resumed = [s for step in driver.steps for s in step.sequences if s.seq_id == 1 and s.init][1]
    assert resumed.init is not None
    assert resumed.init.num_output_tokens == num_outputs
    assert resumed.num_computed_tokens == 0
    driver.assert_complete()


def test_a_worse_priority_gives_way_to_a_younger_sequence() -> None:
    driver = SchedulerDriver(8, enable_prefix_caching=False)
    driver.start(0, range(6), max_tokens=20, priority=1)
    driver.start(1, range(6), max_tokens=20, priority=0)
    until_preemption(driver)
    assert preempted(driver) == [0]
    driver.run()
    driver.assert_complete()


def test_the_tenant_that_was_served_most_gives_way() -> None:
    driver = SchedulerDriver(8, enable_prefix_caching=False)
    driver.start(0, range(10), max_tokens=15, tenant="a")
    driver.start(1, range(4), max_tokens=20, tenant="b")
    until_preemption(driver)
    assert preempted(driver) == [0]
    driver.run()
    driver.assert_complete()


def test_a_victim_that_is_in_the_step_already_leaves_it() -> None:
    driver = SchedulerDriver(8, enable_prefix_caching=False, max_num_batched_tokens=16)
    driver.start(0, range(10), max_tokens=15, tenant="a")  # planned first, and preempted first
    driver.start(1, range(4), max_tokens=25, tenant="b")
    until_preemption(driver)
    assert [share.seq_id for share in driver.steps[-1].sequences] == [1]
    assert preempted(driver) == [0]
    driver.run()
    driver.assert_complete()


def test_a_step_that_preempted_admits_nobody() -> None:
    driver = SchedulerDriver(8, enable_prefix_caching=False)
    for seq_id in range(2):
        driver.start(seq_id, range(6), max_tokens=20)
    driver.run_until(lambda: driver.scheduler.num_free_blocks == 0)
    driver.start(2, [1], max_tokens=1, priority=-1)
    until_preemption(driver)
    assert [share.seq_id for share in driver.steps[-1].sequences] == [0]
    assert driver.scheduler.num_free_blocks == 3
    driver.receive()
    step = driver.send()
    assert step is not None
    assert [share.seq_id for share in step.sequences] == [0, 2]
    driver.run()
    driver.assert_complete()


def test_a_preempted_sequence_resumes_before_newcomers_that_came_before_it() -> None:
    driver = SchedulerDriver(8)
    prefix = range(8)
    driver.start(0, [*prefix, 1], max_tokens=20)
    driver.start(1, [*prefix, *range(20, 33)], max_tokens=2)  # waits for the prefix, and then for blocks
    driver.start(2, range(40, 46), max_tokens=20)
    until_preemption(driver)
    assert [(s.seq_id, s.was_admitted) for s in driver.scheduler.waiting] == [(2, True), (1, False)]
    driver.run()
    driver.assert_complete()


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    driver = SchedulerDriver(4, enable_prefix_caching=False)
    driver.start(0, range(7), max_tokens=6)
    driver.start(1, range(7), max_tokens=6)
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting, driver.scheduler.num_free_blocks) == (1, 1, 2)
    driver.run()
    assert driver.scheduler.counters.num_preemptions == 0
    driver.assert_complete()


def test_the_result_in_flight_of_a_preempted_sequence_counts() -> None:
    driver = SchedulerDriver(8, enable_prefix_caching=False)
    for seq_id in range(2):
        driver.start(seq_id, range(6), max_tokens=20)
    until_preemption(driver, ahead=True)
    assert preempted(driver) == [1]
    assert [share.seq_id for share in driver.sent[0].sequences] == [0, 1]
    num_outputs, num_held_blocks = len(driver.outputs[1]), driver.scheduler.num_held_blocks
    assert num_held_blocks > 0  # until the result comes
    driver.receive()
    assert driver.scheduler.num_held_blocks == 0
    assert len(driver.outputs[1]) == num_outputs + 1
    driver.run(ahead=True)
    driver.assert_complete()


def test_a_preempted_sequence_may_end_by_its_result_in_flight() -> None:
    tokens, _ = SchedulerDriver.expect(range(6), max_tokens=20)
    driver = SchedulerDriver(8, enable_prefix_caching=False)
    for seq_id in range(2):
        driver.start(seq_id, range(6), max_tokens=20)
    until_preemption(driver, ahead=True)
    stopping = len(driver.outputs[1])

    driver = SchedulerDriver(8, enable_prefix_caching=False)
    driver.start(0, range(6), max_tokens=20)
    driver.start(1, range(6), max_tokens=20, stop_token_ids=(tokens[stopping],), min_tokens=stopping + 1)
    until_preemption(driver, ahead=True)
    assert preempted(driver) == [1]
    driver.receive()
    assert driver.reasons() == {1: "stop"}
    driver.run(ahead=True)
    driver.assert_complete()


@pytest.mark.parametrize("ahead", [False, True])
def test_many_long_requests_share_a_pool_that_holds_few_of_them(ahead: bool) -> None:
    driver = SchedulerDriver(24, max_num_seqs=16, max_num_batched_tokens=32)
    for seq_id in range(16):
        driver.start(seq_id, range(seq_id, seq_id + 20), max_tokens=50, tenant=str(seq_id % 3), priority=seq_id % 2)
    driver.run(ahead=ahead)
    assert driver.scheduler.counters.num_preemptions > 0
    driver.assert_complete()


def test_each_state_on_the_executor_is_forgotten_once() -> None:
    driver = SchedulerDriver(8, enable_prefix_caching=False)
    for seq_id in range(3):
        driver.start(seq_id, range(6), max_tokens=20)
    driver.run(ahead=True)
    inits = [share.seq_id for step in driver.steps for share in step.sequences if share.init]
    forgotten = [seq_id for step in driver.steps for seq_id in step.forget] + list(driver.scheduler.forget)
    assert driver.scheduler.counters.num_preemptions > 0
    assert sorted(forgotten) == sorted(inits)


@pytest.mark.parametrize("num_batched_tokens", [2, 3, 64])
def test_prompt_logprobs_come_whole_and_once_through_preemption(num_batched_tokens: int) -> None:
    driver = SchedulerDriver(8, max_num_batched_tokens=num_batched_tokens)
    driver.start(0, range(6), max_tokens=20, tenant="a")
    driver.start(1, range(20), max_tokens=4, num_prompt_logprobs=0, tenant="b")
    driver.run(ahead=True)
    assert driver.scheduler.counters.num_preemptions > 0
    driver.assert_prompt_logprobs(1)
    driver.assert_complete()


def test_prompt_logprobs_of_a_preempted_chunk_are_neither_lost_nor_repeated() -> None:
    driver = SchedulerDriver(12, max_num_batched_tokens=4)
    driver.start(0, range(30), max_tokens=8, num_prompt_logprobs=0, priority=1)
    driver.step()
    driver.step()  # 8 of 30
    driver.start(1, range(50, 53), max_tokens=18)
    driver.run()
    assert driver.scheduler.counters.num_preemptions > 0
    driver.assert_prompt_logprobs(0)
    driver.assert_complete()


def test_a_tenant_that_comes_starts_level_with_the_least_served() -> None:
    usage = TenantUsage()
    usage.join("a")
    usage.serve("a", 10)
    usage.join("b")
    usage.serve("b", 5)
    usage.join("c")
    assert [usage.num_served_tokens(tenant) for tenant in "abc"] == [10, 15, 10]
    usage.leave("a")
    usage.leave("c")
    usage.join("a")
    assert usage.num_served_tokens("a") == 15
