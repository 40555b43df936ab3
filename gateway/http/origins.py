"""Web pages of the server's own origin and of configured origins may use the server. Other pages are refused.

A browser lets a page of any site send requests to any server, also to one on the loopback, and names the page's site in
`Origin`. Other programs send no Origin.
"""

import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.gateway.http.errors import error_response
from octavo.gateway.http.request_id import HEADER
from octavo.gateway.request_error import RequestError
from octavo.protocol.config import ORIGIN_PATTERN

EXPOSED_HEADERS = (HEADER, "Retry-After")
METHODS = ("GET", "POST")
DEFAULT_PORTS = {"http": 80, "https": 443}


class Origins:
    """ASGI middleware that answers 403 to pages of other sites, and answers CORS preflights of allowed pages.

    `has_keys`: API keys are set, so a host that equals the origin needs no further check: the page must have a key.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], *, has_keys: bool) -> None:
        self.app = app
        self.allowed = frozenset(allowed)
        self.has_keys = has_keys
        self.sharing = CORSMiddleware(
            app, allow_origins=allowed, allow_methods=METHODS, allow_headers=["*"], expose_headers=EXPOSED_HEADERS
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = HTTPConnection(scope).headers.get("origin") if scope["type"] == "http" else None
        if origin is None:
            await self.app(scope, receive, send)
        elif "*" in self.allowed or origin in self.allowed:
            await self.sharing(scope, receive, send)
        elif self._is_own(origin, HTTPConnection(scope).headers.get("host", "")):
            await self.app(scope, receive, send)
        else:
            await error_response(_refusal(origin), scope["path"])(scope, receive, send)

    def _is_own(self, origin: str, host: str) -> bool:
        """Return whether `origin` is the server's own.

        An attacker's DNS name can point to this machine (DNS rebinding); then Origin and Host are equal. So without
        keys, only an IP address or localhost counts as the server's own name.
        """
        try:
            parts = urlsplit(origin)
            own = urlsplit(f"{parts.scheme}://{host}")
            is_same = bool(parts.hostname) and (parts.hostname, _port(parts.scheme, parts.port)) == (
                own.hostname,
                _port(own.scheme, own.port),
            )
        except ValueError:
            return False
        return is_same and (self.has_keys or _is_no_dns_name(own.hostname or ""))


def _port(scheme: str, port: int | None) -> int | None:
    return DEFAULT_PORTS.get(scheme) if port is None else port


def _is_no_dns_name(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _refusal(origin: str) -> RequestError:
    shown = ascii(origin[:200])[1:-1]
    allowed = shown if re.search(ORIGIN_PATTERN, shown) else "'*'"  # a file or a sandboxed frame has the origin null
    return RequestError(
        f"pages of {shown} may not use this server: start it with --allowed-origins {allowed} to let them",
        status=403,
        code="origin_not_allowed",
    )
