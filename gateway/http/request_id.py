"""Each request has an id, which the client sent or the server made. It is in the answer's headers and in the log."""

import asyncio
import logging
import os
import re
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.gateway.http.errors import STATUS_CLIENT_CLOSED, error_response, internal_error
from octavo.gateway.request_error import unavailable

HEADER = "X-Request-Id"
SANE = re.compile(rb"[!-~]{1,128}")  # printable ASCII without spaces: it goes into a header and a line of the log
QUIET_PATHS = frozenset({"/health", "/live", "/metrics"})  # read every few seconds: a 503 there is not worth a warning

logger = logging.getLogger(__name__)


def new_request_id() -> str:
    return os.urandom(16).hex()


class RequestIds:
    """ASGI middleware that sets the header of each answer, and logs each request and each unexpected failure.

    It is the outermost middleware, so that every answer has the id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = _given_id(scope) or new_request_id()
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except asyncio.CancelledError:  # the server stops, and its time to wait for this request is over
            if not status:
                await error_response(unavailable("the server is stopping"), scope["path"])(scope, receive, sending)
        except Exception:
            if status:  # the rest of the answer cannot come: the server closes the connection
                logger.error("request %s failed: %s", request_id, _line(scope))
                raise
            logger.exception("request %s failed: %s", request_id, _line(scope))
            await error_response(internal_error(), scope["path"])(scope, receive, sending)
        finally:
            _log(scope, request_id, status or STATUS_CLIENT_CLOSED)


def _given_id(scope: Scope) -> str:
    """Return the id that the client sent, or "" if there is none or it is not sane."""
    given = [value for name, value in scope["headers"] if name == HEADER.lower().encode()]
    return given[0].decode() if len(given) == 1 and SANE.fullmatch(given[0]) else ""


def _line(scope: Scope) -> str:
    # Decoded percent escapes may be line ends, which must not get into the log.
    return ascii(f"{scope['method']} {scope['path']}")[1:-1]


def _log(scope: Scope, request_id: str, status: int) -> None:
    arguments: tuple[Any, ...] = (request_id, _line(scope), status)
    is_failure = status >= 500 and scope["path"] not in QUIET_PATHS
    logger.log(logging.WARNING if is_failure else logging.DEBUG, "request %s: %s: %d", *arguments)
