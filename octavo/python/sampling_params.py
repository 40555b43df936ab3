"""`SamplingParams`: how to sample. It has the sampling fields of the HTTP API, with the same checks."""

import inspect
import math
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from octavo.gateway.openai.completions import DEFAULT_MAX_TOKENS
from octavo.gateway.openai.invalid_field import invalid_field
from octavo.gateway.openai.neutral import OnlyNeutral
from octavo.gateway.openai.structured import StructuredOutputs, asked_grammar
from octavo.gateway.openai.types import CompletionRequest, check_common
from octavo.gateway.request_error import RequestError
from octavo.protocol.settings.suggestions import suggestion

StructuredOutputsParams = StructuredOutputs


class SamplingRequest(CompletionRequest, kw_only=True):
    """A completion request of which only the sampling is used."""

    prompt: Any = None


# Fields of a request that do not concern how tokens are chosen.
NOT_SAMPLING = frozenset(
    {
        "model", "prompt", "prompt_embeds", "suffix", "echo", "add_special_tokens", "stream", "stream_options", "user",
        "metadata", "store", "service_tier", "cache_salt", "priority", "request_id", "return_token_ids",
        "return_tokens_as_token_ids", "kv_transfer_params", "vllm_xargs", "response_format", "max_completion_tokens",
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "moderation",
        "return_prompt_text", "return_token_offsets", "truncation_side", "truncate_prompt_tokens",
    }
)  # fmt: skip
HINTS = typing.get_type_hints(SamplingRequest, include_extras=True)
NAMES = tuple(name for name in HINTS if name not in NOT_SAMPLING)  # some of them are always refused
MARKS = {name: getattr(HINTS[name], "__metadata__", ()) for name in NAMES}
DEFAULTS = {"max_tokens": DEFAULT_MAX_TOKENS}  # the values of fields that were not given; None for all other fields
HONOURED = tuple(name for name in NAMES if not any(isinstance(mark, OnlyNeutral) for mark in MARKS[name]))


class SamplingParams:
    """How the tokens of a prompt's answers are chosen. Give fields that differ from the model's defaults.

    A field that is left out, or None, has the value of the model's files, or else the default of the HTTP API:
    temperature 1, top_p 1, top_k off, min_p 0, no penalties, n 1, a new random seed. `max_tokens` is 16 if left out;
    None means as many as fit. `top_k` -1 and 0 are off. `logprobs` and `prompt_logprobs` are how many of the most
    likely tokens to report beside each token. Raises ValueError, which names the field, for a wrong value, and
    TypeError for an unknown field. Fields may also be set later, with the same checks.
    """

    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name)) for name in HONOURED]
    )

    request: SamplingRequest
    _given: dict[str, Any]

    def __init__(self, **fields: Any) -> None:
        for name in fields:
            if name not in NAMES:
                raise TypeError(f"SamplingParams has no field {name!r}{suggestion(name, HONOURED)}")
        object.__setattr__(self, "request", _checked(fields))
        object.__setattr__(self, "_given", dict(fields))

    @property
    def takes_all_room(self) -> bool:
        """Whether answers may be as long as the model's context has room for: `max_tokens` was given as None."""
        return "max_tokens" in self._given and self._given["max_tokens"] is None

    def __getattr__(self, name: str) -> Any:
        if name in DEFAULTS and name not in self._given:
            return DEFAULTS[name]
        if name in NAMES:
            return getattr(self.request, name)
        raise AttributeError(f"SamplingParams has no field {name!r}{suggestion(name, HONOURED)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in NAMES:
            raise AttributeError(f"SamplingParams has no field {name!r}{suggestion(name, HONOURED)}")
        given = {**self._given, name: value}
        object.__setattr__(self, "request", _checked(given))
        object.__setattr__(self, "_given", given)

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self._given.items())})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingParams):
            return NotImplemented
        return self.request == other.request and self.takes_all_room == other.takes_all_room

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __dir__(self) -> Iterator[str]:
        yield from (*super().__dir__(), *HONOURED)


def _checked(fields: Mapping[str, Any]) -> SamplingRequest:
    """Return the request with these `fields`. Raises ValueError that names the wrong field."""
    values = {name: value for name, value in fields.items() if value is not None}
    if isinstance(structured := values.get("structured_outputs"), StructuredOutputs):
        values["structured_outputs"] = msgspec.to_builtins(structured)
    if isinstance(biases := values.get("logit_bias"), Mapping):
        values["logit_bias"] = {str(token_id): bias for token_id, bias in biases.items()}
    _refuse_not_finite(values)
    try:
        request = msgspec.convert(values, SamplingRequest)
        check_common(request)
        asked_grammar(request)
    except msgspec.ValidationError as error:
        raise ValueError(invalid_field(str(error), SamplingRequest).message) from None
    except RequestError as error:
        raise ValueError(error.message) from None
    if request.max_tokens == 0:
        raise ValueError("max_tokens must be at least 1")
    return request


def _refuse_not_finite(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        numbers = value.values() if isinstance(value, Mapping) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ValueError(f"{name} has to be finite, not {value!r}")
