"""Blocks with one prefix are computed once and held once, by sequences that may share and by no others."""

from typing import Any

import pytest

from octavo.protocol.messages import pack_ids
from octavo.scheduler.prefix import block_hash, root_hash
from tests.fakes.scheduler_driver import SchedulerDriver

PREFIX = [(7 * i + i // 5) % 50 for i in range(512)]


def prefix_driver() -> SchedulerDriver:
    return SchedulerDriver(256, block_size=16, max_num_batched_tokens=600, max_num_seqs=16)


def test_a_second_request_computes_only_what_is_new() -> None:
    driver = prefix_driver()
    driver.start(0, [*PREFIX, 1, 2, 3], max_tokens=2)
    driver.run()
    assert driver.scheduler.counters.num_scheduled_tokens == 515 + 1
    driver.start(1, [*PREFIX, 4, 5, 6], max_tokens=2)
    driver.run()
    assert driver.scheduler.counters.num_scheduled_tokens == 516 + 3 + 1
    assert driver.num_cached_tokens == {0: 0, 1: 512}
    assert driver.scheduler.counters.num_prefix_hit_tokens == 512
    driver.assert_complete()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [100, 600, 8192])
def test_eight_at_once_compute_the_prefix_once_and_hold_it_once(ahead: bool, max_num_batched_tokens: int) -> None:
    driver = SchedulerDriver(256, block_size=16, max_num_batched_tokens=max_num_batched_tokens)
    for seq_id in range(8):
        driver.start(seq_id, [*PREFIX, seq_id, 1, 2], max_tokens=4)
    most_blocks = 0
    while driver.scheduler.has_work:
        driver.step(ahead=ahead)
        most_blocks = max(most_blocks, driver.scheduler.num_used_blocks)
    driver.run()
    assert driver.scheduler.counters.num_scheduled_tokens == 512 + 8 * (3 + 3)
    assert most_blocks == 32 + 8
    assert driver.num_cached_tokens == {0: 0} | dict.fromkeys(range(1, 8), 512)
    driver.assert_complete()


def test_others_overtake_a_sequence_that_waits_for_a_prefix_in_flight() -> None:
    driver = prefix_driver()
    driver.start(0, [*PREFIX, 1])
    driver.start(1, [*PREFIX, 2])
    driver.start(2, [9, 9, 9])
    step = driver.send()
    assert step is not None
    assert [share.seq_id for share in step.sequences] == [0, 2]
    driver.run()
    driver.assert_complete()


def test_a_block_is_shared_only_after_its_step_is_applied() -> None:
    driver = prefix_driver()
    driver.start(0, [*PREFIX, 1])
    driver.send()
    driver.start(1, [*PREFIX, 2])
    step = driver.send()
    assert step is not None
    assert [share.seq_id for share in step.sequences] == [0]
    driver.receive()
    driver.receive()
    step = driver.send()
    assert step is not None
    assert [(share.seq_id, share.num_computed_tokens) for share in step.sequences] == [(0, 514), (1, 512)]


def test_a_sequence_that_waits_for_a_prefix_computes_it_if_the_other_is_aborted() -> None:
    driver = prefix_driver()
    driver.start(0, [*PREFIX, 1])
    driver.send()
    driver.start(1, [*PREFIX, 2])
    driver.scheduler.abort(0)
    driver.settle()
    driver.run()
    assert driver.num_cached_tokens[1] == 0
    driver.assert_complete()


def test_at_least_one_token_is_computed() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(8), max_tokens=1)
    driver.run()
    driver.start(1, range(8), max_tokens=1)
    driver.run()
    assert driver.num_cached_tokens[1] == 4
    driver.assert_complete()


@pytest.mark.parametrize("ahead", [False, True])
def test_generated_tokens_are_a_prefix_too(ahead: bool) -> None:
    driver = SchedulerDriver()
    driver.start(0, range(6), max_tokens=7)
    driver.run(ahead=ahead)
    driver.start(1, [*range(6), *driver.outputs[0], 3], max_tokens=1)
    driver.run()
    assert driver.num_cached_tokens[1] == 12
    driver.assert_complete()


def test_without_prefix_caching_nothing_is_shared() -> None:
    driver = SchedulerDriver(enable_prefix_caching=False)
    for seq_id in range(2):
        driver.start(seq_id, range(9))
    driver.run()
    assert driver.num_cached_tokens == {0: 0, 1: 0}
    assert driver.scheduler.num_cached_blocks == 0
    driver.assert_complete()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"tenant": "x"}, {"cache_salt": "x"}),
        ({"tenant": "ab", "cache_salt": "c"}, {"tenant": "a", "cache_salt": "bc"}),
        ({"tenant": "acache_saltb"}, {"tenant": "a", "cache_salt": "bcache_salt"}),
    ],
)
def test_sequences_that_may_not_share_do_not_share(first: dict[str, Any], second: dict[str, Any]) -> None:
    driver = SchedulerDriver()
    driver.start(0, range(9), **first)
    driver.run()
    driver.start(1, range(9), **second)
    driver.start(2, range(9), **first)
    driver.run()
    assert driver.num_cached_tokens == {0: 0, 1: 0, 2: 8}


def test_a_chain_of_hashes_depends_on_everything_before() -> None:
    root = root_hash("", "")
    a, b = pack_ids(range(4)), pack_ids(range(4, 8))
    assert block_hash(block_hash(root, a), b) != block_hash(block_hash(root, b), b)
    assert block_hash(root, a) != block_hash(root_hash("t", ""), a)
    assert block_hash(root, a) == block_hash(root_hash("", ""), a)
    assert len(block_hash(root, a)) == 32


def test_the_least_recently_used_tail_is_evicted_first() -> None:
    driver = SchedulerDriver(8)
    driver.start(0, range(13), max_tokens=1)  # 3 full blocks stay
    driver.run()
    driver.start(1, range(20, 29), max_tokens=1)  # 2 more
    driver.run()
    assert (driver.scheduler.num_cached_blocks, driver.scheduler.num_free_blocks) == (5, 3)
    driver.start(2, range(40, 53), max_tokens=1)  # takes 3 free blocks and evicts the last block of the oldest prefix
    driver.run()
    assert driver.scheduler.num_evicted_blocks == 1
    driver.start(3, range(20, 29), max_tokens=1)
    driver.run()
    driver.start(4, range(13), max_tokens=1)
    driver.run()
    assert driver.num_cached_tokens == {0: 0, 1: 0, 2: 0, 3: 8, 4: 8}
    driver.assert_complete()


def test_prompt_logprobs_come_whole_and_once_though_the_prefix_is_cached() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.start(0, range(10), max_tokens=2)
    driver.run()
    driver.start(1, range(10), max_tokens=2, num_prompt_logprobs=0)
    driver.start(2, range(10), max_tokens=0, num_prompt_logprobs=0)
    driver.start(3, [1], max_tokens=1, num_prompt_logprobs=0)
    driver.run()
    assert driver.num_cached_tokens == {0: 0, 1: 0, 2: 0, 3: 0}
    assert driver.prompt_logprobs[0] == []
    for seq_id in (1, 2, 3):
        driver.assert_prompt_logprobs(seq_id)
