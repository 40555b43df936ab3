"""The gateway's own metrics: HTTP requests, and generations as clients see them."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.gateway.link.engine import GenerationRequest
from octavo.gateway.measuring.exposition import PREFIX, add_histogram
from octavo.gateway.text.delta import Delta
from octavo.protocol.measures import (
    CHOICES_BOUNDS,
    FIRST_TOKEN_BOUNDS_S,
    REQUEST_BOUNDS_S,
    REQUEST_BOUNDS_TOKENS,
    TOKEN_BOUNDS_S,
    Histogram,
    RecentMaximum,
)

LAG_WINDOW_S = 10.0
LAG_INTERVAL_S = 0.1


class Metrics(Collector):
    """The metrics of one gateway. The registry is not global, so that two gateways in one process do not mix.

    Histograms are our own, because an observation in the library's takes five times as long, and each token makes one.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self._histograms: list[tuple[str, str, Histogram]] = []
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", FIRST_TOKEN_BOUNDS_S
        )
        self.inter_token_s = self._histogram(
            "inter_token_latency_seconds", "From one token of a generation to its next", TOKEN_BOUNDS_S
        )
        self.per_output_token_s = self._histogram(
            "request_time_per_output_token_seconds",
            "The same, as the mean over a generation that came to its end",
            TOKEN_BOUNDS_S,
        )
        self.e2e_s = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token", REQUEST_BOUNDS_S
        )
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a generation that ended", REQUEST_BOUNDS_TOKENS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens that the client of a generation got", REQUEST_BOUNDS_TOKENS
        )
        self.params_n = self._histogram("request_params_n", "Choices asked for, once a prompt", CHOICES_BOUNDS)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens that a generation could have had", REQUEST_BOUNDS_TOKENS
        )
        self.loop_lag_s = RecentMaximum(LAG_WINDOW_S)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.http_requests = Counter(
            f"{PREFIX}http_requests", "HTTP requests answered", ["method", "route", "status"], registry=self.registry
        )
        finished = Counter(
            f"{PREFIX}request_success",
            "Generations ended, by finished_reason (abort: the client left)",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self.finished = {reason: finished.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}

    def collect(self) -> Iterator[Metric]:
        for name, text, histogram in self._histograms:
            family = HistogramMetricFamily(PREFIX + name, text, labels=list(self._labels))
            add_histogram(family, self._labels, histogram.bounds, histogram.read())
            yield family
        lag = GaugeMetricFamily(
            f"{PREFIX}event_loop_lag_seconds",
            "How late the event loop came to what was due, at most in the last 10 to 20 seconds",
            labels=list(self._labels),
        )
        lag.add_metric(list(self._labels.values()), self.loop_lag_s.read(time.monotonic()))
        yield lag

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(bounds)
        self._histograms.append((name, text, histogram))
        return histogram


class ArrivalTime:
    """When a request came. The time to its first token counts once, for whichever of its generations is first."""

    def __init__(self, metrics: Metrics, at_s: float) -> None:
        self._metrics, self.at_s = metrics, at_s
        self._has_token = False

    def see_token(self, now_s: float) -> None:
        if not self._has_token:
            self._has_token = True
            self._metrics.first_token_s.observe(now_s - self.at_s)


class Observation:
    """Counts one generation: each token as it goes to the client, and everything else once, at the end.

    It lives as long as the generation, also across schedulers. The arrival is a time of `clock`.
    """

    def __init__(
        self,
        metrics: Metrics,
        arrival: ArrivalTime,
        num_prompt_tokens: int,
        max_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._metrics, self._arrival, self._clock = metrics, arrival, clock
        self._num_prompt_tokens, self._max_tokens = num_prompt_tokens, max_tokens
        self._num_tokens = 0
        self._first_s = self._last_s = arrival.at_s
        self._ended = False

    def see(self, delta: Delta) -> None:
        if num_tokens := len(delta.token_ids):
            now_s = self._clock()
            if self._num_tokens:  # tokens that came together share the time since the previous tokens
                self._metrics.inter_token_s.observe((now_s - self._last_s) / num_tokens, num_tokens)
            else:
                self._arrival.see_token(now_s)
                self._metrics.inter_token_s.observe(0.0, num_tokens - 1)
                self._first_s = now_s
            self._num_tokens += num_tokens
            self._last_s = now_s
        if delta.finish_reason:
            self.end(delta.finish_reason)

    def end(self, reason: str) -> None:
        """Count the end. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.finished[reason].inc()
        metrics.prompt_tokens.observe(self._num_prompt_tokens)
        metrics.generation_tokens.observe(self._num_tokens)
        metrics.params_max_tokens.observe(self._max_tokens)
        if reason not in ("stop", "length"):
            return
        metrics.e2e_s.observe(self._clock() - self._arrival.at_s)
        if self._num_tokens > 1:
            metrics.per_output_token_s.observe((self._last_s - self._first_s) / (self._num_tokens - 1))


def observers(metrics: Metrics, arrived_s: float, requests: Sequence[GenerationRequest], n: int) -> list[Observation]:
    """Count a body with `n` choices per prompt; return an observer for each choice. `arrived_s` is a `perf_counter`."""
    for _ in range(0, len(requests), n):
        metrics.params_n.observe(n)
    arrival = ArrivalTime(metrics, arrived_s)
    return [
        Observation(
            metrics,
            arrival,
            num_prompt_tokens=len(request.prompt.token_ids),
            max_tokens=request.sampling.max_tokens,
        )
        for request in requests
    ]


async def watch_loop(lag_s: RecentMaximum, clock: Callable[[], float] = time.monotonic) -> None:
    """Measure forever how late the running event loop is."""
    while True:
        due_s = clock() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        now_s = clock()
        lag_s.observe(now_s - due_s, now_s)
