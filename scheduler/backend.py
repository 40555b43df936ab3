"""The executor's side: its messages become calls of the scheduler, planned steps become steps in flight."""

import logging
from collections.abc import Callable

import zmq

from octavo.protocol.config import Config
from octavo.protocol.messages import (
    Displaced,
    ExecutorReady,
    NeedInit,
    Progress,
    Step,
    StepFailed,
    StepResult,
    decode_from_executor,
    encode,
)
from octavo.protocol.sockets import new_identity, try_send
from octavo.scheduler.cadence import Cadence
from octavo.scheduler.executor_link import Arrival, ExecutorLink, LinkState, SentStep
from octavo.scheduler.inbox import Inbox
from octavo.scheduler.predictor import StepSize, step_size
from octavo.scheduler.scheduler import PlannedStep, Scheduler

logger = logging.getLogger(__name__)

MAX_MESSAGES_A_TURN = 256


class Backend:
    """The executor of one scheduler, and executors whose place it took.

    `begin` makes the Scheduler for a model that an executor holds. It is called before any step, and again when an
    executor comes with another model.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        config: Config,
        clock: Callable[[], float],
        begin: Callable[[ExecutorReady], Scheduler],
        max_step_bytes: int,
    ) -> None:
        self._socket = socket
        self._inbox = Inbox(socket, decode_from_executor, "an executor", clock)
        self._clock = clock
        self._begin = begin
        self._max_step_bytes = max_step_bytes
        self._max_num_in_flight = 1 + int(config.async_scheduling)
        self._hang_timeout_s = config.hang_timeout_s
        self.link = ExecutorLink(new_identity(), config.peer_timeout_s, config.hang_timeout_s / 2)
        self.cadence = Cadence(config.target_step_s)
        self.scheduler: Scheduler | None = None  # None until an executor has said what it holds
        self.described: ExecutorReady | None = None  # what the last executor said
        self._used_bytes = 0  # of its device's memory, by its last Progress
        self._done: list[tuple[StepSize, StepResult]] = []
        self._known_idle: set[str] = set()  # incarnations that the operator was told of
        self._seen_state = LinkState.WORKING  # at the last look

    @property
    def num_blocks(self) -> int:
        """The size of the executor's KV pool."""
        return self.described.num_blocks if self.described is not None else 0

    @property
    def device_bytes(self) -> dict[str, int]:
        """What the executor last said about its device's memory."""
        described = self.described.device_bytes if self.described is not None else {}
        return {**described, "used": self._used_bytes} if self._used_bytes else dict(described)

    @property
    def num_restarts(self) -> int:
        return max(0, self.link.num_lives - 1)

    def can_progress(self) -> bool:
        """Return whether an executor is there and does its steps."""
        return self.link.can_progress(self._clock())

    def num_idle(self) -> int:
        """Return how many replaced executors are still there: they hold memory and get no steps."""
        return self.link.num_idle(self._clock())

    def take_done(self) -> list[tuple[StepSize, StepResult]]:
        """Return the steps that were done since the last call, in order."""
        done, self._done = self._done, []
        return done

    # What arrives

    def receive(self) -> bool:
        """Take a bounded number of messages; return whether one of them can change the next plan."""
        has_changed = False
        for identity, message in self._inbox.take(MAX_MESSAGES_A_TURN):
            now_s = self._clock()
            if isinstance(message, ExecutorReady):
                self._on_ready(identity, message, now_s)
                has_changed = True
                continue
            self.link.hear(message, now_s)
            if isinstance(message, Progress):
                if message.executor_incarnation == self.link.incarnation:
                    self._used_bytes = message.used_bytes
            elif self.link.is_current(message):
                assert self.scheduler is not None, "a step is in flight"
                self._on_answer(message, self.scheduler, now_s)
                has_changed = True
        return has_changed

    def _on_answer(self, message: StepResult | StepFailed | NeedInit, scheduler: Scheduler, now_s: float) -> None:
        match message:
            case StepResult():
                self._on_result(message, scheduler, now_s)
            case StepFailed(step_id=step_id, error=error):
                logger.error("the executor failed in step %d: %s", step_id, error)
                scheduler.reset_executor(self.num_blocks)
                self.link.retire()
            case NeedInit(step_id=step_id, seq_ids=seq_ids):
                logger.warning("the executor has no state for %d sequences in step %d", len(seq_ids), step_id)
                self._cancel_from(step_id, seq_ids, scheduler)

    def _on_result(self, result: StepResult, scheduler: Scheduler, now_s: float) -> None:
        for step, answered in self.link.complete(result):
            scheduler.apply(answered)
            self.cadence.complete(step, answered, now_s)
            self._done.append((step.size, answered))
        if self.link.num_in_flight == 0:
            self.cadence.follows_idleness |= not scheduler.has_work
            self._finish_draining()

    def _cancel_from(self, step_id: int, seq_ids: list[int], scheduler: Scheduler) -> None:
        """Cancel the steps from `step_id` on; plan again once the earlier ones are done."""
        self.link.cancel_from(step_id)
        scheduler.need_init(step_id, seq_ids)
        self._finish_draining()

    def _finish_draining(self) -> None:
        """Tell the executor which step comes next, once the steps before it are done or cancelled."""
        if self.link.finish_draining():
            self._send(self._welcome())

    # Who comes

    def _on_ready(self, identity: bytes, ready: ExecutorReady, now_s: float) -> None:
        frames = []
        match self.link.arrive(identity, ready, now_s):
            case Arrival.NEWCOMER:
                frames = [encode(self.link.welcome_newcomer(ready, self._next_step_id()))]
            case Arrival.JOINED:
                self._on_joined(ready)
                self._send(self._welcome())
            case Arrival.PRESENT:
                frames = [self._welcome(), *self.link.unanswered()]
            case Arrival.STALE if self.link.is_idle(ready.executor_incarnation, now_s):
                frames = [encode(self._displaced(ready, now_s))]
        for frame in frames:
            try_send(self._socket, [identity, frame])

    def _on_joined(self, described: ExecutorReady) -> None:
        """Take up work with an executor that has no KV and no state.

        If it holds another model, the scheduler becomes another one for its peers: gateways submit again the requests
        that can go on, and end the others.
        """
        logger.info(
            "executor %s (%s): %d blocks of %d tokens, up to %d tokens a sequence",
            described.executor_incarnation,
            described.process,
            described.num_blocks,
            described.block_size,
            described.max_model_len,
        )
        before, self.described, self._used_bytes = self.described, described, 0
        if self.scheduler is not None and before is not None and _model(before) == _model(described):
            self.scheduler.reset_executor(described.num_blocks)
            return
        if self.scheduler is not None:
            logger.warning("the executor holds another model than the one before: requests in flight end")
            self.link.scheduler_incarnation = new_identity()
        self.scheduler = self._begin(described)

    def _displaced(self, idle: ExecutorReady, now_s: float) -> Displaced:
        """Return the answer to an executor whose place another one took. The operator is told once."""
        by = ""
        if self.link.can_progress(now_s):
            by = self.described.process if self.described is not None else ""
            self._tell_operator(idle, by)
        return Displaced(self.link.scheduler_incarnation, idle.executor_incarnation, by)

    def _tell_operator(self, idle: ExecutorReady, by: str) -> None:
        if idle.executor_incarnation in self._known_idle:
            return
        self._known_idle.add(idle.executor_incarnation)
        logger.warning(
            "executor %s (%s) holds memory and gets nothing to do: executor %s (%s) took its place."
            " A scheduler has one executor: end either, or give it a scheduler of its own",
            idle.executor_incarnation,
            idle.process,
            self.link.incarnation,
            by,
        )

    def _next_step_id(self) -> int:
        return self.scheduler.next_step_id if self.scheduler is not None else 1

    def _welcome(self) -> bytes:
        return encode(self.link.welcome(self._next_step_id()))

    def _send(self, frame: bytes) -> None:
        if not try_send(self._socket, [self.link.identity, frame]):
            self.link.mark_unreachable()

    # What is planned

    def plan_at_s(self) -> float | None:
        """Return when the next step is to be planned (0: now), or None if something must happen before."""
        if self.link.num_in_flight >= self._max_num_in_flight:
            return None
        if self.link.state(self._clock()) is not LinkState.WORKING:
            return None
        return self.cadence.plan_at_s(self.link.oldest)

    def send(self, planned: PlannedStep, started_s: float) -> None:
        """Send a step that was planned from `started_s` on. If no message has room for it, its sequences end."""
        assert self.link.incarnation is not None
        frame = encode(
            Step(
                scheduler_incarnation=self.link.scheduler_incarnation,
                executor_incarnation=self.link.incarnation,
                step_id=planned.step_id,
                sequences=planned.sequences,
                forget=planned.forget,
            )
        )
        if len(frame) > self._max_step_bytes:
            self._end_undeliverable(planned, len(frame))
            return
        sent = SentStep(
            step_id=planned.step_id,
            frame=frame,
            size=step_size(planned.sequences, follows_idleness=self.cadence.follows_idleness),
            is_ahead=self.link.oldest is not None,
            sent_s=self._clock(),
        )
        self.link.add(sent)
        self._send(frame)
        self.cadence.send(sent, started_s, self._clock())

    def _end_undeliverable(self, planned: PlannedStep, num_bytes: int) -> None:
        """End the sequences of a step that no message has room for; each gets its error.

        The executor is told that this step's number is not used, once the steps in flight are done.
        """
        assert self.scheduler is not None
        logger.error("step %d would be a message of %d bytes: its sequences end", planned.step_id, num_bytes)
        self._cancel_from(planned.step_id, [], self.scheduler)
        for share in planned.sequences:
            error = "one step of this request is too large for a message"
            self.scheduler.fail(share.seq_id, error)

    # Whether it makes progress

    def watch(self, now_s: float) -> bool:
        """Look at the executor once a second; return whether its steps were given up."""
        self.link.watch(now_s)
        before, self._seen_state = self._seen_state, self.link.state(now_s)
        if before.can_progress != self._seen_state.can_progress:
            is_back = self._seen_state.can_progress
            logger.warning("the executor is back" if is_back else "the executor makes no progress: requests wait")
        if self.link.stalled_s <= self._hang_timeout_s:
            return False
        self._give_up()
        return True

    def _give_up(self) -> None:
        """Drop the steps in flight of an executor that lives and does not do them; plan their sequences anew.

        If the executor is stuck, its parent ends it. If it never got the steps, sending them again does not help. A
        sequence that is stuck alone again ends with an error, as after the death of an executor.
        """
        assert self.scheduler is not None, "a step is in flight"
        logger.error("no step has progressed for %.0f s: the steps in flight are planned anew", self.link.stalled_s)
        self.scheduler.give_up()
        self.link.give_up()
        self._send(self._welcome())


def _model(described: ExecutorReady) -> tuple[str, int, int, int]:
    """Return what must be the same for work to go on with another executor."""
    return described.model_fingerprint, described.vocab_size, described.max_model_len, described.block_size
