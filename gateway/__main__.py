"""`python -m gateway`: serve HTTP until told to stop."""

import argparse
import logging
import os
import socket
import sys
from ipaddress import ip_address

import uvicorn
from starlette.applications import Starlette

from gateway.app import create_app
from protocol.config import Config, add_flags, load_config

GRACE_S = 5  # for open streams, once told to stop
IDLE_CONNECTION_S = 75  # longer than clients and proxies keep one, so that they close it first

logger = logging.getLogger("gateway")


def main(arguments: list[str] | None = None) -> int:
    """Serve; return 2 for a configuration that cannot be, 1 for a port that cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m gateway", description="The HTTP side of an Octavo server.")
    add_flags(parser)
    given = vars(parser.parse_args(arguments))
    try:
        config = load_config(os.environ, given)
        app = create_app(config)
    except ValueError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        print(f"gateway: cannot listen on {config.host} port {config.port}: {error.strerror}", file=sys.stderr)
        return 1
    with listener:
        return _serve(app, config, listener)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` (a name or an address of either kind). Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address[:2], family=family, backlog=2048)
    # Connections inherit it. Without it each small write waits for the client's delayed acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _serve(app: Starlette, config: Config, listener: socket.socket) -> int:
    server = uvicorn.Server(uvicorn_config(app, config))
    url = _url(listener)
    if not config.api_key and not _is_loopback(listener):
        logger.warning("%s can be reached from other machines and no API key is set: anyone may use it", url)
    logger.info("listening on %s", url)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises the signal again after it has stopped in order
        return 0
    return 0 if server.started else 1


def uvicorn_config(app: Starlette, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
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
