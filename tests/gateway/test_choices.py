"""One body with many choices: they share one prompt, and leave places for others. A real scheduler plans them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from octavo.gateway.asking.choices import Choices, UsedTokens
from octavo.gateway.link.client import SchedulerClient
from octavo.gateway.link.engine import EncodedPrompt, Engine, GenerationRequest
from octavo.gateway.measuring.metrics import Metrics, observers
from octavo.gateway.parsing.parts import Content, Part, PlainText, Splitter
from octavo.gateway.text.delta import Delta, Whole
from octavo.gateway.text.tokenizer import Tokenizer
from octavo.protocol.sampling import Sampling
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.model_directories import write_tiny_model
from tests.fakes.scheduler_thread import SchedulerThread, socket_directory, toy_config
from tests.fakes.toy_model import expected_output


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def directory() -> Iterator[Path]:
    with socket_directory() as path:
        yield path


@asynccontextmanager
async def connected(server: SchedulerThread, tokenizer: Tokenizer) -> AsyncIterator[Engine]:
    async with Engine([SchedulerClient(server.config.frontend_address)], tokenizer) as engine:
        async with asyncio.timeout(10):
            while not engine.healthy:
                await asyncio.sleep(0.01)
        yield engine


def body(name: str, prompt: list[int], n: int, max_tokens: int) -> list[GenerationRequest]:
    shared = EncodedPrompt.of(name, prompt)
    return [GenerationRequest(f"{name}-{i}", shared, Sampling(max_tokens, seed=i)) for i in range(n)]


async def start(
    engine: Engine, requests: list[GenerationRequest], new_splitter: Callable[[], Splitter] = PlainText
) -> Choices:
    observe = partial(observers, Metrics("m"), 0.0)
    splitters = [new_splitter() for _ in requests]
    return await Choices.start(engine, requests, n=len(requests), observe=observe, splitters=splitters)


async def answers(engine: Engine, requests: list[GenerationRequest]) -> list[Whole]:
    choices = await start(engine, requests)
    try:
        return [answer.whole for answer in await choices.collect()]
    finally:
        choices.close()


async def test_more_choices_than_a_step_has_places_for_all_end(tokenizer: Tokenizer, directory: Path) -> None:
    config = toy_config(directory, max_num_seqs=8, max_num_queued_reqs=6)
    with SchedulerThread(config) as server, FakeExecutor(config.backend_address, num_blocks=400) as executor:
        async with connected(server, tokenizer) as engine:
            requests = body("r", [5, 6, 7], 50, 6)
            async with asyncio.timeout(30):
                wholes = await answers(engine, requests)
            for request, whole in zip(requests, wholes, strict=True):
                assert (whole.token_ids, whole.finish_reason) == expected_output([5, 6, 7], request.sampling)
        assert max(len(step.num_tokens) for step in executor.steps) == 6  # a quarter of the places is left
        executor.check()


async def test_one_body_leaves_places_and_a_queue_for_others(tokenizer: Tokenizer, directory: Path) -> None:
    """1,000 choices that go on for long, then one short request of somebody else."""
    config = toy_config(directory, max_num_seqs=16)
    with SchedulerThread(config) as server, FakeExecutor(config.backend_address, num_blocks=4000, step_s=0.002):
        async with connected(server, tokenizer) as engine:
            choices = await start(engine, body("long", [5, 6, 7], 1000, 900))
            reading = asyncio.ensure_future(choices.collect())
            before = server.scheduler.counters.num_steps
            [short] = await answers(engine, body("short", [8, 9], 1, 3))
            assert (short.token_ids, short.finish_reason) == expected_output([8, 9], Sampling(max_tokens=3, seed=0))
            assert server.scheduler.counters.num_steps - before < 100
            assert server.scheduler.num_waiting == 0
            reading.cancel()
            choices.close()
            async with asyncio.timeout(10):
                while server.scheduler.has_work:
                    await asyncio.sleep(0.01)


class HoldingBack:
    """A splitter that says all of a text at its end."""

    num_reasoning_tokens = 3

    def __init__(self) -> None:
        self._text = ""

    def split(self, delta: Delta) -> tuple[Part, ...]:
        self._text += delta.text
        return (Content(self._text.upper()),) if delta.finish_reason else ()


async def test_an_answer_says_what_the_splitter_made_of_its_text(tokenizer: Tokenizer, directory: Path) -> None:
    config = toy_config(directory)
    with SchedulerThread(config) as server, FakeExecutor(config.backend_address):
        async with connected(server, tokenizer) as engine:
            choices = await start(engine, body("r", [5, 6, 7], 2, 8), HoldingBack)
            for answer in await choices.collect():
                assert answer.whole.text
                assert answer.content == answer.whole.text.upper()
            assert choices.used_tokens() == UsedTokens(prompt=3, cached=0, completion=16, reasoning=6)


async def test_a_long_prompt_of_many_choices_keeps_its_gateway(tokenizer: Tokenizer, directory: Path) -> None:
    """100,000 tokens, 1,000 times: with its prompt in each Submit, all of it every second, the scheduler fell behind,
    took the gateway for dead and admitted what an old connection had left behind."""
    prompt = [number % 997 + 1 for number in range(100_000)]
    config = toy_config(directory, max_num_seqs=128, max_num_batched_tokens=16384, peer_timeout_s=2.0)
    with (
        SchedulerThread(config) as server,
        FakeExecutor(
            config.backend_address, num_blocks=16_000, block_size=16, max_model_len=131_072, checks_kv=False
        ) as executor,
    ):
        async with connected(server, tokenizer) as engine:
            choices = await start(engine, body("r", prompt, 1000, 1))
            num_ended = 0
            async with asyncio.timeout(60):
                async for event in choices:
                    num_ended += event.delta.finish_reason == "length"
                    if num_ended == 200:
                        break
            assert server.server is not None
            assert len(server.server.frontend.ledger.gateways) == 1
            assert server.scheduler.counters.finished.keys() == {"length"}
            assert executor.num_scheduled_tokens < 100_000 + 1000 * 32  # the prompt is computed once
            choices.close()
        executor.check()
