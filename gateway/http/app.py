"""Makes the HTTP application: its routes, its middleware, and the service that the routes share."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.gateway.asking.encodings import Encodings
from octavo.gateway.http.auth import Authentication
from octavo.gateway.http.body_limits import Bodies, BodyTimes
from octavo.gateway.http.count_requests import CountRequests
from octavo.gateway.http.errors import EXCEPTION_HANDLERS, error_response
from octavo.gateway.http.generate import CHAT, COMPLETIONS, generating_route
from octavo.gateway.http.metrics_page import metrics_page
from octavo.gateway.http.models import list_models, show_model
from octavo.gateway.http.origins import Origins
from octavo.gateway.http.request_id import RequestIds
from octavo.gateway.http.root_path import RootPath
from octavo.gateway.http.service import Service
from octavo.gateway.http.tokenization import DETOKENIZE, TOKENIZE, token_route
from octavo.gateway.link.engine import Engine, scheduler_addresses, scheduler_clients
from octavo.gateway.measuring.engine_metrics import EngineCollector
from octavo.gateway.measuring.metrics import Metrics, watch_loop
from octavo.gateway.reading.long_bodies import LongBodies
from octavo.gateway.request_error import unavailable
from octavo.gateway.text.model_files import read_model_files
from octavo.protocol.config import Config
from octavo.protocol.link_keys import client_keys
from octavo.protocol.version import __version__

KEEP_ALIVE_S = 10.0
FIRST_ANSWER_S = 2.0  # the longest wait for a scheduler before the first request is taken

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[dict[str, Service]]]


async def health(request: Request) -> Response:
    """Answer 200 only while a request could make progress."""
    service: Service = request.state.service
    warning = idle_executors(service.engine.num_idle_executors)
    if service.engine.healthy:
        answer = {"status": "ok", "warning": warning} if warning else {"status": "ok"}
        return Response(msgspec.json.encode(answer), media_type="application/json")
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
    return Response(b'{"status":"ok"}', media_type="application/json")


async def version(request: Request) -> Response:
    answer = {"version": __version__}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def show_metrics(request: Request) -> Response:
    service: Service = request.state.service
    return metrics_page(service.metrics)


ROUTES = [
    Route("/v1/chat/completions", generating_route(CHAT), methods=["POST"]),
    Route("/v1/completions", generating_route(COMPLETIONS), methods=["POST"]),
    Route("/v1/models", list_models),
    Route("/v1/models/{id:path}", show_model),
    Route("/tokenize", token_route(TOKENIZE), methods=["POST"]),
    Route("/detokenize", token_route(DETOKENIZE), methods=["POST"]),
    Route("/health", health),
    Route("/live", live),
    Route("/version", version),
    Route("/metrics", show_metrics),
]
# For clients whose base URL lacks the /v1.
SHORT_ROUTES = [
    Route(route.path.removeprefix("/v1"), route.endpoint, methods=route.methods)
    for route in ROUTES
    if route.path.startswith("/v1/")
]


def model_names(config: Config) -> tuple[str, ...]:
    """Return the names that requests may use for the model. An answer to a request without a name has the first."""
    return config.served_model_name or (config.model,)


def create_app(
    config: Config,
    metrics: Metrics | None = None,
    *,
    keep_alive_s: float = KEEP_ALIVE_S,
    body_times: BodyTimes = BodyTimes(),  # noqa: B008  (frozen)
) -> Starlette:
    """Return the application that serves the model directory `config.model` through `config.schedulers`.

    `/metrics` shows `metrics`, or metrics of the application's own. A stream that is silent for `keep_alive_s` seconds
    gets a comment. Raises ValueError if the directory cannot be used, or a link lacks its keys. The application
    connects to schedulers when its lifespan begins.
    """
    names = model_names(config)
    metrics = metrics or Metrics(names[0])
    app = Starlette(
        routes=[*ROUTES, *SHORT_ROUTES],
        middleware=[
            Middleware(RequestIds),
            Middleware(RootPath, root_path=config.root_path),
            Middleware(CountRequests, metrics=metrics, routes=ROUTES),
            # A preflight has no key: Origins must come before Authentication.
            Middleware(Origins, allowed=config.allowed_origins, has_keys=bool(config.api_key)),
            Middleware(Authentication, keys=config.api_key),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=_lifespan(config, names, metrics, keep_alive_s, body_times),
    )
    app.router.redirect_slashes = False  # a redirect names a host that a proxy's client cannot reach
    return app


def _lifespan(
    config: Config, names: tuple[str, ...], metrics: Metrics, keep_alive_s: float, body_times: BodyTimes
) -> Lifespan:
    keys = client_keys(config, "gateway", scheduler_addresses(config))
    files = read_model_files(config)
    seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Service]]:
        async with Engine(scheduler_clients(config, keys), files.tokenizer) as engine:
            reports = EngineCollector(engine, names[0])
            metrics.registry.register(reports)
            watching = asyncio.create_task(watch_loop(metrics.loop_lag_s))
            # Requests that arrive earlier wait in the listener's queue, so that a new replica refuses no request.
            await engine.first_answer(FIRST_ANSWER_S)
            encodings, long_bodies = Encodings(), LongBodies(config, names)
            bodies = Bodies(config.max_held_body_bytes, body_times)
            service = Service(
                model_names=names,
                files=files,
                engine=engine,
                metrics=metrics,
                seeds=seeds,
                keep_alive_s=keep_alive_s,
                bodies=bodies,
                encodings=encodings,
                long_bodies=long_bodies,
            )
            yield {"service": service}
            watching.cancel()
            metrics.registry.unregister(reports)
        await long_bodies.close()
        encodings.close()

    return lifespan
