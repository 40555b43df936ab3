"""Makes the HTTP application: its routes, its middleware, and the service that the routes share."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware

from octavo.gateway.asking.encodings import Encodings
from octavo.gateway.asking.model import formats_from
from octavo.gateway.http.auth import Authentication
from octavo.gateway.http.body_limits import Bodies, BodyTimes
from octavo.gateway.http.count_requests import CountRequests
from octavo.gateway.http.description import Description
from octavo.gateway.http.endpoints import ENDPOINTS
from octavo.gateway.http.errors import EXCEPTION_HANDLERS
from octavo.gateway.http.origins import Origins
from octavo.gateway.http.request_id import RequestIds
from octavo.gateway.http.root_path import RootPath
from octavo.gateway.http.service import Service
from octavo.gateway.link.engine import Engine, scheduler_addresses, scheduler_clients
from octavo.gateway.measuring.engine_metrics import EngineCollector
from octavo.gateway.measuring.metrics import Metrics, watch_loop
from octavo.gateway.reading.grammar_checks import GrammarChecks
from octavo.gateway.reading.long_bodies import LongBodies
from octavo.gateway.settings import FIELDS
from octavo.gateway.text.model_files import read_model_files
from octavo.protocol.config import SECRETS, Config
from octavo.protocol.link_keys import client_keys

KEEP_ALIVE_S = 10.0
FIRST_ANSWER_S = 2.0  # the longest wait for a scheduler before the first request is taken

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[dict[str, Any]]]

ROUTES = [endpoint.route for endpoint in ENDPOINTS]
SHORT_ROUTES = [endpoint.short_route for endpoint in ENDPOINTS if endpoint.path.startswith("/v1/")]


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


def shown_settings(config: Config) -> dict[str, Any]:
    """Return the settings that this gateway reads, without secrets."""
    return {name: getattr(config, name) for name in FIELDS if name not in SECRETS}


def _lifespan(
    config: Config, names: tuple[str, ...], metrics: Metrics, keep_alive_s: float, body_times: BodyTimes
) -> Lifespan:
    keys = client_keys(config, "gateway", scheduler_addresses(config))
    files = read_model_files(config)
    description = Description.of(ENDPOINTS, config.root_path, has_keys=bool(config.api_key))
    seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with Engine(scheduler_clients(config, keys), files.tokenizer) as engine:
            reports = EngineCollector(engine, names[0])
            metrics.registry.register(reports)
            watching = asyncio.create_task(watch_loop(metrics.loop_lag_s))
            # Requests that arrive earlier wait in the listener's queue, so that a new replica refuses no request.
            await engine.first_answer(FIRST_ANSWER_S)
            encodings, long_bodies = Encodings(), LongBodies(config, names)
            grammar_checks = GrammarChecks(files.directory)
            bodies = Bodies(config.max_held_body_bytes, body_times)
            service = Service(
                model_names=names,
                files=files,
                formats=formats_from(config, files.chat_template),
                engine=engine,
                metrics=metrics,
                seeds=seeds,
                keep_alive_s=keep_alive_s,
                bodies=bodies,
                encodings=encodings,
                long_bodies=long_bodies,
                grammar_checks=grammar_checks,
                settings=shown_settings(config),
            )
            yield {"service": service, "description": description}
            watching.cancel()
            metrics.registry.unregister(reports)
        await long_bodies.close()
        grammar_checks.close()
        encodings.close()

    return lifespan
