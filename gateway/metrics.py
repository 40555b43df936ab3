"""The gateway's own counts, and beside them the scheduler's latest Stats under an `engine` label."""

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.engine import Delta, Engine
from gateway.errors import STATUS_CLIENT_CLOSED

# As vLLM has them, so that its dashboards fit.
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
E2E_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

NO_ROUTE = "unknown"


class Metrics:
    """One registry a gateway: nothing is global, so that two of them in one process do not mix."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.http_requests = Counter(
            "octavo:http_requests", "HTTP requests answered", ["method", "route", "status"], registry=self.registry
        )
        labels, values = ["model_name"], {"model_name": model_name}
        self._ttft_s = Histogram(
            "octavo:time_to_first_token_seconds",
            "From a request's arrival to its first token",
            labels,
            registry=self.registry,
            buckets=TTFT_BUCKETS_S,
        ).labels(**values)
        self._e2e_s = Histogram(
            "octavo:e2e_request_latency_seconds",
            "From a request's arrival to its last token",
            labels,
            registry=self.registry,
            buckets=E2E_BUCKETS_S,
        ).labels(**values)
        self._finished = Counter(
            "octavo:request_success",
            "Generations ended, by finished_reason (abort: the client left)",
            [*labels, "finished_reason"],
            registry=self.registry,
        )
        self._values = values
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(**values, finished_reason=reason)

    def first_token(self, seconds: float) -> None:
        self._ttft_s.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        self._finished.labels(**self._values, finished_reason=reason).inc()
        if reason in ("stop", "length"):
            self._e2e_s.observe(seconds)


class Observation:
    """What one generation adds to the metrics: its first token once, its end once."""

    def __init__(self, metrics: Metrics, arrived_s: float) -> None:
        self._metrics, self._arrived_s = metrics, arrived_s
        self._started = self._ended = False

    def see(self, delta: Delta) -> None:
        if delta.token_ids and not self._started:
            self._started = True
            self._metrics.first_token(time.perf_counter() - self._arrived_s)
        if delta.finish_reason:
            self.end(delta.finish_reason)

    def end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.finished(reason, time.perf_counter() - self._arrived_s)


class SchedulerCollector(Collector):
    """Turns what the scheduler last said into metrics when the page is read; without a scheduler there are none."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        stats, ready = self._engine.stats, self._engine.ready
        if stats is None or ready is None:
            return
        used = stats.num_used_blocks / ready.num_blocks if ready.num_blocks else 0.0
        yield from self._gauges(
            num_requests_running=(stats.num_running_seqs, "Sequences in the running batch"),
            num_requests_waiting=(stats.num_waiting_seqs, "Sequences that wait for a place"),
            kv_cache_usage_perc=(used, "Share of the KV blocks that sequences hold (1 is all)"),
        )
        yield from self._counters(
            prefix_cache_queries=(stats.num_prefix_queried_tokens, "Prompt tokens looked up in the prefix cache"),
            prefix_cache_hits=(stats.num_prefix_hit_tokens, "Prompt tokens found in the prefix cache"),
            num_preemptions=(stats.num_preemptions, "Sequences that gave their blocks up to be recomputed"),
            prompt_tokens=(stats.num_prompt_tokens, "Prompt tokens of the requests taken"),
            generation_tokens=(stats.num_generated_tokens, "Tokens generated"),
            scheduler_steps=(stats.num_steps, "Steps planned"),
            executor_restarts=(stats.num_executor_restarts, "Times that the executor came back as another life"),
        )

    def _gauges(self, **rows: tuple[float, str]) -> Iterable[Metric]:
        for name, (value, text) in rows.items():
            gauge = GaugeMetricFamily(f"octavo:{name}", text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge

    def _counters(self, **rows: tuple[float, str]) -> Iterable[Metric]:
        for name, (value, text) in rows.items():
            counter = CounterMetricFamily(f"octavo:{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter


class CountRequests:
    """ASGI middleware that counts each answer by method, route and status. Paths without a route share one name."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: list[Route]) -> None:
        self.app = app
        self.metrics = metrics
        self.paths: Mapping[object, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = STATUS_CLIENT_CLOSED

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            route = self.paths.get(scope.get("endpoint"), NO_ROUTE)
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            self.metrics.http_requests.labels(method, route, str(status)).inc()


async def show_metrics(request: Request) -> Response:
    return Response(generate_latest(request.state.service.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
