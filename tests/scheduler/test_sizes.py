"""A step's messages have a limit in bytes: shares that do not fit wait for a later step."""

import pytest

from octavo.protocol.messages import Step, encode
from octavo.scheduler.limits import refusal
from tests.fakes.scheduler_driver import SchedulerDriver

LIMIT = 4000
ASKS = [
    {},
    {"num_prompt_logprobs": 20},
    {"num_logprobs": 20},
    {"repetition_penalty": 1.5, "presence_penalty": 1.0},
    {"logit_bias": tuple((token_id % 7, 0.5) for token_id in range(100))},
    {"stop_token_ids": tuple(range(70_000, 70_100))},
]


def message_bytes(driver: SchedulerDriver) -> list[int]:
    return [len(encode(Step("s" * 16, "e" * 16, step.step_id, step.sequences, []))) for step in driver.steps]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("asked", ASKS)
def test_no_step_is_larger_than_its_limit(asked, ahead):
    driver = SchedulerDriver(300, max_num_seqs=32, max_num_batched_tokens=1000, max_step_bytes=LIMIT)
    for seq_id in range(30):
        driver.start(seq_id, [seq_id % 7] * (20 + seq_id), max_tokens=4, **asked)
    driver.run(ahead=ahead)
    driver.assert_complete()
    assert max(message_bytes(driver)) <= LIMIT
    assert max(len(step.sequences) for step in driver.steps) > 1


def test_a_long_prompt_is_cut_so_that_its_log_probabilities_fit():
    """A token takes 4 bytes in the Step, and its log probability and rank take 8 in the result."""
    driver = SchedulerDriver(400, max_num_batched_tokens=10_000, max_step_bytes=20_000)
    driver.start(0, [1, 2, 3] * 500, max_tokens=2, num_prompt_logprobs=0)
    driver.run()
    driver.assert_complete()
    nums_tokens = [len(step.sequences[0].token_ids) // 4 for step in driver.steps]
    assert sum(nums_tokens) > 1500 > 3 * len(nums_tokens) > 6
    assert max(nums_tokens) <= 20_000 // 12


def test_a_sequence_that_fits_in_no_step_is_planned_alone():
    """Nothing waits for ever; the backend ends the sequences of a step that cannot be sent."""
    driver = SchedulerDriver(300, max_num_batched_tokens=1000, max_step_bytes=100)
    for seq_id in range(3):
        driver.start(seq_id, [seq_id] * 200, max_tokens=3)
    driver.run()
    driver.assert_complete()
    assert {len(step.sequences) for step in driver.steps} == {1}


def test_log_probabilities_of_a_prompt_that_fit_in_no_message_are_refused():
    driver = SchedulerDriver(1 << 17, max_model_len=1 << 19)
    scheduler = driver.scheduler
    much = driver.make(0, [1] * 400_000, num_prompt_logprobs=20)
    told = refusal(much, scheduler.limits, scheduler.blocks.num_blocks, 0)
    assert told is not None
    assert not told.temporary
    assert "the log probabilities of 400000 prompt tokens take 64 MiB, of 32 at most" in told.reason
    assert scheduler.refusal(driver.make(1, [1] * 400_000, num_prompt_logprobs=1)) is None
