"""The generations of one request: they start together or not at all, are read as one stream, and end together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from octavo.gateway.asking.events import Answer, Event
from octavo.gateway.link.engine import Engine, Generation, GenerationRequest, Overloaded, Refused, Unavailable
from octavo.gateway.parsing.parts import Content, PlainText, Splitter, ToolCall
from octavo.gateway.request_error import RequestError, overloaded, unavailable
from octavo.gateway.text.delta import Delta, merged


class Observer(Protocol):
    """Counts one generation for the metrics."""

    def see(self, delta: Delta) -> None: ...
    def end(self, reason: str) -> None: ...


# Called with the requests and n as soon as those that run first are admitted; returns an observer for each request.
Observe = Callable[[Sequence[GenerationRequest], int], Sequence[Observer]]


class UsedTokens(NamedTuple):
    """The tokens that a request used. A prompt with n choices counts once, with `cached` of its first choice."""

    prompt: int
    cached: int  # prompt tokens that the KV cache had already
    completion: int
    reasoning: int  # of the completion


class Choices:
    """The choices of one request; as many as may run at once are admitted. Iterating gives events in the order in
    which they arrive, and starts a waiting choice whenever another choice has ended.

    Iterating raises RequestError if a choice fails. `close` is idempotent and aborts the choices that still run.
    """

    def __init__(
        self,
        engine: Engine,
        generations: Sequence[Generation],
        requests: Sequence[GenerationRequest],
        observers: Sequence[Observer],
        n: int,
        splitters: Sequence[Splitter],
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._generations = dict(enumerate(generations))  # by choice; a waiting choice is missing
        self._is_closed = False
        self._observers = observers
        self._splitters = splitters
        self._held: dict[int, Delta] = {}  # by choice: output of which the splitter gave no part yet
        self._calling: set[int] = set()  # choices with tool calls
        self._counted = range(0, len(requests), n)
        self._num_prompt_tokens = sum(len(requests[index].prompt.token_ids) for index in self._counted)
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0

    @classmethod
    async def start(
        cls,
        engine: Engine,
        requests: Sequence[GenerationRequest],
        *,
        n: int,
        observe: Observe,
        splitters: Sequence[Splitter] = (),
    ) -> "Choices":
        """Return the choices of `requests`, n per prompt, as soon as as many as may run at once are admitted.

        `splitters` has one for each request; without any, all text is content.

        Raises RequestError (429, 503 or 400) if one of these choices is not admitted; then the others are aborted.
        """
        try:
            generations = await _start_all(engine, requests[: _num_places(engine)])
        except Overloaded as error:
            raise overloaded(error.reason, error.retry_after_s) from None
        except Unavailable as error:
            raise unavailable(error.reason) from None
        except Refused as error:
            raise RequestError(error.reason, code="refused") from None
        return cls(engine, generations, requests, observe(requests, n), n, splitters or [PlainText()] * len(requests))

    async def __aiter__(self) -> AsyncIterator[Event]:
        if len(self._requests) == 1:
            async for delta in self._generations[0]:
                if event := self._event(0, delta):
                    yield event
            return
        async for index, delta in self._merged():
            if event := self._event(index, delta):
                yield event

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

    def _event(self, index: int, delta: Delta) -> Event | None:
        """Count the tokens of `delta` and return its event. Raises RequestError if the choice failed.

        Output without a part waits for the next part: then there is None.
        """
        self._observers[index].see(delta)
        self._num_completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            if index in self._counted:
                self._num_cached_tokens += delta.num_cached_tokens
            if delta.finish_reason in ("error", "abort"):
                message = delta.error or "the generation was ended by the server"
                raise RequestError(message, status=500, code="generation_failed")
        parts = self._splitters[index].split(delta)
        if len(parts) == 1 and type(parts[0]) is Content and delta.finish_reason is None and not self._held:
            return Event(index, parts, delta)  # what most tokens are
        if held := self._held.pop(index, None):
            delta = merged(held, delta)
        if not parts and delta.finish_reason is None and delta.prompt_logprobs is None:
            self._held[index] = delta
            return None
        if any(type(part) is ToolCall for part in parts):
            self._calling.add(index)
        ends_with_calls = delta.finish_reason == "stop" and index in self._calling
        return Event(index, parts, delta, "tool_calls" if ends_with_calls else delta.finish_reason)

    async def collect(self) -> list[Answer]:
        """Return the complete answers of all choices."""
        answers = [Answer() for _ in self._requests]
        async for event in self:
            answers[event.choice].add(event)
        return answers

    def used_tokens(self) -> UsedTokens:
        """Return how many tokens were used. Call it after every choice has ended."""
        num_reasoning_tokens = sum(splitter.num_reasoning_tokens for splitter in self._splitters)
        return UsedTokens(
            self._num_prompt_tokens, self._num_cached_tokens, self._num_completion_tokens, num_reasoning_tokens
        )

    def close(self) -> None:
        self._is_closed = True
        for generation in self._generations.values():
            generation.close()
        for observer in self._observers:
            observer.end("abort")


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
    """Return how many choices of one request may run at once: a quarter of each step is left to other requests."""
    return max(1, engine.ready.max_num_seqs * 3 // 4) if engine.ready else 1
