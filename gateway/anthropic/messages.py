"""A body of the Messages API becomes a chat request, which then asks as every chat does."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from octavo.gateway.anthropic.types import (
    CountRequest,
    MessagesRequest,
    OutputFormat,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    joined_text,
)
from octavo.gateway.asking.asked import Asked, AskedPrompts
from octavo.gateway.openai.chat import ask_chat
from octavo.gateway.openai.neutral import refuse_unsupported
from octavo.gateway.openai.structured import NamedSchema, ResponseFormat
from octavo.gateway.openai.tools import (
    ChosenFunction,
    FunctionDefinition,
    FunctionTool,
    MessageToolCall,
    NamedTool,
    PastFunctionCall,
)
from octavo.gateway.openai.tools import ToolChoice as ChatToolChoice
from octavo.gateway.openai.types import ChatMessage, ChatRequest
from octavo.gateway.request_error import RequestError

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
DEFAULT_EFFORT: Effort = "medium"


def ask_messages(body: MessagesRequest) -> Asked:
    """Return what the body asks for. Raises RequestError for faults that decoding by type cannot find.

    As in Anthropic's API, `max_tokens` that do not fit the context are cut to what fits.
    """
    asked = ask_chat(as_chat(body, body.max_tokens))
    return replace(asked, sampling=replace(asked.sampling, cuts_max_tokens=True))


def ask_count(body: CountRequest) -> AskedPrompts:
    """Return the prompt of the body. Raises RequestError for faults that decoding by type cannot find."""
    asked = ask_chat(as_chat(body, 1))
    return AskedPrompts(prompts=asked.prompts, names=asked.names)


def as_chat(body: MessagesRequest | CountRequest, max_tokens: int) -> ChatRequest:
    """Return the same request as a chat. Raises RequestError for faults that decoding by type cannot find."""
    refuse_unsupported(body)
    for index, tool in enumerate(body.tools or ()):
        refuse_unsupported(tool, f"tools[{index}].")
    continues = body.messages[-1].role == "assistant"
    chat = ChatRequest(
        messages=[*_system(body), *(message for turn in body.messages for message in _messages(turn))],
        max_tokens=max_tokens,
        continue_final_message=continues,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        response_format=_format(body),
    )
    thinks = body.thinking is not None and body.thinking.is_on
    effort: Effort | None = body.output_config.effort if body.output_config else None
    if not thinks:
        effort = "none"
    chat.reasoning_effort = effort or DEFAULT_EFFORT
    chat.include_reasoning = thinks
    if isinstance(body, MessagesRequest):
        chat.stop, chat.temperature, chat.top_p, chat.top_k = (
            body.stop_sequences,
            body.temperature,
            body.top_p,
            body.top_k,
        )
    return chat


def _system(body: MessagesRequest | CountRequest) -> list[ChatMessage]:
    text = joined_text(body.system, "\n\n")
    return [ChatMessage(role="system", content=text)] if text else []


def _messages(turn: Turn) -> Iterator[ChatMessage]:
    """Yield a turn as messages of a chat: results of tools are messages of their own, before the user's words."""
    if isinstance(turn.content, str):
        yield ChatMessage(role=turn.role, content=turn.content)
        return
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            _require(turn.role == "user", "tool_result", "user")
            yield ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=block.text)
    calls = [
        MessageToolCall(id=block.id, function=PastFunctionCall(block.name, block.input))
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    _require(turn.role == "assistant" or not calls, "tool_use", "assistant")
    _require(turn.role == "assistant" or not thoughts, "thinking", "assistant")
    if turn.role == "assistant" or texts or not any(isinstance(block, ToolResultBlock) for block in turn.content):
        yield ChatMessage(
            role=turn.role,
            content=joined_text(texts),
            tool_calls=calls or None,
            reasoning_content="\n".join(thoughts) or None,
        )


def _require(is_right: bool, block: str, role: str) -> None:
    if not is_right:
        raise RequestError(f"a block of type {block} needs the role {role}", param="messages", code="invalid_value")


def _tool(tool: Tool) -> FunctionTool:
    definition = FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return FunctionTool(definition)


def _choice(choice: ToolChoice | None) -> ChatToolChoice | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]  # type: ignore[return-value]
    if choice.name is None:
        param = "tool_choice.name"
        raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    return NamedTool(ChosenFunction(choice.name))


def _format(body: MessagesRequest | CountRequest) -> ResponseFormat | None:
    asked: OutputFormat | None = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        asked = body.output_config.format
    if asked is None:
        return None
    return ResponseFormat("json_schema", NamedSchema("output", asked.schema))
