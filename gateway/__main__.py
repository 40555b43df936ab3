"""`python -m gateway`: serve HTTP until SIGINT or SIGTERM."""

import logging
import os
import signal
import socket
import sys
from ipaddress import ip_address
from typing import TYPE_CHECKING

from protocol.config import Config
from protocol.process import refuse, start_process

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

FIELDS = (
    "model",
    "served_model_name",
    "host",
    "port",
    "api_key",
    "generation_config",
    "seed",
    "frontend_address",
    "schedulers",
    "peer_timeout_s",
)
GRACE_S = 5  # for open streams, once told to stop
IDLE_CONNECTION_S = 75  # longer than clients and proxies keep one, so that they close it first

logger = logging.getLogger(__name__)


def main() -> int:
    """Return the exit status: 0 after a signal, 2 for a model that cannot be used or a port that cannot be had."""
    config = start_process("gateway", "Answer HTTP requests with what the schedulers of a model generate.", FIELDS)
    try:
        from gateway.app import create_app  # only now, so that --help and a wrong setting do not wait

        if not config.model:
            raise ValueError("no model: set --model to its directory")
        app = create_app(config)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return refuse("gateway", error)
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        reason = (
            os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        )  # a name's are negative
        return refuse(
            "gateway", f"cannot listen on {config.host}:{config.port}: {reason}. Choose another --port or --host."
        )
    with listener:
        return _serve(app, config, listener)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` (a name or an address of either kind). Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address[:2], family=family, backlog=2048)
    # Connections inherit it. Without it each small write waits for the client's delayed acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _serve(app: "Starlette", config: Config, listener: socket.socket) -> int:
    import uvicorn

    server = uvicorn.Server(uvicorn_config(app, config))
    url = _url(listener)
    if not config.api_key and not _is_loopback(listener):
        logger.warning("%s can be reached from other machines and no API key is set: anyone may use it", url)
    logger.info("listening on %s (until the model is ready, requests get a 503)", url)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # uvicorn raises them again once it has stopped: to no effect here
    server.run(sockets=[listener])
    return 0 if server.started else 1


def uvicorn_config(app: "Starlette", config: Config) -> "uvicorn.Config":
    import uvicorn

    from gateway.http_protocol import BoundedHttpProtocol

    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=config.log_level == "debug",
        server_header=False,
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=GRACE_S,
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(listener: socket.socket) -> bool:
    return ip_address(listener.getsockname()[0]).is_loopback


if __name__ == "__main__":
    sys.exit(main())
