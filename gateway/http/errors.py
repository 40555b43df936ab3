"""Answers for errors. They always have one form: `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.gateway.anthropic.answers import error_body as messages_error
from octavo.gateway.request_error import RequestError

STATUS_CLIENT_CLOSED = 499  # for metrics and the log: no client reads it

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}

_encode = msgspec.json.Encoder().encode


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The envelope of every error; `param` is the path of the field that is wrong, `code` a word for programs."""

    error: Error


def error_body(error: RequestError) -> bytes:
    """Return the envelope as one line of JSON."""
    kind = TYPES.get(error.status, TYPES[400 if error.status < 500 else 500])
    return _encode(ErrorAnswer(Error(error.message, kind, error.param, error.code)))


def error_response(error: RequestError, path: str = "") -> Response:
    """Return the answer for an error of a request to `path`, whose dialect may have an envelope of its own."""
    body = messages_error(error) if is_messages(path) else error_body(error)
    return Response(body, error.status, error.headers, media_type="application/json")


def is_messages(path: str) -> bool:
    """Return whether the path is one of Anthropic's Messages API."""
    return path.removeprefix("/v1").split("/")[1:2] == ["messages"]


async def on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer 404 and 405, which the router raises."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    message = {
        404: f"there is no {where}",
        405: f"{where} is not allowed: this path takes {(error.headers or {}).get('Allow', 'other methods')}",
    }.get(error.status_code, error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers) if error.headers else None
    return error_response(RequestError(message, status=error.status_code, code=code, headers=headers), request.url.path)


async def on_client_disconnect(request: Request, error: Exception) -> Response:
    """End a request whose client left while it sent the body; nobody reads this answer."""
    return Response(status_code=STATUS_CLIENT_CLOSED)


def internal_error() -> RequestError:
    """Return the error for a fault of the server. Its message shows no internals."""
    return RequestError("internal error: the server's log says more", status=500, code="internal_error")


async def on_exception(request: Request, error: Exception) -> Response:
    """Answer for an unexpected exception; Starlette raises it again, so that it is logged."""
    return error_response(internal_error(), request.url.path)


EXCEPTION_HANDLERS: dict[Any, Any] = {
    RequestError: on_request_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_client_disconnect,
    Exception: on_exception,
}
