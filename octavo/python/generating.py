"""Runs prepared requests: as many at a time as a scheduler can hold, so that no request is refused."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

from octavo.errors import GenerationFailedError
from octavo.gateway.link.engine import Engine, Generation, GenerationRequest, Refused
from octavo.gateway.text.delta import Delta, Whole
from octavo.gateway.text.tokenizer import Tokenizer
from octavo.python.outputs import Collected, EmbeddingRequestOutput, RequestOutput, embedding_output, request_output
from octavo.python.preparation import PreparedRequest


class Generating:
    """Runs requests on `engine`, in its event loop, with at most `num_places` sequences running at a time."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, num_places: int) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._num_places = num_places
        self._places = asyncio.Semaphore(num_places)

    async def complete(
        self, requests: Sequence[PreparedRequest], when_finished: Callable[[], object]
    ) -> list[RequestOutput]:
        """Return the output of each request, in order; `when_finished` is called after each.

        Raises GenerationError or ValueError if one fails: the others are aborted.
        """
        answers = [collected(request, self._tokenizer) for request in requests]

        def taking(answer: Collected, its_answers: Sequence[Collected]) -> Callable[[Delta], None]:
            def take(delta: Delta) -> None:
                answer.add(delta)
                if delta.finish_reason and all(other.finish_reason for other in its_answers):
                    when_finished()

            return take

        work = [
            (sequence, taking(answer, its_answers))
            for request, its_answers in zip(requests, answers, strict=True)
            for sequence, answer in zip(request.sequences, its_answers, strict=True)
        ]
        await self._work_off(work)
        return [output_of(request, its_answers) for request, its_answers in zip(requests, answers, strict=True)]

    async def embed(
        self, requests: Sequence[PreparedRequest], when_finished: Callable[[], object]
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each request's prompt, in order; `when_finished` is called after each.

        Raises GenerationError or ValueError if one fails: the others are aborted.
        """
        wholes = [Whole() for _ in requests]

        def taking(whole: Whole) -> Callable[[Delta], None]:
            def take(delta: Delta) -> None:
                whole.add(delta)
                if delta.finish_reason:
                    when_finished()

            return take

        await self._work_off(
            [(request.sequences[0], taking(whole)) for request, whole in zip(requests, wholes, strict=True)]
        )
        return [
            embedding_output(request.request_id, request.prompt_token_ids, whole)
            for request, whole in zip(requests, wholes, strict=True)
        ]

    async def _work_off(self, work: Sequence[tuple[GenerationRequest, Callable[[Delta], None]]]) -> None:
        """Run each sequence of `work`, its Deltas going to the function beside it."""
        remaining = iter(work)

        async def work_off() -> None:
            for sequence, take in remaining:
                async for delta in self._deltas(sequence):
                    take(delta)

        with _first_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._num_places, len(work))):
                    group.create_task(work_off())

    async def deliver(self, request: PreparedRequest, deliver: Callable[[tuple[int, Delta]], object]) -> None:
        """Pass each Delta of `request`, with the index of its sequence, to `deliver` as it comes.

        Raises GenerationError or ValueError if one fails: the others are aborted.
        """

        async def pass_on(index: int, sequence: GenerationRequest) -> None:
            async for delta in self._deltas(sequence):
                deliver((index, delta))

        with _first_error():
            async with asyncio.TaskGroup() as group:
                for index, sequence in enumerate(request.sequences):
                    group.create_task(pass_on(index, sequence))

    async def _deltas(self, sequence: GenerationRequest) -> AsyncIterator[Delta]:
        async with self._places, await self._start(sequence) as generation:
            async for delta in generation:
                if delta.finish_reason in ("error", "abort"):
                    raise GenerationFailedError(delta.error or "the generation was ended by the engine")
                yield delta

    async def _start(self, sequence: GenerationRequest) -> Generation:
        """Return the generation once the scheduler has admitted it. Raises ValueError if the scheduler refuses it."""
        try:
            return await self._engine.start_patiently(sequence)
        except Refused as error:
            raise ValueError(error.reason) from None


def collected(request: PreparedRequest, tokenizer: Tokenizer) -> list[Collected]:
    """Return an empty Collected for each answer to `request`."""
    return [Collected(index, tokenizer) for index in range(len(request.sequences))]


def output_of(request: PreparedRequest, answers: Sequence[Collected]) -> RequestOutput:
    """Return the answers to `request` so far."""
    return request_output(request.request_id, request.prompt, request.prompt_token_ids, answers)


@contextmanager
def _first_error() -> Iterator[None]:
    """Raise only the first error of a group."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
