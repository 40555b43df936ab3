"""Formats: what of a text is content, reasoning or a call, however the text is cut into pieces."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.parsing.calls import Calls
from octavo.gateway.parsing.formats import (
    DEEPSEEK_CALL,
    LISTED,
    REASONING_FORMAT_NAMES,
    TOOL_FORMAT_NAMES,
    reasoning_format,
    tool_format,
)
from octavo.gateway.parsing.harmony import Harmony
from octavo.gateway.parsing.parts import Content, Parser, Part, Reasoning, ToolCall, joined
from octavo.gateway.parsing.splitters import HarmonySplitter, TextSplitter
from octavo.gateway.parsing.thinking import Thinking
from octavo.gateway.text.delta import Delta

NAMES = {"get_weather", "add", "f", "g.h"}
WEATHER = '{"city": "Zürich \\"}{", "days": [1, {"a": null}]}'
CALLS_BEGIN, CALL_END, CALLS_END = (DEEPSEEK_CALL.replace("call", each) for each in ("calls", "call", "calls"))
CALL_END, CALLS_END = CALL_END.replace("begin", "end"), CALLS_END.replace("begin", "end")
SEP = DEEPSEEK_CALL.replace("call\u2581begin", "sep")


def call(index: int, name: str, arguments: str) -> ToolCall:
    return ToolCall(index, arguments, f"id{index}", name)


def parser(name: str) -> Parser:
    numbers = itertools.count()

    def new_id() -> str:
        return f"id{next(numbers)}"

    if name == "listed":
        return Calls(LISTED, NAMES, new_id)
    return TOOL_FORMAT_NAMES[name].parser(NAMES, new_id)


def parsed(name: str, pieces: list[str]) -> list[Part]:
    reads = parser(name)
    parts = [part for piece in pieces for part in reads.feed(piece)]
    return joined([*parts, *reads.end()])


# By format: a text and its parts.
TEXTS: dict[str, list[tuple[str, list[Part]]]] = {
    "hermes": [
        ("just text < with signs <tool", [Content("just text < with signs <tool")]),
        (
            f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
            [call(0, "get_weather", WEATHER)],
        ),
        (
            'Let me look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
            '{"arguments": {"a": 1}, "name": "add"}\n</tool_call>\n',
            [Content("Let me look."), call(0, "f", "{}"), call(1, "add", '{"a": 1}')],
        ),
        ('<tool_call>{"name": "f"}</tool_call> done', [call(0, "f", "{}"), Content("done")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [call(0, "f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [call(0, "f", '{"a": 1}')]),
        ('<tool_call>[{"name": "f"}, {"name": "add", "parameters": {"b": 2}}]</tool_call>',
         [call(0, "f", "{}"), call(1, "add", '{"b": 2}')]),
        ('<tool_call>\n{"name": "f"}\n{"name": "add"}\n</tool_call>', [call(0, "f", "{}"), call(1, "add", "{}")]),
        ("<tool_call>not json</tool_call>", [Content("<tool_call>not json")]),
        ('<tool_call>{"nam', [Content('<tool_call>{"nam')]),
        ('<tool_call>{"name": 5}</tool_call>', [Content('<tool_call>{"name": 5}')]),
        ('<tool_call>{"name": "a b", "arguments": {}}', [Content('<tool_call>{"name": "a b", "arguments": {}}')]),
        ('<tool_call>{"name": "unknown", "arguments": {"x": 1}}</tool_call>', [call(0, "unknown", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "cut', [call(0, "f", '{"a": "cut')]),
        ('<tool_call>{"x" 1} <tool_call>{"name": "f"}', [Content('<tool_call>{"x" 1}'), call(0, "f", "{}")]),
        ("ends with space \n", [Content("ends with space \n")]),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}}', [call(0, "f", '{"a": 1}')]),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', [call(0, "f", '{"a": 1}')]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [call(0, "f", '{"a": 1}')]),
        (
            '{"name": "f", "parameters": {}}; {"name": "add", "parameters": {"b": 2}}',
            [call(0, "f", "{}"), call(1, "add", '{"b": 2}')],
        ),
        ('{"name": "Bob", "age": 3}', [Content('{"name": "Bob", "age": 3}')]),
        ("  {a set}", [Content("  {a set}")]),
        ('said {"name": "f", "parameters": {}}', [Content('said {"name": "f", "parameters": {}}')]),
        ("[1, 2]", [Content("[1, 2]")]),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', [call(0, "f", '{"a": 1}')]),
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "add", "arguments": {"b": [2]}}]',
            [call(0, "f", "{}"), call(1, "add", '{"b": [2]}')],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"b": 2}',
         [call(0, "f", '{"a": 1}'), call(1, "add", '{"b": 2}')]),
        ('well[TOOL_CALLS]f{"a": 1}', [Content("well"), call(0, "f", '{"a": 1}')]),
        ("a [TOOL_", [Content("a [TOOL_")]),
        ("[TOOL_CALLS]f", [Content("[TOOL_CALLS]f")]),
    ],
    "deepseek_v3": [
        (
            f"Sure.{CALLS_BEGIN}{DEEPSEEK_CALL}function{SEP}f\n```json\n{WEATHER}\n```{CALL_END}\n"
            f'{DEEPSEEK_CALL}function{SEP}add\n```json\n{{"b": 2}}\n```{CALL_END}{CALLS_END}',
            [Content("Sure."), call(0, "f", WEATHER), call(1, "add", '{"b": 2}')],
        ),
        (f'{CALLS_BEGIN}{DEEPSEEK_CALL}f{SEP}{{"a": 1}}{CALL_END}{CALLS_END}', [call(0, "f", '{"a": 1}')]),
        ("text { with } braces", [Content("text { with } braces")]),
    ],
    "openai": [
        (
            "<|channel|>analysis<|message|>hm, f.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            [Reasoning("hm, f."), call(0, "f", '{"a": 1}')],
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello<|return|>",
            [Reasoning("hm"), Content("hello")],
        ),
        ('<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.g.h<|channel|>commentary json'
         '<|message|>{}', [Content("I look."), call(0, "g.h", "{}")]),
        (' to=functions.f<|channel|>commentary<|message|>{"a"', [call(0, "f", '{"a"')]),
        ("plain text", [Content("plain text")]),
        ("<|channel|>ana", []),
        ("<|channel|>final<|message|>cut <|en", [Content("cut <|en")]),
    ],
    "pythonic": [
        ("[f(a=1)]", [call(0, "f", '{"a": 1}')]),
        ("[f(a='x)]', b=[1, {'c': None}]), add()]",
         [call(0, "f", '{"a": "x)]", "b": [1, {"c": null}]}'), call(1, "add", "{}")]),
        ("<|python_start|>[f(a=true)]<|python_end|>", [call(0, "f", '{"a": true}')]),
        ("[g.h(a=-1.5)] and so", [call(0, "g.h", '{"a": -1.5}'), Content("and so")]),
        ("[unknown(a=1)]", [Content("[unknown(a=1)]")]),
        ("[1, 2, 3]", [Content("[1, 2, 3]")]),
        ("[f(a=", [Content("[f(a=")]),
        ("[f(a=open('x'))]", [Content("[f(a=open('x'))]")]),
        ("[f(1)]", [Content("[f(1)]")]),
        ("[ f", [Content("[ f")]),
    ],
    "listed": [
        (f'[{{"name": "f", "parameters": {WEATHER}}}]', [call(0, "f", WEATHER)]),
        (' [ {"name": "f", "parameters": {}} , {"name":"add","parameters":{"b":2}} ]',
         [call(0, "f", "{}"), call(1, "add", '{"b":2}')]),
        ('[{"name": "f", "parameters": {"a', [call(0, "f", '{"a')]),
    ],
}  # fmt: skip
CASES = [(name, *case) for name, cases in TEXTS.items() for case in cases]


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_a_text_has_the_same_parts_however_it_is_cut(name: str, text: str, parts: list[Part]) -> None:
    assert parsed(name, [text]) == parts
    assert parsed(name, list(text)) == parts
    for cut in range(1, len(text)):
        assert parsed(name, [text[:cut], text[cut:]]) == parts, cut


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_text_has_the_same_parts_however_it_is_cut(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TEXTS)))
    fragments = [text[at : at + 9] for text, _ in TEXTS[name] for at in range(0, len(text), 3)]
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=8)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert parsed(name, pieces) == parsed(name, [text])


@pytest.mark.parametrize("name", TEXTS)
def test_arguments_come_piece_by_piece(name: str) -> None:
    if name == "pythonic":
        pytest.skip("Python becomes JSON once a call is complete")
    text = next(text for text, parts in TEXTS[name] if any(isinstance(part, ToolCall) for part in parts))
    reads = parser(name)
    first, *more = [part for piece in text for part in reads.feed(piece) if isinstance(part, ToolCall)]
    assert (first.index, first.id) == (0, "id0")
    own = list(itertools.takewhile(lambda part: part.index == 0, more))
    assert len(own) > 1
    assert all(part.id is part.name is None for part in own)


THOUGHTS = [
    ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
    ("hm </think>yes", True, "hm", "yes"),
    ("<think>hm</think>yes", True, "hm", "yes"),
    ("no <think> here", False, "", "no <think> here"),
    ("  plain", False, "", "  plain"),
    ("<thin", False, "", "<thin"),
    ("<think>cut </thi", False, "cut </thi", ""),
    ("<think></think>yes ", False, "", "yes "),
    ("a </b> c</think> ", True, "a </b> c", ""),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "rest"), THOUGHTS)
def test_thinking_is_divided_from_the_answer(text: str, is_open: bool, reasoning: str, rest: str) -> None:
    tags = REASONING_FORMAT_NAMES["think"].tags
    assert tags is not None
    for cut in range(len(text) + 1):
        thinking = Thinking(tags, is_open=is_open)
        pieces = [thinking.feed(text[:cut]), thinking.feed(text[cut:]), thinking.end()]
        assert ("".join(each for each, _ in pieces), "".join(each for _, each in pieces)) == (reasoning, rest), cut


def as_tokens(text: str, length: int) -> list[str]:
    return [text[at : at + length] for at in range(0, len(text), length)]


@pytest.mark.parametrize("num_together", [1, 2, 3, 7, 100])
def test_reasoning_tokens_are_those_before_the_end_of_the_thinking(num_together: int) -> None:
    """Also if several tokens come at once. The tokens here are texts of three characters."""
    text = "<think>some thoughts</think>an answer"
    tokens = as_tokens(text, 3)
    tags = REASONING_FORMAT_NAMES["think"].tags
    assert tags is not None
    splitter = TextSplitter(Thinking(tags, is_open=False), None, lambda token_id: 3)
    for start in range(0, len(tokens), num_together):
        piece = tokens[start : start + num_together]
        splitter.split(Delta("".join(piece), list(range(len(piece)))))
    assert splitter.num_reasoning_tokens == -(-text.index("an answer") // 3)


@pytest.mark.parametrize("num_together", [1, 2, 5, 100])
def test_harmony_s_reasoning_tokens_are_those_of_the_analysis(num_together: int) -> None:
    tokens = ["<|channel|>", "analysis", "<|message|>", "so", " it", " is", "<|end|>", "<|start|>", "assistant",
              "<|channel|>", "final", "<|message|>", "yes"]  # fmt: skip
    splitter = HarmonySplitter(Harmony(lambda: "id", calls=False), lambda token_id: len(tokens[token_id]))
    for start in range(0, len(tokens), num_together):
        piece = tokens[start : start + num_together]
        splitter.split(Delta("".join(piece), list(range(start, start + len(piece)))))
    assert splitter.num_reasoning_tokens == 4


def test_only_the_first_call_counts_where_calls_are_not_parallel() -> None:
    splitter = TextSplitter(None, parser("hermes"), lambda token_id: 1, is_parallel=False)
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "add"}</tool_call>'
    assert splitter.split(Delta(text, [1], finish_reason="stop")) == (call(0, "f", "{}"),)


def test_calls_inside_the_thinking_are_thoughts() -> None:
    tags = REASONING_FORMAT_NAMES["think"].tags
    assert tags is not None
    splitter = TextSplitter(Thinking(tags, is_open=True), parser("hermes"), lambda token_id: 1)
    text = 'I could <tool_call>.</think>\n<tool_call>{"name": "f"}</tool_call>'
    assert splitter.split(Delta(text, [1], finish_reason="stop")) == (
        Reasoning("I could <tool_call>."),
        call(0, "f", "{}"),
    )


SIGNS = {
    "hermes": "<tools>{{ tools }}</tools> within <tool_call></tool_call>",
    "llama3_json": "{% if builtin_tools %}<|python_tag|>{% endif %}",
    "mistral": "[AVAILABLE_TOOLS][TOOL_CALLS]",
    "deepseek_v3": f"{CALLS_BEGIN}{DEEPSEEK_CALL}function{SEP}",
    "openai": "<|start|>assistant<|channel|>analysis<|message|>",
    "pythonic": "should be [func_name1(params_name1=params_value1)]",
}


@pytest.mark.parametrize("name", SIGNS)
def test_a_template_shows_how_its_model_calls_tools(name: str) -> None:
    found = tool_format("auto", SIGNS[name], knows_tools=True)
    assert found is not None
    assert found.name == name


def test_a_template_without_tools_gets_the_format_of_hermes_and_an_unknown_one_gets_none() -> None:
    found = tool_format("auto", "{{ messages }}", knows_tools=False)
    assert found is not None
    assert found.name == "hermes"
    assert tool_format("auto", "<tool_call><function=f>", knows_tools=True) is None
    assert tool_format("qwen", "", knows_tools=True) is TOOL_FORMAT_NAMES["hermes"]


def test_a_template_shows_how_its_model_thinks() -> None:
    found = {
        template: reasoning_format("auto", template)
        for template in ("{{ x }}</think>", "[/THINK]", "<|channel|>a<|message|>", "{{ messages }}")
    }
    assert [each and each.name for each in found.values()] == ["think", "mistral", "openai", None]
    assert reasoning_format("none", "</think>") is None


def test_arguments_are_json() -> None:
    [only] = parsed("pythonic", ["[f(a='é', b=(1, 2))]"])
    assert isinstance(only, ToolCall)
    assert json.loads(only.arguments) == {"a": "é", "b": [1, 2]}
