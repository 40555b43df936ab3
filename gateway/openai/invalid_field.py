"""Turns msgspec's message about a wrong value into an error in the caller's words."""

import re
from typing import Any

import msgspec

from octavo.gateway.request_error import RequestError
from octavo.protocol.settings.suggestions import suggestion

MAX_SHOWN_CHARACTERS = 100  # of a client's value, in an error message

# msgspec's words for a value of the right type that is beyond its bounds, too long or malformed.
OUT_OF_RANGE = re.compile(r"Expected `\w+` (?:[<>]=? .*|of length .*|matching .*|that's .*)", re.DOTALL)
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)

JSON_NAMES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def invalid_field(complaint: str, kind: Any) -> RequestError:
    """Return the error for msgspec's message, such as "Expected `int`, got `str` - at `$.messages[0].content`"."""
    reason, _, path = complaint.partition(" - at ")
    param = shortened(re.sub(r"^.*?\$\.?", "", path.strip("`")))
    if missing := re.fullmatch(r"Object missing required field `(.*)`", reason):
        name = join(param, missing[1])
        return RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    if unknown := UNKNOWN_FIELD.fullmatch(reason):
        name = join(param, shortened(unknown[1]))
        known = _names_at(kind, param)
        return RequestError(
            f"{name!r} is not a field here{suggestion(shortened(unknown[1]), known)}",
            param=name,
            code="unknown_parameter",
        )
    if value := re.fullmatch(r"Invalid (?:enum )?value (.*)", reason, re.DOTALL):
        return RequestError(f"{param} cannot be {shortened(value[1])}", param=param, code="unsupported_value")
    code = "invalid_value" if OUT_OF_RANGE.fullmatch(reason) else "invalid_type"
    words = re.sub(r"`([^`]*)`", lambda match: _in_json_words(match[1]), reason)
    subject = param or "the body"
    return RequestError(f"{subject}: {words[0].lower()}{words[1:]}", param=param or None, code=code)


def _names_at(kind: Any, path: str) -> list[str]:
    """Return the names of the fields at `path` in a Struct, such as "messages[0].content[0]"."""
    found = _struct_in(msgspec.inspect.type_info(kind))
    for name in filter(None, re.sub(r"\[[^\]]*\]", "", path).split(".")):
        field = next((field for field in found.fields if field.name == name), None) if found else None
        found = _struct_in(field.type) if field else None
    return [field.name for field in found.fields] if found else []


def _struct_in(kind: msgspec.inspect.Type) -> msgspec.inspect.StructType | None:
    match kind:
        case msgspec.inspect.StructType():
            return kind
        case msgspec.inspect.ListType():
            return _struct_in(kind.item_type)
        case msgspec.inspect.UnionType():
            return next(filter(None, map(_struct_in, kind.types)), None)
        case _:
            return None


def shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "..."


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _in_json_words(types: str) -> str:
    return " or ".join(JSON_NAMES.get(name, name) for name in types.split(" | "))
