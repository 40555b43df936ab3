"""Tools in a chat request: their definitions, the choice among them, and the calls in its messages."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.gateway.asking.asked import AskedTool, AskedTools
from octavo.gateway.request_error import RequestError

MAX_TOOLS = 1024
NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
Name = Annotated[str, Meta(pattern=NAME)]
SCHEMA_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
NO_PARAMETERS = {"type": "object", "properties": {}}


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: FunctionDefinition
    cache_control: Any = None  # advisory


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: ChosenFunction


class AllowedSet(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    allowed_tools: AllowedSet


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class PastFunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] = ""


class MessageToolCall(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True, kw_only=True):
    id: Annotated[str, Meta(min_length=1, max_length=1024)]
    function: PastFunctionCall
    index: Any = None  # advisory: what a stream had
    provider_specific_fields: Any = None  # advisory


def usable_tools(tools: Sequence[FunctionTool] | None, choice: ToolChoice | None) -> list[FunctionTool]:
    """Return the tools that an answer may call. Raises RequestError for faults that decoding by type cannot find."""
    given = {tool.function.name: tool for tool in tools or ()}
    _check_tools(tools or ())
    if not given and choice not in (None, "none", "auto"):
        raise RequestError("tool_choice needs tools", param="tool_choice", code="invalid_value")
    match choice:
        case "none":
            return []
        case NamedTool(function):
            _check_known(function.name, given)
        case AllowedTools(allowed):
            for tool in allowed.tools:
                _check_known(tool.function.name, given)
            names = {tool.function.name for tool in allowed.tools}
            return [tool for name, tool in given.items() if name in names]
    return list(given.values())


def asked_tools(tools: Sequence[FunctionTool], choice: ToolChoice | None, *, is_parallel: bool) -> AskedTools | None:
    """Return what the usable tools and the choice among them ask for."""
    if not tools:
        return None
    must_call = choice == "required" or isinstance(choice, NamedTool)
    if isinstance(choice, AllowedTools):
        must_call = choice.allowed_tools.mode == "required"
    return AskedTools(
        tools=[AskedTool(tool.function.name, tool.function.parameters) for tool in tools],
        must_call=must_call,
        only=choice.function.name if isinstance(choice, NamedTool) else None,
        is_parallel=is_parallel,
    )


def shown_tools(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """Return the definitions as chat templates take them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or NO_PARAMETERS,
            },
        }
        for tool in tools
    ]


def shown_call(call: MessageToolCall) -> dict[str, Any]:
    """Return a call of an earlier answer as chat templates take it: the arguments are an object.

    Arguments that are no JSON object, which a model may have made, stay text.
    """
    arguments: Any = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _check_tools(tools: Sequence[FunctionTool]) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}].function"
        if tool.function.name in names:
            message = f"{path}.name: there are two tools named {tool.function.name!r}"
            raise RequestError(message, param=f"{path}.name", code="invalid_value")
        names.add(tool.function.name)
        try:
            _check_schema(tool.function.parameters, f"{path}.parameters")
        except RecursionError:
            message = f"{path}.parameters: the schema is nested too deeply"
            raise RequestError(message, param=f"{path}.parameters", code="invalid_value") from None


def _check_schema(schema: Any, path: str) -> None:
    """Raise RequestError for a type that JSON schemas do not have, at any depth of properties and items."""
    if not isinstance(schema, Mapping):
        return
    named = schema.get("type", [])
    for name in named if isinstance(named, list) else [named]:
        if not isinstance(name, str) or name not in SCHEMA_TYPES:
            shown = repr(name)[:40]
            known = ", ".join(sorted(SCHEMA_TYPES))
            message = f"{path}.type cannot be {shown}: the types of JSON schemas are {known}"
            raise RequestError(message, param=f"{path}.type", code="invalid_value")
    properties = schema.get("properties")
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        _check_schema(inner, f"{path}.properties.{re.sub(r'[^A-Za-z0-9_]', '_', name)[:64]}")
    _check_schema(schema.get("items"), f"{path}.items")


def _check_known(name: str, given: Mapping[str, FunctionTool]) -> None:
    if name not in given:
        message = f"tool_choice: there is no tool {name[:64]!r} among tools"
        raise RequestError(message, param="tool_choice", code="invalid_value")
