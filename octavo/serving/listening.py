"""Checks whether a server of this machine can listen at its address, and whether it answers there."""

import errno
import http.client
import socket
from collections.abc import Callable
from contextlib import closing
from urllib.parse import urlsplit

import msgspec

from octavo.errors import LaunchError
from octavo.protocol.config import Config
from octavo.protocol.settings.flags import flag_name
from octavo.protocol.tcp import bind, netloc, without_brackets

HEALTH_TIMEOUT_S = 2.0


def with_ports(config: Config, name_of: Callable[[str], str] = flag_name) -> Config:
    """Return `config` with ports on which its gateway can listen: the configured ones, or free ones for 0.

    Raises LaunchError if the gateway cannot listen, before minutes of loading. The message names the setting to change
    in the form that `name_of` returns.
    """
    metrics_port = config.metrics_port
    return msgspec.structs.replace(
        config,
        port=config.port if config.uds else _free_port(config, config.port, "port", name_of),
        metrics_port=None if metrics_port is None else _free_port(config, metrics_port, "metrics_port", name_of),
    )


def _free_port(config: Config, port: int, name: str, name_of: Callable[[str], str]) -> int:
    host = config.host
    try:
        with bind(host, port) as probe:
            return int(probe.getsockname()[1])
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise LaunchError(f"cannot listen on {netloc(host, port)}: {cause}. {_remedy(error, name, name_of)}") from None


def _remedy(error: Exception, name: str, name_of: Callable[[str], str]) -> str:
    match getattr(error, "errno", None):
        case errno.EADDRINUSE:
            return f"Stop what uses it, or choose another with {name_of(name)} (0 takes a free one)."
        case errno.EACCES:
            return f"Only root may take ports below 1024 here: choose another with {name_of(name)}, such as 8000."
        case _:
            return (
                f"{name_of('host')} takes an address or a name of this machine, such as 127.0.0.1, 0.0.0.0 for all"
                " of IPv4, or :: for all."
            )


def server_url(config: Config) -> str:
    """Return the URL at which the server of `config` can be reached from this machine."""
    host = without_brackets(config.host)
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1", "*": "127.0.0.1"}.get(host, host)
    return f"http://{netloc(reachable, config.port)}"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=HEALTH_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(HEALTH_TIMEOUT_S)
        self.sock.connect(self._path)


def is_healthy(config: Config) -> bool:
    """Return whether the server of `config` answers requests."""
    url = urlsplit(server_url(config))
    connection = (
        _UnixConnection(config.uds)
        if config.uds
        else http.client.HTTPConnection(url.hostname or "", url.port, timeout=HEALTH_TIMEOUT_S)
    )
    with closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # refused, timed out, or not HTTP
            return False
