"""A door reads the body of a request: here, or in a process of its own if the body is long."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.gateway.asking.asked import AskedPrompts
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.http.body import decode_body, read_body
from octavo.gateway.http.body_limits import Place
from octavo.gateway.http.service import Service, unless_client_leaves
from octavo.gateway.openai.types import ModelRequest
from octavo.gateway.text.steps import Steps

Body = TypeVar("Body", bound=ModelRequest)
What = TypeVar("What", bound=AskedPrompts)

SHORT_BYTES = 64 << 10  # a body of this length is decoded and encoded in a few milliseconds, whatever it contains


@dataclass(frozen=True, slots=True, kw_only=True)
class Door(Generic[Body, What]):
    """One API's way in: its body becomes what is asked, and the asked prompts become tokens."""

    name: str
    decoder: "msgspec.json.Decoder[Body]"
    ask: Callable[[Body], What]
    prepare: Callable[[What, ServedModel], Steps[list[PreparedPrompt]]]


@dataclass(frozen=True, slots=True)
class ArrivedRequest:
    """A request whose body has arrived."""

    service: Service
    tenant: str
    place: Place  # counts the body until its bytes are given back
    arrived_s: float


Respond = Callable[[Body, What, ArrivedRequest], Awaitable[Response]]


def route_through(door: Door[Body, What], answer: Respond[Body, What]) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that answers requests through `door`: it calls `answer` with the decoded body."""

    async def route(request: Request) -> Response:
        arrived_s = time.perf_counter()
        service: Service = request.state.service
        with service.bodies.place() as place:
            pieces = await read_body(request, place)
            arrival = ArrivedRequest(service, request.state.tenant, place, arrived_s)
            return await unless_client_leaves(request, _answer(door, answer, pieces, arrival))

    return route


async def _answer(
    door: Door[Body, What], answer: Respond[Body, What], pieces: list[bytes], arrival: ArrivedRequest
) -> Response:
    body, asked = await _read(door, pieces, arrival.place.num_bytes, arrival.service)
    pieces.clear()
    return await answer(body, asked, arrival)


async def _read(door: Door[Body, What], pieces: Sequence[bytes], num_bytes: int, service: Service) -> tuple[Body, What]:
    """Return a body and what it asks for. The prompts of a long body come as token ids, and the body without them."""
    if num_bytes > SHORT_BYTES:
        body, prompts = await service.long_bodies.read(door.name, door.decoder, pieces, service.ready())
        return body, replace(door.ask(body), prompts=prompts)
    body = decode_body(door.decoder, b"".join(pieces))
    return body, door.ask(body)
