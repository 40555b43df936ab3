"""The bodies and answers of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from octavo.gateway.openai.neutral import Unsupported, UnsupportedList
from octavo.gateway.openai.tools import MAX_TOOLS, Name
from octavo.gateway.openai.types import MAX_MESSAGES, MAX_STOP_STRINGS, GeneratingRequest, ModelRequest, StopString

encode = msgspec.json.Encoder().encode


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: Any = None  # advisory
    citations: Any = None  # advisory


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=1024)]
    name: str
    input: dict[str, Any]
    cache_control: Any = None  # advisory
    caller: Any = None  # advisory


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None  # advisory

    @property
    def text(self) -> str:
        text = joined_text(self.content)
        return f"Error: {text}" if self.is_error else text


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    thinking: str
    signature: Any = None  # advisory


class RedactedBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    """Thinking that only the service which wrote it can read: it is left out."""

    data: Any = None


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    cache_control: Any = None  # advisory
    eager_input_streaming: Any = None  # advisory
    strict: bool | None = None  # advisory
    input_examples: UnsupportedList = None
    defer_loading: Any = None  # advisory
    allowed_callers: Any = None  # advisory


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1024, le=2**31 - 1)] | None = None  # advisory
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_on(self) -> bool:
        return self.type != "disabled"

    @property
    def is_shown(self) -> bool:
        return self.is_on and self.display != "omitted"


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(GeneratingRequest, kw_only=True):
    """A body of `/v1/messages`."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    system: str | list[TextBlock] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an earlier name of output_config.format

    # Advisory: these fields are for the caller's own records, or for the service that runs the model.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    cache_control: Any = None
    context_management: Any = None
    speed: Any = None

    container: Unsupported = None
    mcp_servers: UnsupportedList = None

    def forget_prompt(self) -> None:
        self.messages, self.system = [Turn("user", "")], None

    def forget_advice(self) -> None:
        self.metadata = self.service_tier = self.inference_geo = self.cache_control = None
        self.context_management = self.speed = None


class CountRequest(ModelRequest, kw_only=True):
    """A body of `/v1/messages/count_tokens`."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Any = None  # advisory
    context_management: Any = None  # advisory
    speed: Any = None  # advisory

    mcp_servers: UnsupportedList = None

    def forget_prompt(self) -> None:
        self.messages, self.system = [Turn("user", "")], None

    def forget_advice(self) -> None:
        self.cache_control = self.context_management = self.speed = None


messages_decoder = msgspec.json.Decoder(MessagesRequest)
count_decoder = msgspec.json.Decoder(CountRequest)


class TokenCount(msgspec.Struct):
    input_tokens: int


class TextAnswer(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingAnswer(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseAnswer(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessageUsage(msgspec.Struct, omit_defaults=True):
    """As Anthropic counts: `input_tokens` are those that were not in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int | UnsetType = UNSET


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class MessageEvent(msgspec.Struct):
    """An event of a stream, for its description: message_start, content_block_start and so on."""

    type: str


def joined_text(content: str | list[TextBlock] | None, separator: str = "\n") -> str:
    """Return a content as one string."""
    if isinstance(content, list):
        return separator.join(block.text for block in content)
    return content or ""
