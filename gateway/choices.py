"""The generations of one HTTP request: started together or not at all, read as one stream, ended together."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from gateway.delta import Delta, Whole
from gateway.engine import Engine, Generation, GenerationRequest, Overloaded, Prompt, Refused, Unavailable
from gateway.errors import RequestError, overloaded, unavailable
from gateway.metrics import Arrival, Metrics, Observation
from gateway.openai_responses import PromptTokensDetails, Usage
from gateway.openai_types import CommonRequest, stop_strings
from gateway.sampling import for_choice
from protocol.messages import excess_of_prompt_logprobs
from protocol.sampling import Sampling


class Choices:
    """What `start` returns: as many choices are admitted as may run at once. Iterating gives (choice, Delta), as they
    come, and starts one of the others whenever a choice has ended.

    Iterating raises RequestError if one of them fails; `close`, idempotent, aborts what still runs.
    """

    def __init__(
        self,
        engine: Engine,
        generations: Sequence[Generation],
        requests: Sequence[GenerationRequest],
        observations: Sequence[Observation],
        n: int,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._generations = dict(enumerate(generations))  # by choice; a choice that waits has none
        self._is_closed = False
        self._observations = observations
        # The prompt of n choices counts once, and so does what the first of them found in the cache.
        self._counted = range(0, len(requests), n)
        self._num_prompt_tokens = sum(len(requests[index].prompt.token_ids) for index in self._counted)
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0

    @classmethod
    async def start(
        cls, engine: Engine, requests: Sequence[GenerationRequest], *, n: int, metrics: Metrics, arrived_s: float
    ) -> "Choices":
        """Return the choices of `requests`, n a prompt, once as many choices as may run together are admitted.

        `arrived_s` is a `perf_counter`. Raises RequestError if one is not (429, 503 or 400): then none is left running.
        """
        try:
            generations = await _start_all(engine, requests[: _num_places(engine)])
        except Overloaded as error:
            raise overloaded(error.reason, error.retry_after_s) from None
        except Unavailable as error:
            raise unavailable(error.reason) from None
        except Refused as error:
            raise RequestError(error.reason, code="refused") from None
        for _ in range(0, len(requests), n):
            metrics.params_n.observe(n)
        arrival = Arrival(metrics, arrived_s)
        observations = [
            Observation(metrics, arrival, len(request.prompt.token_ids), request.sampling.max_tokens)
            for request in requests
        ]
        return cls(engine, generations, requests, observations, n)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        if len(self._requests) == 1:
            async for delta in self._generations[0]:
                self._count(0, delta)
                yield 0, delta
            return
        async for index, delta in self._merged():
            self._count(index, delta)
            yield index, delta

    async def _merged(self) -> AsyncIterator[tuple[int, Delta]]:
        pending = {asyncio.ensure_future(anext(each)): index for index, each in self._generations.items()}
        num_begun = len(pending)
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=pending.__getitem__):
                    index, delta = pending.pop(task), task.result()
                    if not delta.finish_reason:
                        pending[asyncio.ensure_future(anext(self._generations[index]))] = index
                    elif num_begun < len(self._requests):
                        pending[asyncio.ensure_future(self._begin(num_begun))] = num_begun
                        num_begun += 1
                    yield index, delta
        finally:
            for task in pending:
                task.cancel()

    async def _begin(self, index: int) -> Delta:
        """Start one more choice and return its first Delta."""
        try:
            generation = await self._engine.start_patiently(self._requests[index])
        except Refused as error:
            raise RequestError(error.reason, code="refused") from None
        self._generations[index] = generation
        if self._is_closed:
            generation.close()
            raise asyncio.CancelledError
        return await anext(generation)

    def _count(self, index: int, delta: Delta) -> None:
        """Take what a choice gives into account. Raises RequestError if it failed."""
        self._observations[index].see(delta)
        self._num_completion_tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return
        if index in self._counted:
            self._num_cached_tokens += delta.num_cached_tokens
        if delta.finish_reason in ("error", "abort"):
            message = delta.error or "the generation was ended by the server"
            raise RequestError(message, status=500, code="generation_failed")

    async def collect(self) -> list[Whole]:
        """Return all choices, complete."""
        wholes = [Whole() for _ in self._requests]
        async for index, delta in self:
            wholes[index].add(delta)
        return wholes

    def usage(self) -> Usage:
        """Return what was used, once every choice has ended."""
        num_tokens = self._num_prompt_tokens + self._num_completion_tokens
        details = PromptTokensDetails(self._num_cached_tokens)
        return Usage(self._num_prompt_tokens, self._num_completion_tokens, num_tokens, details)

    def close(self) -> None:
        self._is_closed = True
        for generation in self._generations.values():
            generation.close()
        for observation in self._observations:
            observation.end("abort")


def generation_requests(
    body: CommonRequest,
    response_id: str,
    tenant: str,
    prompts: Sequence[list[int]],
    samplings: Sequence[Sampling],
) -> list[GenerationRequest]:
    """Return what to start for the choices of a request, n a prompt, in the order of their indexes.

    Raises RequestError for log probabilities of a prompt that are too much for one answer.
    """
    for token_ids, sampling in zip(prompts, samplings, strict=True):
        if excess := excess_of_prompt_logprobs(len(token_ids), sampling.num_prompt_logprobs):
            raise RequestError(excess, param="logprobs", code="invalid_value")
    n = body.n or 1
    shared = [Prompt.of(f"{response_id}-{index}", token_ids) for index, token_ids in enumerate(prompts)]
    return [
        GenerationRequest(
            request_id=f"{response_id}-{index * n + choice}",
            prompt=prompt,
            sampling=for_choice(sampling, choice),
            stop=stop_strings(body),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            tenant=tenant,
            cache_salt=body.cache_salt or "",
            body_id=response_id,
        )
        for index, (prompt, sampling) in enumerate(zip(shared, samplings, strict=True))
        for choice in range(n)
    ]


async def _start_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    starting = [asyncio.create_task(engine.start(request)) for request in requests]
    try:
        return list(await asyncio.gather(*starting))
    except BaseException:
        for task in starting:
            task.cancel()
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(outcome, Generation):
                outcome.close()
        raise


def _num_places(engine: Engine) -> int:
    """Return how many choices of one request may run at once: a quarter of a step is left to others."""
    return max(1, engine.ready.max_num_seqs * 3 // 4) if engine.ready else 1
