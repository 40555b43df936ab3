"""Resolves sampling: a value comes from the caller, or else from the generation config, or else from OpenAI's API."""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from octavo.gateway.asking.asked import AskedSampling, FieldNames
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.generation_config import SamplingDefaults
from octavo.gateway.text.tokenizer import Tokenizer
from octavo.protocol.sampling import Sampling

MASK_64 = 2**64 - 1

Value = TypeVar("Value", int, float)


def resolve_sampling(
    asked: AskedSampling, model: ServedModel, num_prompt_tokens: int, names: FieldNames, *, has_grammar: bool = False
) -> Sampling:
    """Return the sampling of choice 0. What follows a grammar ends with it, also if `ignore_eos` is asked for.

    Raises RequestError for an id that is not in the vocabulary, more tokens than fit, or too many log probabilities.
    """
    files, vocab_size = model.files, model.ready.vocab_size
    max_tokens = _resolve_max_tokens(
        asked, files.sampling_defaults.max_tokens, num_prompt_tokens, model.ready.max_model_len, names
    )
    if asked.min_tokens > max_tokens:
        message = f"min_tokens is {asked.min_tokens} but at most {max_tokens} tokens will be generated"
        raise RequestError(message, param="min_tokens", code="invalid_value")
    for name, wanted in ((names.logprobs, asked.num_logprobs), (names.prompt_logprobs, asked.num_prompt_logprobs)):
        if (wanted or 0) > files.max_logprobs:
            message = f"{name} is more than {files.max_logprobs}, which is the most here (--max-logprobs)"
            raise RequestError(message, param=name, code="invalid_value")
    check_token_ids(asked.stop_token_ids, vocab_size, "stop_token_ids")
    special_ids = _special_stop_ids(asked.stop, files.tokenizer)
    return msgspec.structs.replace(
        _params(asked, files.sampling_defaults),
        max_tokens=max_tokens,
        min_tokens=asked.min_tokens,
        seed=model.draw_seed() if asked.seed is None else asked.seed & MASK_64,
        eos_token_ids=() if asked.ignore_eos and not has_grammar else tuple(files.eos_token_ids),
        stop_token_ids=tuple(dict.fromkeys([*asked.stop_token_ids, *special_ids])),
        logit_bias=_logit_bias(asked.logit_bias, vocab_size),
        num_logprobs=asked.num_logprobs,
        num_prompt_logprobs=asked.num_prompt_logprobs,
        ends_late=asked.ignore_eos and has_grammar,
    )


def _resolve_max_tokens(
    asked: AskedSampling, model_default: int | None, num_prompt_tokens: int, max_model_len: int, names: FieldNames
) -> int:
    """Return how many tokens to generate at most. Raises RequestError if these, or the prompt alone, do not fit."""
    room = max_model_len - num_prompt_tokens
    if room < (0 if asked.max_tokens == 0 else 1):
        raise context_length_exceeded(
            max_model_len, f"the prompt has {num_prompt_tokens} tokens, which leaves no room to generate", names.prompt
        )
    if asked.max_tokens is None:
        default = asked.default_max_tokens if model_default is None else model_default
        return room if default is None else min(default, room)
    if asked.max_tokens > room and not asked.cuts_max_tokens:
        raise context_length_exceeded(
            max_model_len,
            f"the prompt has {num_prompt_tokens} tokens and {names.max_tokens} is {asked.max_tokens}: "
            f"ask for at most {room}",
            names.max_tokens,
        )
    return min(asked.max_tokens, room)


def _special_stop_ids(stops: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the stop strings that are special tokens. They are not in the text, so only the id can stop."""
    token_ids = map(tokenizer.token_id, stops)
    return [token_id for token_id in token_ids if token_id in tokenizer.special_token_ids]


def for_choice(params: Sampling, index: int) -> Sampling:
    """Return the sampling of choice `index`: its seed depends on the request's seed and `index` alone."""
    if index == 0:
        return params
    digest = hashlib.blake2b(params.seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return msgspec.structs.replace(params, seed=int.from_bytes(digest, "little"))


def context_length_exceeded(max_model_len: int, reason: str, param: str) -> RequestError:
    """Return the error for a request that does not fit the context. Clients recognise it by its first words."""
    message = f"the prompt is too long: this model's maximum context length is {max_model_len} tokens, {reason}"
    return RequestError(message, param=param, code="context_length_exceeded")


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise RequestError that names the first id outside the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        shown = wrong if abs(wrong) < 2**64 else "of more than 64 bits"
        message = f"{param}: token id {shown} is not in the vocabulary (0 to {vocab_size - 1})"
        raise RequestError(message, param=param, code="invalid_token_id")


def _params(asked: AskedSampling, defaults: SamplingDefaults) -> Sampling:
    return Sampling(
        max_tokens=0,
        seed=0,
        temperature=_first(asked.temperature, defaults.temperature, 1.0),
        top_p=_first(asked.top_p, defaults.top_p, 1.0),
        top_k=max(0, _first(asked.top_k, defaults.top_k, 0)),
        min_p=_first(asked.min_p, defaults.min_p, 0.0),
        presence_penalty=_first(asked.presence_penalty, None, 0.0),
        frequency_penalty=_first(asked.frequency_penalty, None, 0.0),
        repetition_penalty=_first(asked.repetition_penalty, defaults.repetition_penalty, 1.0),
    )


def _first(asked: Value | None, default: Value | None, otherwise: Value) -> Value:
    if asked is not None:
        return asked
    return otherwise if default is None else default


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for key in biases:
        # Each id has exactly one spelling, so that no id has two biases.
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
            message = f"logit_bias: {key[:40]!r} is not a token id"
            raise RequestError(message, param="logit_bias", code="invalid_token_id")
    check_token_ids([int(key) for key in biases], vocab_size, "logit_bias")
    return tuple(sorted((int(key), bias) for key, bias in biases.items()))
