"""Counts every answer: those of routes, of middleware and of error handlers."""

from collections.abc import Mapping

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.gateway.http.errors import STATUS_CLIENT_CLOSED
from octavo.gateway.measuring.metrics import Metrics

NO_ROUTE = "unknown"


class CountRequests:
    """ASGI middleware that counts each answer by method, route and status. Paths without a route share one name."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: list[Route]) -> None:
        self.app = app
        self.metrics = metrics
        self.paths: Mapping[object, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = STATUS_CLIENT_CLOSED

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            route = self.paths.get(scope.get("endpoint"), NO_ROUTE)
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            self.metrics.http_requests.labels(method, route, str(status)).inc()
