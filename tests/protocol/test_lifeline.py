"""The parent and its child: beats, silence, and the end of either."""

import os
import socket
from collections.abc import Iterator

import pytest

from octavo.protocol.lifeline import INTERVAL_S, LONGEST_TURN_S, Heart, Lifeline


class Tie:
    """Both ends of a lifeline in one process, under one clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.lifeline = Lifeline()
        self._theirs = socket.socket(fileno=os.dup(self.lifeline.fd))
        self.lifeline.release()
        self.heart = Heart(self._theirs, lambda: self.now_s)

    def close(self) -> None:
        self._theirs.close()
        self.lifeline.close()

    def end_child(self) -> None:
        self._theirs.close()

    def silence_after(self, seconds: float) -> float:
        """Let time pass in turns of a second; return the silence at the end."""
        silence_s = 0.0
        for _ in range(int(seconds)):
            self.now_s += 1.0
            silence_s = self.lifeline.silence_s(self.now_s)
        return silence_s


@pytest.fixture
def tie() -> Iterator[Tie]:
    tie = Tie()
    yield tie
    tie.close()


def test_before_the_first_beat_nothing_is_expected(tie: Tie) -> None:
    assert tie.silence_after(100) == 0


def test_silence_lasts_from_one_beat_to_the_next(tie: Tie) -> None:
    tie.heart.beat()
    assert tie.silence_after(1) == 0
    assert tie.silence_after(7) == 7
    tie.heart.beat()
    assert tie.silence_after(1) == 0
    assert tie.silence_after(3) == 3


def test_a_loop_may_turn_more_often_than_it_beats() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        times_s = iter([0.0, 0.0, 0.1, INTERVAL_S - 0.1, INTERVAL_S, INTERVAL_S + 0.1])
        heart = Heart(theirs, lambda: next(times_s))
        for _ in range(5):
            heart.beat()
        assert ours.recv(100) == b".."


def test_a_parent_that_was_frozen_does_not_blame_its_child(tie: Tie) -> None:
    tie.heart.beat()
    assert tie.silence_after(1) == 0
    tie.now_s += 3600.0
    assert tie.lifeline.silence_s(tie.now_s) == LONGEST_TURN_S


def test_beats_that_nobody_reads_do_not_block(tie: Tie) -> None:
    for _ in range(10_000):
        tie.now_s += INTERVAL_S
        tie.heart.beat()
    assert tie.silence_after(1) == 0
    assert tie.silence_after(1) == 1


def test_a_child_that_is_gone_is_silent(tie: Tie) -> None:
    tie.heart.beat()
    assert tie.silence_after(1) == 0
    tie.end_child()
    assert tie.silence_after(2) == 2


def test_a_heart_without_parent_beats_for_nobody() -> None:
    Heart().beat()


def test_a_fork_does_not_hold_a_childs_lifeline() -> None:
    lifeline = Lifeline()
    theirs = socket.socket(fileno=os.dup(lifeline.fd))
    lifeline.release()
    theirs.settimeout(20)
    ended, end = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(end)
        os.read(ended, 1)  # the fork lives on after the parent closes the lifeline
        os._exit(0)
    try:
        lifeline.close()
        assert theirs.recv(1) == b""
    finally:
        for each in (ended, end):
            os.close(each)
        os.waitpid(fork, 0)
        theirs.close()
