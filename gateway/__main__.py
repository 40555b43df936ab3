"""`python -m octavo.gateway`: serve HTTP until SIGINT or SIGTERM."""

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from ipaddress import ip_address

from octavo.gateway.settings import FIELDS
from octavo.protocol.config import Config
from octavo.protocol.extras import imports_of
from octavo.protocol.lifeline import Heart
from octavo.protocol.process import refuse, start_process
from octavo.protocol.tcp import netloc

with imports_of("python -m octavo.gateway", "gateway"):
    import uvicorn
    from starlette.applications import Starlette

    from octavo.gateway.http.app import create_app, model_names
    from octavo.gateway.http.http_protocol import BoundedHttpProtocol
    from octavo.gateway.http.listener import listen, listening_at, turn_away
    from octavo.gateway.http.metrics_page import create_metrics_app, serving
    from octavo.gateway.measuring.metrics import Metrics

BEAT_S = 0.5
LAST_ACCEPTS_S = 0.1  # for connections that are being made, once new ones are turned away
METRICS_GRACE_S = 1  # after the main server has stopped, for requests of /metrics

logger = logging.getLogger(__name__)


def main() -> int:
    """Return the exit status: 0 after a signal, 2 for a model that cannot be used or a port that is not free."""
    config, heart = start_process(
        "gateway", "Answer HTTP requests with what the schedulers of a model generate.", FIELDS
    )
    # Otherwise all encodings share the library's threads, and short ones wait for long ones.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        if not config.model:
            raise ValueError("no model: set --model to its directory")
        metrics = Metrics(model_names(config)[0])
        app = create_app(config, metrics)
    except (ValueError, OSError) as error:
        return refuse("gateway", error)
    with ExitStack() as stack:
        try:
            listener = _main_listener(config, stack)
            beside: AbstractAsyncContextManager[None] = nullcontext()
            if config.metrics_port is not None:
                page = stack.enter_context(_listen(config.host, config.metrics_port, "--metrics-port"))
                beside = _metrics_alone(metrics, config, page)
        except ListenError as error:
            return refuse("gateway", error)
        return _serve(app, config, listener, beside, heart)


class ListenError(Exception):
    """The gateway cannot listen at its address."""


def _main_listener(config: Config, stack: ExitStack) -> socket.socket:
    if not config.uds:
        return stack.enter_context(_listen(config.host, config.port, "--port"))
    try:
        return stack.enter_context(listening_at(config.uds))
    except OSError as error:
        reason = error.strerror or error
        raise ListenError(f"cannot listen at {config.uds}: {reason}. Choose another --uds.") from None


def _listen(host: str, port: int, flag: str) -> socket.socket:
    try:
        return listen(host, port)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        # Errors of name resolution have negative numbers.
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or error
        where = netloc(host, port)
        raise ListenError(f"cannot listen on {where}: {reason}. Choose another {flag} or --host.") from None


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which here loses no connection when it is told to stop."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called when the server is told to stop: turn new connections away, serve the present ones, then end."""
        for listener in sockets or []:
            turn_away(listener)
        await asyncio.sleep(LAST_ACCEPTS_S)
        await super().shutdown(sockets)


def _serve(
    app: Starlette,
    config: Config,
    listener: socket.socket,
    beside: AbstractAsyncContextManager[None],
    heart: Heart,
) -> int:
    server = DrainingServer(uvicorn_config(app, config))
    url = _url(listener)
    if not config.api_key and not _is_loopback(listener):
        logger.warning("%s can be reached from other machines and no API key is set: anyone may use it", url)
    logger.info("listening on %s (until the model is ready, requests get a 503)", url)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # takes also the signal that uvicorn raises again
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve_beside(server, listener, beside, heart))
    return 0 if server.started else 1


async def _serve_beside(
    server: uvicorn.Server, listener: socket.socket, beside: AbstractAsyncContextManager[None], heart: Heart
) -> None:
    beating = asyncio.create_task(_beat(heart))  # also while the server stops, which can take long
    async with beside:
        await server.serve(sockets=[listener])
    beating.cancel()


async def _beat(heart: Heart) -> None:
    """Show regularly that the event loop runs."""
    while True:
        heart.beat()
        await asyncio.sleep(BEAT_S)


def _metrics_alone(metrics: Metrics, config: Config, listener: socket.socket) -> AbstractAsyncContextManager[None]:
    logger.info("metrics alone, for anyone, at %s/metrics", _url(listener))
    return serving(uvicorn_config(create_metrics_app(metrics), config, grace_s=METRICS_GRACE_S), listener)


def uvicorn_config(app: Starlette, config: Config, *, grace_s: int | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.keep_alive_timeout_s,
        timeout_graceful_shutdown=config.shutdown_timeout_s if grace_s is None else grace_s,
    )


def _url(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    return f"http://{netloc(*listener.getsockname()[:2])}"


def _is_loopback(listener: socket.socket) -> bool:
    return listener.family == socket.AF_UNIX or ip_address(listener.getsockname()[0]).is_loopback


if __name__ == "__main__":
    sys.exit(main())
