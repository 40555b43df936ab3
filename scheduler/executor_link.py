"""The window of numbered steps between the scheduler and its executor group: what is in flight, and with whom.

Pure: messages in, decisions out. An executor's life (its incarnation) that was replaced or that failed is over for
good, so whatever still arrives of it is stale.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from protocol.messages import ExecutorReady, NeedInit, Progress, StepFailed, StepResult, Welcome
from scheduler.stats import StepSize


class Arrival(Enum):
    """What an ExecutorReady means."""

    STALE = auto()  # of a life that is over
    NEWCOMER = auto()  # of an unknown life while the present one is well: it counts once it echoes a Welcome
    FORMING = auto()  # ranks of the group are missing
    JOINED = auto()  # a new life, complete: it has no KV and no state
    PRESENT = auto()  # of the group that is there already


@dataclass(slots=True)
class SentStep:
    step_id: int
    frame: bytes
    size: StepSize
    is_ahead: bool  # planned while another was in flight
    result: StepResult | None = None


class ExecutorLink:
    """One executor group at a time, and the steps that it was given. Times are seconds of the caller's clock."""

    def __init__(self, scheduler_incarnation: str, peer_timeout_s: float, num_ranks: int = 1) -> None:
        self.scheduler_incarnation = scheduler_incarnation
        self.peer_timeout_s = peer_timeout_s
        self.num_ranks = num_ranks
        self.incarnation: str | None = None
        self.num_lives = 0
        self._ranks: dict[int, tuple[bytes, ExecutorReady]] = {}
        self._retired: set[str] = set()
        self._window: dict[int, SentStep] = {}  # in order of step_id
        self._last_heard_s = 0.0
        self._is_reachable = False

    @property
    def is_complete(self) -> bool:
        return len(self._ranks) == self.num_ranks

    @property
    def identities(self) -> list[bytes]:
        """Return the addresses of all ranks: each gets every step."""
        return [identity for identity, _ in self._ranks.values()]

    @property
    def description(self) -> ExecutorReady:
        """Return what rank 0 said of itself; only when complete."""
        return self._ranks[0][1]

    @property
    def num_blocks(self) -> int:
        """Return the group's: the least over its ranks."""
        return min(ready.num_blocks for _, ready in self._ranks.values())

    @property
    def num_in_flight(self) -> int:
        return len(self._window)

    def can_progress(self, now_s: float) -> bool:
        """Return whether there is a group that can be reached and was heard of lately."""
        return self.is_complete and self._is_reachable and now_s - self._last_heard_s <= self.peer_timeout_s

    def arrive(self, identity: bytes, ready: ExecutorReady, now_s: float) -> Arrival:
        """Take note of a rank that says it is there; a life not seen before ends the one before."""
        if ready.executor_incarnation in self._retired or not 0 <= ready.rank < self.num_ranks:
            return Arrival.STALE
        if ready.executor_incarnation != self.incarnation:
            # A message that was delayed past the end of its sender must not end the life of a group that works.
            if self.can_progress(now_s) and ready.scheduler_incarnation != self.scheduler_incarnation:
                return Arrival.NEWCOMER
            self.retire()
            self.incarnation = ready.executor_incarnation
        was_complete = self.is_complete
        self._ranks[ready.rank] = (identity, ready)
        self._hear(now_s)
        if not self.is_complete:
            return Arrival.FORMING
        if was_complete:
            return Arrival.PRESENT
        self.num_lives += 1
        return Arrival.JOINED

    def retire(self) -> None:
        """End the group's life: what it did not answer will not be answered."""
        if self.incarnation is not None:
            self._retired.add(self.incarnation)
        self.incarnation = None
        self._ranks.clear()
        self._window.clear()
        self._is_reachable = False

    def welcome_newcomer(self, ready: ExecutorReady, next_step_id: int) -> Welcome:
        """Return what a newcomer must echo in its next ExecutorReady to show that it is alive."""
        return Welcome(self.scheduler_incarnation, ready.executor_incarnation, ready.num_blocks, next_step_id)

    def welcome(self, next_step_id: int) -> Welcome:
        """Return the answer to ExecutorReady. `next_step_id` is that of the next step to be planned."""
        assert self.incarnation is not None
        first_step_id = self.oldest.step_id if self.oldest else next_step_id
        return Welcome(self.scheduler_incarnation, self.incarnation, self.num_blocks, first_step_id)

    @property
    def oldest(self) -> SentStep | None:
        """Return the step that the executor does, or will do, first."""
        return next(iter(self._window.values()), None)

    def add(self, step: SentStep) -> None:
        """Put a step in flight."""
        assert not self._window or step.step_id == next(reversed(self._window)) + 1, "steps are numbered without a gap"
        self._window[step.step_id] = step

    def unanswered(self) -> list[bytes]:
        """Return the frames of the steps to send again to an executor that says it is idle.

        A step that it has done already is among them: it then repeats the result, which was lost.
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
        """Keep a current result; yield those whose turn it is, in order of their steps."""
        self._window[result.step_id].result = result
        while (step := self.oldest) is not None and step.result is not None:
            del self._window[step.step_id]
            yield step, step.result

    def cancel_from(self, step_id: int) -> None:
        """Take the steps from `step_id` on out of flight: the executor will not do them."""
        for cancelled in [number for number in self._window if number >= step_id]:
            del self._window[cancelled]

    def hear(self, message: StepResult | StepFailed | NeedInit | Progress, now_s: float) -> None:
        """Take a message of the group's life as a sign of it."""
        if message.executor_incarnation == self.incarnation:
            self._hear(now_s)

    def _hear(self, now_s: float) -> None:
        self._last_heard_s = now_s
        self._is_reachable = True

    def mark_unreachable(self) -> None:
        """Remember that the socket took nothing for the group; the next that is heard of it puts that right."""
        self._is_reachable = False
