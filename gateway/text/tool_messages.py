"""Gives tools, calls and their results to chat templates, in the form that each template takes, or as plain text."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Message = dict[str, Any]
Render = Callable[..., str]  # of messages, and perhaps tools; raises anything

# Models of the Hermes family are taught these words; others understand them.
DESCRIPTION = """You are a function calling AI model. You are provided with function signatures within <tools></tools> \
XML tags. You may call one or more functions to assist with the user query. Don't make assumptions about what values \
to plug into functions. Here are the available tools:
<tools>
{tools}
</tools>
For each function call return a json object with function name and arguments within <tool_call></tool_call> XML tags \
as follows:
<tool_call>
{{"name": <function-name>, "arguments": <args-dict>}}
</tool_call>"""

PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probename", "description": "", "parameters": {"type": "object", "properties": {}}},
}
QUESTION = {"role": "user", "content": "probe"}
LONG_ID, SHORT_ID = "call_0123456789abcdef01234567", "probe0001"
SHORT = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class HistoryForm:
    """How a template takes calls in messages of an assistant."""

    has_short_ids: bool
    has_text_arguments: bool  # JSON as text, instead of an object
    has_empty_content: bool  # "" where there is no content, instead of None

    def of(self, message: Message) -> Message:
        """Return a message of an assistant or a tool in this form."""
        if message["role"] == "tool":
            return {**message, "tool_call_id": self._id(message.get("tool_call_id") or "")}
        calls = [self._call(call) for call in message["tool_calls"]]
        return {
            **message,
            "content": message["content"] or ("" if self.has_empty_content else None),
            "tool_calls": calls,
        }

    def _call(self, call: Mapping[str, Any]) -> Message:
        function = call["function"]
        arguments = _as_text(function["arguments"]) if self.has_text_arguments else function["arguments"]
        return {**call, "id": self._id(call["id"]), "function": {**function, "arguments": arguments}}

    def _id(self, call_id: str) -> str:
        if not self.has_short_ids or SHORT.fullmatch(call_id):
            return call_id
        return hashlib.blake2b(call_id.encode()).hexdigest()[:9]


def knows_tools(render: Render) -> bool:
    """Whether a template shows the tools that it is given."""
    try:
        return "probename" in render([QUESTION], tools=[PROBE_TOOL])
    except Exception:  # a template can raise any exception
        return False


def find_history_form(render: Render) -> HistoryForm | None:
    """Return the form in which a template shows calls and their results, or None if it shows them in no form."""
    forms = (HistoryForm(*flags) for flags in product((False, True), repeat=3))
    return next((form for form in forms if _takes(render, form)), None)


def takes_tool_messages(render: Render) -> bool:
    """Whether a template shows messages of a tool that follow an assistant's text."""
    messages = [QUESTION, {"role": "assistant", "content": "call"}, {"role": "tool", "content": "proberesult"}]
    try:
        return "proberesult" in render(messages)
    except Exception:  # a template can raise any exception
        return False


def _takes(render: Render, form: HistoryForm) -> bool:
    function = {"name": "probename", "arguments": {"probekey": "probevalue"}}
    call = {"id": SHORT_ID if form.has_short_ids else LONG_ID, "type": "function", "function": function}
    messages = [
        QUESTION,
        form.of({"role": "assistant", "content": "", "tool_calls": [call]}),
        {"role": "tool", "content": "proberesult", "tool_call_id": call["id"]},
    ]
    try:
        shown, without = render(messages), render([QUESTION])
    except Exception:  # a template can raise any exception
        return False
    is_shown = all(word in shown for word in ("probename", "probekey", "probevalue", "proberesult"))
    is_python = "'probekey'" in shown
    is_quoted = '\\"probekey' in shown
    return is_shown and not is_python and not is_quoted and shown.count("None") == without.count("None")


def as_text(messages: Sequence[Message], *, keeps_results: bool) -> list[Message]:
    """Return messages without calls: these are text, in the words of Hermes.

    Results of tools are messages of their own role if `keeps_results` is set, else of the user, those that follow one
    another as one.
    """
    found: list[Message] = []
    is_behind_result = False
    for message in messages:
        is_result = message["role"] == "tool" and not keeps_results
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if is_behind_result:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            texts = [message["content"], *map(_call_text, calls)]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            found.append({**rest, "content": "\n".join(text for text in texts if text)})
        else:
            found.append(message)
        is_behind_result = is_result
    return found


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that tells a model of tools."""
    return DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    shown = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{shown}\n</tool_call>"


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
