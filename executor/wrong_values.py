"""Errors about a model's JSON: one sentence with the key, its value and the values that are allowed."""

import re
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

# msgspec's words for types and comparisons, and plain ones
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
COMPARISONS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
LONGEST_SHOWN = 80  # characters of a value


class WrongValueError(ValueError):
    """A key of a file is missing, or has a value that is not allowed."""


def converted(written: Any, kind: type[T]) -> T:
    """Return a file's object as `kind`. Raises WrongValueError."""
    try:
        return msgspec.convert(written, kind)
    except msgspec.ValidationError as error:
        raise WrongValueError(_sentence(str(error), written, kind)) from None


def _sentence(said: str, written: Any, kind: type[msgspec.Struct]) -> str:
    what, _, place = said.partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"{path}.{missing[1]} is missing".lstrip(".")
    value = _value_at(written, path)
    subject = f"{path} is {value}" if path else f"it is {value}"
    if supported := _literals(kind, path):
        return f"{subject}, which is not supported; supported: {', '.join(map(str, supported))}"
    if bound := re.fullmatch(r"Expected `.*` (>=|<=|>|<) (.*)", what):
        return f"{subject}, and has to be {COMPARISONS[bound[1]]} {bound[2]}"
    if expected := re.match(r"Expected `(.*?)`( of length \d+)?", what):
        kinds = [TYPES.get(name, name) for name in expected[1].split(" | ")]
        return f"{subject}, and has to be {' or '.join(kinds)}{expected[2] or ''}"
    return f"{subject}: {what[:1].lower()}{what[1:]}"


def _value_at(written: Any, path: str) -> str:
    """Return the value at msgspec's path, as a message shows it. Inside an object of any keys it is unknown."""
    for step in re.findall(r"[^.\[\]]+", path):
        if isinstance(written, list) and step.isdecimal() and int(step) < len(written):
            written = written[int(step)]
        elif isinstance(written, dict) and step in written:
            written = written[step]
        else:
            return "not what it may be"
    shown = repr(written)
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}…"


def _literals(kind: type[msgspec.Struct], path: str) -> tuple[Any, ...]:
    """Return the values that a key's Literal lists; nothing if the key has another type."""
    hint = get_type_hints(kind, include_extras=True).get(path)
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_args(hint) if get_origin(hint) is Literal else ()
