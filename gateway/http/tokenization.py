"""The routes that answer with tokens or with the text of tokens, and generate nothing."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from octavo.gateway.asking.asked import AskedPrompts
from octavo.gateway.asking.encode import PreparedPrompt, encode_only
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.http.door import ArrivedRequest, Body, Door, route_through
from octavo.gateway.openai.tokenization import (
    ask_detokenize,
    ask_tokenize,
    detokenize_decoder,
    tokenize_decoder,
    write_text,
    write_tokens,
)
from octavo.gateway.text.steps import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDoor(Door[Body, AskedPrompts]):
    """A door with a way out: the tokens of one prompt become the answer."""

    write: Callable[[Body, PreparedPrompt, ServedModel], bytes]


TOKENIZE = TokenDoor(
    name="tokenize", decoder=tokenize_decoder, ask=ask_tokenize, prepare=encode_only, write=write_tokens
)
DETOKENIZE = TokenDoor(
    name="detokenize", decoder=detokenize_decoder, ask=ask_detokenize, prepare=encode_only, write=write_text
)


def token_route(door: TokenDoor[Body]) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that answers requests through `door`."""

    async def answer(body: Body, asked: AskedPrompts, arrival: ArrivedRequest) -> Response:
        service = arrival.service
        service.model_name(body.model)
        model = service.model(service.ready())
        content = await service.encodings.run(_written(door, body, asked, model))
        return Response(content, media_type="application/json")

    return route_through(door, answer)


def _written(door: TokenDoor[Body], body: Body, asked: AskedPrompts, model: ServedModel) -> Steps[bytes]:
    [prompt] = yield from door.prepare(asked, model)
    yield
    return door.write(body, prompt, model)
