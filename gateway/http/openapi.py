"""The description of the API as OpenAPI has it, made of the types that bodies are decoded and answers encoded with."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from octavo.gateway.http.auth import PUBLIC_PATHS
from octavo.gateway.http.endpoint import JSON, Endpoint
from octavo.gateway.http.errors import ErrorAnswer
from octavo.gateway.openai.fields import meaning
from octavo.gateway.openai.neutral import neutral_values

SCHEMAS = "#/components/schemas/{name}"
ERRORS = {
    400: "The body is malformed, a field is wrong or not supported, or the prompt is too long",
    401: "A key is needed, and none that is known was sent",
    403: "A page of another site asked",
    404: "There is no such model",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "The body is compressed or not JSON",
    429: "Too much is under way: nothing was begun, and Retry-After says when to come back",
    500: "The server failed",
    503: "No scheduler can be reached, or its model is still loading",
}
RETRIED = (429, 503)
ABOUT = """An inference server for large language models. The routes of /v1 are those of OpenAI's API, and are there \
without /v1 too. A field that is known and not supported is refused by name, unless it asks for nothing; such fields \
are not listed here. In bodies null is the same as leaving a field out."""


def openapi(endpoints: Sequence[Endpoint], root_path: str, *, has_keys: bool) -> dict[str, Any]:
    """Return the document. `root_path` is where a proxy shows the server."""
    types = [kind for endpoint in endpoints for kind in (endpoint.body, endpoint.answer, endpoint.chunk) if kind]
    _, schemas = msgspec.json.schema_components([*types, ErrorAnswer], ref_template=SCHEMAS)
    _describe_fields(schemas, filter(None, (endpoint.body for endpoint in endpoints)))
    keys: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]
    return {
        "openapi": "3.1.0",
        # Of the API, not of the server: strangers may read this.
        "info": {"title": "Octavo", "version": "v1", "description": ABOUT, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": root_path or "/"}],
        "security": keys if has_keys else [{}, *keys],
        "paths": {_path(endpoint): {endpoint.method.lower(): _operation(endpoint)} for endpoint in endpoints},
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error(status) for status in ERRORS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _path(endpoint: Endpoint) -> str:
    """Return the path without the kinds of its parameters, which are Starlette's."""
    return re.sub(r":\w+}", "}", endpoint.path)


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    path = _path(endpoint)
    is_public = path in PUBLIC_PATHS
    names = re.findall(r"{(\w+)}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    errors = sorted({*endpoint.errors, *(() if is_public else (401,)), 403, 500})
    operation: dict[str, Any] = {
        "operationId": "_".join([endpoint.method.lower(), *re.findall(r"\w+", path)]),
        "summary": endpoint.summary,
        "responses": {
            "200": _answer(endpoint),
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in errors},
        },
    }
    if is_public:
        operation["security"] = []
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _reference(endpoint.body)}}}
    return operation


def _answer(endpoint: Endpoint) -> dict[str, Any]:
    content = {endpoint.media_type: {"schema": _reference(endpoint.answer)}}
    if endpoint.chunk is None:
        return {"description": "The answer", "content": content}
    content["text/event-stream"] = {"schema": _reference(endpoint.chunk)}
    description = "The answer; with stream, events with a chunk each, and [DONE] as the last"
    return {"description": description, "content": content}


def _error(status: int) -> dict[str, Any]:
    response = {"description": ERRORS[status], "content": {JSON: {"schema": _reference(ErrorAnswer)}}}
    if status in RETRIED:
        seconds = {"description": "In how many seconds to come back", "schema": {"type": "integer"}}
        return response | {"headers": {"Retry-After": seconds}}
    return response


def _reference(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=SCHEMAS)
    return schema


def _describe_fields(schemas: dict[str, Any], bodies: Iterable[type[msgspec.Struct]]) -> None:
    """Give each field of the bodies its meaning, and take those away that are only there to be refused."""
    for kind in dict.fromkeys(struct for body in bodies for struct in _structs(inspect.type_info(body))):
        properties = schemas[kind.__name__]["properties"]
        for name in neutral_values(kind):
            del properties[name]
        for name, schema in properties.items():
            schema["description"] = meaning(name)


def _structs(kind: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """Return the Struct that is `kind`, and those in it."""
    match kind:
        case inspect.StructType():
            yield kind.cls
            for field in kind.fields:
                yield from _structs(field.type)
        case inspect.UnionType():
            for each in kind.types:
                yield from _structs(each)
        case inspect.ListType():
            yield from _structs(kind.item_type)
        case inspect.DictType():
            yield from _structs(kind.value_type)
