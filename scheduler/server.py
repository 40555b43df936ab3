"""The scheduler's process: both sockets, the clock, and one loop around the pure scheduler.

Each turn: wait until something arrives or is due; take what the executor says, then a bounded number of gateway
messages; plan a step if one is due; send each gateway what it lacks.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from octavo.protocol.config import Config
from octavo.protocol.lifeline import Heart
from octavo.protocol.link_keys import server_keys
from octavo.protocol.messages import ExecutorReady, Ready, Stats
from octavo.protocol.sockets import MAX_MESSAGE_BYTES, bind_router, hold_address
from octavo.scheduler.backend import Backend
from octavo.scheduler.door import keep_door, report_refused
from octavo.scheduler.executor_link import MAX_LOOK_S
from octavo.scheduler.frontend import Frontend, Offer
from octavo.scheduler.reports import Reports
from octavo.scheduler.scheduler import Limits, Scheduler

logger = logging.getLogger(__name__)

HOUSEKEEPING_INTERVAL_S = 1.0


@contextmanager
def open_server(
    config: Config,
    clock: Callable[[], float] = time.monotonic,
    *,
    high_water_mark: int = 1000,
    max_step_bytes: int = MAX_MESSAGE_BYTES,
) -> Iterator["Server"]:
    """Bind both addresses while the context lasts. Raises ValueError if one cannot be bound, or lacks its keys.

    `high_water_mark` is how many messages wait for a gateway that does not read them. A Step of more than
    `max_step_bytes` is not sent.
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
    """The loop between the gateways and the executor of one scheduler."""

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
        self.clock = clock
        self.frontend = Frontend(frontend, config, clock)
        self.backend = Backend(backend, config, clock, self._begin, max_step_bytes)
        self.reports = Reports(clock())
        self._may_plan = False  # something has happened since there was nothing to plan
        self._is_stopping = False
        self._kept_house_s = clock()
        self._num_checked_steps = 0  # steps after which the accounts were last found to agree
        self._num_seen_steps = 0
        self._stuck_s = 0.0  # for how long no step was planned although there is work and an executor for it
        self._wake_reader, self._wake_writer = wakeup
        self._poller = zmq.Poller()
        for source in (backend, frontend, self._wake_reader):
            self._poller.register(source, zmq.POLLIN)

    @property
    def scheduler(self) -> Scheduler | None:
        """None until an executor has said what it holds."""
        return self.backend.scheduler

    @property
    def incarnation(self) -> str:
        """The name of this scheduler's life: a new one with every model."""
        return self.backend.link.scheduler_incarnation

    def run(self, heart: Heart) -> None:
        """Serve until `stop`. `heart` beats with every turn, at least once a second, unless nothing is planned although
        there is work and an executor for it."""
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
        self._may_plan |= self.backend.receive()
        self._report_steps()
        self._may_plan |= self.frontend.receive()
        plan_at_s = self._plan_at_s()
        if plan_at_s is not None and plan_at_s <= self.clock():
            self._plan()
        self.frontend.deliver()
        if self.clock() - self._kept_house_s >= HOUSEKEEPING_INTERVAL_S:
            self._keep_house()
        now_s = self.clock()
        self.reports.observe_lag(now_s - woken_s, now_s)  # messages that arrived meanwhile had to wait for so long

    def _patience_ms(self) -> int:
        """Return for how long nothing is due, rounded up to what a poll can wait."""
        due_s = (self._kept_house_s + HOUSEKEEPING_INTERVAL_S, self._plan_at_s(), self.frontend.next_try_s)
        next_s = min(time_s for time_s in due_s if time_s is not None)
        return max(0, math.ceil(1000 * (next_s - self.clock())))

    # A turn

    def _report_steps(self) -> None:
        for size, result in self.backend.take_done():
            self.reports.observe_step(size, result)

    def _plan_at_s(self) -> float | None:
        """Return when the next step is to be planned (0: now), or None if something must happen before."""
        if self.scheduler is None or not self._may_plan or not self.scheduler.has_work:
            return None
        return self.backend.plan_at_s()

    def _plan(self) -> None:
        """Plan one step, if there is one, and send it."""
        assert self.scheduler is not None
        started_s = self.clock()
        num_running, block_size = self.scheduler.num_running, self.scheduler.limits.block_size
        planned = self.scheduler.schedule(self.backend.cadence.max_num_prompt_tokens(num_running, block_size))
        if planned is None:
            self._may_plan = False
            return
        self.reports.measures.plan(planned.sequences, started_s)
        self.backend.send(planned, started_s)

    # A model

    def _begin(self, described: ExecutorReady) -> Scheduler:
        """Return the scheduler for the model that an executor holds, and offer it to gateways."""
        self._report_steps()  # of the model before
        scheduler = Scheduler(
            Limits(
                num_blocks=described.num_blocks,
                block_size=described.block_size,
                max_model_len=described.max_model_len,
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                max_num_waiting_seqs=self.config.max_num_queued_reqs,
                enable_prefix_caching=self.config.enable_prefix_caching,
                tasks=described.tasks,
                embedding_size=described.embedding_size,
                embeds_all_tokens=described.embeds_all_tokens,
                whole_prompts=described.whole_prompts,
            )
        )
        self.reports.begin(self._stats(scheduler))
        offer = Offer(
            scheduler=scheduler,
            vocab_size=described.vocab_size,
            ready=self._ready,
            measures=self.reports.measures,
        )
        self.frontend.offer(offer)
        return scheduler

    def _ready(self) -> Ready:
        """Return the answer to a Hello. Only once an executor has been there."""
        described = self.backend.described
        assert described is not None
        return Ready(
            scheduler_incarnation=self.incarnation,
            model_fingerprint=described.model_fingerprint,
            vocab_size=described.vocab_size,
            max_model_len=described.max_model_len,
            block_size=described.block_size,
            num_blocks=described.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            can_progress=self.backend.can_progress(),
            num_idle_executors=self.backend.num_idle(),
            tasks=described.tasks,
            embedding_size=described.embedding_size,
        )

    def _stats(self, scheduler: Scheduler) -> Stats:
        return self.reports.stats(
            scheduler,
            scheduler_incarnation=self.incarnation,
            num_executor_restarts=self.backend.num_restarts,
            device_bytes=self.backend.device_bytes,
            now_s=self.clock(),
        )

    # Housekeeping, once a second

    def _keep_house(self) -> None:
        """End what dead gateways had in flight, look at the executor and at this process, and report."""
        now_s = self.clock()
        interval_s, self._kept_house_s = now_s - self._kept_house_s, now_s
        self.reports.observe_lag(interval_s - HOUSEKEEPING_INTERVAL_S, now_s)
        self._drop_dead_gateways()
        if self.scheduler is None:
            return
        self._may_plan |= self.backend.watch(now_s)
        self._watch_planning(self.scheduler, min(interval_s, MAX_LOOK_S))
        self._check_when_idle(self.scheduler)
        stats = self._stats(self.scheduler)
        self.frontend.finish_rate.observe(sum(stats.finished.values()), interval_s, is_busy=self.scheduler.has_work)
        self.frontend.broadcast(stats)
        self.reports.log(stats, self.backend.num_blocks, now_s)

    def _drop_dead_gateways(self) -> None:
        for identity, num_aborted in self.frontend.drop_dead():
            level = logging.WARNING if num_aborted else logging.DEBUG  # a probe also leaves without saying so
            name = identity.decode(errors="replace")
            logger.log(level, "gateway %s is dead: %d sequences aborted", name, num_aborted)
            self._may_plan = True

    def _watch_planning(self, scheduler: Scheduler, interval_s: float) -> None:
        """Measure for how long nothing was planned although a step could be.

        A process that stays stuck stops beating, so that its parent starts another one.
        """
        num_steps, num_seen_steps = scheduler.counters.num_steps, self._num_seen_steps
        is_idle = not scheduler.has_work or self.backend.link.num_in_flight > 0 or not self.backend.can_progress()
        self._stuck_s = 0.0 if is_idle or num_steps != num_seen_steps else self._stuck_s + interval_s
        self._num_seen_steps = num_steps

    def _check_when_idle(self, scheduler: Scheduler) -> None:
        """Let the process end, and start again, rather than serve on with accounts that do not agree."""
        num_steps = scheduler.counters.num_steps
        if not scheduler.has_work and not scheduler.num_in_flight and num_steps != self._num_checked_steps:
            scheduler.check_integrity()
            self._num_checked_steps = num_steps
