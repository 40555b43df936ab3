"""Flags for the fields of SamplingParams, made from the types that check them in the HTTP API."""

import argparse
import re
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.gateway.openai.structured import StructuredOutputs
from octavo.protocol.config import ConfigError
from octavo.protocol.settings.values import base_type, explain_value, parse_integer, range_of
from octavo.python.sampling_params import HINTS, HONOURED

# The older names of what structured_outputs has need no flags.
KINDS = {name: HINTS[name] for name in HONOURED if not name.startswith("guided_")}
NO_BOUND = re.compile(r" (of at least -|and at most )\d{10,}")  # limits that nobody reaches are not shown
DESCRIPTION = (
    "As in the HTTP API (docs/api.md). A flag that is left out has the value of the model's generation_config.json, or"
    " else the default that is shown here."
)
MEANINGS = {
    "n": "answers to each prompt (1)",
    "max_tokens": "the longest an answer may be (16; in a chat all that fits the context)",
    "min_tokens": "the shortest, before any stop counts (0)",
    "temperature": "how freely tokens are drawn; 0 takes the likeliest (1)",
    "top_p": "draws from the likeliest tokens whose probabilities add up to this (1: all)",
    "top_k": "draws from this many of the likeliest tokens; -1 and 0 are all (all)",
    "min_p": "draws from tokens at least this probable, as a part of the likeliest's probability (0: all)",
    "presence_penalty": "lowers tokens that the answer has already (0)",
    "frequency_penalty": "lowers tokens for each time that the answer has them (0)",
    "repetition_penalty": "divides the logits of tokens in prompt and answer; above 1 against repetition (1)",
    "seed": "makes the random choices repeatable (a new one each time)",
    "stop": "a text that ends the answer; may be given several times",
    "stop_token_ids": "token ids that end the answer, separated by commas",
    "ignore_eos": "go on beyond the model's own end of text (off)",
    "include_stop_str_in_output": "keep the stop text in the answer (off)",
    "skip_special_tokens": "leave special tokens out of the text (on)",
    "logit_bias": 'numbers to add to logits: a JSON object by token id, such as {"50": -100}',
    "logprobs": "report log probabilities, with this many alternatives a token (none)",
    "prompt_logprobs": "report log probabilities of the prompt too (none)",
    "structured_outputs": 'what an answer has to be, such as {"choice": ["yes", "no"]} or {"json": ...}',
}


def add_sampling_flags(parser: argparse.ArgumentParser, *without: str) -> None:
    """Add the flags of all sampling fields to `parser`, except those in `without`."""
    group = parser.add_argument_group("sampling", DESCRIPTION)
    for name, kind in KINDS.items():
        if name not in without:
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, default=argparse.SUPPRESS, **_flag_options(name, kind))


def sampling_values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling fields that were given, converted to their types. Raises ConfigError that names the field."""
    return {name: _convert(name, flags[name]) for name in KINDS if name in flags}


def _flag_options(name: str, kind: Any) -> dict[str, Any]:
    base, meaning = base_type(kind), MEANINGS[name]
    if name == "stop":
        return {"action": "append", "metavar": "TEXT", "help": meaning}
    if base is bool:
        return {"action": argparse.BooleanOptionalAction, "help": meaning}
    if base in (int, float):
        bounds = NO_BOUND.sub("", range_of(kind)).removeprefix(" of")
        return {"metavar": "N" if base is int else "X", "help": f"{meaning};{bounds}" if bounds else meaning}
    return {"metavar": "JSON" if _is_object(base) else "IDS", "help": meaning}


def _is_object(base: Any) -> bool:
    return typing.get_origin(base) is dict or base is StructuredOutputs


def _convert(name: str, value: object) -> object:
    kind = KINDS[name]
    base = base_type(kind)
    try:
        if isinstance(value, str) and base is int:
            value = int(value) if value.startswith("-") else parse_integer(value)
        elif isinstance(value, str) and _is_object(base):
            value = msgspec.json.decode(value)
        elif isinstance(value, str) and base is not float:
            value = [part.strip() for part in value.strip("[]").split(",")]
        converted = msgspec.convert(value, kind, strict=False)
        return value if base is StructuredOutputs else converted
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{name} cannot be {value!r}: {_reason(kind, value, error)}") from None


def _reason(kind: Any, value: object, error: Exception) -> str:
    if base_type(kind) in (int, float):
        return explain_value(kind, value, error)
    return str(error)[:1].lower() + str(error)[1:]
