"""Each scheduler's last report, as metrics. The label `engine` is the scheduler's index among the configured ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.gateway.link.engine import Engine
from octavo.gateway.measuring.exposition import PREFIX, add_histogram
from octavo.protocol.measures import REQUEST_BOUNDS_S, STEP_BOUNDS_S, STEP_BOUNDS_SEQS, STEP_BOUNDS_TOKENS
from octavo.protocol.messages import EngineHistograms, HistogramCounts, Ready, Stats


class EngineReport(NamedTuple):
    """The last report of one scheduler."""

    labels: Mapping[str, str]
    ready: Ready
    stats: Stats


class Gauge(NamedTuple):
    name: str
    text: str
    read: Callable[[Ready, Stats], float]


class Count(NamedTuple):
    name: str
    text: str
    read: Callable[[Stats], int]


class Kept(NamedTuple):
    name: str
    text: str
    bounds: Sequence[float]
    read: Callable[[EngineHistograms], HistogramCounts]


GAUGES = (
    Gauge("num_requests_running", "Sequences in the running batch", lambda _, stats: stats.num_running_seqs),
    Gauge("num_requests_waiting", "Sequences that wait for a place", lambda _, stats: stats.num_waiting_seqs),
    Gauge(
        "kv_cache_usage_perc",
        "Share of the KV blocks that sequences hold (1 is all)",
        lambda ready, stats: stats.num_used_blocks / max(1, ready.num_blocks),
    ),
    Gauge(
        "scheduler_loop_lag_seconds",
        "Longest that what arrived had to wait for the scheduler, in the last 10 to 20 seconds",
        lambda _, stats: stats.loop_lag_s,
    ),
)
COUNTERS = (
    Count("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda s: s.num_prefix_queried_tokens),
    Count("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda s: s.num_prefix_hit_tokens),
    Count("num_preemptions", "Times that a sequence gave its blocks up, to be recomputed", lambda s: s.num_preemptions),
    Count("prompt_tokens", "Prompt tokens of the sequences begun", lambda s: s.num_prompt_tokens),
    Count("generation_tokens", "Tokens generated", lambda s: s.num_generated_tokens),
    Count("evicted_blocks", "Cached blocks that were taken for something else", lambda s: s.num_evicted_blocks),
    Count("aborted_requests", "Sequences whose client left or gateway died", lambda s: s.finished.get("abort", 0)),
    Count("executor_restarts", "Times that the executor came back as another life", lambda s: s.num_executor_restarts),
    Count("scheduler_steps", "Steps planned", lambda s: s.num_steps),
)
HISTOGRAMS = (
    Kept("request_queue_time_seconds", "From arrival to the first step", REQUEST_BOUNDS_S, lambda h: h.queue_s),
    Kept("request_prefill_time_seconds", "From there to the first token", REQUEST_BOUNDS_S, lambda h: h.prefill_s),
    Kept("request_decode_time_seconds", "From the first token to the last", REQUEST_BOUNDS_S, lambda h: h.decode_s),
    Kept("request_inference_time_seconds", "Prefill and decode", REQUEST_BOUNDS_S, lambda h: h.inference_s),
    Kept("step_time_seconds", "The executor's time for one step", STEP_BOUNDS_S, lambda h: h.step_s),
    Kept("step_batch_size", "Sequences in one step", STEP_BOUNDS_SEQS, lambda h: h.step_seqs),
    Kept("iteration_tokens_total", "Tokens computed in one step", STEP_BOUNDS_TOKENS, lambda h: h.step_tokens),
)


class EngineCollector(Collector):
    """Turns the schedulers' last reports into metrics when the page is read. A silent scheduler has no metrics."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        reports = [
            EngineReport({"model_name": self._model_name, "engine": str(number)}, ready, stats)
            for number, (ready, stats) in self._engine.reports.items()
        ]
        if reports:
            yield from _gauges(reports)
            yield _cache_config(reports)
            yield _device_memory(reports)
            yield from _counters(reports)
            yield from _histograms(reports)


def _gauges(reports: Sequence[EngineReport]) -> Iterator[Metric]:
    for name, text, read in GAUGES:
        family = GaugeMetricFamily(PREFIX + name, text, labels=list(reports[0].labels))
        for labels, ready, stats in reports:
            family.add_metric(list(labels.values()), read(ready, stats))
        yield family


def _counters(reports: Sequence[EngineReport]) -> Iterator[Metric]:
    for name, text, read in COUNTERS:
        family = CounterMetricFamily(PREFIX + name, text, labels=list(reports[0].labels))
        for labels, _, stats in reports:
            family.add_metric(list(labels.values()), read(stats))
        yield family


def _histograms(reports: Sequence[EngineReport]) -> Iterator[Metric]:
    for name, text, bounds, read in HISTOGRAMS:
        family = HistogramMetricFamily(PREFIX + name, text, labels=list(reports[0].labels))
        for labels, _, stats in reports:
            add_histogram(family, labels, bounds, read(stats.histograms))
        yield family


def _cache_config(reports: Sequence[EngineReport]) -> Metric:
    names = [*reports[0].labels, "block_size", "num_gpu_blocks"]
    family = GaugeMetricFamily(f"{PREFIX}cache_config_info", "The KV cache, in its labels; always 1", labels=names)
    for labels, ready, _ in reports:
        family.add_metric([*labels.values(), str(ready.block_size), str(ready.num_blocks)], 1)
    return family


def _device_memory(reports: Sequence[EngineReport]) -> Metric:
    text = "Memory of the executor's device (rank 0's), by kind: weights, kv_cache, used now, total"
    family = GaugeMetricFamily(f"{PREFIX}device_memory_bytes", text, labels=[*reports[0].labels, "kind"])
    for labels, _, stats in reports:
        for kind, num_bytes in stats.device_bytes.items():
            family.add_metric([*labels.values(), kind], num_bytes)
    return family
