"""The description of the API for programs and for readers, written once: /openapi.json and /docs."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.gateway.http.docs_page import CONTENT_SECURITY_POLICY, docs_page
from octavo.gateway.http.endpoint import Endpoint
from octavo.gateway.http.openapi import openapi


@dataclass(frozen=True, slots=True)
class Description:
    openapi: bytes
    page: bytes

    @classmethod
    def of(cls, endpoints: Sequence[Endpoint], root_path: str, *, has_keys: bool) -> "Description":
        document = openapi(endpoints, root_path, has_keys=has_keys)
        return cls(msgspec.json.encode(document), docs_page(document).encode())


async def show_openapi(request: Request) -> Response:
    description: Description = request.state.description
    return Response(description.openapi, media_type="application/json")


async def show_docs(request: Request) -> Response:
    description: Description = request.state.description
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(description.page, headers=headers, media_type="text/html")
