"""The routes that generate: a door decodes the body and renders the answer."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.gateway.asking.asked import Asked
from octavo.gateway.asking.choices import Choices
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.asking.prepare import prepare, prepare_prompts
from octavo.gateway.http.door import ArrivedRequest, Door, route_through
from octavo.gateway.http.service import new_response_id
from octavo.gateway.http.sse import EventStream, error_event
from octavo.gateway.measuring.metrics import observers
from octavo.gateway.openai.answer_types import system_fingerprint
from octavo.gateway.openai.answers import Heading
from octavo.gateway.openai.chat import ChatRenderer, ask_chat
from octavo.gateway.openai.completions import CompletionRenderer, ask_completion
from octavo.gateway.openai.types import GeneratingRequest, chat_decoder, completion_decoder
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.tokenizer import Tokenizer

Body = TypeVar("Body", bound=GeneratingRequest)


class Writer(Protocol):
    """Writes the answer to one request."""

    async def whole(self, choices: Choices) -> bytes: ...

    def chunks(self, choices: Choices) -> AsyncIterator[bytes]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingDoor(Door[Body, Asked]):
    """A door with a way out: events become the answer."""

    renderer: Callable[[Body, Heading, Sequence[PreparedPrompt], Tokenizer], Writer]
    id_prefix: str
    error_event: Callable[[RequestError], bytes] = error_event


CHAT = GeneratingDoor(
    name="chat",
    decoder=chat_decoder,
    ask=ask_chat,
    prepare=prepare_prompts,
    renderer=ChatRenderer,
    id_prefix="chatcmpl",
)
COMPLETIONS = GeneratingDoor(
    name="completions",
    decoder=completion_decoder,
    ask=ask_completion,
    prepare=prepare_prompts,
    renderer=CompletionRenderer,
    id_prefix="cmpl",
)


def generating_route(door: GeneratingDoor[Body]) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that answers requests through `door`."""

    async def answer(body: Body, asked: Asked, arrival: ArrivedRequest) -> Response:
        return await _generate(door, body, asked, arrival)

    return route_through(door, answer)


async def _generate(door: GeneratingDoor[Body], body: Body, asked: Asked, arrival: ArrivedRequest) -> Response:
    service = arrival.service
    model, ready = service.model_name(body.model), service.ready()
    response_id = new_response_id(door.id_prefix)
    prepared = await service.encodings.run(prepare(asked, service.model(ready), response_id, arrival.tenant))
    if prepared.grammar is not None:
        await service.grammar_checks.check_aside(prepared.grammar)
    body.forget_prompt()
    arrival.place.give_back()
    observe = partial(observers, service.metrics, arrival.arrived_s)
    choices = await Choices.start(
        service.engine, prepared.requests, n=asked.n, observe=observe, splitters=prepared.splitters
    )
    heading = Heading(
        id=f"{door.id_prefix}-{body.request_id}" if body.request_id else response_id,
        created=int(time.time()),
        model=model,
        system_fingerprint=system_fingerprint(ready),
    )
    prompts = [prepared.prompts[index // asked.n] for index in range(len(prepared.requests))]
    renderer = door.renderer(body, heading, prompts, service.files.tokenizer)
    if body.stream:
        return EventStream(renderer.chunks(choices), choices.close, service.keep_alive_s, door.error_event)
    try:
        return Response(await renderer.whole(choices), media_type="application/json")
    finally:
        choices.close()
