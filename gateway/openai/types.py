"""The bodies that clients may send. A field is honoured, refused by name, or advisory: taken, with no effect here.

The fields have types and ranges, so that decoding a body checks it. Null in an optional field is the same as no field.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.gateway.openai.neutral import (
    OnlyNeutral,
    Unsupported,
    UnsupportedList,
    UnsupportedObject,
    UnsupportedSwitch,
    UnsupportedText,
    refuse_unsupported,
)
from octavo.gateway.openai.structured import Choices, GrammarText, ResponseFormat, SchemaOrText, StructuredOutputs
from octavo.gateway.openai.tools import MessageToolCall, ToolChoice, Tools
from octavo.gateway.request_error import RequestError

MAX_CHOICES = 1024  # prompts x n of one request
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096  # of all stop strings together: they are prepared before the first token
MAX_MESSAGES = 1 << 14
MAX_LISTED_IDS = 1024

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopString = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: UnsupportedSwitch = None
    continuous_usage_stats: bool | None = None  # in effect only with include_usage, as in vLLM


class ModelRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body that names a model."""

    model: str | None = None

    def forget_prompt(self) -> None:
        """Drop the prompt, which can be long, once its tokens are known. The rest is still a valid body."""
        raise NotImplementedError

    def forget_advice(self) -> None:
        """Drop the advisory fields, which can be long."""


class GeneratingRequest(ModelRequest, kw_only=True):
    """A body that asks for an answer, in whatever dialect."""

    stream: bool | None = None
    request_id: Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None


class CommonRequest(GeneratingRequest, kw_only=True):
    """The fields that chat and completions share."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None  # another name of max_tokens
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0 are off
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    seed: Int64 | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_LISTED_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_LISTED_IDS)] | None
    ) = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # lower goes first; nobody goes before others
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: as many as leave room
    truncation_side: Literal["left", "right"] | None = None  # where tokens are taken away; None: left
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    # Advisory: these fields are for the caller's own records and do not change what is generated.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    moderation: Any = None

    bad_words: UnsupportedList = None
    allowed_token_ids: Unsupported = None
    logprob_token_ids: Unsupported = None
    logits_processors: UnsupportedList = None
    use_beam_search: UnsupportedSwitch = None
    length_penalty: Annotated[Any, OnlyNeutral(1, 1.0)] = None
    spaces_between_special_tokens: Annotated[Any, OnlyNeutral(True)] = None
    early_stopping: UnsupportedSwitch = None
    return_prompt_text: UnsupportedSwitch = None
    return_token_offsets: UnsupportedSwitch = None
    thinking_token_budget: Unsupported = None
    kv_transfer_params: UnsupportedObject = None
    vllm_xargs: UnsupportedObject = None

    def forget_advice(self) -> None:
        self.user = self.metadata = self.store = self.service_tier = self.safety_identifier = None
        self.prompt_cache_key = self.prompt_cache_retention = self.prompt_cache_options = self.moderation = None


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str

    # Advisory: marks for a provider's cache.
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    annotations: Any = None
    id: Any = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # another name of reasoning

    # Advisory: records of a client or a provider, which come back with the history of a conversation.
    id: Any = None
    metadata: Any = None
    timestamp: Any = None
    created_at: Any = None
    annotations: Any = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None
    provider_specific_fields: Any = None

    refusal: UnsupportedText = None
    audio: Unsupported = None
    function_call: Unsupported = None
    thinking_blocks: UnsupportedList = None
    images: UnsupportedList = None

    @property
    def text(self) -> str:
        """The content as one string: the parts are joined without a separator."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(CommonRequest, kw_only=True):
    """A body of `/v1/chat/completions`."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # the answer begins with the last message, if that is an assistant's
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None

    functions: UnsupportedList = None
    function_call: Annotated[Any, OnlyNeutral("none", "auto")] = None
    modalities: Annotated[Any, OnlyNeutral(["text"])] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None
    verbosity: Annotated[Any, OnlyNeutral("medium")] = None
    add_special_tokens: UnsupportedSwitch = None
    chat_template: Unsupported = None
    documents: UnsupportedList = None
    mm_processor_kwargs: UnsupportedObject = None

    def forget_prompt(self) -> None:
        last = self.messages[-1] if self.echo else ChatMessage(role="assistant")
        self.messages, self.chat_template_kwargs = [last], None


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_STRINGS, _TOKENS = {"type": "array", "items": _STRING}, {"type": "array", "items": _INTEGER}
# Told apart in gateway/openai/completions.py, which can name the place of what is wrong.
Prompt = Annotated[
    Any, Meta(extra_json_schema={"anyOf": [_STRING, _STRINGS, _TOKENS, {"type": "array", "items": _TOKENS}]})
]


class CompletionRequest(CommonRequest, kw_only=True):
    """A body of `/v1/completions`."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    best_of: Annotated[Any, OnlyNeutral(1)] = None
    suffix: Annotated[Any, OnlyNeutral("")] = None
    prompt_embeds: Unsupported = None

    def forget_prompt(self) -> None:
        self.prompt = ""


chat_decoder = msgspec.json.Decoder(ChatRequest)
completion_decoder = msgspec.json.Decoder(CompletionRequest)


def without_nulls(body: Any) -> Any:
    """Return a decoded body without the fields that are null, at every level: null is the same as no field."""
    if not isinstance(body, Mapping):
        return body
    fields = {name: value for name, value in body.items() if value is not None}
    if "stream_options" in fields:
        fields["stream_options"] = without_nulls(fields["stream_options"])
    if isinstance(messages := fields.get("messages"), Sequence) and not isinstance(messages, str):
        fields["messages"] = [_message_without_nulls(message) for message in messages]
    if isinstance(tools := fields.get("tools"), Sequence) and not isinstance(tools, str):
        fields["tools"] = [_tool_without_nulls(tool) for tool in tools]
    return fields


def _message_without_nulls(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    fields = {name: value for name, value in message.items() if value is not None}
    if isinstance(parts := fields.get("content"), Sequence) and not isinstance(parts, str):
        fields["content"] = [without_nulls(part) for part in parts]
    return fields


def _tool_without_nulls(tool: Any) -> Any:
    fields = without_nulls(tool)
    if isinstance(fields, dict) and "function" in fields:
        fields["function"] = without_nulls(fields["function"])
    return fields


def check_common(request: CommonRequest) -> None:
    """Raise RequestError for faults of the shared fields that decoding by type cannot find."""
    refuse_unsupported(request)
    if request.stream_options is not None:
        refuse_unsupported(request.stream_options, "stream_options.")
        if not request.stream and any(msgspec.structs.astuple(request.stream_options)):
            raise RequestError("stream_options needs stream to be true", param="stream_options", code="invalid_value")
    if request.stream and request.prompt_logprobs is not None:
        complaint = "prompt_logprobs needs stream to be false"
        raise RequestError(complaint, param="prompt_logprobs", code="invalid_value")
    if request.truncation_side is not None and request.truncate_prompt_tokens is None:
        complaint = "truncation_side needs truncate_prompt_tokens"
        raise RequestError(complaint, param="truncation_side", code="invalid_value")
    _check_stop_strings(stop_strings(request))
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        complaint = "max_tokens and max_completion_tokens mean the same: they must agree"
        raise RequestError(complaint, param="max_tokens", code="invalid_value")


def _check_stop_strings(stops: tuple[str, ...]) -> None:
    if "" in stops:
        raise RequestError("stop cannot hold an empty string", param="stop", code="invalid_value")
    num_characters = sum(map(len, stops))
    if num_characters > MAX_STOP_CHARACTERS:
        complaint = f"stop has {num_characters} characters in all: it may have {MAX_STOP_CHARACTERS}"
        raise RequestError(complaint, param="stop", code="invalid_value")


def wanted_tokens(request: CommonRequest) -> tuple[int | None, str]:
    """Return how many tokens the request wants at most, and the name of the field that says so."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def usage_options(request: CommonRequest) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether each of its chunks has the usage so far."""
    options = request.stream_options
    if options is None or not options.include_usage:
        return False, False
    return True, bool(options.continuous_usage_stats)


def stop_strings(request: CommonRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
