"""The metrics page: what the gateway counts, and what the scheduler last said."""

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.gateway.measuring.engine_metrics import HISTOGRAMS
from octavo.protocol.measures import REQUEST_BOUNDS_S, STEP_BOUNDS_SEQS, Histogram
from octavo.protocol.messages import Abort, EngineHistograms, HistogramCounts, Stats, Submit, encode
from tests.fakes.fake_scheduler import FakeScheduler, running
from tests.fakes.gateway_server import MODEL, Served, chat, completion, serving

DOCS = Path(__file__).parents[2] / "docs/metrics.md"
ENGINE_BOUNDS = [kept.bounds for kept in HISTOGRAMS]  # in the order of EngineHistograms

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def scrape(served: Served, name: str, **labels: str) -> float | None:
    """Return the value of the one sample of that name with these labels among its own."""
    response = await served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = [
        sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(values) < 2
    return values[0] if values else None


async def test_requests_are_counted_by_route_and_status(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler) as served:
        await served.chat()
        await served.chat()
        await served.post("/v1/chat/completions", chat(n=0))
        await served.http.get("/nothing/1")
        await served.http.get("/nothing/2")
        await served.http.get(f"/v1/models/{MODEL}")

        async def count(route: str, status: str) -> float | None:
            return await scrape(served, "octavo:http_requests_total", route=route, status=status)

        assert await count("/v1/chat/completions", "200") == 2
        assert await count("/v1/chat/completions", "400") == 1
        assert await count("/v1/models/{id:path}", "200") == 1
        assert await count("unknown", "404") == 2


async def test_every_generation_ends_once(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler) as served:

        async def ended(reason: str) -> float | None:
            return await scrape(served, "octavo:request_success_total", model_name=MODEL, finished_reason=reason)

        assert [await ended(reason) for reason in ("stop", "length", "abort", "error")] == [0, 0, 0, 0]
        await served.chat(n=3)
        await served.stream("/v1/chat/completions", chat(stop="w", max_tokens=100))
        scheduler.paused = True
        async with served.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)):
            pass  # the headers have come, so it is admitted; its client leaves
        await scheduler.wait_for_requests(Abort, 2)
        scheduler.paused = False
        failing = asyncio.create_task(served.post("/v1/chat/completions", chat(max_tokens=400)))
        await scheduler.wait_for_requests(Submit, 6)
        scheduler.fail("out of luck")
        response = await failing
        assert (response.status_code, response.json()["error"]["message"]) == (500, "out of luck")
        assert [await ended(reason) for reason in ("stop", "length", "abort", "error")] == [1, 3, 1, 1]
        assert await scrape(served, "octavo:e2e_request_latency_seconds_count", model_name=MODEL) == 4


async def test_first_tokens_are_timed_once_a_request(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler) as served:
        for _ in range(10):
            await served.chat(n=2)
        assert (await histogram(served, "time_to_first_token_seconds"))[0] == 10
        await served.stream("/v1/completions", completion(["four", "three"], n=2))
        assert (await histogram(served, "time_to_first_token_seconds"))[0] == 11


async def histogram(served: Served, name: str) -> tuple[float | None, float | None]:
    """Return how often and how much in all a gateway's histogram was told."""
    values = [await scrape(served, f"octavo:{name}_{part}", model_name=MODEL) for part in ("count", "sum")]
    return values[0], values[1]


async def test_lengths_are_counted_for_each_generation_and_n_for_each_prompt(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    async with serving(tiny_model, scheduler) as served:
        await served.complete(["four", "three"], n=2, max_tokens=5)
        await served.complete("hi", max_tokens=1)
        assert await histogram(served, "request_params_n") == (3, 5)
        assert await histogram(served, "request_prompt_tokens") == (5, 2 * 4 + 2 * 5 + 2)
        assert await histogram(served, "request_generation_tokens") == (5, 4 * 5 + 1)
        assert await histogram(served, "request_params_max_tokens") == (5, 4 * 5 + 1)
        assert (await histogram(served, "inter_token_latency_seconds"))[0] == 4 * 4
        assert (await histogram(served, "request_time_per_output_token_seconds"))[0] == 4  # none without a second token
        assert (await histogram(served, "e2e_request_latency_seconds"))[0] == 5


async def test_what_a_restarted_scheduler_goes_on_with_counts_once(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler) as served:
        scheduler.step_s = 0.01
        generating = asyncio.create_task(served.complete("hi", max_tokens=30))
        await scheduler.wait_for_requests(Submit, 1)
        while not any(record.num_tokens > 3 for record in scheduler.records.values()):
            await asyncio.sleep(0)
        scheduler.restart()
        await generating
        assert scheduler.messages(Submit)[-1].output_token_ids  # it was resumed
        assert await scrape(served, "octavo:request_success_total", finished_reason="length") == 1
        assert await histogram(served, "request_generation_tokens") == (1, 30)
        assert await histogram(served, "request_prompt_tokens") == (1, 2)
        assert (await histogram(served, "time_to_first_token_seconds"))[0] == 1
        assert (await histogram(served, "inter_token_latency_seconds"))[0] == 29


STATS = {
    "num_running_seqs": 3,
    "num_waiting_seqs": 2,
    "num_used_blocks": 256,
    "num_prompt_tokens": 1000,
    "num_generated_tokens": 500,
    "num_prefix_queried_tokens": 900,
    "num_prefix_hit_tokens": 100,
    "num_preemptions": 4,
    "num_steps": 600,
    "num_evicted_blocks": 5,
    "num_executor_restarts": 1,
}
SHOWN = {
    "num_requests_running": 3,
    "num_requests_waiting": 2,
    "kv_cache_usage_perc": 0.25,
    "scheduler_loop_lag_seconds": 0.5,
    "prefix_cache_queries_total": 900,
    "prefix_cache_hits_total": 100,
    "num_preemptions_total": 4,
    "prompt_tokens_total": 1000,
    "generation_tokens_total": 500,
    "evicted_blocks_total": 5,
    "aborted_requests_total": 7,
    "executor_restarts_total": 1,
    "scheduler_steps_total": 600,
    "request_queue_time_seconds_count": 6,
    "request_queue_time_seconds_sum": 1.5,
    "step_batch_size_count": 2,
    "step_batch_size_sum": 9,
}


def stats_of(scheduler: FakeScheduler, **fields: Any) -> Stats:
    histograms = EngineHistograms(
        queue_s=HistogramCounts((5, 1, *[0] * (len(REQUEST_BOUNDS_S) - 1)), 1.5),
        step_seqs=HistogramCounts((0, 0, 2, *[0] * (len(STEP_BOUNDS_SEQS) - 2)), 9),
    )
    chosen = {"finished": {"stop": 20, "abort": 7}, "histograms": histograms, "loop_lag_s": 0.5}
    return Stats(**{"scheduler_incarnation": scheduler.incarnation, **STATS, **chosen, **fields})


async def until_shown(served: Served, name: str, **labels: str) -> None:
    async with asyncio.timeout(10):
        while await scrape(served, name, **labels) is None:
            await asyncio.sleep(0.01)


async def test_the_scheduler_s_stats_are_shown(tiny_model: Path, scheduler: FakeScheduler) -> None:
    scheduler.stats = stats_of(scheduler, device_bytes={"weights": 11, "used": 22})
    async with serving(tiny_model, scheduler) as served:
        await until_shown(served, "octavo:num_requests_running")
        labels = {"model_name": MODEL, "engine": "0"}
        assert {name: await scrape(served, f"octavo:{name}", **labels) for name in SHOWN} == SHOWN
        for kind, num_bytes in scheduler.stats.device_bytes.items():
            assert await scrape(served, "octavo:device_memory_bytes", kind=kind, **labels) == num_bytes
        config = {"block_size": "16", "num_gpu_blocks": "1024", **labels}
        assert await scrape(served, "octavo:cache_config_info", **config) == 1
        buckets = [
            await scrape(served, "octavo:request_queue_time_seconds_bucket", le=le, **labels)
            for le in ("0.3", "0.5", "1.0", "7680.0", "+Inf")
        ]
        assert buckets == [5, 6, 6, 6, 6]


async def test_each_scheduler_is_an_engine(tiny_model: Path, scheduler: FakeScheduler, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        others = [FakeScheduler(f"ipc://{directory}/{name}") for name in "ab"]
        async with running(others[0]), running(others[1]):
            for number, one in enumerate((scheduler, *others)):
                one.stats = stats_of(one, num_generated_tokens=number)
            others[0].stats = None  # it has not said yet
            addresses = (scheduler.address, *(other.address for other in others))
            async with serving(tiny_model, scheduler, schedulers=addresses) as served:
                for engine in ("0", "2"):
                    await until_shown(served, "octavo:generation_tokens_total", engine=engine)
                    shown = await scrape(served, "octavo:generation_tokens_total", engine=engine)
                    assert shown == float(engine)
                assert await scrape(served, "octavo:generation_tokens_total", engine="1") is None


async def test_stats_of_a_scheduler_that_is_gone_are_not_shown_again(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    async with serving(tiny_model, scheduler) as served:
        former = stats_of(scheduler)
        scheduler.restart()
        scheduler.stats = stats_of(scheduler, num_steps=1)
        await until_shown(served, "octavo:scheduler_steps_total")
        scheduler.stats = None
        scheduler.send_frame(encode(former))  # it was late
        scheduler.send_frame(encode(stats_of(scheduler, num_steps=2)))
        async with asyncio.timeout(10):
            while (shown := await scrape(served, "octavo:scheduler_steps_total")) == 1:
                await asyncio.sleep(0.01)
        assert shown == 2


async def test_the_page_of_the_docs_has_what_is_shown(tiny_model: Path, scheduler: FakeScheduler) -> None:
    """Names, types and labels; `le`, and the times of creation that the library adds, apart."""
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \|(.*?)\| .+ \|$", DOCS.read_text(), re.MULTILINE)
    documented = {(name, kind, frozenset(re.findall(r"\w+", labels))) for name, kind, labels in rows}
    assert len(documented) == len(rows)
    scheduler.stats = stats_of(
        scheduler,
        device_bytes={"used": 1},
        histograms=EngineHistograms(*(Histogram(bounds).read() for bounds in ENGINE_BOUNDS)),
    )
    async with serving(tiny_model, scheduler) as served:
        await served.chat()
        await until_shown(served, "octavo:num_requests_running")
        page = (await served.http.get("/metrics")).text
    shown = set()
    for family in text_string_to_metric_families(page):
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        total = "_total" if family.type == "counter" else ""
        shown.add((family.name + total, family.type, labels))
    assert {row for row in shown if not row[0].endswith("_created")} == documented


async def test_cached_tokens_are_in_the_usage(tiny_model: Path, scheduler: FakeScheduler) -> None:
    scheduler.num_cached_tokens = 16
    async with serving(tiny_model, scheduler) as served:
        for n in (1, 2):
            usage = (await served.chat(n=n))["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
        options = {"include_usage": True}
        chunks = await served.stream("/v1/chat/completions", chat(stream_options=options))
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
