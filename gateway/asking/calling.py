"""The grammar of an answer that must call tools: whatever the model is, it calls, and with arguments of the schema."""

from octavo.gateway.asking.asked import AskedTool, AskedTools
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.request_error import unsupported
from octavo.gateway.text.grammar import Grammar, Tagged, tagged_grammar

MAX_CALLS = 16  # of one answer: a weak model would go on to the last token
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(tools: AskedTools, model: ServedModel) -> Grammar:
    """Return the grammar of one call or, if several are allowed, of up to MAX_CALLS of them.

    Raises RequestError for a schema that is no schema, and for models whose calls are written in harmony.
    """
    reasoning = model.formats.reasoning
    if reasoning is not None and reasoning.tags is None:
        raise unsupported("tool_choice", "tool_choice required, or one tool, with models that answer in harmony")
    return tagged_grammar(
        [_call(tool) for tool in tools.tools if tools.only in (None, tool.name)],
        "tools",
        separator="\n",
        most=MAX_CALLS if tools.is_parallel and tools.only is None else 1,
    )


def _call(tool: AskedTool) -> Tagged:
    schema = NOTHING if tool.parameters is None else tool.parameters
    return Tagged(f'{{"name": "{tool.name}", "arguments": ', schema, "}")
