"""The window of steps: results in order, each once, and none from a life that is over."""

import pytest

from octavo.protocol.messages import ExecutorReady, NeedInit, Progress, StepResult, Welcome
from octavo.scheduler.executor_link import Arrival, ExecutorLink, LinkState, SentStep
from octavo.scheduler.predictor import StepSize

SIZE = StepSize(1, 1)


def ready(incarnation: str = "e1", *, welcomed_by: str = "") -> ExecutorReady:
    return ExecutorReady(incarnation, 10, 4, 100, 1000, "model", welcomed_by)


def result(step_id: int, executor: str = "e1", scheduler: str = "s1") -> StepResult:
    return StepResult(scheduler, executor, step_id, [])


def put_in_flight(link: ExecutorLink, *step_ids: int) -> None:
    for step_id in step_ids:
        link.add(SentStep(step_id, b"step %d" % step_id, SIZE, is_ahead=False))


def completed(link: ExecutorLink, message: StepResult) -> list[int]:
    return [answered.step_id for _, answered in link.complete(message)]


@pytest.fixture
def link() -> ExecutorLink:
    """A link with one executor there."""
    link = ExecutorLink("s1", peer_timeout_s=10.0, stall_timeout_s=30.0)
    assert link.arrive(b"one", ready(), 0.0) is Arrival.JOINED
    return link


def test_without_an_executor_nothing_can_progress():
    link = ExecutorLink("s1", peer_timeout_s=10.0, stall_timeout_s=30.0)
    assert not link.can_progress(0.0)
    assert not link.is_current(result(1))
    assert link.incarnation is None


def test_an_executor_joins_once(link):
    assert link.can_progress(0.0)
    assert link.arrive(b"one", ready(), 0.0) is Arrival.PRESENT
    assert (link.description, link.num_lives, link.incarnation) == (ready(), 1, "e1")
    assert link.welcome(1) == Welcome("s1", "e1", 1)


def test_results_come_out_in_the_order_of_steps(link):
    put_in_flight(link, 1, 2)
    assert completed(link, result(2)) == []
    assert link.num_in_flight == 2
    assert completed(link, result(1)) == [1, 2]
    assert link.num_in_flight == 0


def test_a_result_counts_once(link):
    put_in_flight(link, 1, 2)
    assert link.is_current(result(1))
    assert completed(link, result(1)) == [1]
    assert not link.is_current(result(1))
    assert not link.is_current(result(3))


def test_results_of_other_lives_are_stale(link):
    put_in_flight(link, 1)
    assert not link.is_current(result(1, executor="e0"))
    assert not link.is_current(result(1, scheduler="s0"))


def test_steps_without_an_answer_are_sent_again(link):
    put_in_flight(link, 1, 2)
    assert link.unanswered() == [b"step 1", b"step 2"]
    completed(link, result(2))
    assert link.unanswered() == [b"step 1"]
    completed(link, result(1))
    assert link.unanswered() == []


def test_a_welcome_names_the_oldest_step_that_is_not_done(link):
    put_in_flight(link, 5, 6)
    assert link.welcome(7).next_step_id == 5
    completed(link, result(5))
    assert link.welcome(7).next_step_id == 6
    completed(link, result(6))
    assert link.welcome(7).next_step_id == 7


def test_cancelled_steps_are_not_waited_for(link):
    put_in_flight(link, 1, 2, 3)
    link.cancel_from(2)
    assert not link.is_current(NeedInit("s1", "e1", 2, [1]))
    assert completed(link, result(1)) == [1]
    assert link.welcome(4).next_step_id == 4


def test_a_drain_ends_once_when_the_steps_before_it_are_done(link):
    put_in_flight(link, 1, 2)
    link.cancel_from(2)
    assert link.state(0.0) is LinkState.DRAINING
    assert link.can_progress(0.0)
    assert not link.finish_draining()
    completed(link, result(1))
    assert [link.finish_draining(), link.finish_draining()] == [True, False]
    assert link.state(0.0) is LinkState.WORKING


@pytest.mark.parametrize("end", [ExecutorLink.give_up, ExecutorLink.retire])
def test_a_drain_ends_with_the_steps_that_are_given_up(link, end):
    put_in_flight(link, 1, 2)
    link.cancel_from(2)
    end(link)
    link.arrive(b"two", ready("e2", welcomed_by="s1"), 1.0)
    assert link.state(1.0) is LinkState.WORKING
    assert not link.finish_draining()


def test_the_state_of_a_link_from_its_first_executor_to_the_end_of_it():
    link = ExecutorLink("s1", peer_timeout_s=10.0, stall_timeout_s=30.0)
    assert link.state(0.0) is LinkState.ABSENT
    link.arrive(b"one", ready(), 0.0)
    assert link.state(0.0) is LinkState.WORKING
    assert link.state(10.1) is LinkState.SILENT
    put_in_flight(link, 1, 2)
    stall(link, 40, start_s=20)
    assert link.state(60.0) is LinkState.STALLED
    link.mark_unreachable()
    assert link.state(60.0) is LinkState.SILENT
    link.hear(Progress("e1", 1, 9), 61.0)
    link.watch(61.0)
    assert link.state(61.0) is LinkState.WORKING
    link.retire()
    assert link.state(61.0) is LinkState.ABSENT


def test_steps_have_no_gap(link):
    put_in_flight(link, 1)
    with pytest.raises(AssertionError, match="gap"):
        put_in_flight(link, 3)


def test_a_restarted_executor_takes_over_once_it_echoes(link):
    put_in_flight(link, 1)
    assert link.arrive(b"two", ready("e2"), 1.0) is Arrival.NEWCOMER
    assert link.incarnation == "e1"
    assert link.welcome_newcomer(ready("e2"), 2) == Welcome("s1", "e2", 2)
    assert link.arrive(b"two", ready("e2", welcomed_by="s1"), 1.5) is Arrival.JOINED
    assert (link.incarnation, link.identity, link.num_in_flight, link.num_lives) == ("e2", b"two", 0, 2)
    assert not link.is_current(result(1))
    assert link.arrive(b"one", ready(welcomed_by="s1"), 2.0) is Arrival.STALE


@pytest.mark.parametrize("how", ["silence", "unreachable", "failed"])
def test_a_restarted_executor_takes_over_at_once_from_a_lost_one(link, how):
    if how == "unreachable":
        link.mark_unreachable()
    elif how == "failed":
        link.retire()
    assert link.arrive(b"two", ready("e2"), 10.1 if how == "silence" else 1.0) is Arrival.JOINED


def test_a_ghost_does_not_end_a_life(link):
    """A message of a process that has died arrives late: nobody echoes the Welcome, and nothing changes."""
    put_in_flight(link, 1)
    assert link.arrive(b"ghost", ready("e0"), 1.0) is Arrival.NEWCOMER
    assert completed(link, result(1)) == [1]
    assert link.arrive(b"one", ready(welcomed_by="s1"), 2.0) is Arrival.PRESENT


def test_a_failed_life_is_over(link):
    put_in_flight(link, 1)
    link.retire()
    assert not link.can_progress(0.0)
    assert link.num_in_flight == 0
    assert link.arrive(b"one", ready(), 0.0) is Arrival.STALE


def test_a_silent_executor_makes_no_progress_until_it_is_heard(link):
    assert link.can_progress(10.0)
    assert not link.can_progress(10.1)
    link.hear(Progress("e0", 1, 1), 11.0)
    assert not link.can_progress(11.0)
    link.hear(Progress("e1", 1, 1), 11.0)
    assert link.can_progress(11.0)


def test_unreachable_until_heard(link):
    put_in_flight(link, 1)
    link.mark_unreachable()
    assert not link.can_progress(0.0)
    assert link.arrive(b"one again", ready(), 1.0) is Arrival.PRESENT
    assert link.can_progress(1.0)
    assert link.identity == b"one again"
    assert link.unanswered() == [b"step 1"]


def stall(link: ExecutorLink, seconds: int, start_s: int) -> None:
    """The executor says all the time that it is there, and its step does not progress."""
    for now_s in range(start_s, start_s + seconds):
        link.arrive(b"one", ready(), float(now_s))
        link.hear(Progress("e1", 1, 3), float(now_s))
        link.watch(float(now_s))


def test_an_executor_that_only_says_it_is_there_makes_no_progress(link):
    stall(link, 100, start_s=0)
    assert link.can_progress(100.0)  # it has no step to do
    put_in_flight(link, 1, 2)
    stall(link, 30, start_s=100)
    assert link.can_progress(130.0)
    stall(link, 3, start_s=130)
    assert not link.can_progress(133.0)
    assert link.stalled_s > 30


@pytest.mark.parametrize(
    "moved", [lambda link: link.hear(Progress("e1", 1, 4), 120.0), lambda link: completed(link, result(1))]
)
def test_a_layer_or_a_result_is_progress(link, moved):
    put_in_flight(link, 1, 2)
    stall(link, 20, start_s=100)
    moved(link)
    stall(link, 20, start_s=120)
    assert link.can_progress(140.0)
    assert 15 < link.stalled_s < 25


def test_a_freeze_of_both_is_no_stall(link):
    put_in_flight(link, 1)
    stall(link, 3, start_s=100)
    stall(link, 3, start_s=1000)
    assert link.can_progress(1003.0)


def test_steps_that_are_given_up_are_no_longer_in_flight(link):
    put_in_flight(link, 1, 2)
    stall(link, 40, start_s=100)
    link.give_up()
    assert link.can_progress(140.0)
    assert link.unanswered() == []
    assert not link.is_current(result(1))
    assert link.welcome(3) == Welcome("s1", "e1", 3)


def test_a_replaced_life_is_idle_while_it_is_heard_and_not_if_its_messages_were_only_late(link):
    link.arrive(b"two", ready("e2", welcomed_by="s1"), 1.0)
    for _ in range(5):  # delayed messages come all at once
        assert link.arrive(b"one", ready(), 2.0) is Arrival.STALE
    assert link.num_idle(2.0) == 0
    assert link.arrive(b"one", ready(), 3.0) is Arrival.STALE
    assert link.is_idle("e1", 3.0)
    assert link.num_idle(3.0) == 1
    assert link.num_idle(13.5) == 0  # it has ended meanwhile
    assert not link.is_idle("e2", 3.0)
