"""A flag for each field of SamplingParams, from the type that checks it in the HTTP API."""

import argparse
import re
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.sampling_params import HINTS, HONOURED
from protocol.config import ConfigError, base_type, explain_value, parse_integer, range_of

KINDS = {name: HINTS[name] for name in HONOURED}
NO_BOUND = re.compile(r" (of at least -|and at most )\d{10,}")  # that anybody would come near
DESCRIPTION = (
    "As in the HTTP API (docs/api.md). What is left out comes from the model's generation_config.json, or is the"
    " API's default."
)


def add_sampling_flags(parser: argparse.ArgumentParser, *without: str) -> None:
    """Give `parser` the flags of all sampling fields but those in `without`."""
    group = parser.add_argument_group("sampling", DESCRIPTION)
    for name, kind in KINDS.items():
        if name not in without:
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, default=argparse.SUPPRESS, **_flag_options(name, kind))


def sampling_values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling fields that were given, of their types. Raises ConfigError that names the field."""
    return {name: _convert(name, flags[name]) for name in KINDS if name in flags}


def _flag_options(name: str, kind: Any) -> dict[str, Any]:
    base = base_type(kind)
    if name == "stop":
        return {
            "action": "append",
            "metavar": "TEXT",
            "help": "a text that ends the answer; may be given several times",
        }
    if base is bool:
        return {"action": argparse.BooleanOptionalAction}
    if base in (int, float):
        return {"metavar": "N" if base is int else "X", "help": f"a number{NO_BOUND.sub('', range_of(kind))}"}
    if typing.get_origin(base) is dict:
        return {"metavar": "JSON", "help": 'a JSON object of token ids, such as {"50": -100}'}
    return {"metavar": "IDS", "help": "token ids, separated by commas"}


def _convert(name: str, value: object) -> object:
    kind = KINDS[name]
    base = base_type(kind)
    try:
        if isinstance(value, str) and base is int:
            value = int(value) if value.startswith("-") else parse_integer(value)
        elif isinstance(value, str) and typing.get_origin(base) is dict:
            value = msgspec.json.decode(value)
        elif isinstance(value, str) and base is not float:
            value = [part.strip() for part in value.strip("[]").split(",")]
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be {value!r}: {_reason(kind, value, error)}") from None


def _reason(kind: Any, value: object, error: Exception) -> str:
    if base_type(kind) in (int, float):
        return explain_value(kind, value, error)
    return str(error)[:1].lower() + str(error)[1:]
