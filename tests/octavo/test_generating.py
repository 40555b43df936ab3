"""Many requests over a scheduler that refuses, fails or is away: a FakeScheduler behind a real socket."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from octavo.errors import GenerationFailedError
from octavo.gateway.link.client import SchedulerClient
from octavo.gateway.link.engine import Engine
from octavo.gateway.text.model_files import ModelFiles, read_model_files
from octavo.protocol.config import Config
from octavo.protocol.messages import Abort, Hello, Rejected, Submit
from octavo.python.generating import Generating
from octavo.python.outputs import RequestOutput
from octavo.python.preparation import Preparation, PreparedRequest
from octavo.python.sampling_params import SamplingParams
from tests.fakes.fake_scheduler import FakeScheduler, computed_reply, running
from tests.fakes.model_directories import text_ids, write_tiny_model

NUM_PLACES = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return read_model_files(Config(model=str(write_tiny_model(tmp_path_factory.mktemp("tiny")))))


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own paths can be too long for a socket
        yield f"ipc://{Path(directory)}/s"


class Setup:
    """A Generating over `scheduler`, and what makes requests for it."""

    def __init__(self, engine: Engine, files: ModelFiles) -> None:
        assert engine.ready is not None
        self.engine = engine
        self.generating = Generating(engine, files.tokenizer, NUM_PLACES)
        self.preparation = Preparation(files, engine.ready, seed=0)
        self.num_finished = 0

    def requests(self, *texts: str, **fields: object) -> list[PreparedRequest]:
        return [self.preparation.of_prompt(text, SamplingParams(**fields)) for text in texts]

    async def complete(self, requests: list[PreparedRequest]) -> list[RequestOutput]:
        async with asyncio.timeout(20):
            return await self.generating.complete(requests, self._count)

    def _count(self) -> None:
        self.num_finished += 1


@asynccontextmanager
async def connected(scheduler: FakeScheduler, files: ModelFiles) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(scheduler))
        engine = await stack.enter_async_context(Engine([SchedulerClient(scheduler.address)], files.tokenizer))
        await until(lambda: engine.healthy)
        yield Setup(engine, files)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_no_more_are_under_way_than_there_are_places(files: ModelFiles, address: str) -> None:
    scheduler = FakeScheduler(address)
    scheduler.paused = True
    async with connected(scheduler, files) as setup:
        requests = setup.requests(*map(str, range(10)), max_tokens=2, ignore_eos=True)
        running = asyncio.create_task(setup.complete(requests))
        await scheduler.wait_for_requests(Submit, NUM_PLACES)
        await scheduler.wait_for(Hello, len(scheduler.messages(Hello)) + 2)  # which others would have come before
        assert len({submit.request_id for submit in scheduler.messages(Submit)}) == NUM_PLACES
        scheduler.paused = False
        outputs = await running
    assert [output.prompt for output in outputs] == [str(index) for index in range(10)]
    assert all(len(output.outputs[0].token_ids) == 2 and output.finished for output in outputs)
    assert setup.num_finished == 10


async def test_a_full_queue_is_asked_again(files: ModelFiles, address: str) -> None:
    scheduler = FakeScheduler(address)
    num_refused = 0

    def refuse_twice(submit: Submit) -> Rejected | None:
        nonlocal num_refused
        num_refused += 1
        return Rejected(submit.request_id, "the queue is full", 1.0) if num_refused < 3 else None

    scheduler.rejection = refuse_twice
    async with connected(scheduler, files) as setup:
        [output] = await setup.complete(setup.requests("a", max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    assert num_refused == 3


async def test_a_scheduler_that_cannot_progress_is_waited_for(files: ModelFiles, address: str) -> None:
    scheduler = FakeScheduler(address)
    async with connected(scheduler, files) as setup:
        scheduler.can_progress = False
        await until(lambda: not setup.engine.healthy)
        running = asyncio.create_task(setup.complete(setup.requests("a", max_tokens=3, ignore_eos=True)))
        await scheduler.wait_for(Hello, len(scheduler.messages(Hello)) + 2)
        assert not running.done()
        scheduler.can_progress = True
        assert len((await running)[0].outputs[0].token_ids) == 3


async def test_what_is_never_taken_is_a_value_error(files: ModelFiles, address: str) -> None:
    scheduler = FakeScheduler(address)
    scheduler.rejection = lambda submit: Rejected(submit.request_id, "too long for the KV cache")
    async with connected(scheduler, files) as setup:
        with pytest.raises(ValueError, match="too long for the KV cache"):
            await setup.complete(setup.requests("a", "b"))


async def test_one_that_fails_ends_the_others(files: ModelFiles, address: str) -> None:
    scheduler = FakeScheduler(address)
    scheduler.paused = True
    async with connected(scheduler, files) as setup:
        running = asyncio.create_task(setup.complete(setup.requests("a", "b", "c", "d")))
        await scheduler.wait_for_requests(Submit, NUM_PLACES)
        scheduler.paused = False
        scheduler.fail("it ended the executor twice")
        with pytest.raises(GenerationFailedError, match="it ended the executor twice"):
            await running
        [output] = await setup.complete(setup.requests("e", max_tokens=1, ignore_eos=True))
        assert output.finished


async def test_a_cancelled_call_aborts_what_runs_and_gives_its_places_back(files: ModelFiles, address: str) -> None:
    scheduler = FakeScheduler(address)
    scheduler.paused = True
    async with connected(scheduler, files) as setup:
        running = asyncio.create_task(setup.complete(setup.requests("a", "b", "c", "d")))
        await scheduler.wait_for_requests(Submit, NUM_PLACES)
        running.cancel()
        await scheduler.wait_for_requests(Abort, NUM_PLACES)
        scheduler.paused = False
        outputs = await setup.complete(setup.requests("e", "f", "g", "h", max_tokens=1, ignore_eos=True))
        assert [output.prompt for output in outputs] == ["e", "f", "g", "h"]


async def test_log_probabilities_have_vllms_shape(files: ModelFiles, address: str) -> None:
    scheduler = FakeScheduler(address)
    scheduler.num_cached_tokens = 1
    async with connected(scheduler, files) as setup:
        requests = setup.requests("ab", max_tokens=2, logprobs=2, prompt_logprobs=1, n=2, ignore_eos=True)
        [output] = await setup.complete(requests)
    assert [answer.index for answer in output.outputs] == [0, 1]
    assert output.num_cached_tokens == 1
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert output.prompt_logprobs is not None
    submit = scheduler.messages(Submit)[0]
    assert answer.token_ids == computed_reply(submit)
    assert [next(iter(alternatives)) for alternatives in answer.logprobs] == answer.token_ids
    own = [alternatives[token_id] for alternatives, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(token.logprob for token in own))
    assert [token.decoded_token for token in own] == [files.tokenizer.token_text(each) for each in answer.token_ids]
    assert all(len(alternatives) in (2, 3) for alternatives in answer.logprobs)
    assert output.prompt_logprobs[0] is None
    assert [next(iter(each)) for each in output.prompt_logprobs[1:] if each] == text_ids("b")


async def test_without_log_probabilities_there_are_none(files: ModelFiles, address: str) -> None:
    async with connected(FakeScheduler(address), files) as setup:
        [output] = await setup.complete(setup.requests("a", max_tokens=2))
    assert (output.prompt_logprobs, output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None,) * 3
