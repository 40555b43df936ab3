"""Fields that are known and not implemented: they are refused by name, unless they ask for nothing."""

import typing
from functools import cache
from typing import Annotated, Any

import msgspec

from octavo.gateway.request_error import unsupported


class OnlyNeutral:
    """Marks a field that is not implemented. Null and these values are accepted, because they ask for nothing.

    Marks compare by identity: `typing` would keep one Annotated for equal marks, and 0 equals False.
    """

    def __init__(self, *values: Any) -> None:
        self.values = values


Unsupported = Annotated[Any, OnlyNeutral()]
UnsupportedSwitch = Annotated[Any, OnlyNeutral(False)]
UnsupportedList = Annotated[Any, OnlyNeutral([])]
UnsupportedText = Annotated[Any, OnlyNeutral("")]
UnsupportedObject = Annotated[Any, OnlyNeutral({})]


@cache
def neutral_values(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Return the fields that are not implemented, with the values that ask for nothing."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        name: mark.values
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, OnlyNeutral)
    }


def refuse_unsupported(struct: msgspec.Struct, path: str = "") -> None:
    """Raise RequestError if a field that is not implemented asks for something."""
    for name, neutral in neutral_values(type(struct)).items():
        value = getattr(struct, name)
        if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise unsupported(path + name, f"{path}{name}{_shown(value)}")


def _shown(value: Any) -> str:
    """Return the value as an error message shows it, or "" if the value is long."""
    if isinstance(value, dict) and isinstance(value.get("type"), str):
        return f" of type {value['type'][:40]!r}"
    return f" {value!r}" if isinstance(value, str | int | float) and len(repr(value)) < 40 else ""
