"""Long bodies in a reader: they take turns, are given up with their client, and what is slow ends the process."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.gateway.http.endpoints import ENDPOINTS
from octavo.gateway.reader import DOORS, Jobs
from octavo.gateway.reading.messages import Cancel, Done, Piece, Read, Reply, Wrong, decode_order, framed
from octavo.gateway.request_error import RequestError
from octavo.protocol.messages import Ready

READY = Ready("i", "f", vocab_size=8, max_model_len=8, block_size=16, num_blocks=8, max_num_seqs=8)


def test_every_body_that_a_route_takes_can_be_read_here() -> None:
    bodies = [endpoint.body for endpoint in ENDPOINTS if endpoint.body]
    assert {door.decoder.type for door in DOORS.values()} == set(bodies)
    assert len(DOORS) == len(bodies)


class Driver:
    """Jobs whose bodies say how many steps they take, with what was answered and which step was done when."""

    def __init__(self, work: Callable[[], None] = lambda: None, **limits_s: float) -> None:
        self._work = work
        self.answers: list[Reply] = []
        self.turns: list[int] = []
        self.jobs = Jobs(self._steps, self.answers.append, **limits_s)

    def _steps(self, read: Read, content: bytes) -> Iterator[Any]:
        for _ in range(int(content)):
            self.turns.append(read.job_id)
            self._work()
            yield
        if read.door == "wrong":
            raise RequestError("wrong", param="prompt", code="c")
        if read.door == "broken":
            raise KeyError("secret")
        return [Done(read.job_id, content)]

    def order(self, job_id: int, pieces: list[bytes], kind: str = "k") -> None:
        for message in (*(Piece(job_id, piece) for piece in pieces), Read(job_id, kind, ("m",), READY)):
            self.jobs.take(decode_order(framed(message)[4:]))

    def turn(self, num: int) -> None:
        for _ in range(num):
            self.jobs.turn()


def test_bodies_take_turns_so_that_the_shorter_of_them_ends_first() -> None:
    driver = Driver()
    driver.order(1, [b"1", b"00"])
    driver.order(2, [b"2"])
    driver.turn(6)
    assert driver.turns == [1, 2, 1, 2, 1]
    assert driver.answers == [Done(2, b"2")]


def test_a_body_that_nobody_waits_for_gets_no_more_steps() -> None:
    driver = Driver()
    driver.order(1, [b"100"])
    driver.turn(1)
    driver.jobs.take(Cancel(1))
    driver.jobs.take(Piece(2, b"half of it"))
    driver.jobs.take(Cancel(2))
    driver.order(3, [b"1"])
    driver.turn(3)
    assert driver.turns == [1, 3]
    assert driver.answers == [Done(3, b"1")]


def test_an_error_is_answered_and_the_next_body_is_read(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    for job_id, kind in enumerate(("wrong", "broken", "k")):
        driver.order(job_id, [b"0"], kind)
    driver.turn(3)
    wrong, broken, done = driver.answers
    assert wrong == Wrong(0, "wrong", "prompt", 400, "c")
    assert isinstance(broken, Wrong)
    assert broken.status == 500
    assert "secret" not in broken.message
    assert "secret" in caplog.text
    assert done == Done(2, b"0")


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_step_that_takes_too_long_ends_the_process_with_an_answer(is_wanted: bool) -> None:
    limits_s = {"step_s": 0.02, "unwanted_s": 1e9} if is_wanted else {"step_s": 1e9, "unwanted_s": 0.02}
    ended: list[bool] = []

    def work() -> None:
        driver.jobs.end_if_slow(lambda: ended.append(True))
        assert not ended
        if not is_wanted:
            driver.jobs.take(Cancel(1))
        begun_s = time.process_time()
        while time.process_time() - begun_s < 0.05:
            pass
        driver.jobs.end_if_slow(lambda: ended.append(True))

    driver = Driver(work, **limits_s)
    driver.order(1, [b"1"])
    driver.turn(1)
    assert ended == [True]
    [answer] = driver.answers
    assert isinstance(answer, Wrong)
    assert (answer.status, answer.code) == (400, "prompt_too_slow")
    driver.jobs.end_if_slow(lambda: ended.append(True))  # no step is under way
    assert ended == [True]
