"""Encodings take turns, are bounded, and end when nobody waits for them any more."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from gateway.encodings import MAX_LONG, SHORT_CHARACTERS, Encodings
from gateway.request_error import RequestError
from gateway.steps import Steps, finished
from gateway.tokenizer import Tokenizer
from tests.fakes.counted_work import Work

LONG = SHORT_CHARACTERS + 1


@pytest_asyncio.fixture
async def encodings() -> AsyncIterator[Encodings]:
    made = Encodings()
    yield made
    made.close()


async def test_a_short_one_waits_for_no_long_one(encodings: Encodings) -> None:
    work = Work()
    long = [asyncio.create_task(encodings.run(work.steps(1), LONG)) for _ in range(MAX_LONG)]
    await work.begun(1)
    async with asyncio.timeout(20):
        assert await encodings.run(short(), SHORT_CHARACTERS) == "short"
    work.allow(MAX_LONG)
    assert await asyncio.gather(*long) == ["done"] * MAX_LONG


def short() -> Steps[str]:
    yield
    return "short"


async def test_beyond_the_bound_there_is_a_429_before_any_work(encodings: Encodings) -> None:
    work, refused = Work(), Work()
    long = [asyncio.create_task(encodings.run(work.steps(1), LONG)) for _ in range(MAX_LONG)]
    await work.begun(1)
    with pytest.raises(RequestError) as caught:
        await encodings.run(refused.steps(1), LONG)
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
    assert refused.num_begun == 0
    work.allow(MAX_LONG)
    await asyncio.gather(*long)
    assert await encodings.run(short(), LONG) == "short"


async def test_one_that_nobody_waits_for_ends_with_its_present_slice(encodings: Encodings) -> None:
    works = [Work() for _ in range(MAX_LONG)]
    tasks = [asyncio.create_task(encodings.run(work.steps(1000), LONG)) for work in works]
    await works[0].begun(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    begun = [work.num_begun for work in works]
    for work in works:
        work.allow(1000)
    assert await encodings.run(short(), LONG) == "short"  # behind what was queued
    assert [work.num_begun for work in works] == begun
    assert max(begun) == 1
    assert begun[-1] == 0  # it had not begun, and never will


async def test_long_ones_take_turns(encodings: Encodings) -> None:
    turns: list[str] = []

    def noting(name: str, num: int) -> Iterator[None]:
        for _ in range(num):
            turns.append(name)
            yield

    longer = asyncio.create_task(encodings.run(noting("longer", 200), LONG))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await encodings.run(noting("shorter", 3), LONG)  # type: ignore[arg-type]
    assert not longer.done()
    await longer
    assert turns.index("shorter") < turns.count("longer")
    assert turns[-1] == "longer"


async def test_the_event_loop_turns_while_a_long_text_is_encoded(encodings: Encodings, demo: Tokenizer) -> None:
    text = "the quick brown fox, " * 20_000
    encoding = asyncio.create_task(encodings.run(demo.encode_steps(text), len(text)))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert await encoding == finished(demo.encode_steps(text))
    assert num_turns > 10


async def test_what_steps_raise_is_raised(encodings: Encodings, demo: Tokenizer) -> None:
    with pytest.raises(ValueError, match="at character 9000"):
        await encodings.run(demo.encode_steps("a" * 9000 + "\ud800"), LONG)
