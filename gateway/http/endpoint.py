"""A route and what its description says of it, in one place."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

JSON = "application/json"
BODY_ERRORS = (400, 404, 408, 413, 415, 429, 503)  # of routes that take a body for the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """`answer` and `chunk`, of a stream, are types; a route with a `body` takes POST, another GET."""

    path: str
    respond: Callable[[Request], Awaitable[Response]]
    summary: str
    answer: Any
    media_type: str = JSON
    body: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    @property
    def route(self) -> Route:
        return Route(self.path, self.respond, methods=[self.method])

    @property
    def short_route(self) -> Route:
        """The route without its /v1, for clients whose base URL lacks it."""
        return Route(self.path.removeprefix("/v1"), self.respond, methods=[self.method])
