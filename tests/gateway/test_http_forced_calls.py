"""tool_choice required, or one tool: a grammar makes every model call, with arguments that the schema allows."""

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.protocol.messages import Submit
from tests.fakes.gateway_server import Served, chat
from tests.fakes.model_directories import VOCAB_SIZE, write_byte_level_model
from tests.fakes.streamed_answers import same_streamed_and_not
from tests.fakes.template_server import HARMONY, HARMONY_TOKENS, MESSAGES, QWEN, saying, serving_template, with_tools

HERMES = with_tools("<tool_call>")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string"}},
        },
    },
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
WEATHER_CALL = '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}'
ADD_CALL = '{"name": "add", "arguments": {}}'


def asking(choice: Any, **fields: Any) -> dict[str, Any]:
    return chat(max_tokens=400, tools=[WEATHER, ADD], tool_choice=choice, **fields)


def one(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [one(name) for name in names]}}


class Reader:
    """Says which texts a grammar allows, by a tokenizer of its own."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = LLTokenizer(str(write_byte_level_model(directory) / "tokenizer.json"))

    def allows(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        token_ids = self.tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("tokenizer"))


async def grammar_of(served: Served, body: dict[str, Any]) -> str:
    served.scheduler.received.clear()
    response = await served.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return served.scheduler.messages(Submit)[-1].grammar


@pytest.mark.parametrize(
    ("choice", "fields", "allowed_texts"),
    [
        ("required", {}, {WEATHER_CALL, ADD_CALL, f"{WEATHER_CALL}\n{ADD_CALL}"}),
        ("required", {"parallel_tool_calls": False}, {WEATHER_CALL, ADD_CALL}),
        (one("add"), {}, {ADD_CALL}),
        (one("get_weather"), {}, {WEATHER_CALL}),
        (allowed("required", "add"), {}, {ADD_CALL, f"{ADD_CALL}\n{ADD_CALL}"}),
    ],
)
async def test_an_answer_is_calls_and_nothing_else(
    choice: Any, fields: dict[str, Any], allowed_texts: set[str], reader: Reader
) -> None:
    texts = {WEATHER_CALL, ADD_CALL, f"{WEATHER_CALL}\n{ADD_CALL}", f"{ADD_CALL}\n{ADD_CALL}", "", "The weather"}
    texts |= {f"Well. {ADD_CALL}", f"{ADD_CALL} done", '{"name": "other", "arguments": {}}'}
    texts |= {'{"name": "get_weather", "arguments": {"days": 2}}', '{"name": "add", "arguments": {"a": 1}}'}
    if choice == "required" and not fields:
        allowed_texts = allowed_texts | {f"{ADD_CALL}\n{ADD_CALL}"}
    async with serving_template(HERMES) as served:
        grammar = await grammar_of(served, asking(choice, **fields))
    assert {text for text in texts if reader.allows(grammar, text)} == allowed_texts


@pytest.mark.parametrize("choice", ["auto", None, "none", allowed("auto", "add")])
async def test_other_choices_force_nothing(choice: Any) -> None:
    async with serving_template(HERMES) as served:
        assert await grammar_of(served, asking(choice)) == ""


@pytest.mark.parametrize("template", [HERMES, MESSAGES, with_tools("[TOOL_CALLS]"), with_tools("unknown")])
@pytest.mark.parametrize("tokens_per_step", [1, 7])
async def test_forced_calls_are_read_whatever_the_models_format_is(template: str, tokens_per_step: int) -> None:
    async with serving_template(template) as served:
        served.scheduler.tokens_per_step = tokens_per_step
        served.scheduler.reply = saying(f"{WEATHER_CALL}\n{ADD_CALL}")
        [choice] = await same_streamed_and_not(served, asking("required"))
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [
        {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 2}'},
        {"name": "add", "arguments": "{}"},
    ]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


async def test_a_model_that_thinks_first_thinks_before_it_calls(reader: Reader) -> None:
    thought = f"The user wants {{\n</thin> it.</think>\n\n{ADD_CALL}"
    async with serving_template(f"{QWEN}<think>\n") as served:
        grammar = await grammar_of(served, asking(one("add")))
        assert reader.allows(grammar, thought)
        assert not reader.allows(grammar, ADD_CALL)
        served.scheduler.reply = saying(thought)
        [choice] = await same_streamed_and_not(served, asking(one("add")))
    assert choice["message"]["reasoning"] == "The user wants {\n</thin> it."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


async def test_an_end_of_thinking_that_is_a_special_token_is_a_token_of_the_grammar() -> None:
    async with serving_template(f"{QWEN}<think>\n", tokens=["<think>", "</think>"]) as served:
        grammar = await grammar_of(served, asking(one("add")))
    assert f"<[{VOCAB_SIZE + 1}]>" in grammar


async def test_a_schema_that_cannot_be_enforced_is_refused_only_where_a_call_is_forced() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}
    body = chat(tools=[{"type": "function", "function": function}])
    async with serving_template(HERMES) as served:
        assert (await served.post("/v1/chat/completions", body)).status_code == 200
        response = await served.post("/v1/chat/completions", body | {"tool_choice": "required"})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "tools", "invalid_grammar")
        assert "not" in error["message"]


async def test_harmony_is_refused_by_name() -> None:
    async with serving_template(HARMONY, tokens=HARMONY_TOKENS) as served:
        response = await served.post("/v1/chat/completions", asking("required"))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
