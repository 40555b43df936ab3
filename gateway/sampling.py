"""From a request to Sampling: what it says, else what the generation config says, else OpenAI's default."""

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from gateway.errors import RequestError
from gateway.generation_config import SamplingDefaults
from gateway.least_tokens import MAX_CHARACTERS_PER_TOKEN
from gateway.openai_types import MAX_LOGPROBS, ChatRequest, CommonRequest, stop_strings
from gateway.tokenizer import Tokenizer
from protocol.sampling import Sampling

MASK_64 = 2**64 - 1
DEFAULT_MAX_TOKENS = 16  # of a completion

Value = TypeVar("Value", int, float)


def sampling_params(
    request: CommonRequest,
    defaults: SamplingDefaults,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    tokenizer: Tokenizer,
    max_tokens: int,
    seed: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    max_logprobs: int = MAX_LOGPROBS,
) -> Sampling:
    """Return the sampling of choice 0. Raises RequestError for an id not in the vocabulary or too many min_tokens."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"min_tokens is {min_tokens} but at most {max_tokens} tokens will be generated"
        raise RequestError(message, param="min_tokens", code="invalid_value")
    if max(num_logprobs or 0, num_prompt_logprobs or 0) > max_logprobs:
        param = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        message = f"{param} is more than {max_logprobs}, which is the most here (--max-logprobs)"
        raise RequestError(message, param=param, code="invalid_value")
    stop_token_ids = request.stop_token_ids or []
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    return msgspec.structs.replace(
        _params(request, defaults),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=seed,
        eos_token_ids=() if request.ignore_eos else tuple(eos_token_ids),
        stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *_special_stop_ids(request, tokenizer)])),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _special_stop_ids(request: CommonRequest, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the stop strings that are special tokens: texts leave those out, so only the id can stop."""
    token_ids = map(tokenizer.token_id, stop_strings(request))
    return [token_id for token_id in token_ids if token_id in tokenizer.special_token_ids]


def for_choice(params: Sampling, index: int) -> Sampling:
    """Return the sampling of choice `index`: its own seed, which depends on nothing but the request's and the index."""
    if index == 0:
        return params
    digest = hashlib.blake2b(params.seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return msgspec.structs.replace(params, seed=int.from_bytes(digest, "little"))


def unsigned_seed(seed: int) -> int:
    """Return the 64 bits of a seed of either sign."""
    return seed & MASK_64


def resolve_max_tokens(
    asked: int | None, default: int | None, *, num_prompt_tokens: int, max_model_len: int, asked_by: str, prompt_is: str
) -> int:
    """Return how many tokens to generate at most: those asked for, else `default`, else all that fit.

    `asked_by` and `prompt_is` name the request's fields. Raises RequestError if the prompt, or both, are too long.
    """
    room = max_model_len - num_prompt_tokens
    if room < (0 if asked == 0 else 1):
        raise context_length_exceeded(
            max_model_len, f"the prompt has {num_prompt_tokens} tokens, which leaves no room to generate", prompt_is
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise context_length_exceeded(
            max_model_len,
            f"the prompt has {num_prompt_tokens} tokens and {asked_by} is {asked}: ask for at most {room}",
            asked_by,
        )
    return asked


def check_text_length(num_characters: int, max_model_len: int, prompt_is: str) -> None:
    """Raise RequestError for messages that can only be too long, so that no template has to render them."""
    if num_characters > max_model_len * MAX_CHARACTERS_PER_TOKEN:
        raise context_length_exceeded(
            max_model_len, f"the prompt has {num_characters} characters, more than that many tokens can have", prompt_is
        )


def too_many_tokens(at_least: int, max_model_len: int, prompt_is: str) -> RequestError:
    """Return the error for a prompt that was not encoded to its end."""
    reason = f"the prompt has at least {at_least} tokens, which leaves no room to generate"
    return context_length_exceeded(max_model_len, reason, prompt_is)


def context_length_exceeded(max_model_len: int, reason: str, param: str) -> RequestError:
    """Return the error for what does not fit the context: it begins with the words by which clients recognise it."""
    message = f"the prompt is too long: this model's maximum context length is {max_model_len} tokens, {reason}"
    return RequestError(message, param=param, code="context_length_exceeded")


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raise RequestError that names the first id outside of the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        shown = wrong if abs(wrong) < 2**64 else "of more than 64 bits"
        message = f"{param}: token id {shown} is not in the vocabulary (0 to {vocab_size - 1})"
        raise RequestError(message, param=param, code="invalid_token_id")


def _params(request: CommonRequest, defaults: SamplingDefaults) -> Sampling:
    return Sampling(
        max_tokens=0,
        seed=0,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=max(0, _first(request.top_k, defaults.top_k, 0)),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        presence_penalty=_first(request.presence_penalty, None, 0.0),
        frequency_penalty=_first(request.frequency_penalty, None, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
    )


def _first(asked: Value | None, default: Value | None, otherwise: Value) -> Value:
    if asked is not None:
        return asked
    return otherwise if default is None else default


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for key in biases:
        # One way to write an id, so that none has two biases.
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
            message = f"logit_bias: {key[:40]!r} is not a token id"
            raise RequestError(message, param="logit_bias", code="invalid_token_id")
    check_token_ids([int(key) for key in biases], vocab_size, "logit_bias")
    return tuple(sorted((int(key), bias) for key, bias in biases.items()))
