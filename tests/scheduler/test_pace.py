"""How many tokens of prompts a step may have while some sequences generate."""

import pytest

from octavo.scheduler.pace import Pace
from octavo.scheduler.predictor import StepPredictor, StepSize, step_size
from tests.scheduler.test_predictor import share

BLOCK_SIZE = 16


def decoding(num_seqs: int) -> StepSize:
    return StepSize(num_seqs, num_seqs)


def mixed(num_seqs: int, num_prompt_tokens: int) -> StepSize:
    """Return a step in which `num_seqs` generate and one prompt is computed."""
    shares = [share(0)] * num_seqs + [share(num_prompt_tokens)]
    return step_size(shares, follows_idleness=False)


class Machine:
    """Takes 10 ms for a step and 1 ms for each of its tokens, all times `slow`."""

    def __init__(self, target_step_s: float = 0.05) -> None:
        self.predictor = StepPredictor()
        self.pace = Pace(self.predictor, target_step_s)

    def do(self, size: StepSize, slow: float = 1.0) -> None:
        busy_s = slow * (0.01 + 0.001 * size.num_tokens)
        self.predictor.observe_step(size, busy_s)
        self.pace.observe_step(size, busy_s)

    def limit(self, num_seqs: int, block_size: int = BLOCK_SIZE) -> int | None:
        return self.pace.max_num_prompt_tokens(num_seqs, block_size)


def test_there_is_no_limit_before_a_prompt_was_measured() -> None:
    machine = Machine()
    assert machine.limit(8) is None
    machine.do(decoding(8))
    assert machine.limit(8) is None
    machine.do(mixed(8, 3))  # too few tokens to learn from
    assert machine.limit(8) is None


def test_prompts_fill_a_step_up_to_its_target() -> None:
    machine = Machine()
    machine.do(decoding(8))
    machine.do(mixed(8, 100))
    assert machine.limit(8) == 32  # 18 ms without prompts, and 32 tokens of 1 ms
    machine.do(decoding(1))
    assert machine.limit(1) == 39


def test_prompts_may_take_as_long_as_the_generating_sequences() -> None:
    machine = Machine()
    machine.do(decoding(60))
    machine.do(mixed(60, 100))
    assert machine.limit(60) == 70


def test_a_block_is_computed_however_long_it_takes() -> None:
    machine = Machine(target_step_s=0.001)
    machine.do(decoding(1))
    machine.do(mixed(1, 100))
    assert machine.limit(1) == BLOCK_SIZE


def test_a_large_target_is_no_limit() -> None:
    machine = Machine(target_step_s=3600)
    machine.do(decoding(1))
    machine.do(mixed(1, 100))
    assert machine.limit(1) > 1_000_000


def test_a_prompt_alone_says_what_its_tokens_take() -> None:
    machine = Machine()
    machine.do(StepSize(1, 490, num_prompt_seqs=1, num_prompt_tokens=490))
    assert machine.limit(8) == 49  # its tokens took all of the 500 ms
    machine.do(decoding(1))
    machine.do(StepSize(1, 490, num_prompt_seqs=1, num_prompt_tokens=490))
    assert machine.limit(1) == 39


def test_one_step_that_takes_long_changes_nothing() -> None:
    machine = Machine()
    machine.do(decoding(8))
    machine.do(mixed(8, 100), slow=50)
    machine.do(mixed(8, 100))
    assert machine.limit(8) == 32
    machine.do(mixed(8, 100))
    machine.do(mixed(8, 100), slow=50)
    assert machine.limit(8) == 32


def test_the_time_of_prompts_is_learned_again() -> None:
    machine = Machine()
    machine.do(decoding(8))
    for num_prompt_tokens in (100, 200, 300, 100, 50, 40, 30, 20, 90):
        machine.do(mixed(8, num_prompt_tokens))
    assert machine.limit(8) == 32
    for _ in range(5):
        machine.do(mixed(8, 100), slow=1.5)  # (177 - 18) ms for 100 tokens
    assert machine.limit(8) == 20


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_limit_recovers_from_slow_steps_however_small_a_block_is(block_size: int) -> None:
    machine = Machine()
    machine.do(decoding(8))
    for _ in range(9):
        machine.do(mixed(8, 100), slow=50)
    assert machine.limit(8, block_size) == max(8, block_size)
    for _ in range(5):
        machine.do(mixed(8, machine.limit(8, block_size)))
    assert machine.limit(8, block_size) == 32


def test_a_step_that_is_faster_than_one_without_prompts_teaches_nothing() -> None:
    machine = Machine()
    machine.do(decoding(8))
    machine.do(mixed(8, 8), slow=0.5)
    assert machine.limit(8) is None
