"""The flags of argparse and their help, made from the fields of `Config`."""

import argparse
import typing
from collections.abc import Iterable
from typing import Any, Literal

from octavo.protocol.config import FIELDS
from octavo.protocol.settings.values import base_type, metas_of

SHORT_FLAGS = {"tensor_parallel_size": ("-tp",), "shutdown_timeout_s": ("--shutdown-timeout",)}
SEVERAL_VALUES = ("served_model_name",)  # one flag takes several, as in vLLM
ITEMS = {"served_model_name": "NAME", "api_key": "KEY", "allowed_origins": "ORIGIN", "schedulers": "ADDRESS"}


def add_flags(parser: argparse._ActionsContainer, names: Iterable[str] = tuple(FIELDS)) -> None:
    """Give `parser` one --flag for each field; only the flags that were given appear in what it parses."""
    for name in names:
        flags = (flag_name(name), *SHORT_FLAGS.get(name, ()))
        help_text = describe(name).replace("%", "%%")
        parser.add_argument(*flags, default=argparse.SUPPRESS, help=help_text, **_options(name))


def flag_name(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def describe(name: str) -> str:
    """Return what the field `name` is, with its default."""
    field = FIELDS[name]
    description = next(meta.description for meta in metas_of(field.type) if meta.description)
    return description + (f" (default: {_show(name, field.default)})" if field.default not in (None, "", ()) else "")


def _options(name: str) -> dict[str, Any]:
    """Return what argparse has to know of the field `name`."""
    base = base_type(FIELDS[name].type)
    if base is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(base) is Literal:
        return {"metavar": "|".join(typing.get_args(base))}
    if typing.get_origin(base) is tuple:
        # A flag that takes one value may be repeated.
        several: dict[str, Any] = {"action": "extend", "nargs": "+"} if name in SEVERAL_VALUES else {"action": "append"}
        return several | {"metavar": ITEMS[name]}
    return {"metavar": {int: "N", float: "X"}.get(base, name.rsplit("_", 1)[-1].upper())}


def _show(name: str, value: object) -> str:
    """Return the default `value` of the field `name` as a person would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value >> 20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)
