"""The window of numbered steps between the scheduler and its executor: which steps are in flight, and with whom.

Pure: messages in, decisions out. Once an executor's life (its incarnation) was replaced or failed, it is over for good.
Messages of it that still arrive are stale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from octavo.protocol.messages import ExecutorReady, NeedInit, Progress, StepFailed, StepResult, Welcome
from octavo.scheduler.predictor import StepSize

MAX_LOOK_S = 2.0  # one call of `watch` adds at most this to a stall
MIN_PRESENCE_S = 1.0  # between two messages that prove a life; messages that are only late come all at once


class LinkState(Enum):
    """How things stand with the executor. Steps are planned only while it is WORKING."""

    ABSENT = auto()  # no executor has come yet, or the last executor failed
    SILENT = auto()  # it sent nothing for `peer_timeout_s`, or since a message to it could not be sent
    STALLED = auto()  # it sends messages, but no step in flight has progressed for `stall_timeout_s`
    DRAINING = auto()  # it lacks state: it is told where to go on once the steps in flight are done
    WORKING = auto()

    @property
    def can_progress(self) -> bool:
        """Whether the steps in flight get done."""
        return self in (LinkState.DRAINING, LinkState.WORKING)


class Arrival(Enum):
    """Whose life an ExecutorReady comes from."""

    STALE = auto()  # a life that is over
    NEWCOMER = auto()  # an unknown life while the present life works: it counts once it echoes a Welcome
    JOINED = auto()  # a new life: it has no KV and no state
    PRESENT = auto()  # the life that has joined already


@dataclass(slots=True)
class SentStep:
    step_id: int
    frame: bytes
    size: StepSize
    is_ahead: bool  # planned while another step was in flight
    sent_s: float = 0.0
    result: StepResult | None = None


class ExecutorLink:
    """One executor at a time, and the steps that it was given. Times are seconds of the caller's clock.

    For a group of ranks, rank 0 speaks here.
    """

    def __init__(self, scheduler_incarnation: str, peer_timeout_s: float, stall_timeout_s: float) -> None:
        self.scheduler_incarnation = scheduler_incarnation
        self.peer_timeout_s = peer_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.stalled_s = 0.0  # for how long no step in flight has progressed
        self.description: ExecutorReady | None = None  # what the present life said about itself
        self.identity = b""  # its address
        self.num_lives = 0
        self._state = LinkState.ABSENT  # from messages: ABSENT, DRAINING or WORKING; the clock adds the others
        self._last_heard_s = -math.inf  # -inf: not since a message to the executor could not be sent
        self._retired: set[str] = set()
        self._heard_after_end: dict[str, tuple[float, float]] = {}  # of retired lives: the first and the last time
        self._window: dict[int, SentStep] = {}  # in order of step_id
        self._layer = (0, 0)  # the step and the layer that its last Progress named
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
        """Measure for how long no step has progressed. Call it about once a second.

        Only time in which this process looked counts: if both were frozen and thawed together, the executor did
        nothing wrong.
        """
        elapsed_s, self._watched_s = min(now_s - self._watched_s, MAX_LOOK_S), now_s
        has_progressed = self._num_advances != self._num_seen_advances
        self.stalled_s = self.stalled_s + elapsed_s if self._window and not has_progressed else 0.0
        self._num_seen_advances = self._num_advances

    def arrive(self, identity: bytes, ready: ExecutorReady, now_s: float) -> Arrival:
        """Take an ExecutorReady. A new life ends the life before it."""
        if ready.executor_incarnation in self._retired:
            first_s, _ = self._heard_after_end.get(ready.executor_incarnation, (now_s, now_s))
            self._heard_after_end[ready.executor_incarnation] = first_s, now_s
            return Arrival.STALE
        is_new = ready.executor_incarnation != self.incarnation
        if is_new:
            # A message may arrive after its sender has ended. It must not end the life of an executor that works.
            if self.can_progress(now_s) and ready.scheduler_incarnation != self.scheduler_incarnation:
                return Arrival.NEWCOMER
            self.retire()
            self.num_lives += 1
            self._state = LinkState.WORKING
        self.description, self.identity, self._last_heard_s = ready, identity, now_s
        return Arrival.JOINED if is_new else Arrival.PRESENT

    def is_idle(self, incarnation: str, now_s: float) -> bool:
        """Return whether a replaced executor is still there, and not only its messages were late."""
        first_s, last_s = self._heard_after_end.get(incarnation, (now_s, now_s))
        return last_s - first_s >= MIN_PRESENCE_S and now_s - last_s <= self.peer_timeout_s

    def num_idle(self, now_s: float) -> int:
        """Return how many replaced executors are still there: they hold memory and get no steps."""
        return sum(self.is_idle(incarnation, now_s) for incarnation in self._heard_after_end)

    def retire(self) -> None:
        """End the executor's life: the steps in flight will not be answered."""
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
        """Return the Welcome that a newcomer must echo in its next ExecutorReady, to show that it is alive."""
        return Welcome(self.scheduler_incarnation, ready.executor_incarnation, next_step_id)

    def welcome(self, next_step_id: int) -> Welcome:
        """Return the answer to ExecutorReady. `next_step_id` is the id of the next step to be planned."""
        assert self.incarnation is not None
        first_step_id = self.oldest.step_id if self.oldest else next_step_id
        return Welcome(self.scheduler_incarnation, self.incarnation, first_step_id)

    @property
    def oldest(self) -> SentStep | None:
        """Return the step that the executor does now, or will do first."""
        return next(iter(self._window.values()), None)

    def add(self, step: SentStep) -> None:
        """Put a step in flight."""
        assert not self._window or step.step_id == next(reversed(self._window)) + 1, "steps are numbered without a gap"
        if not self._window:
            self._num_advances += 1  # before, there was no step that could stall
        self._window[step.step_id] = step

    def unanswered(self) -> list[bytes]:
        """Return the frames of the steps to send again to an executor that says it is idle.

        If the executor has done such a step already, it repeats the result, which was lost.
        """
        return [step.frame for step in self._window.values() if step.result is None]

    def is_current(self, message: StepResult | StepFailed | NeedInit) -> bool:
        """Return whether both incarnations in the message are the present ones and its step is in flight."""
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
        """Take the steps from `step_id` on out of flight: the executor will not do them. The earlier steps drain."""
        for cancelled in [number for number in self._window if number >= step_id]:
            del self._window[cancelled]
        self._state = LinkState.DRAINING

    def finish_draining(self) -> bool:
        """Return whether a drain has just ended: then the executor must be told where to go on."""
        if self._state is not LinkState.DRAINING or self._window:
            return False
        self._state = LinkState.WORKING
        return True

    def hear(self, message: StepResult | StepFailed | NeedInit | Progress, now_s: float) -> None:
        """Note that the present life is there, and whether its step has progressed."""
        if message.executor_incarnation != self.incarnation:
            return
        self._last_heard_s = now_s
        if isinstance(message, Progress) and (layer := (message.step_id, message.layers_done)) != self._layer:
            self._layer = layer
            self._num_advances += 1

    def mark_unreachable(self) -> None:
        """Note that a message to the executor could not be sent. The next message from the executor ends this state."""
        self._last_heard_s = -math.inf
