import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from octavo.gateway.link.client import SchedulerClient
from octavo.gateway.link.engine import (
    Delta,
    EncodedPrompt,
    Engine,
    Generation,
    GenerationRequest,
    Overloaded,
    Refused,
    Unavailable,
)
from octavo.gateway.text.tokenizer import Tokenizer
from octavo.protocol.messages import Abort, Admitted, Hello, Outputs, Rejected, Stats, Submit, unpack_ids
from octavo.protocol.sampling import Sampling
from tests.fakes.fake_scheduler import FakeScheduler, Faults, LoseFirst, running


@pytest.fixture(scope="module")
def tokenizer(byte_level: Tokenizer) -> Tokenizer:
    return byte_level


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own paths can be too long for a socket
        yield f"ipc://{Path(directory)}/s"


def reply(submit: Submit) -> list[int]:
    """Return one-byte tokens that depend on the seed and their position alone."""
    seed = submit.sampling.seed
    return [5 + random.Random(seed * 1009 + i).randrange(30, 90) for i in range(submit.sampling.max_tokens)]


@asynccontextmanager
async def connected(
    tokenizer: Tokenizer, *schedulers: FakeScheduler, peer_timeout_s: float = 10.0
) -> AsyncIterator[Engine]:
    """Run `schedulers`, and an engine that knows that they are there."""
    async with AsyncExitStack() as stack:
        for scheduler in schedulers:
            await stack.enter_async_context(running(scheduler))
        clients = [SchedulerClient(each.address, peer_timeout_s=peer_timeout_s) for each in schedulers]
        engine = await stack.enter_async_context(Engine(clients, tokenizer))
        await until(lambda: all(client.healthy for client in clients))
        yield engine


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def request(name: str = "r", *, num_tokens: int = 20, seed: int = 1, stop: tuple[str, ...] = ()) -> GenerationRequest:
    return GenerationRequest(name, EncodedPrompt.of(name, [5, 6, 7]), Sampling(max_tokens=num_tokens, seed=seed), stop)


def expected(num_tokens: int = 20, seed: int = 1) -> list[int]:
    return reply(Submit("", 0, b"", Sampling(max_tokens=num_tokens, seed=seed)))


async def rest(generation: Generation) -> list[Delta]:
    async with asyncio.timeout(20):
        return [delta async for delta in generation]


def token_ids(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def finishes(deltas: list[Delta]) -> list[str]:
    return [delta.finish_reason for delta in deltas if delta.finish_reason]


async def test_a_generation_streams_text_and_tokens_and_ends_once(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        deltas = await rest(await engine.start(request()))
        assert token_ids(deltas) == expected()
        assert "".join(delta.text for delta in deltas) == tokenizer.decode(expected())
        assert finishes(deltas) == ["length"]
        assert deltas[-1].finish_reason == "length"
        await until(lambda: not scheduler.records)
    assert scheduler.messages(Abort) == []


@pytest.mark.parametrize("seed", range(4))
async def test_every_token_arrives_once_over_a_bad_network(tokenizer: Tokenizer, address: str, seed: int) -> None:
    faults = Faults(seed, drop=0.15, duplicate=0.2, delay=0.3)
    scheduler = FakeScheduler(address, reply=reply, tokens_per_step=1 + seed % 3, faults=faults)
    async with connected(tokenizer, scheduler) as engine:

        async def generate(index: int) -> list[Delta]:
            return await rest(await engine.start(request(f"r{index}", num_tokens=10 + index, seed=index)))

        for index, deltas in enumerate(await asyncio.gather(*map(generate, range(16)))):
            assert token_ids(deltas) == expected(10 + index, index)
            assert finishes(deltas) == ["length"]
        await until(lambda: not scheduler.records)


@pytest.mark.parametrize("kind", [Submit, Admitted, Outputs, Hello])
async def test_one_lost_message_is_made_up_for(tokenizer: Tokenizer, address: str, kind: type) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        scheduler.faults = lost = LoseFirst(kind)
        scheduler.paused = kind is not Outputs  # so that nothing but a repetition can bring Admitted
        generation = await engine.start(request())
        scheduler.paused = False
        assert token_ids(await rest(generation)) == expected()
        await until(lambda: lost.lost)


async def test_a_lost_rejection_is_repeated(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address)
    scheduler.rejection = lambda submit: Rejected(submit.request_id, "too long for the pool")
    async with connected(tokenizer, scheduler) as engine:
        scheduler.faults = LoseFirst(Rejected)
        with pytest.raises(Refused, match="too long for the pool"):
            await engine.start(request())
        assert len(scheduler.messages(Submit)) >= 2


async def test_a_full_queue_is_an_overload_with_its_wait(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address)
    scheduler.rejection = lambda submit: Rejected(submit.request_id, "1024 requests wait", 2.5)
    async with connected(tokenizer, scheduler) as engine:
        with pytest.raises(Overloaded, match="1024 requests wait") as caught:
            await engine.start(request())
        assert caught.value.retry_after_s == 2.5


@pytest.mark.parametrize("tells_incarnation", [True, False])
async def test_a_scheduler_that_forgot_goes_on_with_the_tokens_that_the_gateway_has(
    tokenizer: Tokenizer, address: str, tells_incarnation: bool
) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        async with asyncio.timeout(20):
            generation = await engine.start(request(num_tokens=400))
            begun = [await anext(generation) for _ in range(5)]
        if tells_incarnation:
            scheduler.restart()
        else:
            scheduler.records.clear()  # Unknown says so
        deltas = [*begun, *await rest(generation)]
        assert token_ids(deltas) == expected(400)
        assert finishes(deltas) == ["length"]
    first, *_, again = scheduler.messages(Submit)
    known = list(unpack_ids(again.output_token_ids))
    assert len(known) >= 5
    assert known == expected(400)[: len(known)]
    assert (again.prompt_token_ids, again.sampling) == (first.prompt_token_ids, first.sampling)


async def test_a_stream_goes_on_at_another_process_on_the_same_address(tokenizer: Tokenizer, address: str) -> None:
    async with AsyncExitStack() as stack:
        async with running(FakeScheduler(address, reply=reply)):
            engine = await stack.enter_async_context(Engine([SchedulerClient(address)], tokenizer))
            await until(lambda: engine.healthy)
            generation = await engine.start(request(num_tokens=200))
            begun = [await anext(generation)]
        async with running(FakeScheduler(address, reply=reply)) as second:
            deltas = [*begun, *await rest(generation)]
        assert token_ids(deltas) == expected(200)
        assert finishes(deltas) == ["length"]
        assert {submit.request_id for submit in second.messages(Submit)} == {"r"}


async def test_a_restarted_scheduler_that_is_full_is_asked_again(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        scheduler.paused = True
        generation = await engine.start(request())
        answers = iter([Rejected("r", "full", 0.01), None])
        scheduler.rejection = lambda submit: next(answers, None)
        scheduler.restart()
        scheduler.paused = False
        deltas = await rest(generation)
        assert token_ids(deltas) == expected()
        assert next(answers, "used up") == "used up"


async def test_another_model_ends_what_was_in_flight(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        scheduler.paused = True
        generation = await engine.start(request())
        scheduler.restart(model_fingerprint="another")
        [delta] = await rest(generation)
        assert (delta.finish_reason, delta.error) == ("error", "the model was replaced while this request ran")
        assert all(submit.output_token_ids == b"" for submit in scheduler.messages(Submit))
        scheduler.paused = False
        assert token_ids(await rest(await engine.start(request("next")))) == expected()


async def test_a_frozen_scheduler_is_unhealthy_and_its_streams_wait(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler, peer_timeout_s=1.0) as engine:
        scheduler.paused = True
        generation = await engine.start(request())
        scheduler.frozen = True
        await until(lambda: not engine.healthy)
        assert engine.ready is None
        with pytest.raises(Unavailable, match="no scheduler answers"):
            await engine.start(request("refused"))
        scheduler.frozen = scheduler.paused = False
        assert token_ids(await rest(generation)) == expected()
        assert engine.healthy


async def test_a_request_that_waits_for_admission_ends_when_the_scheduler_falls_silent(
    tokenizer: Tokenizer, address: str
) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler, peer_timeout_s=0.7) as engine:
        scheduler.frozen = True
        with pytest.raises(Unavailable, match="does not answer"):
            await engine.start(request())
        scheduler.frozen = False
        await until(lambda: engine.healthy and not scheduler.records)


async def test_without_an_executor_nothing_is_started(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        scheduler.can_progress = False
        await until(lambda: not engine.healthy)
        assert engine.ready is not None
        with pytest.raises(Unavailable, match="not ready"):
            await engine.start(request())


async def test_without_a_scheduler_starting_fails_at_once_and_works_when_it_comes(
    tokenizer: Tokenizer, address: str
) -> None:
    async with Engine([SchedulerClient(address)], tokenizer) as engine:
        assert not engine.healthy
        assert engine.ready is None
        assert engine.reports == {}
        with pytest.raises(Unavailable):
            await engine.start(request())
        async with running(FakeScheduler(address, reply=reply)):
            await until(lambda: engine.healthy)
            assert token_ids(await rest(await engine.start(request()))) == expected()


async def test_a_scheduler_that_comes_late_gets_no_stale_news(tokenizer: Tokenizer, address: str) -> None:
    async with Engine([SchedulerClient(address)], tokenizer) as engine:
        await asyncio.sleep(0.35)  # some Hellos find nobody
        async with running(FakeScheduler(address, reply=reply)) as scheduler:
            await until(lambda: engine.healthy)
            [hello] = await scheduler.wait_for(Hello)
            assert hello.hello_seq > 1


async def test_closing_aborts_once_and_ends_the_reader(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        scheduler.paused = True
        generation = await engine.start(request())
        reader = asyncio.create_task(rest(generation))
        await asyncio.sleep(0)
        generation.close()
        generation.close()
        assert await reader == []
        await until(lambda: not scheduler.records)
        hellos = len(scheduler.messages(Hello))
        await scheduler.wait_for(Hello, hellos + 1)
        assert scheduler.messages(Abort) == [Abort("r")]
        assert scheduler.messages(Hello)[-1].in_flight == []


async def test_an_abort_that_is_lost_is_made_up_for_by_hello(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        scheduler.paused = True
        generation = await engine.start(request())
        scheduler.faults = LoseFirst(Abort)
        generation.close()
        await until(lambda: not scheduler.records)


async def test_cancelling_a_start_aborts(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        scheduler.faults = LoseFirst(Admitted)
        scheduler.paused = True
        starting = asyncio.create_task(engine.start(request()))
        await scheduler.wait_for(Submit)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await scheduler.wait_for(Abort) == [Abort("r")]


async def test_a_stop_string_ends_the_request_here_and_there(tokenizer: Tokenizer, address: str) -> None:
    ids = [token for byte in b"abSTOPcdefgh" for token in tokenizer.encode_now(chr(byte))]
    scheduler = FakeScheduler(address, reply=lambda submit: ids * 10)
    async with connected(tokenizer, scheduler) as engine:
        deltas = await rest(await engine.start(request(num_tokens=120, stop=("STOP", "zzz"))))
        assert "".join(delta.text for delta in deltas) == "ab"
        assert token_ids(deltas) == ids[:6]
        assert (finishes(deltas), deltas[-1].stop_reason) == (["stop"], "STOP")
        assert await scheduler.wait_for(Abort) == [Abort("r", stopped=True)]


async def test_a_failure_ends_the_stream_with_its_reason(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        scheduler.paused = True
        generation = await engine.start(request())
        scheduler.fail("the sequence no longer fits")
        scheduler.paused = False
        [delta] = await rest(generation)
        assert (delta.finish_reason, delta.error) == ("error", "the sequence no longer fits")


async def test_logprobs_and_cached_tokens_arrive(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply, tokens_per_step=4)
    scheduler.num_cached_tokens = 2
    sampling = Sampling(max_tokens=20, seed=1, num_logprobs=2, num_prompt_logprobs=1)
    async with connected(tokenizer, scheduler) as engine:
        deltas = await rest(await engine.start(GenerationRequest("r", EncodedPrompt.of("r", [5, 6, 7]), sampling)))
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs or []]
    assert [logprob.token_id for logprob in logprobs] == expected()
    assert {len(logprob.top) for logprob in logprobs} == {2}
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert deltas[-1].num_cached_tokens == 2


async def test_frames_that_are_no_messages_are_dropped(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with connected(tokenizer, scheduler) as engine:
        for frame in (b"", b"\x80\x04N.", b"\xff" * 100):
            scheduler.send_frame(frame)
        assert token_ids(await rest(await engine.start(request()))) == expected()


async def test_requests_go_to_the_scheduler_with_the_least_to_do(tokenizer: Tokenizer, address: str) -> None:
    schedulers = [FakeScheduler(address + name, reply=reply) for name in "ab"]
    async with connected(tokenizer, *schedulers, peer_timeout_s=1.0) as engine:
        for scheduler in schedulers:
            scheduler.paused = True
        generations = [await engine.start(request(f"r{index}")) for index in range(4)]
        assert [len(scheduler.records) for scheduler in schedulers] == [2, 2]
        schedulers[0].frozen = True
        await until(lambda: not engine._clients[0].healthy)
        generations.append(await engine.start(request("r4")))
        assert [len(scheduler.records) for scheduler in schedulers] == [2, 3]
        for generation in generations:
            generation.close()


async def test_reports_are_the_latest_of_each_scheduler(tokenizer: Tokenizer, address: str) -> None:
    schedulers = [FakeScheduler(address + name) for name in "abc"]
    async with connected(tokenizer, *schedulers) as engine:
        for number in (0, 2):
            schedulers[number].stats = Stats(schedulers[number].incarnation, number, *range(10))
        await until(
            lambda: (
                {key: stats for key, (_, stats) in engine.reports.items()}
                == {number: schedulers[number].stats for number in (0, 2)}
            )
        )
        ready, _ = engine.reports[2]
        assert ready.scheduler_incarnation == schedulers[2].incarnation


async def test_shutting_down_ends_what_is_in_flight(tokenizer: Tokenizer, address: str) -> None:
    scheduler = FakeScheduler(address, reply=reply)
    async with running(scheduler):
        async with Engine([SchedulerClient(address)], tokenizer) as engine:
            await until(lambda: engine.healthy)
            scheduler.paused = True
            generation = await engine.start(request())
        [delta] = await rest(generation)
        assert (delta.finish_reason, delta.error) == ("error", "the gateway is shutting down")
        await scheduler.wait_for(Abort)
