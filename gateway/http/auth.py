"""API keys, as bearer token or X-Api-Key. If keys are set, every path except PUBLIC_PATHS needs one.

The key determines the tenant.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.gateway.http.errors import error_response
from octavo.gateway.request_error import RequestError

PUBLIC_PATHS = frozenset({"/health", "/live", "/ping", "/openapi.json", "/docs"})


def tenant_of(key: bytes) -> str:
    """Return the name by which the scheduler knows a key's requests: the key itself never leaves the gateway."""
    return hashlib.sha256(b"octavo tenant\0" + key).hexdigest()[:16]


class Authentication:
    """ASGI middleware that answers 401, or sets `request.state.tenant` ("" while no keys are set)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.tenants = [tenant_of(key) for key in self.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        tenant = self._tenant(scope)
        if tenant is None:
            await error_response(_refusal(scope), scope["path"])(scope, receive, send)
            return
        scope["state"]["tenant"] = tenant
        await self.app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        if not self.keys:
            return ""
        for given in _given_keys(scope):
            # Every key is compared, so that the time does not tell which key was close.
            matches = [hmac.compare_digest(given, key) for key in self.keys]
            if any(matches):
                return self.tenants[matches.index(True)]
        return "" if scope["path"] in PUBLIC_PATHS else None


def _given_keys(scope: Scope) -> list[bytes]:
    """Return the keys that the client sent, one per header: a proxy may use one of the two headers itself."""
    first = dict(reversed(scope["headers"]))
    scheme, _, token = first.get(b"authorization", b"").partition(b" ")
    given = (token.strip() if scheme.lower() == b"bearer" else b"", first.get(b"x-api-key", b"").strip())
    return [key for key in given if key]


def _refusal(scope: Scope) -> RequestError:
    given = _given_keys(scope)
    needed = "an API key is needed: send Authorization: Bearer KEY, or X-Api-Key: KEY"
    message = "the API key is not known" if given else needed
    code = "invalid_api_key" if given else "missing_api_key"
    return RequestError(message, status=401, code=code, headers={"WWW-Authenticate": "Bearer"})
