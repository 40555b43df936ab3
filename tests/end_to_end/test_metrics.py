"""Two gateways on one scheduler under load: what their pages say is what their clients saw."""

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.model_directories import VOCAB_SIZE, write_tiny_model
from tests.fakes.octavo_server import running_server
from tests.fakes.waiting import wait_until

MODEL = "tiny"
FLAGS = {
    "dtype": "float32",
    "kv-cache-memory-bytes": "16MiB",
    "max-model-len": "256",
    "max-num-seqs": "8",
    "served-model-name": MODEL,
    "api-key": "secret",
}
LOAD_S = 8.0
NUM_CLIENTS = 4  # of each gateway
ROUTE = "/v1/completions"


@dataclass(frozen=True)
class Gateway:
    url: str
    metrics_url: str

    def page(self) -> "Page":
        return Page(httpx.get(f"{self.metrics_url}/metrics").text)

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="secret", max_retries=0, timeout=60)


class Page:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == f"octavo:{name}" and labels.items() <= sample.labels.items()
        )

    def engine_rows(self) -> dict[str, float]:
        """Return what counts from the scheduler's start on, by name and labels."""
        return {
            f"{sample.name} {sorted(sample.labels.items())}": sample.value
            for sample in self._samples
            if "engine" in sample.labels and sample.name.endswith(("_total", "_count", "_bucket", "_sum"))
        }


@dataclass
class Seen:
    """What clients saw: of all gateways together."""

    statuses: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    num_prompts: int = 0  # that were taken
    num_prompt_tokens: int = 0  # of each choice that ended
    num_tokens: int = 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def second_gateway(environ: dict[str, str]) -> Iterator[Gateway]:
    """Run another replica of the gateway with `environ`, on other ports."""
    ports = {"OCTAVO_PORT": str(free_port()), "OCTAVO_METRICS_PORT": str(free_port())}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "octavo.gateway"], env={**environ, **ports}, stderr=subprocess.DEVNULL
    )
    urls = [f"http://127.0.0.1:{port}" for port in ports.values()]
    try:
        wait_until(lambda: answers(f"{urls[0]}/health"), 60)
        yield Gateway(*urls)
    finally:
        process.terminate()
        assert process.wait(20) == 0


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Gateway]]:
    checkpoint = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    make_checkpoint(checkpoint, num_hidden_layers=2, vocab_size=VOCAB_SIZE)
    metrics_port = free_port()
    flags = [text for flag, value in FLAGS.items() for text in (f"--{flag}", value)]
    flags += ["--metrics-port", str(metrics_port)]
    with running_server(tmp_path_factory.mktemp("server"), str(checkpoint), *flags) as server:
        environ = server.child("gateway").environ()
        assert environ["OCTAVO_API_KEY"]
        with second_gateway({**os.environ, **environ}) as other:
            yield [Gateway(server.url, f"http://127.0.0.1:{metrics_port}"), other]


async def client_of(gateway: Gateway, seen: Seen, rng: random.Random, until_s: float) -> None:
    """Ask one thing after the other: whole and streamed, and what is refused."""
    async with gateway.client() as client:
        while asyncio.get_running_loop().time() < until_s:
            match rng.randrange(6):
                case 0:
                    await refused(client, seen, openai.BadRequestError, temperature=-1)
                case 1:
                    await refused(client, seen, openai.NotFoundError, model="another")
                case 2 | 3:
                    await streamed(client, seen, rng)
                case _:
                    await whole(client, seen, rng)


async def refused(client: openai.AsyncOpenAI, seen: Seen, error: type[openai.APIStatusError], **fields: object) -> None:
    with pytest.raises(error) as raised:
        await client.completions.create(**({"model": MODEL, "prompt": "x"} | fields))
    seen.statuses[str(raised.value.status_code)] += 1


async def whole(client: openai.AsyncOpenAI, seen: Seen, rng: random.Random) -> None:
    n = rng.randrange(1, 4)
    answer = await client.completions.create(**request(rng), n=n)
    assert answer.usage is not None
    seen.statuses["200"] += 1
    seen.finishes.update(choice.finish_reason for choice in answer.choices)
    seen.num_prompts += 1
    seen.num_prompt_tokens += n * answer.usage.prompt_tokens
    seen.num_tokens += answer.usage.completion_tokens


async def streamed(client: openai.AsyncOpenAI, seen: Seen, rng: random.Random) -> None:
    stream = await client.completions.create(**request(rng), stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        seen.finishes.update(choice.finish_reason for choice in chunk.choices if choice.finish_reason)
        if chunk.usage is not None:
            seen.num_prompt_tokens += chunk.usage.prompt_tokens
            seen.num_tokens += chunk.usage.completion_tokens
    seen.statuses["200"] += 1
    seen.num_prompts += 1


def request(rng: random.Random) -> dict[str, object]:
    """Return a request that only its length ends; of one token now and then."""
    return {
        "model": MODEL,
        "prompt": "once upon a time"[: rng.randrange(1, 17)],
        "max_tokens": rng.choice((1, 10, 40, 80)),
        "seed": rng.randrange(1000),
        "extra_body": {"ignore_eos": True},
    }


async def stop_at_a_string(client: openai.AsyncOpenAI, seen: Seen) -> None:
    """Be a client whose answer ends at a stop string: three of four tokens have one."""
    answer = await client.completions.create(model=MODEL, prompt="stopping", max_tokens=200, seed=1, stop="w")
    assert answer.usage is not None
    assert answer.choices[0].finish_reason == "stop"
    seen.statuses["200"] += 1
    seen.finishes["stop"] += 1
    seen.num_prompts += 1
    seen.num_prompt_tokens += answer.usage.prompt_tokens
    seen.num_tokens += answer.usage.completion_tokens


async def leave(client: openai.AsyncOpenAI, seen: Seen) -> None:
    """Be a client that leaves its stream, having seen some of it."""
    stream = await client.completions.create(
        model=MODEL, prompt="leaving", max_tokens=240, seed=1, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    seen.statuses["200"] += 1
    seen.finishes["abort"] += 1
    seen.num_prompts += 1
    seen.num_prompt_tokens += len("leaving")  # its tokens are bytes


def has_been_told(pages: list[Page]) -> bool:
    """Return whether both gateways know of the last thing that happened: that one left, and its last step was done."""
    return pages[0].engine_rows() == pages[1].engine_rows() and all(
        page.value("aborted_requests_total") == 1
        and page.value("step_time_seconds_count") == page.value("scheduler_steps_total")
        for page in pages
    )


@pytest.fixture(scope="module")
def seen(gateways: list[Gateway]) -> Seen:
    """Load both gateways, and wait until their pages have all of it."""

    async def load() -> Seen:
        rng, seen = random.Random(0), Seen()
        until_s = asyncio.get_running_loop().time() + LOAD_S
        plans = [(gateway, random.Random(rng.random())) for gateway in gateways for _ in range(NUM_CLIENTS)]
        await asyncio.gather(*(client_of(gateway, seen, drawn, until_s) for gateway, drawn in plans))
        async with gateways[1].client() as client:
            await stop_at_a_string(client, seen)
            await leave(client, seen)
        return seen

    seen = asyncio.run(load())
    wait_until(lambda: has_been_told([gateway.page() for gateway in gateways]))
    return seen


def test_the_gateways_own_figures_add_up_to_what_clients_saw(gateways: list[Gateway], seen: Seen) -> None:
    pages = [gateway.page() for gateway in gateways]
    assert all(page.value("request_success_total") for page in pages)

    def total(name: str, **labels: str) -> float:
        return sum(page.value(name, **labels) for page in pages)

    for status in ("200", "400", "404"):
        assert total("http_requests_total", route=ROUTE, status=status) == seen.statuses[status] > 0
    for reason in ("stop", "length", "abort", "error"):
        assert total("request_success_total", finished_reason=reason) == seen.finishes[reason]
    num_ended = sum(seen.finishes.values())
    of_every_generation = ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens")
    for name in of_every_generation:
        assert total(f"{name}_count") == num_ended
    for name in ("request_params_n", "time_to_first_token_seconds"):  # each request has one prompt
        assert total(f"{name}_count") == seen.num_prompts
    assert total("request_prompt_tokens_sum") == seen.num_prompt_tokens
    num_tokens_of_the_one_that_left = total("request_generation_tokens_sum") - seen.num_tokens
    assert 1 <= num_tokens_of_the_one_that_left < 240
    assert total("inter_token_latency_seconds_count") == total("request_generation_tokens_sum") - num_ended
    assert total("e2e_request_latency_seconds_count") == num_ended - 1


def test_the_engine_s_figures_are_the_same_everywhere_and_right(gateways: list[Gateway], seen: Seen) -> None:
    pages = [gateway.page() for gateway in gateways]
    assert pages[0].engine_rows() == pages[1].engine_rows()
    engine = pages[0].value
    num_ended = sum(seen.finishes.values())
    assert engine("prompt_tokens_total") == engine("prefix_cache_queries_total") == seen.num_prompt_tokens
    # Of the two that ended early a little more was made than anybody was given.
    num_given = sum(page.value("request_generation_tokens_sum") for page in pages)
    assert num_given <= engine("generation_tokens_total") <= num_given + 240
    for name in ("queue", "prefill"):
        assert engine(f"request_{name}_time_seconds_count") == num_ended
    for name in ("decode", "inference"):
        assert engine(f"request_{name}_time_seconds_count") == num_ended - 1
    for name in ("step_batch_size", "iteration_tokens_total"):
        assert engine(f"{name}_count") == engine("scheduler_steps_total")
    num_inputs = engine("prompt_tokens_total") + engine("generation_tokens_total") - num_ended
    assert engine("iteration_tokens_total_sum") >= num_inputs - engine("prefix_cache_hits_total")
    assert (engine("num_requests_running"), engine("num_requests_waiting"), engine("kv_cache_usage_perc")) == (0, 0, 0)
    assert engine("device_memory_bytes", kind="kv_cache") == 16 << 20
    for kind in ("weights", "used", "total"):
        assert engine("device_memory_bytes", kind=kind) > 0
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, their size, tokens, float32
    assert engine("cache_config_info", block_size="16", num_gpu_blocks=str((16 << 20) // block_bytes)) == 1


def test_only_the_port_for_metrics_needs_no_key(gateways: list[Gateway]) -> None:
    for gateway in gateways:
        assert httpx.get(f"{gateway.url}/metrics").status_code == 401
        assert httpx.get(f"{gateway.metrics_url}/metrics").status_code == 200
        assert httpx.get(f"{gateway.metrics_url}/health").status_code == 404
