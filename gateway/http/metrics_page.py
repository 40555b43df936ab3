"""The page that Prometheus reads: on the gateway's own port, and on a second listener that needs no keys."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.gateway.http.errors import EXCEPTION_HANDLERS
from octavo.gateway.http.request_id import RequestIds
from octavo.gateway.measuring.metrics import Metrics


def metrics_page(metrics: Metrics) -> Response:
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def create_metrics_app(metrics: Metrics) -> Starlette:
    """Return the application that answers `/metrics` and nothing else."""

    async def show(request: Request) -> Response:
        return metrics_page(metrics)

    app = Starlette(
        routes=[Route("/metrics", show)], middleware=[Middleware(RequestIds)], exception_handlers=EXCEPTION_HANDLERS
    )
    app.router.redirect_slashes = False
    return app


class Companion(uvicorn.Server):
    """A second server of the process; the first one handles the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(config: uvicorn.Config, listener: socket.socket) -> AsyncIterator[None]:
    """Answer on `listener` as long as the context lasts."""
    server = Companion(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
