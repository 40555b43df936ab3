"""The window of numbered steps between the scheduler and its executor: what is in flight, and with whom.

Pure: messages in, decisions out. An executor's life (its incarnation) that was replaced or that failed is over for
good, so whatever still arrives of it is stale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from protocol.messages import ExecutorReady, NeedInit, Progress, StepFailed, StepResult, Welcome
from scheduler.predictor import StepSize

LONGEST_LOOK_S = 2.0  # what one call of `watch` adds to a stall, at most
SURELY_THERE_S = 1.0  # between two messages of a life: messages that are only late come all at once


class LinkState(Enum):
    """How things stand with the executor. Steps are planned only while it is WORKING."""

    ABSENT = auto()  # no executor has come yet, or the last one failed
    SILENT = auto()  # nothing was heard of it for `peer_timeout_s`, or since the socket took nothing for it
    STALLED = auto()  # it is heard of, but no step in flight has progressed for `stall_timeout_s`
    DRAINING = auto()  # it lacks state: it is told where to go on once the steps in flight are done
    WORKING = auto()

    @property
    def can_progress(self) -> bool:
        """Whether the steps in flight get done."""
        return self in (LinkState.DRAINING, LinkState.WORKING)


class Arrival(Enum):
    """What an ExecutorReady means."""

    STALE = auto()  # of a life that is over
    NEWCOMER = auto()  # of an unknown life while the present one is well: it counts once it echoes a Welcome
    JOINED = auto()  # a new life: it has no KV and no state
    PRESENT = auto()  # of the one that is there already


@dataclass(slots=True)
class SentStep:
    step_id: int
    frame: bytes
    size: StepSize
    is_ahead: bool  # planned while another was in flight
    sent_s: float = 0.0  # when
    result: StepResult | None = None


class ExecutorLink:
    """One executor at a time, and the steps that it was given. Times are seconds of the caller's clock.

    A group of ranks is heard of here through its rank 0.
    """

    def __init__(self, scheduler_incarnation: str, peer_timeout_s: float, stall_timeout_s: float) -> None:
        self.scheduler_incarnation = scheduler_incarnation
        self.peer_timeout_s = peer_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.stalled_s = 0.0  # for how long no step in flight has progressed
        self.description: ExecutorReady | None = None  # what the present life said of itself
        self.identity = b""  # its address
        self.num_lives = 0
        self._state = LinkState.ABSENT  # by what was said: ABSENT, DRAINING or WORKING; the clock adds the others
        self._last_heard_s = -math.inf  # -inf: not since the socket took nothing for the executor
        self._retired: set[str] = set()
        self._heard_after_all: dict[str, tuple[float, float]] = {}  # retired lives: when first and last
        self._window: dict[int, SentStep] = {}  # in order of step_id
        self._layer = (0, 0)  # the step and the layer at which the executor was last heard of
        self._num_advances = self._num_seen_advances = 0  # signs of progress: in all, and at the last `watch`
        self._watched_s = 0.0

    @property
    def incarnation(self) -> str | None:
        """Return the present life's name; None while there is none."""
        return self.description.executor_incarnation if self.description else None

    @property
    def num_in_flight(self) -> int:
        return len(self._window)

    def state(self, now_s: float) -> LinkState:
        """Return how things stand with the executor."""
        if self._state is LinkState.ABSENT:
            return LinkState.ABSENT
        if now_s - self._last_heard_s > self.peer_timeout_s:
            return LinkState.SILENT
        return LinkState.STALLED if self.stalled_s > self.stall_timeout_s else self._state

    def can_progress(self, now_s: float) -> bool:
        """Return whether the steps in flight get done."""
        return self.state(now_s).can_progress

    def watch(self, now_s: float) -> None:
        """Measure how long nothing has progressed. To be called every second or so.

        Only time in which this process looked counts: where both were frozen and thawed together, the executor has
        done nothing wrong.
        """
        elapsed_s, self._watched_s = min(now_s - self._watched_s, LONGEST_LOOK_S), now_s
        has_progressed = self._num_advances != self._num_seen_advances
        self.stalled_s = self.stalled_s + elapsed_s if self._window and not has_progressed else 0.0
        self._num_seen_advances = self._num_advances

    def arrive(self, identity: bytes, ready: ExecutorReady, now_s: float) -> Arrival:
        """Take note of an executor that says it is there; a life not seen before ends the one before."""
        if ready.executor_incarnation in self._retired:
            first_s, _ = self._heard_after_all.get(ready.executor_incarnation, (now_s, now_s))
            self._heard_after_all[ready.executor_incarnation] = first_s, now_s
            return Arrival.STALE
        is_new = ready.executor_incarnation != self.incarnation
        if is_new:
            # A message that was delayed past the end of its sender must not end the life of one that works.
            if self.can_progress(now_s) and ready.scheduler_incarnation != self.scheduler_incarnation:
                return Arrival.NEWCOMER
            self.retire()
            self.num_lives += 1
            self._state = LinkState.WORKING
        self.description, self.identity, self._last_heard_s = ready, identity, now_s
        return Arrival.JOINED if is_new else Arrival.PRESENT

    def is_idle(self, incarnation: str, now_s: float) -> bool:
        """Return whether an executor is there although its life was replaced, and its messages are not only late."""
        first_s, last_s = self._heard_after_all.get(incarnation, (now_s, now_s))
        return last_s - first_s >= SURELY_THERE_S and now_s - last_s <= self.peer_timeout_s

    def num_idle(self, now_s: float) -> int:
        """Return how many executors hold memory and are given nothing."""
        return sum(self.is_idle(incarnation, now_s) for incarnation in self._heard_after_all)

    def retire(self) -> None:
        """End the executor's life: what it did not answer will not be answered."""
        if self.incarnation is not None:
            self._retired.add(self.incarnation)
        self.description = None
        self.give_up()
        self._state = LinkState.ABSENT

    def give_up(self) -> None:
        """Take all steps out of flight: they will not be done."""
        self._window.clear()
        self.stalled_s = 0.0
        self._state = LinkState.WORKING

    def welcome_newcomer(self, ready: ExecutorReady, next_step_id: int) -> Welcome:
        """Return what a newcomer must echo in its next ExecutorReady to show that it is alive."""
        return Welcome(self.scheduler_incarnation, ready.executor_incarnation, next_step_id)

    def welcome(self, next_step_id: int) -> Welcome:
        """Return the answer to ExecutorReady. `next_step_id` is that of the next step to be planned."""
        assert self.incarnation is not None
        first_step_id = self.oldest.step_id if self.oldest else next_step_id
        return Welcome(self.scheduler_incarnation, self.incarnation, first_step_id)

    @property
    def oldest(self) -> SentStep | None:
        """Return the step that the executor does, or will do, first."""
        return next(iter(self._window.values()), None)

    def add(self, step: SentStep) -> None:
        """Put a step in flight."""
        assert not self._window or step.step_id == next(reversed(self._window)) + 1, "steps are numbered without a gap"
        if not self._window:
            self._num_advances += 1  # there was nothing to stall
        self._window[step.step_id] = step

    def unanswered(self) -> list[bytes]:
        """Return the frames of the steps to send again to an executor that says it is idle.

        If the executor has done such a step already, it repeats the result, which was lost.
        """
        return [step.frame for step in self._window.values() if step.result is None]

    def is_current(self, message: StepResult | StepFailed | NeedInit) -> bool:
        """Return whether the message is of this life of ours and of theirs, about a step in flight."""
        return (
            message.scheduler_incarnation == self.scheduler_incarnation
            and message.executor_incarnation == self.incarnation
            and message.step_id in self._window
        )

    def complete(self, result: StepResult) -> Iterator[tuple[SentStep, StepResult]]:
        """Keep a current result; yield the results that are due, in order of their steps."""
        self._window[result.step_id].result = result
        while (step := self.oldest) is not None and step.result is not None:
            del self._window[step.step_id]
            self._num_advances += 1
            self.stalled_s = 0.0
            yield step, step.result

    def cancel_from(self, step_id: int) -> None:
        """Take the steps from `step_id` on out of flight: the executor will not do them. The steps before it drain."""
        for cancelled in [number for number in self._window if number >= step_id]:
            del self._window[cancelled]
        self._state = LinkState.DRAINING

    def finish_draining(self) -> bool:
        """Return whether all steps have drained since `cancel_from`: the executor must be told where to go on."""
        if self._state is not LinkState.DRAINING or self._window:
            return False
        self._state = LinkState.WORKING
        return True

    def hear(self, message: StepResult | StepFailed | NeedInit | Progress, now_s: float) -> None:
        """Take a message of the present life as a sign of it."""
        if message.executor_incarnation != self.incarnation:
            return
        self._last_heard_s = now_s
        if isinstance(message, Progress) and (layer := (message.step_id, message.layers_done)) != self._layer:
            self._layer = layer
            self._num_advances += 1

    def mark_unreachable(self) -> None:
        """Remember that the socket took nothing for the executor; hearing of it again puts that right."""
        self._last_heard_s = -math.inf
