"""A client with many waiting requests takes turns with the others."""

from octavo.scheduler.turns import Turns
from tests.fakes.scheduler_driver import SchedulerDriver


def order_of_admission(driver: SchedulerDriver) -> list[int]:
    return [share.seq_id for step in driver.steps for share in step.sequences if share.num_computed_tokens == 0]


def test_a_short_request_waits_for_one_request_of_a_large_body_and_not_for_all() -> None:
    """100 prompts in one body, computed one at a time, then one request of another client."""
    driver = SchedulerDriver(400, max_num_seqs=1)
    for seq_id in range(100):
        driver.start(seq_id, [seq_id % 7, seq_id // 7] * 4, max_tokens=1, body_id="large")
    driver.step()
    driver.start(100, [1], max_tokens=1, body_id="short")
    driver.run()
    driver.assert_complete()
    assert order_of_admission(driver)[:5] == [0, 1, 100, 2, 3]
    assert driver.scheduler.turns.num_bodies == 0


def test_bodies_take_turns() -> None:
    driver = SchedulerDriver(400, max_num_seqs=1)
    for seq_id in range(4):
        driver.start(seq_id, [1, seq_id], max_tokens=1, body_id="a")
    for seq_id in range(4, 8):
        driver.start(seq_id, [2, seq_id - 4], max_tokens=1, body_id="b")
    driver.run()
    assert order_of_admission(driver) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_without_bodies_the_order_is_by_arrival() -> None:
    driver = SchedulerDriver(400, max_num_seqs=1)
    for seq_id in range(9):
        driver.start(seq_id, [seq_id % 7], max_tokens=1 + seq_id % 3)
        driver.step()
    driver.run()
    assert order_of_admission(driver) == list(range(9))


def test_newcomers_do_not_overtake_for_ever() -> None:
    """However many newcomers there are, the second sequence of a body has its turn after the first turn."""
    turns = Turns()
    first, second = turns.join("a"), turns.join("a")
    assert (first, second) == (1, 2)
    assert turns.join("b") == 1
    turns.begin(first)
    newcomers = [turns.join(f"c{number}") for number in range(100)]
    assert set(newcomers) == {2}  # the turn of the second sequence, which came before them
    turns.begin(second)
    assert turns.join("d") == 3


def test_a_body_is_forgotten_with_its_last_sequence() -> None:
    turns = Turns()
    turns.join("a")
    turns.join("a")
    turns.leave("a")
    assert turns.num_bodies == 1
    turns.leave("a")
    assert turns.num_bodies == 0
