"""The door of the Python API: the caller's prompts become `Asked`, which is prepared. No event loop."""

import itertools
import operator
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypedDict, cast

import msgspec

from octavo.gateway.asking.asked import (
    Asked,
    AskedPrompt,
    AskedPrompts,
    AskedSampling,
    FieldNames,
    PromptText,
    PromptTokens,
)
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.asking.prepare import prepare
from octavo.gateway.asking.vectors import prepare_vectors
from octavo.gateway.link.engine import GenerationRequest
from octavo.gateway.openai.answers import asked_sampling
from octavo.gateway.openai.chat import chat_prompt, check_chat
from octavo.gateway.openai.completions import DEFAULT_MAX_TOKENS
from octavo.gateway.openai.invalid_field import invalid_field
from octavo.gateway.openai.structured import asked_grammar
from octavo.gateway.openai.types import ChatRequest, without_nulls
from octavo.gateway.parsing.formats import Formats
from octavo.gateway.reading.grammar_checks import GrammarChecks
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.model_files import ModelFiles
from octavo.gateway.text.steps import finished
from octavo.protocol.messages import Ready
from octavo.python.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


Prompt = str | TextPrompt | TokensPrompt | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A prompt and the sequences to generate for it, one per answer."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    sequences: list[GenerationRequest]


class Preparation:
    """The door of the Python API: prepares the caller's prompts. Several threads may use it at once."""

    def __init__(self, files: ModelFiles, ready: Ready, seed: int | None) -> None:
        seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._model = ServedModel(files, ready, lambda: seeds.getrandbits(64), Formats())
        self._numbers = itertools.count()
        self._grammar_checks = GrammarChecks(files.directory)

    def close(self) -> None:
        """End the processes that check grammars."""
        self._grammar_checks.close()

    def of_prompt(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> PreparedRequest:
        """Return the request for a prompt. Raises ValueError or TypeError if the prompt is wrong."""
        given, names = _asked_prompt(prompt)
        return self._request(given, params, request_id, names)

    def of_text(self, prompt: Prompt, request_id: str | None = None) -> PreparedRequest:
        """Return the request for a prompt's vector. Raises ValueError or TypeError if the prompt is wrong."""
        given, names = _asked_prompt(prompt)
        number = str(next(self._numbers))
        with _as_value_error():
            [request] = finished(prepare_vectors(AskedPrompts(prompts=[given], names=names), self._model, number))
        return PreparedRequest(request_id or number, None, request.prompt.token_ids, [request])

    def of_chat(
        self,
        messages: Conversation,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> PreparedRequest:
        """Return the request for a conversation. Raises ValueError if the conversation is wrong."""
        fields = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        with _as_value_error():
            prompt = chat_prompt(_chat_request(fields))
        return self._request(prompt, params, request_id, FieldNames(prompt="messages"))

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling defaults in the model's files."""
        said = msgspec.structs.asdict(self._model.files.sampling_defaults)
        return SamplingParams(**{name: value for name, value in said.items() if value is not None})

    def _request(
        self, prompt: AskedPrompt, params: SamplingParams, request_id: str | None, names: FieldNames
    ) -> PreparedRequest:
        number = str(next(self._numbers))
        asked = Asked(
            prompts=[prompt],
            sampling=_sampling(params),
            n=params.request.n or 1,
            names=names,
            keeps_text=True,
            grammar=asked_grammar(params.request),
        )
        with _as_value_error():
            prepared = finished(prepare(asked, self._model, number))
            if prepared.grammar is not None:
                self._grammar_checks.check(prepared.grammar)
        [only] = prepared.prompts
        return PreparedRequest(request_id or number, only.text, only.token_ids, prepared.requests)


def _sampling(params: SamplingParams) -> AskedSampling:
    """Return the sampling of `params`. `max_tokens` is a limit here: the end of the context is another limit."""
    body = params.request
    return asked_sampling(
        body,
        max_tokens=sys.maxsize if params.takes_all_room else body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        cuts_max_tokens=True,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
    )


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts in one prompt or in a sequence; integers are the token ids of one prompt. Raises TypeError."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = [_listed(item) for item in _sequence(prompts)]
    if items and not isinstance(items[0], str | Mapping | Sequence):
        return [items]
    return items


def split_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return the conversations in one conversation or in a sequence. Raises TypeError."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages is a list of messages or a list of such lists, not {type(messages).__name__}")
    items = cast("Sequence[Any]", messages)
    return [items] if items and isinstance(items[0], Mapping) else list(items)


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """Return the sampling of each prompt. Raises ValueError for a wrong number of them, TypeError for a wrong type."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    listed: list[Any] = [params] if isinstance(params, Mapping) or not isinstance(params, Iterable) else list(params)
    for item in listed:
        if not isinstance(item, SamplingParams):
            raise TypeError(f"sampling_params is one SamplingParams or one per prompt, not {type(item).__name__}")
    if len(listed) != num_prompts:
        raise ValueError(f"there are {num_prompts} prompts and {len(listed)} sampling_params: give one, or one each")
    return listed


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Add the place to a ValueError or TypeError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    except TypeError as error:
        raise TypeError(f"{place}: {error}") from None


def _asked_prompt(prompt: Prompt) -> tuple[AskedPrompt, FieldNames]:
    """Return a prompt as it is asked for, and the caller's name of it. Raises ValueError or TypeError."""
    given = _only_value(prompt) if isinstance(prompt, Mapping) else prompt
    if isinstance(given, str):
        return PromptText(given), FieldNames()
    return PromptTokens(_token_ids(given)), FieldNames(prompt="prompt_token_ids")


def _only_value(prompt: Mapping[str, Any]) -> Any:
    """Return the prompt in a dictionary. Raises ValueError for keys that it must not have."""
    for name in prompt:
        if name not in ("prompt", "prompt_token_ids"):
            raise ValueError(f"{name!r} in a prompt is not supported: it has 'prompt' or 'prompt_token_ids'")
    if len(prompt) != 1:
        raise ValueError("a prompt has either 'prompt' or 'prompt_token_ids'")
    [(name, value)] = prompt.items()
    if isinstance(value, str) != (name == "prompt"):
        raise TypeError("'prompt' is a string, 'prompt_token_ids' a list of integers")
    return value


def _listed(value: Any) -> Any:
    """Return an array of NumPy or torch as a list, and any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value


def _sequence(value: Any) -> Sequence[Any]:
    """Return a sequence of prompts or token ids. Raises TypeError for bytes, which are neither."""
    listed = _listed(value)
    if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray | memoryview):
        raise _wrong_prompt(type(value).__name__)
    return listed


def _token_ids(given: Any) -> list[int]:
    token_ids = _sequence(given)
    for index, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, SupportsIndex):
            raise _wrong_prompt(f"a list with {type(token_id).__name__} at index {index}")
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError as error:  # every array has the method, also one whose elements are not numbers
        raise _wrong_prompt(f"a list of what is none: {error}") from None


def _wrong_prompt(given: str) -> TypeError:
    forms = "a string, a list of token ids, {'prompt': ...} or {'prompt_token_ids': ...}"
    return TypeError(f"a prompt is {forms}, not {given}")


def _chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    try:
        body = msgspec.convert(without_nulls(fields), ChatRequest)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), ChatRequest) from None
    check_chat(body)
    return body


@contextmanager
def _as_value_error() -> Iterator[None]:
    """Raise a RequestError, which the gateway would send to a client, as a ValueError."""
    try:
        yield
    except RequestError as error:
        raise ValueError(error.message) from None
