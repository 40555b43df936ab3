"""Reads the body of a request within limits, decodes it into a Struct, and explains its faults in plain words."""

import asyncio
import json
import math
import re
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from octavo.gateway.http.body_limits import Place
from octavo.gateway.openai.invalid_field import MAX_SHOWN_CHARACTERS, UNKNOWN_FIELD, invalid_field, join, shortened
from octavo.gateway.openai.types import without_nulls
from octavo.gateway.request_error import RequestError

MAX_BODY_BYTES = 64 << 20
MAX_VALUES = 1 << 20  # the time and memory of decoding depend on the number of values, not of bytes
MAX_EXPLAINED_BYTES = 1 << 20  # the second parse, which explains a fault, takes longer

JSON_TYPE = re.compile(r"application/(json|[a-z0-9!#$&^_.-]+\+json)")

AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)


async def read_body(request: Request, place: Place) -> list[bytes]:
    """Return the whole body in pieces; `place` counts its bytes.

    Raises RequestError if the body is compressed or not JSON (415), too large (413), too slow (408), or if the bodies
    of other requests leave no room (429).
    """
    _check_content_type(request.headers)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise RequestError(f"content-encoding {encoding} is not supported", status=415, code="unsupported_encoding")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal():
        _check_size(int(announced))
        place.check(int(announced))
    try:
        async with asyncio.timeout(place.times.whole_s):
            return await _read_pieces(request, place)
    except TimeoutError:
        raise _too_slow(f"was not there within {place.times.whole_s:g} s") from None


async def _read_pieces(request: Request, place: Place) -> list[bytes]:
    pieces: list[bytes] = []
    num_bytes = 0
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(place.times.stall_s):
                piece = await anext(stream, None)
        except TimeoutError:
            raise _too_slow(f"stood still for {place.times.stall_s:g} s") from None
        if piece is None:
            return pieces
        num_bytes += len(piece)
        _check_size(num_bytes)
        place.hold(num_bytes)
        pieces.append(piece)


def _check_content_type(headers: Headers) -> None:
    """Raise RequestError (415) for a type other than JSON: a page of any site may send some other types.

    Programs may leave the type out; web pages, whose requests have an Origin, may not.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if JSON_TYPE.fullmatch(kind) or (not kind and "origin" not in headers):
        return
    shown = kind[:MAX_SHOWN_CHARACTERS] or "missing"
    message = f"the body must be JSON, but the Content-Type is {shown}: send the header Content-Type: application/json"
    raise RequestError(message, status=415, code="unsupported_content_type")


def decode_body(decoder: "msgspec.json.Decoder[AnyStruct]", body: bytes) -> AnyStruct:
    """Return the Struct in `body`. Raises RequestError that names the field, or the place in malformed JSON."""
    _check_num_values(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if UNKNOWN_FIELD.match(str(error)):
            return _decoded_without_nulls(decoder, body)
        raise invalid_field(str(error), decoder.type) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None
    except RecursionError:
        raise _too_deep() from None


def _decoded_without_nulls(decoder: "msgspec.json.Decoder[AnyStruct]", body: bytes) -> AnyStruct:
    """Return the Struct in a `body` with unknown fields. Raises RequestError if one of them is not null."""
    try:
        found: AnyStruct = msgspec.convert(without_nulls(msgspec.json.decode(body)), decoder.type)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), decoder.type) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None
    except RecursionError:
        raise _too_deep() from None
    return found


def _check_num_values(body: bytes) -> None:
    """Raise RequestError (413) for more values than any request has. Separators inside strings are counted too."""
    num_values = 0
    for start in range(0, len(body), MAX_VALUES):  # so that counting ends soon after the limit
        num_values += sum(body.count(separator, start, start + MAX_VALUES) for separator in (b",", b"[", b"{"))
        if num_values > MAX_VALUES:
            raise RequestError(f"the body has more than {MAX_VALUES} values", status=413, code="body_too_large")


def _too_deep() -> RequestError:
    return RequestError("the body is nested too deeply", code="invalid_json")


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        message = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
        raise RequestError(message, status=413, code="body_too_large")


def _too_slow(complaint: str) -> RequestError:
    headers = {"Connection": "close"}  # the rest of the body must not be read as a request
    return RequestError(f"the body {complaint}: send it again", status=408, code="request_timeout", headers=headers)


def _malformed(body: bytes, complaint: str) -> RequestError:
    if not body.strip():
        return RequestError("the body is empty: it must be a JSON object", code="invalid_json")
    if len(body) > MAX_EXPLAINED_BYTES:
        return RequestError(f"the body is not valid JSON: {complaint}", code="invalid_json")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return RequestError(f"the body must be JSON in UTF-8: byte {error.start} is neither", code="invalid_json")
    try:
        param = shortened(_find_not_finite(json.loads(text), ""))
    except json.JSONDecodeError as error:
        return RequestError(_explain(text, error), code="invalid_json")
    except ValueError as error:
        return RequestError(f"the body is not valid JSON: {error}", code="invalid_json")
    except RecursionError:
        return _too_deep()
    if param:
        return RequestError(f"{param}: NaN and Infinity are not valid JSON", param=param, code="invalid_json")
    # The one fault that msgspec finds and the standard library does not.
    return RequestError("the body has a \\u escape that is half of a surrogate pair", code="invalid_json")


def _explain(text: str, error: json.JSONDecodeError) -> str:
    message = f"the body is not valid JSON: {error.msg.lower()} at line {error.lineno} column {error.colno}"
    rest = text[error.pos : error.pos + 2]
    if rest.startswith("#") or rest in ("//", "/*"):
        message += " (JSON has no comments)"
    return message


def _find_not_finite(value: Any, path: str) -> str:
    """Return the path of the first number in `value` that is NaN or infinite, or ""."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else path or "the body"
    if isinstance(value, dict):
        return next((p for key, item in value.items() if (p := _find_not_finite(item, join(path, key)))), "")
    if isinstance(value, list):
        return next((p for i, item in enumerate(value) if (p := _find_not_finite(item, f"{path}[{i}]"))), "")
    return ""
