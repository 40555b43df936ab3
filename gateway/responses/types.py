"""The bodies and answers of OpenAI's Responses API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.gateway.openai.neutral import OnlyNeutral, Unsupported, UnsupportedSwitch
from octavo.gateway.openai.tools import MAX_TOOLS, Name
from octavo.gateway.openai.types import MAX_LOGPROBS, GeneratingRequest

encode = msgspec.json.Encoder().encode
Id = Annotated[str, Meta(min_length=1, max_length=1024)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    text: str
    prompt_cache_breakpoint: Any = None  # advisory


class OutputTextInput(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """Text of an earlier answer."""

    text: str
    annotations: Any = None  # advisory
    logprobs: Any = None  # advisory


class RefusalInput(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


InputContent = InputText | OutputTextInput | RefusalInput


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message; the type may be left out."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputContent], Meta(min_length=1)]
    type: Literal["message"] | None = None
    id: Any = None  # advisory
    status: Any = None  # advisory
    phase: Any = None  # advisory

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class CallItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call"]
    call_id: Id
    name: str
    arguments: str
    id: Any = None  # advisory
    status: Any = None  # advisory
    namespace: Any = None  # advisory


class OutputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function_call_output"]
    call_id: Id
    output: str | list[InputContent]
    id: Any = None  # advisory
    status: Any = None  # advisory

    @property
    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


class ReasoningText(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["reasoning_text", "summary_text"]


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: Any = None  # advisory
    id: Any = None  # advisory
    status: Any = None  # advisory

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)


Item = MessageItem | CallItem | OutputItem | ReasoningItem
ITEM_TYPES: dict[str | None, Any] = {
    None: MessageItem,
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


class ResponseTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True, kw_only=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # advisory
    defer_loading: Any = None  # advisory


class ResponseNamedTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str


class ResponseAllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseNamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Annotated[Any, OnlyNeutral("medium")] = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Any = None  # advisory
    generate_summary: Any = None  # advisory
    context: Any = None  # advisory


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: UnsupportedSwitch = None


class ResponsesRequest(GeneratingRequest, kw_only=True):
    """A body of `/v1/responses`."""

    input: Annotated[
        Any, Meta(extra_json_schema={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | ResponseAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None

    # Advisory: nothing is stored, and the rest is for the caller's own records.
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: Any = None

    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    background: UnsupportedSwitch = None
    prompt: Unsupported = None
    max_tool_calls: Unsupported = None
    context_management: Unsupported = None

    def forget_prompt(self) -> None:
        self.input, self.instructions = "", None

    def forget_advice(self) -> None:
        self.include = self.user = self.service_tier = self.safety_identifier = None
        self.prompt_cache_key = self.prompt_cache_retention = self.prompt_cache_options = self.client_metadata = None


responses_decoder = msgspec.json.Decoder(ResponsesRequest)


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class MessageOutput(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: str = "completed"
    role: Literal["assistant"] = "assistant"


class ThoughtText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningOutput(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[ThoughtText]
    summary: list[Any] = []
    status: str = "completed"


class CallOutput(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"


OutputBlock = MessageOutput | ReasoningOutput | CallOutput


class InputDetails(msgspec.Struct):
    cached_tokens: int


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class Response(msgspec.Struct, tag_field="object", tag="response"):
    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputBlock]
    tools: list[ResponseTool]
    tool_choice: Any
    parallel_tool_calls: bool
    temperature: float | None
    top_p: float | None
    max_output_tokens: int | None
    text: Any
    reasoning: Any
    truncation: str
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    metadata: dict[str, Any] | None = None
    instructions: str | None = None
    previous_response_id: None = None
    background: bool = False
    store: bool = False


class ResponseEvent(msgspec.Struct):
    """An event of a stream, for its description: response.created, response.output_text.delta and so on."""

    type: str
    sequence_number: int
