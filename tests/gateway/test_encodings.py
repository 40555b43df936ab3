"""Encodings take turns, are bounded, and end when nobody waits for them any more."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from octavo.gateway.asking.encodings import MAX_ENCODINGS, NUM_THREADS, Encodings
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.steps import Steps, finished
from octavo.gateway.text.tokenizer import Tokenizer
from tests.fakes.counted_work import Work


@pytest_asyncio.fixture
async def encodings() -> AsyncIterator[Encodings]:
    made = Encodings()
    yield made
    made.close()


def short() -> Steps[str]:
    yield
    return "short"


async def test_beyond_the_bound_there_is_a_429_before_any_work(encodings: Encodings) -> None:
    work, refused = Work(), Work()
    running = [asyncio.create_task(encodings.run(work.steps(1))) for _ in range(MAX_ENCODINGS)]
    await work.begun(1)
    with pytest.raises(RequestError) as caught:
        await encodings.run(refused.steps(1))
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
    assert refused.num_begun == 0
    work.allow(MAX_ENCODINGS)
    await asyncio.gather(*running)
    assert await encodings.run(short()) == "short"


async def test_one_that_nobody_waits_for_ends_with_its_present_slice(encodings: Encodings) -> None:
    works = [Work() for _ in range(16)]
    tasks = [asyncio.create_task(encodings.run(work.steps(1000))) for work in works]
    await works[NUM_THREADS - 1].begun(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    begun = [work.num_begun for work in works]
    for work in works:
        work.allow(1000)
    assert await encodings.run(short()) == "short"  # behind what was queued
    assert [work.num_begun for work in works] == begun
    assert max(begun) == 1
    assert begun[-1] == 0  # it had not begun, and never will


async def test_they_take_turns(encodings: Encodings) -> None:
    turns: list[str] = []

    def noting(name: str, num: int) -> Iterator[None]:
        for _ in range(num):
            turns.append(name)
            yield

    longer = [asyncio.create_task(encodings.run(noting("longer", 200))) for _ in range(4)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await encodings.run(noting("shorter", 3))  # type: ignore[arg-type]
    assert not any(each.done() for each in longer)
    await asyncio.gather(*longer)
    assert turns.count("shorter") == 3
    assert turns[-1] == "longer"


async def test_the_event_loop_turns_while_a_long_text_is_encoded(encodings: Encodings, demo: Tokenizer) -> None:
    text = "the quick brown fox, " * 20_000
    encoding = asyncio.create_task(encodings.run(demo.encode_steps(text)))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert await encoding == finished(demo.encode_steps(text))
    assert num_turns > 10


async def test_what_steps_raise_is_raised(encodings: Encodings, demo: Tokenizer) -> None:
    with pytest.raises(ValueError, match="at character 9000"):
        await encodings.run(demo.encode_steps("a" * 9000 + "\ud800"))
