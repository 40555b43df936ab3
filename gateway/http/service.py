"""The objects that all routes share. The application's lifespan makes them; routes use `request.state.service`."""

import asyncio
import os
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.gateway.asking.encodings import Encodings
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.http.body_limits import Bodies
from octavo.gateway.http.errors import STATUS_CLIENT_CLOSED
from octavo.gateway.http.sse import wait_for_disconnect
from octavo.gateway.link.engine import Engine
from octavo.gateway.measuring.metrics import Metrics
from octavo.gateway.parsing.formats import Formats
from octavo.gateway.reading.grammar_checks import GrammarChecks
from octavo.gateway.reading.long_bodies import LongBodies
from octavo.gateway.request_error import RequestError, unavailable
from octavo.gateway.text.model_files import ModelFiles
from octavo.protocol.messages import Ready


@dataclass(frozen=True, slots=True)
class Service:
    model_names: tuple[str, ...]  # requests may use any; the first is the default
    files: ModelFiles
    formats: Formats
    engine: Engine
    metrics: Metrics
    seeds: random.Random
    keep_alive_s: float
    bodies: Bodies
    encodings: Encodings
    long_bodies: LongBodies
    grammar_checks: GrammarChecks
    settings: dict[str, Any]  # as /server_info shows them

    def model_name(self, asked: str | None) -> str:
        """Return the name under which to answer. Raises RequestError (404) for a model that is not served."""
        return served_name(asked, self.model_names)

    def ready(self) -> Ready:
        """Return the scheduler's last Ready. Raises RequestError (503) while no scheduler answers."""
        ready = self.engine.ready
        if ready is None:
            raise unavailable("no scheduler answers, or its model is still loading")
        return ready

    def model(self, ready: Ready) -> ServedModel:
        """Return the model as `prepare` needs it."""
        return ServedModel(self.files, ready, lambda: self.seeds.getrandbits(64), self.formats)


def served_name(asked: str | None, served: tuple[str, ...]) -> str:
    """Return the name under which to answer. Raises RequestError (404) for a model that is not served."""
    if asked is None:
        return served[0]
    if asked not in served:
        message = f"there is no model {asked[:200]!r}; served: {', '.join(served)}"
        raise RequestError(message, param="model", status=404, code="model_not_found")
    return asked


def new_response_id(prefix: str) -> str:
    return f"{prefix}-{os.urandom(16).hex()}"


async def unless_client_leaves(request: Request, answering: Coroutine[None, None, Response]) -> Response:
    """Return what `answering` returns; cancel it if the client leaves before. The body must have been read."""
    task = asyncio.create_task(answering)
    leaving = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        try:
            await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server stops, and its time to wait for this answer is over
            raise unavailable("the server is stopping") from None
        return task.result() if task.done() else Response(status_code=STATUS_CLIENT_CLOSED)
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
