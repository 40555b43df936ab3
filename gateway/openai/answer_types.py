"""The types that clients receive. The fields are those of OpenAI's API; `stop_reason` is vLLM's addition."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.protocol.messages import Ready

encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class RunningUsage:
    """The usage of each choice of a stream so far, for `continuous_usage_stats`: its own prompt and its own tokens."""

    def __init__(self, nums_prompt_tokens: Sequence[int]) -> None:
        self._nums_prompt_tokens = nums_prompt_tokens
        self._nums_tokens = [0] * len(nums_prompt_tokens)
        self._nums_cached_tokens = [0] * len(nums_prompt_tokens)

    def add(self, index: int, num_tokens: int, num_cached_tokens: int) -> None:
        self._nums_tokens[index] += num_tokens
        self._nums_cached_tokens[index] = num_cached_tokens

    def of(self, index: int) -> Usage:
        num_prompt_tokens, num_tokens = self._nums_prompt_tokens[index], self._nums_tokens[index]
        details = PromptTokensDetails(self._nums_cached_tokens[index])
        return Usage(num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens, details)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatAnswer(msgspec.Struct):
    """`content` is null only beside tool calls. `reasoning` and `reasoning_content` are one text with two names."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


# Of one token of a prompt: itself first, then the likeliest, by token id; None for the first token of a prompt.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """More of a call. The first delta of each call has its id, type and name."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """`content` is a string in every chunk without reasoning and calls: clients print it without a check."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    """A chunk of a stream, for its description. ChunkWriter writes it in parts."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk of each choice


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists with one entry per token; the first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """A choice of an answer, or of a chunk of a stream: both have the same fields."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, tag_field="object", tag="text_completion"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(msgspec.Struct, tag_field="object", tag="text_completion"):
    """A chunk of a stream, for its description. ChunkWriter writes it in parts."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(msgspec.Struct, tag_field="object", tag="model"):
    id: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(msgspec.Struct, tag_field="object", tag="list"):
    data: list[ModelCard]


def system_fingerprint(ready: Ready) -> str:
    """Return the start of the model's fingerprint: short, because every chunk has it."""
    return f"fp_{ready.model_fingerprint[:12]}"
