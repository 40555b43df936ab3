"""What the server says of itself: /health, /live, /version and /metrics."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.gateway.http.errors import error_response
from octavo.gateway.http.metrics_page import metrics_page
from octavo.gateway.http.service import Service
from octavo.gateway.openai.answer_types import encode
from octavo.gateway.request_error import unavailable
from octavo.protocol.version import __version__


class Status(msgspec.Struct, omit_defaults=True):
    status: str
    warning: str = ""


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int  # requests that this gateway has in flight, a choice each


class ServerInfo(msgspec.Struct):
    version: str
    models: list[str]
    tasks: list[str]
    max_model_len: int | None  # None while no scheduler answers
    settings: dict[str, Any]  # without secrets


async def health(request: Request) -> Response:
    """Answer 200 only while a request could make progress."""
    service: Service = request.state.service
    warning = idle_executors(service.engine.num_idle_executors)
    if service.engine.healthy:
        return Response(encode(Status("ok", warning)), media_type="application/json")
    reason = "no scheduler makes progress, or its model is still loading"
    return error_response(unavailable(f"{reason}; {warning}" if warning else reason))


def idle_executors(num: int) -> str:
    """Return a warning about `num` executors that hold memory and compute nothing; an empty text if `num` is 0."""
    if not num:
        return ""
    who = "1 executor holds" if num == 1 else f"{num} executors hold"
    return f"{who} memory for nothing: another one has the place at the scheduler, which has one executor"


async def live(request: Request) -> Response:
    """Answer 200 while this process works, whatever the scheduler does. A supervisor restarts a process that hangs."""
    return Response(encode(Status("ok")), media_type="application/json")


async def version(request: Request) -> Response:
    return Response(encode(Version(__version__)), media_type="application/json")


async def load(request: Request) -> Response:
    service: Service = request.state.service
    return Response(encode(Load(service.engine.num_in_flight)), media_type="application/json")


async def server_info(request: Request) -> Response:
    service: Service = request.state.service
    ready = service.engine.ready
    info = ServerInfo(
        version=__version__,
        models=list(service.model_names),
        tasks=list(ready.tasks) if ready else [],
        max_model_len=ready.max_model_len if ready else None,
        settings=service.settings,
    )
    return Response(encode(info), media_type="application/json")


async def show_metrics(request: Request) -> Response:
    service: Service = request.state.service
    return metrics_page(service.metrics)
