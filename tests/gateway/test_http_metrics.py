"""The metrics page: what the gateway counts, and what the scheduler last said."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.messages import Abort, Stats, Submit
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import MODEL, Served, chat, serving

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
        leaving = asyncio.create_task(served.chat())
        await scheduler.wait_for_requests(Submit, 5)
        leaving.cancel()
        await scheduler.wait_for_requests(Abort, 2)
        scheduler.paused = False
        failing = asyncio.create_task(served.post("/v1/chat/completions", chat(max_tokens=400)))
        await scheduler.wait_for_requests(Submit, 6)
        scheduler.fail("out of luck")
        response = await failing
        assert (response.status_code, response.json()["error"]["message"]) == (500, "out of luck")
        assert [await ended(reason) for reason in ("stop", "length", "abort", "error")] == [1, 3, 1, 1]
        assert await scrape(served, "octavo:e2e_request_latency_seconds_count", model_name=MODEL) == 4


async def test_first_tokens_are_timed_once_a_generation(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler) as served:
        await served.chat(n=3)
        assert await scrape(served, "octavo:time_to_first_token_seconds_count", model_name=MODEL) == 3


async def test_the_scheduler_s_stats_are_shown(tiny_model: Path, scheduler: FakeScheduler) -> None:
    scheduler.stats = Stats(
        scheduler_incarnation=scheduler.incarnation,
        num_running_seqs=3,
        num_waiting_seqs=2,
        num_used_blocks=256,
        num_cached_blocks=10,
        num_prompt_tokens=1000,
        num_generated_tokens=500,
        num_prefix_queried_tokens=900,
        num_prefix_hit_tokens=100,
        num_preemptions=4,
        num_steps=600,
        num_scheduled_tokens=1400,
        num_evicted_blocks=5,
        num_executor_restarts=1,
    )
    async with serving(tiny_model, scheduler) as served:
        async with asyncio.timeout(10):
            while await scrape(served, "octavo:num_requests_running") is None:
                await asyncio.sleep(0.01)
        shown = {
            name: await scrape(served, f"octavo:{name}", model_name=MODEL, engine="0")
            for name in (
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
                "prefix_cache_queries_total",
                "prefix_cache_hits_total",
                "num_preemptions_total",
                "prompt_tokens_total",
                "generation_tokens_total",
            )
        }
    assert list(shown.values()) == [3, 2, 0.25, 900, 100, 4, 1000, 500]


async def test_cached_tokens_are_in_the_usage(tiny_model: Path, scheduler: FakeScheduler) -> None:
    scheduler.num_cached_tokens = 16
    async with serving(tiny_model, scheduler) as served:
        for n in (1, 2):
            usage = (await served.chat(n=n))["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
        options = {"include_usage": True}
        chunks = await served.stream("/v1/chat/completions", chat(stream_options=options))
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
