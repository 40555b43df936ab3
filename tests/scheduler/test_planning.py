"""One rule for prompts, chunks and decoding, planned when the step before is done or while it runs."""

import pytest

from octavo.protocol.messages import SequenceResult, StepResult, pack_ids
from octavo.scheduler.scheduler import PlannedStep
from tests.fakes.scheduler_driver import SchedulerDriver


def shares(step: PlannedStep | None) -> list[tuple[int, int, int, bool]]:
    """seq_id, first position, number of token ids, sample."""
    assert step is not None
    return [(s.seq_id, s.num_computed_tokens, len(s.token_ids) // 4, s.sample) for s in step.sequences]


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_samples() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.start(0, range(10), max_tokens=2)
    driver.run()
    assert [shares(step) for step in driver.steps] == [
        [(0, 0, 4, False)],
        [(0, 4, 4, False)],
        [(0, 8, 2, True)],
        [(0, 10, 1, True)],
    ]
    driver.assert_complete()


def test_a_decoding_sequence_goes_before_a_new_prompt_in_one_step() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.start(0, [1, 2, 3])
    driver.step()
    driver.start(1, range(9))
    driver.step()
    assert shares(driver.steps[-1]) == [(0, 3, 1, True), (1, 0, 3, False)]
    driver.run()
    driver.assert_complete()


def nums_tokens(step: PlannedStep) -> dict[int, int]:
    """By seq_id, in order."""
    return {s.seq_id: max(1, len(s.token_ids) // 4) for s in step.sequences}


@pytest.mark.parametrize("ahead", [False, True])
def test_while_some_generate_prompts_are_computed_in_small_pieces(ahead: bool) -> None:
    driver = SchedulerDriver(max_num_prompt_tokens=6)
    driver.start(0, range(20), max_tokens=6)
    driver.start(1, range(20, 40), max_tokens=6)
    driver.step(ahead=ahead)
    driver.start(2, range(40, 55), max_tokens=1)
    driver.start(3, range(60, 65), max_tokens=1)
    driver.run(ahead=ahead)
    assert [nums_tokens(step) for step in driver.steps[:6]] == [
        {0: 20, 1: 20},  # nobody generates yet
        {0: 1, 1: 1, 2: 6},
        {0: 1, 1: 1, 2: 6},
        {0: 1, 1: 1, 2: 3, 3: 3},
        {0: 1, 1: 1, 3: 2},
        {0: 1, 1: 1},
    ]
    driver.assert_complete()


def test_a_prompt_is_computed_at_once_when_nobody_generates_any_more() -> None:
    driver = SchedulerDriver(max_num_prompt_tokens=4)
    driver.start(0, [1, 2, 3], max_tokens=2)
    driver.step()
    driver.start(1, range(30), max_tokens=1)
    driver.run()
    assert [nums_tokens(step) for step in driver.steps] == [{0: 3}, {0: 1, 1: 4}, {1: 26}]
    driver.assert_complete()


def test_a_sequence_that_takes_no_token_is_a_prompt_to_its_end() -> None:
    """Its last share computes one token and samples none: the other prompt is not held back for it."""
    driver = SchedulerDriver(max_num_batched_tokens=4, max_num_prompt_tokens=2)
    driver.start(0, range(5), max_tokens=0)
    driver.step()
    driver.start(1, range(10, 14), max_tokens=1)
    driver.step()
    assert nums_tokens(driver.steps[-1]) == {0: 1, 1: 3}
    driver.run()
    driver.assert_complete()


def test_nothing_is_admitted_once_the_tokens_for_prompts_are_spent() -> None:
    driver = SchedulerDriver(max_num_prompt_tokens=4)
    driver.start(0, [1, 2, 3])
    driver.step()
    driver.start(1, range(10), max_tokens=1)
    driver.start(2, range(10, 20), max_tokens=1)
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 1)
    assert driver.scheduler.num_used_blocks == 1 + 3
    driver.run()
    driver.assert_complete()


def test_prompts_are_computed_in_larger_pieces_if_many_wait() -> None:
    """A step computes a 24th of all prompt tokens, begun or waiting, for which there is a place to run."""
    driver = SchedulerDriver(100, max_num_seqs=4, max_num_batched_tokens=64, max_num_prompt_tokens=2)
    driver.start(0, [1, 2, 3], max_tokens=120)
    driver.step()
    for seq_id in range(1, 6):
        driver.start(seq_id, range(64 * seq_id, 64 * seq_id + 64), max_tokens=1)
    driver.run()
    pieces = [sum(nums_tokens(step).values()) - 1 for step in driver.steps[1:]]
    assert pieces[:6] == [192 // 24, 184 // 24, 177 // 24, 170 // 24, 163 // 24, 157 // 24]
    assert pieces[-1] == 0
    driver.assert_complete()


def test_cached_tokens_of_waiting_prompts_do_not_make_pieces_larger() -> None:
    """Four prompts have 264 tokens, a 24th of which is 11. But 240 tokens are cached; a 24th of the others is 1."""
    driver = SchedulerDriver(200, max_num_seqs=5, max_num_batched_tokens=256, max_num_prompt_tokens=2)
    driver.start(0, range(60), max_tokens=1)
    driver.run()
    driver.start(1, [1, 2, 3], max_tokens=40)
    driver.step()
    for seq_id in range(2, 6):
        driver.start(seq_id, [*range(60), *range(60 + 6 * seq_id, 66 + 6 * seq_id)], max_tokens=1)
    driver.step()
    assert nums_tokens(driver.steps[-1]) == {1: 1, 2: 2}
    driver.run()
    driver.assert_complete()


def test_cached_tokens_of_waiting_prompts_count_again_once_the_executor_is_lost() -> None:
    """54 tokens of one prompt are left, and three prompts of 66 wait: a 24th is 10. With 60 of each cached it was 3."""
    driver = SchedulerDriver(200, max_num_seqs=5, max_num_batched_tokens=16, max_num_prompt_tokens=2)
    driver.start(0, range(60), max_tokens=1)
    driver.run()
    driver.start(1, [1, 2, 3], max_tokens=40)
    driver.step()
    for seq_id in range(2, 6):
        driver.start(seq_id, [*range(60), *range(60 + 6 * seq_id, 66 + 6 * seq_id)], max_tokens=1)
    driver.reset(200)
    driver.step()
    assert nums_tokens(driver.steps[-1]) == {1: 4, 2: 12}
    driver.step()
    assert nums_tokens(driver.steps[-1]) == {1: 1, 2: 10}
    driver.run()
    driver.assert_complete()


def test_a_prompt_of_a_better_priority_leaves_each_generating_sequence_its_token() -> None:
    driver = SchedulerDriver(max_num_seqs=4, max_num_batched_tokens=8, max_num_prompt_tokens=100)
    for seq_id in range(3):
        driver.start(seq_id, [seq_id], priority=1)
    driver.step()
    driver.start(3, range(40), max_tokens=1, priority=0)
    driver.step()
    driver.step()
    assert nums_tokens(driver.steps[1]) == {0: 1, 1: 1, 2: 1, 3: 5}
    assert nums_tokens(driver.steps[2]) == {3: 5, 0: 1, 1: 1, 2: 1}
    driver.run()
    driver.assert_complete()


def test_a_preempted_sequence_is_computed_again_in_small_pieces() -> None:
    driver = SchedulerDriver(7, max_num_prompt_tokens=3, enable_prefix_caching=False)
    driver.start(0, [1], max_tokens=20)
    driver.start(1, range(8), max_tokens=5)
    driver.start(2, range(8), max_tokens=8)
    driver.run()
    assert driver.scheduler.counters.num_preemptions == 1
    pieces = [nums_tokens(step).get(2, 0) for step in driver.steps]
    assert pieces[:12] == [8, 1, 1, 1, 0, 3, 3, 3, 3, 1, 1, 1]
    driver.assert_complete()


def test_init_comes_with_the_first_share_only() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.start(0, range(6), max_tokens=3)
    driver.run()
    assert [step.sequences[0].init is not None for step in driver.steps] == [True, False, False, False]
    init = driver.steps[0].sequences[0].init
    assert init is not None
    assert (init.num_prompt_tokens, init.num_output_tokens) == (6, 0)


def test_an_init_has_only_the_tokens_that_sampling_looks_back_at() -> None:
    driver = SchedulerDriver(block_size=16)
    driver.start(0, [1, 2, 1], [3, 3])
    driver.start(1, [1, 2, 1], [3, 3], repetition_penalty=1.5)
    driver.start(2, [1, 2, 1], [3, 3], presence_penalty=1.0)
    driver.start(3, [1, 2, 1], num_prompt_logprobs=0)
    driver.start(4, [1, 2, 1], [3], num_prompt_logprobs=0)  # its prompt's went out with the first token
    step = driver.send()
    assert step is not None
    inits = [share.init for share in step.sequences]
    assert [
        (init.prompt_token_ids, init.distinct_prompt_token_ids, init.output_token_ids) for init in inits if init
    ] == [
        (b"", b"", b""),
        (b"", pack_ids([1, 2]), pack_ids([3, 3])),
        (b"", b"", pack_ids([3, 3])),
        (pack_ids([1, 2, 1]), b"", b""),
        (b"", b"", b""),
    ]
    driver.run()


def test_the_token_being_sampled_is_planned_on_without_being_known() -> None:
    driver = SchedulerDriver()
    driver.start(0, [1, 2, 3])
    driver.send()
    assert shares(driver.send()) == [(0, 3, 0, True)]
    assert driver.scheduler.num_in_flight == 2
    assert driver.send() is None
    driver.run(ahead=True)
    driver.assert_complete()


def test_chunks_are_planned_ahead() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.start(0, range(10))
    assert shares(driver.send()) == [(0, 0, 4, False)]
    assert shares(driver.send()) == [(0, 4, 4, False)]
    driver.run(ahead=True)
    driver.assert_complete()


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(2, 100), (100, 5)])
def test_a_sequence_whose_last_token_is_being_sampled_is_not_planned_ahead(max_tokens: int, max_model_len: int) -> None:
    driver = SchedulerDriver(max_model_len=max_model_len)
    driver.start(0, [1, 2, 3], max_tokens=max_tokens)
    driver.send()
    assert driver.send() is not None
    driver.receive()
    assert driver.send() is None
    driver.receive()
    assert driver.reasons() == {0: "length"}
    assert len(driver.outputs[0]) == 2


def test_a_stop_found_late_wastes_one_slot_and_no_token() -> None:
    driver = SchedulerDriver()
    [stop], _ = SchedulerDriver.expect([1, 2, 3], max_tokens=1)
    driver.start(0, [1, 2, 3], stop_token_ids=(stop,))
    driver.send()
    driver.send()
    driver.receive()
    assert driver.reasons() == {0: "stop"}
    assert driver.scheduler.num_used_blocks == 1  # the step that still runs names it
    driver.receive()
    assert driver.outputs[0] == [stop]
    driver.assert_complete()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("max_num_batched_tokens", [3, 16, 64])
def test_any_schedule_gives_the_same_tokens(ahead: bool, block_size: int, max_num_batched_tokens: int) -> None:
    driver = SchedulerDriver(128, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens)
    for seq_id in range(8):
        driver.start(seq_id, range(seq_id, 2 * seq_id + 1), max_tokens=5 + seq_id)
    driver.run(ahead=ahead)
    driver.assert_complete()


def test_max_tokens_zero_ends_once_the_prompt_is_computed() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.start(0, range(6), max_tokens=0)
    driver.run()
    assert [shares(step) for step in driver.steps] == [[(0, 0, 4, False)], [(0, 4, 2, False)]]
    assert (driver.outputs[0], driver.reasons()) == ([], {0: "length"})


def test_a_prompt_that_fills_the_model_ends_without_a_token() -> None:
    driver = SchedulerDriver(max_model_len=6)
    driver.start(0, range(6))
    driver.run()
    assert (driver.outputs[0], driver.reasons()) == ([], {0: "length"})


def test_stop_ids_count_from_min_tokens_on() -> None:
    tokens, _ = SchedulerDriver.expect([1, 2, 3], max_tokens=30)
    again = tokens.index(tokens[0], 1)
    driver = SchedulerDriver()
    driver.start(0, [1, 2, 3], max_tokens=30, eos_token_ids=(tokens[0],), min_tokens=2)
    driver.start(1, [1, 2, 3], max_tokens=30, stop_token_ids=(tokens[again],), min_tokens=again + 1)
    driver.start(2, [1, 2, 3], max_tokens=30, stop_token_ids=(tokens[0],), min_tokens=1)
    driver.run()
    assert driver.outputs[0] == driver.outputs[1] == tokens[: again + 1]
    assert driver.outputs[2] == tokens[:1]
    assert set(driver.reasons().values()) == {"stop"}


def test_a_stop_id_at_max_tokens_is_a_stop() -> None:
    tokens, _ = SchedulerDriver.expect([1, 2, 3], max_tokens=1)
    driver = SchedulerDriver()
    driver.start(0, [1, 2, 3], max_tokens=1, stop_token_ids=(tokens[0],))
    driver.run()
    assert driver.reasons() == {0: "stop"}


def test_several_tokens_of_one_result_end_at_the_first_that_ends() -> None:
    driver = SchedulerDriver()
    driver.start(0, [1, 2, 3], stop_token_ids=(9,))
    driver.start(1, [1, 2, 3], max_tokens=2)
    step = driver.send()
    assert step is not None
    many = SequenceResult([5, 9, 6])
    driver.scheduler.apply(StepResult("", "", step.step_id, [many, many]))
    driver.settle()
    assert (driver.outputs, driver.reasons()) == ({0: [5, 9], 1: [5, 9]}, {0: "stop", 1: "length"})


def test_a_resubmission_goes_on_where_it_was() -> None:
    tokens, _ = SchedulerDriver.expect(range(5), max_tokens=8)
    driver = SchedulerDriver(max_num_batched_tokens=4)
    driver.start(0, range(5), tokens[:3], max_tokens=8)
    driver.run()
    assert shares(driver.steps[1]) == [(0, 4, 4, True)]
    init = driver.steps[0].sequences[0].init
    assert init is not None
    assert init.num_output_tokens == 3
    driver.assert_complete()


def test_a_resubmission_that_was_complete_ends_at_once() -> None:
    driver = SchedulerDriver()
    driver.start(0, [1, 2], [3, 4], max_tokens=2)
    driver.start(1, [1, 2], [3, 4], stop_token_ids=(4,))
    assert driver.reasons() == {0: "length", 1: "stop"}
    assert driver.send() is None
    assert not driver.scheduler.has_work


def test_lower_priority_numbers_go_first() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    driver.start(0, [1], max_tokens=1, priority=1)
    driver.start(1, [1], max_tokens=1, priority=1)
    driver.start(2, [1], max_tokens=1, priority=0)
    driver.run()
    assert [step.sequences[0].seq_id for step in driver.steps] == [2, 0, 1]


def test_a_sequence_that_lacks_blocks_is_not_overtaken() -> None:
    driver = SchedulerDriver(8)
    driver.start(0, range(20), max_tokens=4)
    driver.step()
    driver.start(1, range(10, 26), max_tokens=4)
    driver.start(2, [1], max_tokens=4)
    driver.step()
    assert driver.scheduler.num_waiting == 2
    driver.run()
    assert [update.seq_id for update in driver.finished.values()] == [0, 1, 2]


def test_refusals() -> None:
    driver = SchedulerDriver(4, max_model_len=20, max_num_waiting_seqs=1)
    refusal = driver.scheduler.refusal
    assert refusal(driver.make(0, range(8))) is None
    for wrong in (
        driver.make(0, []),
        driver.make(0, range(21)),
        driver.make(0, range(18), max_tokens=2),
    ):
        assert (refused := refusal(wrong)) is not None
        assert not refused.temporary
    assert refusal(driver.make(0, range(17), max_tokens=0)) is not None
    assert refusal(driver.make(0, range(16), max_tokens=1)) is None  # the last token is never computed
    driver.start(0, [1])
    assert (refused := refusal(driver.make(1, [1]))) is not None
    assert refused.temporary
    assert refusal(driver.make(1, [1], [2])) is None  # another scheduler had taken it


def test_nothing_is_planned_before_an_executor_says_how_many_blocks_it_has() -> None:
    driver = SchedulerDriver(0)
    sequence = driver.make(0, range(100))
    assert driver.scheduler.refusal(sequence) is None
    driver.add(sequence)
    driver.start(1, range(8))
    assert driver.send() is None
    driver.reset(4)
    assert driver.reasons() == {0: "error"}
    driver.run()
    driver.assert_complete()


def test_a_result_of_no_step_in_flight_is_ignored() -> None:
    driver = SchedulerDriver()
    driver.start(0, [1, 2, 3])
    step = driver.send()
    assert step is not None
    for step_id in (0, 2, 99):
        driver.scheduler.apply(StepResult("", "", step_id, [SequenceResult([1])]))
    assert driver.scheduler.num_in_flight == 1
    driver.receive()
    driver.scheduler.apply(StepResult("", "", step.step_id, [SequenceResult([1])]))
    driver.run()
    driver.assert_complete()


def test_counters() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(10), max_tokens=4)
    driver.run()
    counters = driver.scheduler.counters
    assert (counters.num_prompt_tokens, counters.num_generated_tokens) == (10, 4)
    assert (counters.num_steps, counters.num_scheduled_tokens) == (4, 13)
    assert counters.finished == {"length": 1}
