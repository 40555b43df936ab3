"""The routes that generate: a body comes in through a door, and what was generated goes out through it."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.asked import Asked
from gateway.body import decode_body, read_body
from gateway.body_limits import Place
from gateway.choices import Choices
from gateway.metrics import observers
from gateway.openai_answers import Heading, Renderer
from gateway.openai_chat import ChatRenderer, ask_chat
from gateway.openai_completions import CompletionRenderer, ask_completion
from gateway.openai_responses import system_fingerprint
from gateway.openai_types import ChatRequest, CompletionRequest, chat_decoder, completion_decoder
from gateway.prepare import PreparedPrompt, prepare
from gateway.service import Service, new_response_id, unless_client_leaves
from gateway.sse import EventStream
from gateway.tokenizer import Tokenizer

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


def route_of(door: Door[Body]) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that answers requests through `door`."""

    async def answer(request: Request) -> Response:
        arrived_s = time.perf_counter()
        service: Service = request.state.service
        with service.bodies.place() as place:
            body = decode_body(door.decoder, await read_body(request, place))
            answering = _answer(service, door, body, request.state.tenant, place, arrived_s)
            return await unless_client_leaves(request, answering)

    return answer


async def _answer(
    service: Service, door: Door[Body], body: Body, tenant: str, place: Place, arrived_s: float
) -> Response:
    asked, model, ready = door.ask(body), service.model_name(body.model), service.ready()
    response_id = new_response_id(door.id_prefix)
    steps = prepare(asked, service.model(ready), response_id, tenant)
    prepared = await service.encodings.run(steps, place.num_bytes)
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
