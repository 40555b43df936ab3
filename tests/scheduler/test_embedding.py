"""Sequences that are embedded: nothing is sampled, and a vector comes with the end."""

import pytest

from octavo.protocol.messages import SequenceResult, StepResult, pack_ids
from tests.fakes.scheduler_driver import BLOCK_SIZE, SchedulerDriver, slot_value

PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]


def total_of(prompt: list[int]) -> int:
    """Return what the executor makes a vector of, if it computes all tokens of the prompt in one life."""
    total = slot = 0
    for token_id in prompt:
        slot = slot_value(slot, token_id)
        total += slot
    return total


def embed(driver: SchedulerDriver, seq_id: int, prompt: list[int], **fields: object) -> None:
    driver.start(seq_id, prompt, task="embed", max_tokens=0, **fields)


def vectors(driver: SchedulerDriver) -> dict[int, bytes]:
    return {seq_id: update.embedding for seq_id, update in driver.finished.items()}


@pytest.mark.parametrize("max_num_batched_tokens", [4, 64])
def test_a_vector_comes_with_the_end_and_nothing_is_sampled(max_num_batched_tokens: int) -> None:
    driver = SchedulerDriver(max_num_batched_tokens=max_num_batched_tokens)
    embed(driver, 1, PROMPT)
    driver.run()
    assert vectors(driver) == {1: pack_ids([total_of(PROMPT)])}
    assert driver.reasons() == {1: "length"}
    assert driver.outputs[1] == []
    assert not any(share.sample for step in driver.steps for share in step.sequences)
    assert driver.scheduler.num_used_blocks == 0


def test_a_vector_of_the_last_token_takes_its_prefix_from_the_cache() -> None:
    driver = SchedulerDriver()
    driver.start(1, PROMPT, max_tokens=1)
    driver.run()
    embed(driver, 2, PROMPT)
    driver.run()
    assert driver.num_cached_tokens[2] == 2 * BLOCK_SIZE
    assert len(driver.finished[2].embedding) == 4


def test_a_vector_of_all_tokens_takes_nothing_from_the_cache() -> None:
    driver = SchedulerDriver(embeds_all_tokens=True)
    driver.start(1, PROMPT, max_tokens=1)
    driver.run()
    embed(driver, 2, PROMPT)
    driver.run()
    assert driver.num_cached_tokens[2] == 0
    assert driver.finished[2].embedding == pack_ids([total_of(PROMPT)])


@pytest.mark.parametrize("ahead", [False, True])
def test_a_vector_of_all_tokens_begins_again_if_the_executor_lost_its_sum(ahead: bool) -> None:
    driver = SchedulerDriver(embeds_all_tokens=True, max_num_batched_tokens=4)
    embed(driver, 1, PROMPT)
    driver.step(ahead=ahead)
    driver.executor.lose([1])
    driver.run(ahead=ahead)
    assert vectors(driver) == {1: pack_ids([total_of(PROMPT)])}


def test_a_vector_survives_the_executor() -> None:
    driver = SchedulerDriver(embeds_all_tokens=True, max_num_batched_tokens=4)
    embed(driver, 1, PROMPT)
    driver.step()
    driver.reset(32)
    driver.run()
    assert vectors(driver) == {1: pack_ids([total_of(PROMPT)])}


def test_an_encoder_computes_each_prompt_in_one_share_and_shares_no_prefix() -> None:
    driver = SchedulerDriver(whole_prompts=True, embeds_all_tokens=True, max_num_batched_tokens=16)
    for seq_id in range(1, 5):
        embed(driver, seq_id, PROMPT[: 12 - seq_id])
    driver.run(ahead=True)
    shares = [share for step in driver.steps for share in step.sequences]
    assert [(share.seq_id, share.num_computed_tokens, len(share.token_ids) // 4) for share in shares] == [
        (1, 0, 11),
        (2, 0, 10),
        (3, 0, 9),
        (4, 0, 8),
    ]
    assert set(driver.num_cached_tokens.values()) == {0}
    assert vectors(driver) == {n: pack_ids([total_of(PROMPT[: 12 - n])]) for n in range(1, 5)}


def test_a_prompt_that_no_step_of_an_encoder_has_room_for_is_refused() -> None:
    driver = SchedulerDriver(whole_prompts=True, max_num_batched_tokens=8)
    refusal = driver.scheduler.refusal(driver.make(1, PROMPT, task="embed", max_tokens=0))
    assert refusal is not None
    assert not refusal.temporary
    assert "--max-num-batched-tokens" in refusal.reason


def test_a_task_that_the_model_lacks_is_refused() -> None:
    driver = SchedulerDriver()
    driver.scheduler.limits = driver.limits.__class__(8, 4, 100, 8, 64, 100, tasks=("embed",))
    refusal = driver.scheduler.refusal(driver.make(1, PROMPT))
    assert refusal is not None
    assert refusal.reason == "this model cannot generate"


def test_a_vector_of_the_wrong_size_is_an_error_of_its_request() -> None:
    driver = SchedulerDriver()
    embed(driver, 1, PROMPT)
    step = driver.send()
    assert step is not None
    driver.sent.clear()
    driver.scheduler.apply(StepResult("", "", step.step_id, [SequenceResult([], embedding=b"12345678")]))
    driver.settle()
    assert driver.reasons() == {1: "error"}
