"""What the scheduler reports about itself: Stats for gateways once a second, and the operator's line in the log."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from octavo.protocol.measures import RecentMaximum
from octavo.protocol.messages import Stats, StepResult
from octavo.scheduler.measures import Measures
from octavo.scheduler.predictor import StepSize
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
LAG_WINDOW_S = 10.0


class StepTimes(NamedTuple):
    """Seconds of the steps of one interval: medians of the steps without and with prompt tokens."""

    decode_step_s: float = 0.0
    prefill_step_s: float = 0.0
    executor_wait_fraction: float = 0.0  # of the time in which the executor was busy or waited for the scheduler


@dataclass(slots=True)
class StepMeter:
    """Times of the steps of one interval."""

    decode_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    waited_s: float = 0.0  # for the scheduler, while there was work

    def add(self, size: StepSize, busy_s: float, waited_s: float) -> None:
        (self.prefill_s if size.has_prompt else self.decode_s).append(busy_s)
        self.busy_s += busy_s
        if not size.follows_idleness:
            self.waited_s += waited_s

    def take(self) -> StepTimes:
        """Return the interval's times and start the next interval."""
        total_s = self.busy_s + self.waited_s
        times = StepTimes(
            decode_step_s=median(self.decode_s) if self.decode_s else 0.0,
            prefill_step_s=median(self.prefill_s) if self.prefill_s else 0.0,
            executor_wait_fraction=self.waited_s / total_s if total_s else 0.0,
        )
        self.decode_s, self.prefill_s, self.busy_s, self.waited_s = [], [], 0.0, 0.0
        return times


class Reports:
    """Collects the times of steps, requests and the loop. Counts start again with every Scheduler."""

    def __init__(self, now_s: float) -> None:
        self.measures = Measures()
        self.logged_s = now_s  # when the operator's line was last due
        self._logged: Stats | None = None  # the Stats of that moment
        self._meter = StepMeter()
        self._lag_s = RecentMaximum(LAG_WINDOW_S)

    def begin(self, stats: Stats) -> None:
        """Start again with another Scheduler, whose first Stats these are."""
        self.measures, self._logged = Measures(), stats

    def observe_step(self, size: StepSize, result: StepResult) -> None:
        """Take a step that was done."""
        self.measures.complete(size, result.busy_s)
        self._meter.add(size, result.busy_s, result.waited_s)

    def observe_lag(self, seconds: float, now_s: float) -> None:
        """Take how long a message that had arrived may have waited for the scheduler."""
        self._lag_s.observe(seconds, now_s)

    def stats(
        self,
        scheduler: Scheduler,
        *,
        scheduler_incarnation: str,
        num_executor_restarts: int,
        device_bytes: Mapping[str, int],
        now_s: float,
    ) -> Stats:
        counters = scheduler.counters
        return Stats(
            scheduler_incarnation=scheduler_incarnation,
            num_running_seqs=scheduler.num_running,
            num_waiting_seqs=scheduler.num_waiting,
            num_used_blocks=scheduler.num_used_blocks,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_prefix_queried_tokens=counters.num_prefix_queried_tokens,
            num_prefix_hit_tokens=counters.num_prefix_hit_tokens,
            num_preemptions=counters.num_preemptions,
            num_steps=counters.num_steps,
            num_evicted_blocks=scheduler.num_evicted_blocks,
            num_executor_restarts=num_executor_restarts,
            finished=dict(counters.finished),
            histograms=self.measures.read(),
            loop_lag_s=self._lag_s.read(now_s),
            device_bytes=dict(device_bytes),
        )

    def log(self, stats: Stats, num_blocks: int, now_s: float) -> None:
        """Log the operator's line every ten seconds, if there was or is something to do."""
        interval_s = now_s - self.logged_s
        if interval_s < LOG_INTERVAL_S:
            return
        times, is_busy = self._meter.take(), stats.num_running_seqs + stats.num_waiting_seqs > 0
        if self._logged is not None and (stats.num_steps > self._logged.num_steps or is_busy):
            logger.info("%s", describe(self._logged, stats, times, interval_s, num_blocks))
        self._logged, self.logged_s = stats, now_s


def describe(before: Stats, now: Stats, times: StepTimes, interval_s: float, num_blocks: int) -> str:
    """Return the operator's line about the interval between two Stats."""
    num_queried = now.num_prefix_queried_tokens - before.num_prefix_queried_tokens
    num_hit = now.num_prefix_hit_tokens - before.num_prefix_hit_tokens
    return (
        f"prompt {(now.num_prompt_tokens - before.num_prompt_tokens) / interval_s:.0f} tokens/s,"
        f" output {(now.num_generated_tokens - before.num_generated_tokens) / interval_s:.0f} tokens/s,"
        f" running {now.num_running_seqs}, waiting {now.num_waiting_seqs},"
        f" KV use {100 * now.num_used_blocks / max(1, num_blocks):.0f}%,"
        f" prefix hits {100 * num_hit / max(1, num_queried):.0f}%,"
        f" preemptions {now.num_preemptions - before.num_preemptions},"
        f" prefill step {1000 * times.prefill_step_s:.1f} ms, decode step {1000 * times.decode_step_s:.1f} ms,"
        f" executor waited {100 * times.executor_wait_fraction:.1f}%"
    )
