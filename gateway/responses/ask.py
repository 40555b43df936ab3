"""A body of the Responses API becomes a chat request, which then asks as every chat does."""

from typing import Any

import msgspec

from octavo.gateway.asking.asked import Asked
from octavo.gateway.openai import tools as chat_tools
from octavo.gateway.openai.chat import ask_chat
from octavo.gateway.openai.invalid_field import invalid_field
from octavo.gateway.openai.neutral import refuse_unsupported
from octavo.gateway.openai.structured import NamedSchema, ResponseFormat
from octavo.gateway.openai.types import MAX_MESSAGES, ChatMessage, ChatRequest
from octavo.gateway.request_error import RequestError
from octavo.gateway.responses.types import (
    ITEM_TYPES,
    CallItem,
    Item,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponseAllowedTools,
    ResponseNamedTool,
    ResponsesRequest,
    ResponseTool,
    TextFormat,
)


def ask_responses(body: ResponsesRequest) -> Asked:
    """Return what the body asks for. Raises RequestError for faults that decoding by type cannot find."""
    refuse_unsupported(body)
    for name in ("text", "stream_options"):
        if (part := getattr(body, name)) is not None:
            refuse_unsupported(part, f"{name}.")
    return ask_chat(as_chat(body))


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the same request as a chat. Raises RequestError for a wrong item of the input."""
    instructions = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    return ChatRequest(
        messages=[*instructions, *_conversation(_items(body.input))],
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format) if body.text and body.text.format else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
    )


def _items(given: Any) -> list[Item]:
    """Return the items of an input. Raises RequestError that names the place of what is wrong."""
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    if not isinstance(given, list):
        raise RequestError("input is a string or a list of items", param="input", code="invalid_type")
    if not 1 <= len(given) <= MAX_MESSAGES:
        message = f"input has {len(given)} items: it may have 1 to {MAX_MESSAGES}"
        raise RequestError(message, param="input", code="invalid_value")
    return [_item(each, f"input[{index}]") for index, each in enumerate(given)]


def _item(given: Any, path: str) -> Item:
    name = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(name, str | None) or name not in ITEM_TYPES:
        shown = f" of type {str(name)[:40]!r}" if isinstance(name, str) else ""
        known = ", ".join(filter(None, ITEM_TYPES))
        raise RequestError(f"{path}: an item{shown} is not supported; items are {known}", param=path)
    try:
        item: Item = msgspec.convert(
            {key: value for key, value in given.items() if value is not None}, ITEM_TYPES[name]
        )
    except msgspec.ValidationError as error:
        wrong = invalid_field(str(error), ITEM_TYPES[name])
        param = f"{path}.{wrong.param}" if wrong.param else path
        raise RequestError(f"{path}: {wrong.message}", param=param, code=wrong.code) from None
    return item


def _conversation(items: list[Item]) -> list[ChatMessage]:
    """Return items as messages: reasoning, words and calls of one answer are one message."""
    messages: list[ChatMessage] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                answer = _answer(messages, joins=not (messages and messages[-1].content))
                answer.content = item.text
            case MessageItem():
                messages.append(ChatMessage(role=item.role, content=item.text))
            case CallItem():
                call = chat_tools.PastFunctionCall(item.name, item.arguments)
                answer = _answer(messages)
                answer.tool_calls = [
                    *(answer.tool_calls or ()),
                    chat_tools.MessageToolCall(id=item.call_id, function=call),
                ]
            case ReasoningItem():
                _answer(messages, joins=False).reasoning_content = item.text or None
            case OutputItem():
                messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=item.text))
    return messages


def _answer(messages: list[ChatMessage], *, joins: bool = True) -> ChatMessage:
    """Return the last message if that is an assistant's and `joins` is set, or else a new one of the assistant."""
    if not (joins and messages and messages[-1].role == "assistant"):
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]


def _tool(tool: ResponseTool) -> chat_tools.FunctionTool:
    definition = chat_tools.FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return chat_tools.FunctionTool(definition)


def _choice(choice: Any) -> Any:
    match choice:
        case ResponseNamedTool(name):
            return _named(name)
        case ResponseAllowedTools(mode, tools):
            return chat_tools.AllowedTools(chat_tools.AllowedSet(mode, [_named(tool.name) for tool in tools]))
    return choice


def _named(name: str) -> chat_tools.NamedTool:
    return chat_tools.NamedTool(chat_tools.ChosenFunction(name))


def _format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        return ResponseFormat(asked.type)
    if asked.schema is None:
        param = "text.format.schema"
        raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    return ResponseFormat("json_schema", NamedSchema(asked.name or "output", asked.schema))
