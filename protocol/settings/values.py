"""From a typed text to a value of a setting's type, and the words for a text that does not fit."""

import json
import re
import typing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.protocol.settings.suggestions import suggestion


def parse_value(kind: Any, value: object) -> object:
    """Return what msgspec can convert to the type `kind`: integers and lists are read here, all else stays as it is.

    An integer may carry a unit (`8k`, `256MiB`). A list is JSON, or separated by commas; from flags it comes as a list
    of texts, each of which is one item or a JSON list. Raises ValueError.
    """
    base = base_type(kind)
    is_list = typing.get_origin(base) is tuple
    if isinstance(value, str) and base is int:
        return parse_integer(value)
    if isinstance(value, str) and is_list:
        return json.loads(value) if value.startswith("[") else [v.strip() for v in value.split(",") if v]
    if isinstance(value, list) and is_list:
        return [item for text in value for item in (json.loads(text) if text.startswith("[") else [text])]
    return value


def parse_integer(text: str) -> int:
    """Return the integer of "4096", "8k" (8,000), "8K" or "8Ki" (8,192), "256MiB", "2GB". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgtKMGT])(i)?)?(B|b)?\s*", text)
    if not match:
        raise ValueError(f"{text!r} is not a number of 0 or more, with or without a unit such as k, MiB or GB")
    number, letter, binary, byte = match.groups()
    # As in vLLM, a lone small letter is decimal and a lone capital binary; with a B after it, only "iB" is binary.
    base = 1024 if binary or (letter and letter.isupper() and not byte) else 1000
    value = float(number) * base ** (" kmgt".index(letter.lower()) if letter else 0)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def explain_value(kind: Any, value: object, error: Exception) -> str:
    """Return why `value` is not of type `kind`, in words for the person who typed it."""
    base = base_type(kind)
    if typing.get_origin(base) is Literal:
        choices = typing.get_args(base)
        return f"it is one of {', '.join(choices)}{suggestion(str(value), choices)}"
    if base is bool:
        return "it is true or false"
    if isinstance(error, json.JSONDecodeError):
        return f"it begins like a JSON list, but is not valid JSON: {error}"
    if titles := [meta.title for meta in metas_of(kind) if meta.title]:
        return f"it takes {titles[0]}"
    if not isinstance(error, msgspec.ValidationError):
        return str(error)
    return f"it is a number{range_of(kind)}"


def range_of(kind: Any) -> str:
    """Return the bounds of a number's type in words, such as " of at least 1 and at most 1024"."""
    bounds = (("at least", "ge"), ("more than", "gt"), ("at most", "le"), ("less than", "lt"))
    found = [
        f"{words} {bound:g}" if isinstance(bound, float) else f"{words} {bound}"
        for words, attribute in bounds
        for meta in metas_of(kind)
        if (bound := getattr(meta, attribute)) is not None
    ]
    return " of " + " and ".join(found) if found else ""


def base_type(kind: Any) -> Any:
    """Return the plain type inside Annotated and `| None`."""
    if typing.get_origin(kind) is Annotated:
        return base_type(typing.get_args(kind)[0])
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if len(options) == 1 and type(None) in typing.get_args(kind):
        return base_type(options[0])
    return kind


def metas_of(kind: Any) -> list[Meta]:
    """Return all Meta of a type and of the types inside it, the outermost first."""
    if typing.get_origin(kind) is Annotated:
        inner, *found = typing.get_args(kind)
        return [*(meta for meta in found if isinstance(meta, Meta)), *metas_of(inner)]
    return [meta for option in typing.get_args(kind) for meta in metas_of(option)]
