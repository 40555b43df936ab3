"""The formats in which models think and call tools, by name, and how a chat template shows which one is meant."""

import os
import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass

from octavo.gateway.parsing import harmony, pythonic
from octavo.gateway.parsing.calls import Calls, Syntax
from octavo.gateway.parsing.parts import Parser
from octavo.gateway.parsing.thinking import Tags

NewId = Callable[[], str]


def new_call_id() -> str:
    return f"call_{os.urandom(12).hex()}"


def new_short_id() -> str:
    """Return an id that Mistral's templates take."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`markers` are texts that must be seen to find calls, also where they are special tokens."""

    name: str
    markers: tuple[str, ...]
    parser: Callable[[Collection[str], NewId], Parser]
    new_id: NewId = new_call_id


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`tags` None: harmony."""

    name: str
    tags: Tags | None
    is_always_open: bool = False  # the model thinks first, also without the start tag

    @property
    def markers(self) -> tuple[str, ...]:
        return harmony.MARKERS if self.tags is None else (self.tags.start, self.tags.end)


def _of_syntax(syntax: Syntax) -> Callable[[Collection[str], NewId], Parser]:
    return lambda names, new_id: Calls(syntax, names, new_id)


HERMES = Syntax(opens=("<tool_call>",), closes=("</tool_call>",))
LLAMA = Syntax(opens=("<|python_tag|>",), begins_with_json=True)
MISTRAL = Syntax(
    opens=("[TOOL_CALLS]",),
    header=re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*"),
)


def _deepseek(name: str) -> str:
    return f"<\uff5c{name.replace('_', chr(0x2581))}\uff5c>"


DEEPSEEK_CALL, DEEPSEEK_NAME = _deepseek("tool_call_begin"), _deepseek("tool_sep")
DEEPSEEK = Syntax(
    opens=(DEEPSEEK_CALL,),
    closes=(_deepseek("tool_calls_begin"), _deepseek("tool_call_end"), _deepseek("tool_calls_end")),
    header=re.compile(rf"\s*(?:function\s*{DEEPSEEK_NAME})?\s*([^\s<`{{]+)\s*(?:{DEEPSEEK_NAME}|```(?:json)?)\s*"),
    takes_objects=False,
)
# The form of calls that a grammar demands, where a format has no grammar of its own.
LISTED = Syntax(begins_with_json=True)

TOOL_FORMATS = (
    ToolFormat("hermes", (*HERMES.opens, *HERMES.closes), _of_syntax(HERMES)),
    ToolFormat("llama3_json", LLAMA.opens, _of_syntax(LLAMA)),
    ToolFormat("mistral", (*MISTRAL.opens, "[ARGS]", "[CALL_ID]"), _of_syntax(MISTRAL), new_short_id),
    ToolFormat("deepseek_v3", (*DEEPSEEK.opens, *DEEPSEEK.closes, DEEPSEEK_NAME), _of_syntax(DEEPSEEK)),
    ToolFormat("openai", harmony.MARKERS, lambda names, new_id: harmony.Harmony(new_id, calls=True)),
    ToolFormat("pythonic", pythonic.MARKERS, pythonic.PythonicCalls),
)
REASONING_FORMATS = (
    ReasoningFormat("think", Tags("<think>", "</think>")),
    ReasoningFormat("deepseek_r1", Tags("<think>", "</think>"), is_always_open=True),
    ReasoningFormat("mistral", Tags("[THINK]", "[/THINK]")),
    ReasoningFormat("seed_oss", Tags("<seed:think>", "</seed:think>")),
    ReasoningFormat("openai", None),
)
TOOL_FORMAT_NAMES = {each.name: each for each in TOOL_FORMATS}
REASONING_FORMAT_NAMES = {each.name: each for each in REASONING_FORMATS}
# vLLM's names of the same formats.
TOOL_ALIASES = {
    "qwen": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "deepseek_v31": "deepseek_v3",
    "gpt_oss": "openai",
}
REASONING_ALIASES = {
    "qwen3": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "kimi_k2": "think",
    "minimax_m2": "think",
    "olmo3": "think",
    "openai_gptoss": "openai",
}

# What a template that knows the format says, in order: the first that fits is taken.
_TOOL_SIGNS = (
    ("openai", re.compile(r"<\|channel\|>(?s:.*)<\|message\|>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("deepseek_v3", re.compile(DEEPSEEK_CALL)),
    ("hermes", re.compile(r"\A(?!(?s:.*)(?:<function=|<arg_key>))(?s:.*)<tool_call>")),
    ("pythonic", re.compile(r"<\|python_start\|>|\[func_name1\(")),
    ("llama3_json", re.compile(r"<\|python_tag\|>|\"parameters\": dictionary of argument name")),
)


@dataclass(frozen=True, slots=True)
class Formats:
    """How a model thinks and calls tools. None: it does not think; the format of its calls is not known."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def formats_of(tool_call_parser: str, reasoning_parser: str, template: str, *, knows_tools: bool) -> Formats:
    """Return the formats that two settings name, or, for auto, those of the chat template."""
    return Formats(
        tool_format(tool_call_parser, template, knows_tools=knows_tools), reasoning_format(reasoning_parser, template)
    )


def tool_format(chosen: str, template: str, *, knows_tools: bool) -> ToolFormat | None:
    """Return the format named `chosen`, or, for auto, that of the template; None if it is not known.

    A template that knows no tools is given those of Hermes.
    """
    if chosen != "auto":
        return TOOL_FORMAT_NAMES[TOOL_ALIASES.get(chosen, chosen)]
    found = next((name for name, sign in _TOOL_SIGNS if sign.search(template)), None)
    if found is None and not knows_tools:
        found = "hermes"
    return TOOL_FORMAT_NAMES[found] if found else None


def reasoning_format(chosen: str, template: str) -> ReasoningFormat | None:
    """Return the format named `chosen`, or, for auto, that of the template; None if the model does not think."""
    if chosen == "none":
        return None
    if chosen != "auto":
        return REASONING_FORMAT_NAMES[REASONING_ALIASES.get(chosen, chosen)]
    if _TOOL_SIGNS[0][1].search(template):
        return REASONING_FORMAT_NAMES["openai"]
    candidates = (each for each in REASONING_FORMATS if each.tags and not each.is_always_open)
    return next((each for each in candidates if each.tags and each.tags.end in template), None)
