"""What one generation adds to the gateway's metrics, and the event loop's lag, by clocks that the tests turn."""

import asyncio
import time

from octavo.gateway.measuring.metrics import ArrivalTime, Metrics, Observation, watch_loop
from octavo.gateway.text.delta import Delta
from octavo.protocol.measures import RecentMaximum

MODEL = "tiny"


def test_one_generation_is_timed_as_its_client_sees_it() -> None:
    metrics, now_s = Metrics(MODEL), 10.0
    arrival = ArrivalTime(metrics, 8.0)
    observation = Observation(metrics, arrival, num_prompt_tokens=3, max_tokens=9, clock=lambda: now_s)
    observation.see(Delta("a", [1, 2]))
    now_s = 13.0
    observation.see(Delta("", []))
    observation.see(Delta("bcd", [3, 4, 5]))
    now_s = 15.0
    observation.see(Delta("e", [6], finish_reason="stop"))
    observation.end("abort")  # what closes the generation in any case
    assert metrics.first_token_s.read().sum == 2.0
    between = metrics.inter_token_s.read()
    assert (sum(between.counts), between.counts[0], between.sum) == (5, 1, 5.0)
    assert metrics.per_output_token_s.read().sum == 1.0
    assert metrics.e2e_s.read().sum == 7.0
    assert metrics.generation_tokens.read().sum == 6


def test_what_ends_early_has_no_latency_of_its_whole() -> None:
    for reason in ("abort", "error"):
        metrics = Metrics(MODEL)
        observation = Observation(metrics, ArrivalTime(metrics, 0.0), num_prompt_tokens=3, max_tokens=9)
        observation.see(Delta("a", [1]))
        observation.see(Delta("b", [2]))
        observation.end(reason)
        assert (sum(metrics.first_token_s.read().counts), sum(metrics.inter_token_s.read().counts)) == (1, 1)
        assert sum(metrics.e2e_s.read().counts) == sum(metrics.per_output_token_s.read().counts) == 0
        assert metrics.generation_tokens.read().sum == 2


async def test_the_event_loop_s_lag_is_measured() -> None:
    lost_s, lag_s = 0.0, RecentMaximum(1e6)

    def now_s() -> float:
        return time.monotonic() + lost_s

    watching = asyncio.create_task(watch_loop(lag_s, now_s))
    async with asyncio.timeout(10):
        while not lag_s.read(now_s()):
            await asyncio.sleep(0)
        assert lag_s.read(now_s()) < 30
        lost_s = 31.0
        while lag_s.read(now_s()) < 30:
            await asyncio.sleep(0)
    watching.cancel()
