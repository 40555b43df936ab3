"""The routes that generate: a body comes in through a door, and what was generated goes out through it."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.gateway.asking.asked import Asked
from octavo.gateway.asking.choices import Choices
from octavo.gateway.asking.prepare import PreparedPrompt, prepare
from octavo.gateway.http.body import decode_body, read_body
from octavo.gateway.http.body_limits import Place
from octavo.gateway.http.service import Service, new_response_id, unless_client_leaves
from octavo.gateway.http.sse import EventStream
from octavo.gateway.measuring.metrics import observers
from octavo.gateway.openai.answers import Heading, Renderer
from octavo.gateway.openai.chat import ChatRenderer, ask_chat
from octavo.gateway.openai.completions import CompletionRenderer, ask_completion
from octavo.gateway.openai.responses import system_fingerprint
from octavo.gateway.openai.types import ChatRequest, CompletionRequest, chat_decoder, completion_decoder
from octavo.gateway.text.tokenizer import Tokenizer

Body = TypeVar("Body", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class Door(Generic[Body]):
    """A dialect: its body becomes what is asked, and events become its answer."""

    decoder: "msgspec.json.Decoder[Body]"
    ask: Callable[[Body], Asked]
    renderer: Callable[[Body, Heading, Sequence[PreparedPrompt], Tokenizer], Renderer]
    id_prefix: str


CHAT = Door(chat_decoder, ask_chat, ChatRenderer, "chatcmpl")
COMPLETIONS = Door(completion_decoder, ask_completion, CompletionRenderer, "cmpl")

SHORT_BYTES = 64 << 10  # whatever is in it, to decode it takes a few milliseconds, and its tokens not many more


def route_of(door: Door[Body]) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that answers requests through `door`."""

    async def answer(request: Request) -> Response:
        arrived_s = time.perf_counter()
        service: Service = request.state.service
        with service.bodies.place() as place:
            pieces = await read_body(request, place)
            answering = _answer(service, door, pieces, request.state.tenant, place, arrived_s)
            return await unless_client_leaves(request, answering)

    return answer


async def _answer(
    service: Service, door: Door[Body], pieces: list[bytes], tenant: str, place: Place, arrived_s: float
) -> Response:
    body, asked = await _read(service, door, pieces, place.num_bytes)
    pieces.clear()
    model, ready = service.model_name(body.model), service.ready()
    response_id = new_response_id(door.id_prefix)
    prepared = await service.encodings.run(prepare(asked, service.model(ready), response_id, tenant))
    body.forget_prompt()
    place.give_back()
    observe = partial(observers, service.metrics, arrived_s)
    choices = await Choices.start(service.engine, prepared.requests, n=asked.n, observe=observe)
    heading = Heading(response_id, int(time.time()), model, system_fingerprint(ready))
    prompts = [prepared.prompts[index // asked.n] for index in range(len(prepared.requests))]
    renderer = door.renderer(body, heading, prompts, service.files.tokenizer)
    if body.stream:
        return EventStream(renderer.chunks(choices), choices.close, service.keep_alive_s)
    try:
        return Response(await renderer.whole(choices), media_type="application/json")
    finally:
        choices.close()


async def _read(service: Service, door: Door[Body], pieces: Sequence[bytes], num_bytes: int) -> tuple[Body, Asked]:
    """Return a body and what it asks for. A long one comes without its prompts, which are tokens already."""
    if num_bytes > SHORT_BYTES:
        body, prompts = await service.long_bodies.read(door.id_prefix, door.decoder, pieces, service.ready())
        return body, replace(door.ask(body), prompts=prompts)
    body = decode_body(door.decoder, b"".join(pieces))
    return body, door.ask(body)
