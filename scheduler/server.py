"""The scheduler's process: both sockets, the clock, and one loop around the pure scheduler.

Each turn: wait until something arrives or is due; take what the executor says, then a bounded number of gateway
messages; plan a step if it is time to; send each gateway what it lacks.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from protocol.config import Config
from protocol.lifeline import Heart
from protocol.link_keys import server_keys
from protocol.measures import RecentMaximum
from protocol.messages import (
    Displaced,
    ExecutorReady,
    FromExecutor,
    NeedInit,
    Progress,
    Ready,
    Stats,
    Step,
    StepFailed,
    StepResult,
    decode_from_executor,
    encode,
)
from protocol.sockets import MAX_MESSAGE_BYTES, bind_router, hold_address, new_identity, try_send
from scheduler.door import keep_door, report_refused
from scheduler.executor_link import LONGEST_LOOK_S, Arrival, ExecutorLink, SentStep
from scheduler.frontend import Frontend, Service
from scheduler.inbox import Inbox
from scheduler.measures import Measures
from scheduler.pace import Pace
from scheduler.scheduler import Limits, PlannedStep, Scheduler
from scheduler.stats import StepMeter, StepPredictor, describe, step_size

logger = logging.getLogger(__name__)

MAX_EXECUTOR_MESSAGES_A_TURN = 256
STATS_INTERVAL_S = 1.0
LOG_INTERVAL_S = 10.0
LAG_WINDOW_S = 10.0


@contextmanager
def open_server(
    config: Config,
    clock: Callable[[], float] = time.monotonic,
    *,
    high_water_mark: int = 1000,
    max_step_bytes: int = MAX_MESSAGE_BYTES,
) -> Iterator["Server"]:
    """Bind both addresses while the context lasts. Raises ValueError if one cannot be bound, or lacks its keys.

    `high_water_mark` is how many messages wait for a gateway that does not read them; no Step is sent that is longer
    than `max_step_bytes`.
    """
    frontend_keys, backend_keys = server_keys(config)
    with (
        hold_address(config.frontend_address),
        hold_address(config.backend_address),
        zmq.Context() as context,
        keep_door(context, frontend_keys, backend_keys),
        bind_router(context, config.frontend_address, frontend_keys, high_water_mark=high_water_mark) as frontend,
        bind_router(context, config.backend_address, backend_keys) as backend,
        report_refused(frontend, config.frontend_address, frontend_keys),
        report_refused(backend, config.backend_address, backend_keys),
    ):
        wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield Server(config, frontend, backend, wakeup, clock, max_step_bytes)
        finally:
            for end in wakeup:
                os.close(end)


class Server:
    """One scheduler, its gateways and its executor."""

    def __init__(
        self,
        config: Config,
        frontend: "zmq.Socket[bytes]",
        backend: "zmq.Socket[bytes]",
        wakeup: tuple[int, int],
        clock: Callable[[], float],
        max_step_bytes: int,
    ) -> None:
        self.config = config
        self._max_step_bytes = max_step_bytes
        self.clock = clock
        self.incarnation = new_identity()
        self.frontend = Frontend(frontend, config, clock)
        self.backend = backend
        self.executors = Inbox(backend, decode_from_executor, "an executor", clock)
        self.link = ExecutorLink(self.incarnation, config.peer_timeout_s, config.hang_timeout_s / 2)
        self.scheduler: Scheduler | None = None  # until an executor has said what it holds
        self.described: ExecutorReady | None = None  # what it said
        self.num_blocks = 0  # of its KV pool
        self._may_plan = False  # something has happened since there was nothing to plan
        self._is_draining = False  # from NeedInit until no step is in flight
        self._displaced_executors: set[str] = set()  # that the operator was told of
        self._num_checked_steps = 0  # steps after which the accounts were last found to agree
        self._is_lost = False  # an executor was there, and is not now
        self._stuck_s = 0.0  # for how long nothing was planned although there is work, and an executor for it
        self._num_seen_steps = 0
        self._was_idle = True  # there was nothing to do at some time since the last step was planned
        self._oldest_started_s = 0.0  # when the executor began the oldest step in flight
        self._predictor = StepPredictor()
        self._pace = Pace(self._predictor, config.target_step_s)
        self._log_meter = StepMeter()
        self._measures = Measures()
        self._lag_s = RecentMaximum(LAG_WINDOW_S)
        self._used_bytes = 0  # of its device, by the executor, when it last said
        self._logged: Stats | None = None
        self._logged_s = self._stats_sent_s = clock()
        self._is_stopping = False
        self._wake_reader, self._wake_writer = wakeup
        self._poller = zmq.Poller()
        for source in (backend, frontend, self._wake_reader):
            self._poller.register(source, zmq.POLLIN)

    def run(self, heart: Heart) -> None:
        """Serve until `stop`. `heart` beats with every turn, of which there is one a second at least, unless no turn
        gets any work done."""
        logger.info(
            "gateways at %s, executors at %s; up to %d sequences and %d tokens a step, %d requests waiting",
            self.config.frontend_address,
            self.config.backend_address,
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            self.config.max_num_queued_reqs,
        )
        while not self._is_stopping:
            if self._stuck_s <= self.config.hang_timeout_s:
                heart.beat()
            self.turn()

    def stop(self) -> None:
        """Let `run` return soon. May be called once, from a signal handler or another thread."""
        os.write(self._wake_writer, b".")

    def turn(self) -> None:
        """Wait for something to do, and do it."""
        arrived = self._poller.poll(self._patience_ms())
        woken_s = self.clock()
        self._is_stopping = any(source == self._wake_reader for source, _ in arrived)
        for identity, message in self.executors.take(MAX_EXECUTOR_MESSAGES_A_TURN):
            self._on_executor_message(identity, message)
        self._may_plan |= self.frontend.receive()
        plan_at_s = self._plan_at_s()
        if plan_at_s is not None and plan_at_s <= self.clock():
            self._plan()
        self.frontend.deliver()
        self._keep_house()
        now_s = self.clock()
        self._lag_s.observe(now_s - woken_s, now_s)  # what arrived meanwhile had to wait for so long

    def _patience_ms(self) -> int:
        """Return how long nothing is due, rounded up to what a poll can wait."""
        due_s = (self._stats_sent_s + STATS_INTERVAL_S, self._plan_at_s(), self.frontend.next_try_s)
        next_s = min(time_s for time_s in due_s if time_s is not None)
        return max(0, math.ceil(1000 * (next_s - self.clock())))

    # Executors

    def _on_executor_message(self, identity: bytes, message: FromExecutor) -> None:
        now_s = self.clock()
        if isinstance(message, ExecutorReady):
            self._on_executor_ready(identity, message, now_s)
            return
        self.link.hear(message, now_s)
        if isinstance(message, Progress):
            if message.executor_incarnation == self.link.incarnation:
                self._used_bytes = message.used_bytes
            return
        if not self.link.is_current(message):
            return
        assert self.scheduler is not None, "a step is in flight"
        match message:
            case StepResult():
                self._on_result(message, self.scheduler, now_s)
            case StepFailed(step_id=step_id, error=error):
                logger.error("the executor failed in step %d: %s", step_id, error)
                self.scheduler.reset_executor(self.num_blocks)
                self.link.retire()
            case NeedInit():
                self._on_need_init(message, self.scheduler)
        self._may_plan = True

    def _on_executor_ready(self, identity: bytes, ready: ExecutorReady, now_s: float) -> None:
        frames = []
        match self.link.arrive(identity, ready, now_s):
            case Arrival.NEWCOMER:
                frames = [encode(self.link.welcome_newcomer(ready, self._next_step_id()))]
            case Arrival.JOINED:
                self._on_executor_joined(ready)
                self._send_to_executor(self._welcome())
            case Arrival.PRESENT:
                frames = [self._welcome(), *self.link.unanswered()]
            case Arrival.STALE if self.link.is_idle(ready.executor_incarnation, now_s):
                frames = [encode(self._displaced(ready, now_s))]
        for frame in frames:
            try_send(self.backend, [identity, frame])
        self._may_plan = True

    def _displaced(self, idle: ExecutorReady, now_s: float) -> Displaced:
        """Return what an executor is told that another one replaced, having told the operator once."""
        if not self.link.can_progress(now_s):
            return Displaced(self.incarnation, idle.executor_incarnation, "")
        by = self.described.process if self.described is not None else ""
        if idle.executor_incarnation not in self._displaced_executors:
            self._displaced_executors.add(idle.executor_incarnation)
            logger.warning(
                "executor %s (%s) holds memory and gets nothing to do: executor %s (%s) took its place."
                " A scheduler has one executor: end either, or give it a scheduler of its own",
                idle.executor_incarnation,
                idle.process,
                self.link.incarnation,
                by,
            )
        return Displaced(self.incarnation, idle.executor_incarnation, by)

    def _on_executor_joined(self, described: ExecutorReady) -> None:
        """Take up work with an executor that has no KV and no state."""
        self.num_blocks, self._used_bytes = described.num_blocks, 0
        logger.info(
            "executor %s (%s): %d blocks of %d tokens, up to %d tokens a sequence",
            self.link.incarnation,
            described.process,
            self.num_blocks,
            described.block_size,
            described.max_model_len,
        )
        if self.scheduler is None or self.described is None or _model(self.described) != _model(described):
            self._begin(described)
        else:
            self.scheduler.reset_executor(self.num_blocks)
        self.described = described
        self._is_draining = False

    def _begin(self, described: ExecutorReady) -> None:
        """Start from nothing with a model.

        If another one was served, peers see another scheduler: gateways submit again what may go on, and end the rest.
        """
        if self.scheduler is not None:
            logger.warning("the executor holds another model than the one before: requests in flight end")
            self.incarnation = self.link.scheduler_incarnation = new_identity()
        limits = Limits(
            self.num_blocks,
            described.block_size,
            described.max_model_len,
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            self.config.max_num_queued_reqs,
            self.config.enable_prefix_caching,
        )
        self.scheduler, self._measures = Scheduler(limits), Measures()
        self.frontend.offer(Service(self.scheduler, described.vocab_size, self._ready, self._measures))
        self._logged = self._stats(self.scheduler)

    def _ready(self) -> Ready:
        """Return what gateways are told. Only when an executor has been there."""
        assert self.described is not None
        return Ready(
            self.incarnation,
            self.described.model_fingerprint,
            self.described.vocab_size,
            self.described.max_model_len,
            self.described.block_size,
            self.num_blocks,
            self.config.max_num_seqs,
            self.link.can_progress(self.clock()),
            self.link.num_idle(self.clock()),
        )

    def _on_result(self, result: StepResult, scheduler: Scheduler, now_s: float) -> None:
        for step, answered in self.link.complete(result):
            scheduler.apply(answered)
            lead_s, self._oldest_started_s = self._oldest_started_s - step.sent_s, now_s
            self._predictor.observe_step(step.size, answered.busy_s)
            self._predictor.observe_launch(answered.launch_s)
            self._pace.observe_step(step.size, answered.busy_s)
            self._measures.complete(step.size, answered.busy_s)
            if step.is_ahead:
                self._predictor.observe_wait(step.size, answered.waited_s, lead_s)
            self._log_meter.add(step.size, answered.busy_s, answered.waited_s)
        if self.link.num_in_flight == 0:
            self._was_idle |= not scheduler.has_work
            self._finish_draining()

    def _on_need_init(self, need: NeedInit, scheduler: Scheduler) -> None:
        logger.warning("the executor has no state for %d sequences in step %d", len(need.seq_ids), need.step_id)
        self.link.cancel_from(need.step_id)
        scheduler.need_init(need.step_id, need.seq_ids)
        self._is_draining = True
        if self.link.num_in_flight == 0:
            self._finish_draining()

    def _finish_draining(self) -> None:
        """Tell the executor which step comes next, now that those before it are done or cancelled."""
        if self._is_draining:
            self._is_draining = False
            self._send_to_executor(self._welcome())

    def _next_step_id(self) -> int:
        return self.scheduler.next_step_id if self.scheduler is not None else 1

    def _welcome(self) -> bytes:
        return encode(self.link.welcome(self._next_step_id()))

    def _send_to_executor(self, frame: bytes) -> None:
        if not try_send(self.backend, [self.link.identity, frame]):
            self.link.mark_unreachable()

    # Planning

    def _plan_at_s(self) -> float | None:
        """Return when the next step is to be planned (0: now), None if something must happen before."""
        if self.scheduler is None or not self._may_plan or not self.scheduler.has_work or self._is_draining:
            return None
        if self.link.num_in_flight > int(self.config.async_scheduling) or not self.link.can_progress(self.clock()):
            return None
        if self.link.oldest is None:
            return 0.0
        return self._oldest_started_s + self._predictor.plan_after_s(self.link.oldest.size)

    def _plan(self) -> None:
        """Plan one step, if there is one, and send it."""
        assert self.scheduler is not None
        assert self.link.incarnation is not None
        started_s = self.clock()
        num_running, block_size = self.scheduler.num_running, self.scheduler.limits.block_size
        planned = self.scheduler.schedule(self._pace.max_num_prompt_tokens(num_running, block_size))
        if planned is None:
            self._may_plan = False
            return
        self._measures.plan(planned.sequences, started_s)
        step = Step(self.incarnation, self.link.incarnation, planned.step_id, planned.sequences, planned.forget)
        frame = encode(step)
        if len(frame) > self._max_step_bytes:
            self._end_undeliverable(planned, len(frame), self.scheduler)
            return
        size = step_size(planned.sequences, follows_idleness=self._was_idle)
        is_ahead = self.link.oldest is not None
        if not is_ahead:
            self._oldest_started_s = started_s
        self.link.add(SentStep(planned.step_id, frame, size, is_ahead, self.clock()))
        self._send_to_executor(frame)
        self._was_idle = False
        self._predictor.observe_planning(self.clock() - started_s)

    def _end_undeliverable(self, planned: PlannedStep, num_bytes: int, scheduler: Scheduler) -> None:
        """End the sequences of a step that no message has room for; each gets its error. No later one is planned
        before those in flight are done, and the executor is told that this one's number is not used."""
        logger.error("step %d would be a message of %d bytes: its sequences end", planned.step_id, num_bytes)
        scheduler.need_init(planned.step_id, ())
        for share in planned.sequences:
            scheduler.fail(share.seq_id, "what has to be computed at once for this request is too large for a message")
        self._is_draining = True
        if self.link.num_in_flight == 0:
            self._finish_draining()

    # Housekeeping

    def _keep_house(self) -> None:
        """Once a second: end what dead gateways had, say how things stand; every ten, while busy, log it."""
        now_s = self.clock()
        interval_s = now_s - self._stats_sent_s
        if interval_s < STATS_INTERVAL_S:
            return
        self._stats_sent_s = now_s
        self._lag_s.observe(interval_s - STATS_INTERVAL_S, now_s)
        for identity, num_aborted in self.frontend.drop_dead():
            level = logging.WARNING if num_aborted else logging.DEBUG  # probes leave without a word as well
            logger.log(
                level, "gateway %s is dead: %d sequences aborted", identity.decode(errors="replace"), num_aborted
            )
            self._may_plan = True
        if self.scheduler is None:
            return
        self._watch_executor(self.scheduler, now_s)
        self._watch_planning(self.scheduler, min(interval_s, LONGEST_LOOK_S), now_s)
        self._check_when_idle(self.scheduler)
        stats = self._stats(self.scheduler)
        self.frontend.finish_rate.observe(sum(stats.finished.values()), interval_s, is_busy=self.scheduler.has_work)
        self.frontend.broadcast(stats)
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._log(self.scheduler, now_s)

    def _watch_executor(self, scheduler: Scheduler, now_s: float) -> None:
        self.link.watch(now_s)
        was_lost, self._is_lost = self._is_lost, not self.link.can_progress(now_s)
        if self._is_lost != was_lost:
            logger.warning("the executor makes no progress: requests wait" if self._is_lost else "the executor is back")
        if self.link.stalled_s > self.config.hang_timeout_s:
            self._give_up(scheduler)

    def _give_up(self, scheduler: Scheduler) -> None:
        """Take what is in flight back from an executor that lives and does not get on with it.

        If it is stuck, its parent ends it; if it never got what it was sent, sending that again will not help. So the
        sequences are planned anew, as after the death of an executor: one that is stuck alone again gets an error.
        """
        logger.error("no step has progressed for %.0f s: what is in flight is planned anew", self.link.stalled_s)
        scheduler.give_up()
        self.link.give_up()
        self._is_draining = False
        self._send_to_executor(self._welcome())
        self._may_plan = True

    def _watch_planning(self, scheduler: Scheduler, interval_s: float, now_s: float) -> None:
        """Measure how long nothing was planned although it could be: then this process has lost its way, and falls
        silent, so that its parent starts another."""
        num_steps, num_seen_steps = scheduler.counters.num_steps, self._num_seen_steps
        is_idle = not scheduler.has_work or self.link.num_in_flight > 0 or not self.link.can_progress(now_s)
        self._stuck_s = 0.0 if is_idle or num_steps != num_seen_steps else self._stuck_s + interval_s
        self._num_seen_steps = num_steps

    def _check_when_idle(self, scheduler: Scheduler) -> None:
        """Let the process end, and start again, rather than serve on with accounts that do not agree."""
        num_steps = scheduler.counters.num_steps
        if not scheduler.has_work and not scheduler.num_in_flight and num_steps != self._num_checked_steps:
            scheduler.check_integrity()
            self._num_checked_steps = num_steps

    def _log(self, scheduler: Scheduler, now_s: float) -> None:
        stats, times = self._stats(scheduler), self._log_meter.take()
        if self._logged is not None and (stats.num_steps > self._logged.num_steps or scheduler.has_work):
            logger.info("%s", describe(self._logged, stats, times, now_s - self._logged_s, self.num_blocks))
        self._logged, self._logged_s = stats, now_s

    def _stats(self, scheduler: Scheduler) -> Stats:
        counters = scheduler.counters
        return Stats(
            self.incarnation,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_used_blocks,
            counters.num_prompt_tokens,
            counters.num_generated_tokens,
            counters.num_prefix_queried_tokens,
            counters.num_prefix_hit_tokens,
            counters.num_preemptions,
            counters.num_steps,
            scheduler.num_evicted_blocks,
            max(0, self.link.num_lives - 1),
            dict(counters.finished),
            self._measures.read(),
            self._lag_s.read(self.clock()),
            self._device_bytes(),
        )

    def _device_bytes(self) -> dict[str, int]:
        """Return what the executor last said of its device's memory."""
        described = self.described.device_bytes if self.described else {}
        return {**described, "used": self._used_bytes} if self._used_bytes else dict(described)


def _model(described: ExecutorReady) -> tuple[str, int, int, int]:
    """Return what must be the same for work to go on with another executor."""
    return described.model_fingerprint, described.vocab_size, described.max_model_len, described.block_size
