"""Structured output: what the fields ask the scheduler for, and what is refused before anything is generated."""

import asyncio
import json
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.protocol.messages import Submit
from tests.fakes.fake_scheduler import computed_reply
from tests.fakes.gateway_server import Served, chat, completion
from tests.fakes.model_directories import text_ids, write_tiny_model
from tests.fakes.template_server import (
    HARMONY,
    HARMONY_TOKENS,
    QWEN,
    R1,
    harmony_ids,
    saying,
    serving_template,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Takes more than a second to compile.
EXPLODING = {"type": "integer", "multipleOf": 999_983}

pytestmark = pytest.mark.asyncio(loop_scope="module")


def named(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def bodies(fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(CHAT, chat("hi", **fields)), (COMPLETIONS, completion("hi", **fields))]


async def grammar_of(served: Served, path: str, body: dict[str, Any]) -> str:
    """Return the grammar of the Submit that a body causes."""
    response = await served.post(path, body)
    assert response.status_code == 200, response.text
    return served.scheduler.messages(Submit)[-1].grammar


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": named(SCHEMA)}, SCHEMA),
        ({"response_format": named(SCHEMA, strict=True, description="An answer.")}, SCHEMA),
        ({"response_format": named(SCHEMA, strict=None)}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
        ({"guided_json": SCHEMA}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
    ],
)
async def test_a_schema_reaches_the_scheduler(served: Served, fields: dict[str, Any], part: dict[str, Any]) -> None:
    for path, body in bodies(fields):
        [grammar] = json.loads(await grammar_of(served, path, body))["grammars"]
        del grammar["json_schema"]["x-guidance"]
        assert grammar["json_schema"] == part


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"structured_outputs": {"regex": "a|b"}}, "start: /a|b/"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, 'start: "yes" | "no"'),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, 'start: "x"'),
        ({"guided_regex": "a|b"}, "start: /a|b/"),
        ({"guided_choice": ["yes", "no"]}, 'start: "yes" | "no"'),
        ({"guided_grammar": 'start: "x"'}, 'start: "x"'),
    ],
)
async def test_other_grammars_reach_the_scheduler(served: Served, fields: dict[str, Any], part: str) -> None:
    for path, body in bodies(fields):
        [grammar] = json.loads(await grammar_of(served, path, body))["grammars"]
        assert grammar["lark_grammar"] == part


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None},
        {"guided_json": None},
    ],
)
async def test_no_grammar_is_asked_for(served: Served, fields: dict[str, Any]) -> None:
    for path, body in bodies(fields):
        assert await grammar_of(served, path, body) == ""


async def test_all_choices_follow_the_grammar_and_end_where_it_ends(served: Served) -> None:
    await served.chat("hi", guided_choice=["yes"], n=3, ignore_eos=True, min_tokens=2)
    submits = served.scheduler.messages(Submit)[-3:]
    assert len({submit.grammar for submit in submits}) == 1
    assert all(submit.grammar and submit.sampling.eos_token_ids and submit.sampling.ends_late for submit in submits)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": "json_object"}, "response_format", "expected object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "required"),
        ({"response_format": named(1)}, "response_format.json_schema.schema", "a JSON schema is an object"),
        ({"response_format": named(SCHEMA, colour=1)}, "response_format.json_schema.colour", "colour"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema", "needs type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "needs type"),
        ({"response_format": named({"type": "strin"})}, "response_format.json_schema.schema", "Invalid type: strin"),
        ({"response_format": named({"uniqueItems": True})}, "response_format.json_schema.schema", "uniqueItems"),
        ({"response_format": named({"type": "string", "pattern": "("}, strict=True)},
         "response_format.json_schema.schema", "unclosed group"),
        ({"response_format": named({"pattern": "a(?=b)"})}, "response_format.json_schema.schema", "look-around"),
        ({"response_format": named({"$ref": "https://example.com/x.json"})},
         "response_format.json_schema.schema", "example.com"),
        ({"response_format": named({"$ref": "#/$defs/none"})}, "response_format.json_schema.schema", "does not exist"),
        ({"response_format": named({"minimum": 5, "maximum": 3, "type": "integer"})},
         "response_format.json_schema.schema", "Unsatisfiable"),
        ({"response_format": named({"oneOf": [{"minimum": 1}, {"maximum": 9}]})},
         "response_format.json_schema.schema", "oneOf needs variants"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"colour": 1}}, "structured_outputs.colour", "colour"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "exclude each other"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern", "not supported"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "expected array"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "unknown name"),
        ({"structured_outputs": {"grammar": 'root ::= ( "a" '}}, "structured_outputs.grammar", "Expected"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "exclude each other"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type"),
        ({"guided_regex": "["}, "guided_regex", "unclosed character class"),
        ({"guided_choice": []}, "guided_choice", "length >= 1"),
        ({"guided_grammar": "start: /[/"}, "guided_grammar", "invalid regex"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "bytes"),
        ({"guided_regex": "x" * 70_000}, "guided_regex", "length <= 65536"),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str, said: str
) -> None:
    """Never an unconstrained answer."""
    num_submits = len(served.scheduler.messages(Submit))
    for path, body in bodies(fields):
        for streams in (False, True):
            response = await served.post(path, body | {"stream": streams})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert said in error["message"], error
    assert len(served.scheduler.messages(Submit)) == num_submits


def nested(depth: int) -> dict[str, Any]:
    """Return oneOf in oneOf, which grows exponentially where it is written out."""
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        variants = ((side, {"const": f"{level}{side}"}) for side in "ab")
        schema = {
            "oneOf": [
                {"type": "object", "properties": {"tag": tag, side: schema}, "required": ["tag"]}
                for side, tag in variants
            ]
        }
    return schema


@pytest.mark.parametrize(
    ("schema", "status"),
    [
        (nested(4), 200),
        (nested(8), 200),
        (nested(12), 400),  # half a MB
        ({"type": "string", "pattern": "(a{1,1000}){1,1000}"}, 200),
        ({"enum": [f"{number:01000}" for number in range(1000)]}, 400),  # a MB
        ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(12)]}, 400),
        ({"allOf": [{"type": "string", "pattern": f"^.*(a|b){{{i}}}.*$"} for i in range(30)]}, 400),
    ],
)
async def test_large_schemas_are_taken_or_refused_and_slow_no_other(
    served: Served, schema: dict[str, Any], status: int
) -> None:
    canary = asyncio.create_task(served.chat("canary", seed=7, max_tokens=40))
    response = await served.post(CHAT, chat("hi", response_format=named(schema)))
    assert response.status_code == status, response.text
    if status == 400:
        assert response.json()["error"]["param"].startswith("response_format.json_schema")
    assert (await canary)["choices"] == (await served.chat("canary", seed=7, max_tokens=40))["choices"]


@pytest.mark.parametrize("fields", [{"response_format": named({"type": "string"})}, {"guided_regex": ".*"}])
async def test_stop_strings_hold_back_and_end_an_answer_with_a_grammar(served: Served, fields: dict[str, Any]) -> None:
    served.scheduler.reply = lambda submit: text_ids('"one ENDS and EN')
    served.scheduler.tokens_per_step = 1
    for path, body in bodies(fields | {"stop": ["END"], "max_tokens": 16}):
        choice = (await served.post(path, body)).json()["choices"][0]
        assert (choice.get("text") or choice["message"]["content"], choice["finish_reason"]) == ('"one ', "stop")
        chunks = [chunk["choices"][0] for chunk in await served.stream(path, body)]
        assert "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in chunks) == '"one '
    served.scheduler.reply = computed_reply


async def test_tools_and_a_grammar_exclude_each_other(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    response = await served.post(CHAT, chat("hi", tools=tools, response_format=named(SCHEMA)))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert (await served.post(CHAT, chat("hi", tools=tools, tool_choice="none", guided_json={}))).status_code == 200


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, pydantic.Field(ge=1, le=9)] = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    friend: "Dog | None" = None
    secret: pydantic.SecretStr


class Zoo(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    pets: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]]
    colour: Colour | None = None
    sizes: dict[str, float] = {}
    pair: tuple[int, str]


async def test_schemas_as_pydantic_writes_them_are_taken(served: Served) -> None:
    assert await grammar_of(served, CHAT, chat("hi", response_format=named(Zoo.model_json_schema(), strict=True)))


async def test_a_grammar_of_a_long_body_is_checked_too(served: Served) -> None:
    long = {"note": "x" * 70_000}
    response = await served.post(CHAT, chat("hi", guided_json={"type": "strin"}, metadata=long))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_json")
    assert await grammar_of(served, CHAT, chat("hi", guided_json=SCHEMA, metadata=long))


async def test_a_schema_that_explodes_is_a_400_and_burns_nothing_afterwards(served: Served) -> None:
    """Beside it streams go on, and simple grammars are still checked."""
    stopping = asyncio.Event()

    async def canary() -> int:
        num_answers = 0
        while not stopping.is_set():
            assert (await served.post(CHAT, chat("hi", guided_choice=["a", f"b{num_answers % 3}"]))).status_code == 200
            num_answers += 1
        return num_answers

    canaries = asyncio.create_task(canary())
    for path, body in bodies({"response_format": named(EXPLODING)}):
        response = await served.post(path, body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "response_format.json_schema.schema"
        assert "takes more than" in error["message"]
    stopping.set()
    assert await canaries > 0


def whole_answers(directory: Path, grammar: str, tokens: Sequence[str] = ()) -> Callable[[list[int]], bool]:
    """Return a function that says whether tokens of the tiny model are a whole answer by `grammar`."""
    write_tiny_model(directory, more_control_tokens=tokens)
    tokenizer = LLTokenizer((directory / "tokenizer.json").read_text())

    def is_whole(token_ids: list[int]) -> bool:
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return is_whole


THOUGHT = text_ids("<think>\nIs it {}?\n</think>\n\n")


@pytest.mark.parametrize(
    ("template", "whole", "others"),
    [
        (QWEN, [text_ids('{"a":1}'), THOUGHT + text_ids('{"a":1}')], [THOUGHT, THOUGHT + text_ids("1")]),
        (R1, [THOUGHT[7:] + text_ids('{"a":1}')], [text_ids('{"a":1}'), THOUGHT[7:] + text_ids("1")]),
    ],
)
async def test_what_a_model_thinks_comes_before_what_follows_the_grammar(
    template: str, whole: list[list[int]], others: list[list[int]], tmp_path: Path
) -> None:
    async with serving_template(template) as served:
        is_whole = whole_answers(tmp_path, await grammar_of(served, CHAT, chat("hi", guided_json=SCHEMA)))
        assert all(map(is_whole, whole))
        assert not any(map(is_whole, others))
        served.scheduler.reply = saying('<think>Hm.</think>{"a":1}' if template == QWEN else 'Hm.</think>{"a":1}')
        [choice] = (await served.chat("hi", guided_json=SCHEMA, max_tokens=100))["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ('{"a":1}', "Hm.")


async def test_the_last_message_of_harmony_follows_the_grammar(tmp_path: Path) -> None:
    async with serving_template(HARMONY, tokens=HARMONY_TOKENS) as served:
        grammar = await grammar_of(served, CHAT, chat("hi", guided_json=SCHEMA))
        is_whole = whole_answers(tmp_path, grammar, HARMONY_TOKENS)
        final = '<|channel|>final<|message|>{"a":1}'
        assert is_whole(harmony_ids(final))
        assert is_whole(harmony_ids(f"<|channel|>analysis<|message|>Hm {{}}.<|end|><|start|>assistant{final}"))
        assert not is_whole(harmony_ids('{"a":1}'))
        assert not is_whole(harmony_ids("<|channel|>final<|message|>1"))
