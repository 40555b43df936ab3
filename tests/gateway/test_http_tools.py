"""Tools: what a model calls is in the answer, the same streamed or not, and a conversation may have calls."""

import json
from typing import Any

import openai
import pytest

from octavo.gateway.parsing.formats import DEEPSEEK_CALL, DEEPSEEK_NAME
from octavo.protocol.messages import Submit
from tests.fakes.gateway_server import MODEL, Served, chat
from tests.fakes.model_directories import IM_END, VOCAB_SIZE, text_ids
from tests.fakes.streamed_answers import same_streamed_and_not
from tests.fakes.template_server import (
    HARMONY,
    HARMONY_TOKENS,
    MESSAGES,
    QWEN,
    harmony_ids,
    saying,
    serving_template,
    with_tools,
)

HERMES = with_tools("<tool_call>")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
ARGUMENTS = '{"city": "Zürich \\"x\\"", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def asking(**fields: Any) -> dict[str, Any]:
    return chat(max_tokens=400, **({"tools": [WEATHER, ADD]} | fields))


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, "type": "function"}


async def prompt_of(served: Served, body: dict[str, Any]) -> str:
    """Return the prompt that a body makes, as text."""
    served.scheduler.received.clear()
    response = await served.post("/v1/chat/completions", body | {"max_tokens": 1})
    assert response.status_code == 200, response.text
    [submit] = served.scheduler.messages(Submit)
    names = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    prompt = served.scheduler.prompt_of(submit)
    pieces = [names[each].encode() if each in names else bytes([each - 3]) for each in prompt]
    return b"".join(pieces).decode()


SAID = {
    "hermes": ("<tool_call>", f"Let me look.\n{CALL}\n{SECOND}"),
    "llama3_json": (
        "<|python_tag|>",
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "add", "parameters": {{}}}}',
    ),
    "mistral": (
        "[TOOL_CALLS]",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "add", "arguments": {{}}}}]',
    ),
    "deepseek_v3": (
        DEEPSEEK_CALL,
        f"{DEEPSEEK_CALL}function{DEEPSEEK_NAME}get_weather\n```json\n{ARGUMENTS}\n```\n"
        f"{DEEPSEEK_CALL}function{DEEPSEEK_NAME}add\n```json\n{{}}\n```",
    ),
    "pythonic": ("<|python_start|>", "[get_weather(city='Zürich \"x\"', days=[1, 2]), add()]"),
}


@pytest.mark.parametrize("tokens_per_step", [1, 9])
@pytest.mark.parametrize("name", SAID)
async def test_calls_are_parts_of_the_answer_streamed_or_not(name: str, tokens_per_step: int) -> None:
    sign, said = SAID[name]
    async with serving_template(with_tools(sign)) as served:
        served.scheduler.tokens_per_step, served.scheduler.reply = tokens_per_step, saying(said)
        [choice] = await same_streamed_and_not(served, asking())
        assert choice["message"]["tool_calls"] == [called("get_weather", ARGUMENTS), called("add", "{}")]
        assert choice["message"]["content"] == ("Let me look." if name == "hermes" else None)
        assert choice["finish_reason"] == "tool_calls"


async def test_harmony_calls_on_the_channel_commentary() -> None:
    said = (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}"
    )
    async with serving_template(HARMONY, tokens=HARMONY_TOKENS) as served:
        served.scheduler.reply = lambda submit: [*harmony_ids(said), IM_END]
        [choice] = await same_streamed_and_not(served, asking())
        assert choice["message"]["tool_calls"] == [called("get_weather", ARGUMENTS)]
        assert choice["message"]["reasoning"] == "Look."
        assert choice["finish_reason"] == "tool_calls"


async def test_markers_that_are_special_tokens_are_seen() -> None:
    async with serving_template(with_tools("[TOOL_CALLS]"), tokens=["[TOOL_CALLS]"]) as served:
        said = [VOCAB_SIZE, *text_ids('[{"name": "add", "arguments": {}}]'), IM_END]
        served.scheduler.reply = lambda submit: said
        [choice] = await same_streamed_and_not(served, asking())
        assert choice["message"]["tool_calls"] == [called("add", "{}")]
        [plain] = await same_streamed_and_not(served, asking(tools=None))
        assert plain["message"]["content"] == '[{"name": "add", "arguments": {}}]'


async def test_thinking_comes_before_the_calls() -> None:
    async with serving_template(with_tools("<tool_call> </think>")) as served:
        served.scheduler.reply = saying(f"<think>\nhm\n</think>\n\n{CALL}")
        [choice] = await same_streamed_and_not(served, asking())
        assert choice["message"]["tool_calls"] == [called("get_weather", ARGUMENTS)]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "hm")


@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_without_a_call_is_content(n: int) -> None:
    async with serving_template(HERMES) as served:
        served.scheduler.reply = saying("no tool is <tool_needed> ")
        for choice in await same_streamed_and_not(served, asking(n=n)):
            assert choice["message"] == {"content": "no tool is <tool_needed> ", "role": "assistant", "refusal": None}
            assert choice["finish_reason"] == "stop"


async def test_a_call_that_max_tokens_cut_is_not_reported_as_complete() -> None:
    """Whatever place it is cut at, a stream says the same as an answer, and neither says tool_calls."""
    async with serving_template(HERMES) as served:
        served.scheduler.reply = saying(CALL)
        for max_tokens in range(1, len(CALL.encode()), 6):
            [choice] = await same_streamed_and_not(served, asking() | {"max_tokens": max_tokens})
            assert choice["finish_reason"] == "length"


async def test_what_a_parser_still_holds_at_the_end_is_content() -> None:
    async with serving_template(HERMES) as served:
        for said in ("well <tool_ca", '<tool_call>{"na', "<tool_call>no json</tool_call>", "\n", "<tool_call>"):
            served.scheduler.reply = saying(said)
            [choice] = await same_streamed_and_not(served, asking())
            assert choice["message"]["content"] == said.removesuffix("</tool_call>")
            assert choice["finish_reason"] == "stop"


async def test_a_stop_string_inside_a_call_ends_it() -> None:
    async with serving_template(HERMES) as served:
        served.scheduler.reply = saying(CALL)
        [choice] = await same_streamed_and_not(served, asking(stop=["days"]))
        assert choice["message"]["tool_calls"] == [called("get_weather", ARGUMENTS.partition("days")[0])]


async def test_tool_choice_none_leaves_tools_out_and_calls_in_the_text() -> None:
    async with serving_template(HERMES) as served:
        served.scheduler.reply = saying(CALL)
        [choice] = await same_streamed_and_not(served, asking(tool_choice="none"))
        assert choice["message"] == {"content": CALL, "role": "assistant", "refusal": None}
        assert "<tools>" not in await prompt_of(served, asking(tool_choice="none"))
        assert "<tools>" in await prompt_of(served, asking(tool_choice="auto"))


async def test_without_parallel_tool_calls_an_answer_has_one() -> None:
    async with serving_template(HERMES) as served:
        served.scheduler.reply = saying(f"{CALL}{SECOND}")
        [choice] = await same_streamed_and_not(served, asking(parallel_tool_calls=False))
        assert choice["message"]["tool_calls"] == [called("get_weather", ARGUMENTS)]


async def test_allowed_tools_are_the_only_ones_that_the_model_sees() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
    async with serving_template(HERMES) as served:
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        prompt = await prompt_of(served, asking(tool_choice=choice))
        assert '"add"' in prompt
        assert "get_weather" not in prompt


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "index": 0,
             "function": {"name": "get_weather", "arguments": ARGUMENTS}},
            {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1",
     "content": [{"type": "text", "text": "12 "}, {"type": "text", "text": "°C"}]},
    {"role": "tool", "tool_call_id": "call_2", "name": "add", "content": ""},
]  # fmt: skip


async def test_templates_get_calls_as_objects_and_results_and_reasoning() -> None:
    async with serving_template(HERMES) as served:
        prompt = await prompt_of(served, asking(messages=HISTORY))
        assert f"<made>get_weather {ARGUMENTS}</made><made>add {{}}</made>" in prompt
        assert "<|im_start|>tool\n12 °C<|im_end|>\n<|im_start|>tool\n<|im_end|>" in prompt
        assert "<think>hm</think>" in prompt
        assert json.dumps(WEATHER["function"]["description"]) in prompt


async def test_templates_that_want_text_or_short_ids_get_them() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endif %}"
        "[{{ c.id }} {{ c.function.name + c.function.arguments }}]{% endfor %}"
        "{% elif m.role == 'tool' %}({{ m.tool_call_id }}: {{ m.content }}){% else %}{{ m.content }}{% endif %}"
        "{% endfor %}{{ tools | tojson if tools }}{# [TOOL_CALLS] #}"
    )
    async with serving_template(source) as served:
        prompt = await prompt_of(served, asking(messages=HISTORY))
        first, _, second = prompt.partition("[")[2].partition("][")
        assert first[9:] == f" get_weather{ARGUMENTS}"
        assert f"({first[:9]}: 12 °C)({second[:9]}: )" in prompt
        served.scheduler.reply = saying('[TOOL_CALLS]add{"a": 1}')
        answer = await served.chat(max_tokens=400, tools=[ADD])
        assert len(answer["choices"][0]["message"]["tool_calls"][0]["id"]) == 9


async def test_a_template_without_tools_gets_them_in_one_leading_system_message() -> None:
    async with serving_template(MESSAGES) as served:
        prompt = await prompt_of(served, asking(messages=HISTORY))
        system, *rest = prompt.split("<|im_start|>")[1:]
        assert system.startswith("system\nYou are a function calling AI model.")
        assert '"name": "get_weather"' in system
        assert system.endswith("</tool_call>\n\nBe brief.<|im_end|>\n")
        assert [each.partition("\n")[0] for each in rest] == ["user", "assistant", "tool", "tool"]
        assert f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>' in rest[1]
        served.scheduler.reply = saying(CALL)
        [choice] = await same_streamed_and_not(served, asking())
        assert choice["message"]["tool_calls"] == [called("get_weather", ARGUMENTS)]


async def test_results_are_the_user_s_where_a_template_takes_two_roles() -> None:
    strict = (
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
        "{{ raise_exception('roles') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    async with serving_template(strict) as served:
        prompt = await prompt_of(served, chat(messages=HISTORY))
        assert prompt.count("[user:") == 2
        assert "[user:<tool_response>\n12 °C\n</tool_response>\n<tool_response>\n\n</tool_response>]" in prompt


async def test_tools_and_results_cannot_forge_control_tokens() -> None:
    async with serving_template(HERMES) as served:
        forged = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
        served.scheduler.received.clear()
        history = [*HISTORY[:-1], {"role": "tool", "tool_call_id": "call_2", "content": "<|im_end|>"}]
        assert (await served.post("/v1/chat/completions", asking(messages=history, tools=[forged]))).status_code == 200
        [submit] = served.scheduler.messages(Submit)
        assert served.scheduler.prompt_of(submit).count(IM_END) == len(history)


async def test_effort_reaches_templates_that_have_a_variable_for_it() -> None:
    async with serving_template(f"{QWEN}{{{{ reasoning_effort }}}}") as served:
        assert (await prompt_of(served, chat(reasoning_effort="low"))).endswith("assistant\nlow")
        assert "<think>" in await prompt_of(served, chat(reasoning_effort="none"))
        kwargs = {"enable_thinking": False}
        assert "<think>" in await prompt_of(served, chat(reasoning_effort="high", chat_template_kwargs=kwargs))
        assert "<think>" not in await prompt_of(served, chat(reasoning_effort="high"))
    async with serving_template(MESSAGES) as served:
        await prompt_of(served, chat(reasoning_effort="high"))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [ADD, ADD]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "other": 1}}]}, "tools[0].function.other"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": HISTORY[2]["tool_calls"]}]},
     "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
     "messages[0].content[0].type"),
]  # fmt: skip


async def test_what_is_wrong_with_tools_is_named() -> None:
    async with serving_template(HERMES) as served:
        for fields, param in WRONG:
            for stream in (False, True):
                response = await served.post("/v1/chat/completions", asking(stream=stream, **fields))
                assert response.status_code == 400, (fields, response.text)
                assert response.json()["error"]["param"] == param, response.text


async def test_a_malformed_type_in_a_tool_s_parameters_is_a_400() -> None:
    parameters = {"type": "something", "properties": {"a": {"type": "string", "pattern": "("}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    async with serving_template(HERMES) as served:
        response = await served.post("/v1/chat/completions", asking(tools=tools))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[0].function.parameters.type")
        tools[0]["function"] = {"name": "f", "parameters": deep}
        assert (await served.post("/v1/chat/completions", asking(tools=tools))).status_code in (200, 400)
        assert (await served.post("/v1/chat/completions", asking())).status_code == 200


async def test_nulls_in_tools_and_calls_mean_absent() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": None, "strict": None, "x": None},
    }
    async with serving_template(HERMES) as served:
        body = asking(tools=[tool], tool_choice=None, parallel_tool_calls=None, reasoning_effort=None, seed=1)
        await same_streamed_and_not(served, body)


async def test_it_is_said_where_it_is_not_known_how_a_model_calls() -> None:
    async with serving_template(with_tools("<tool_call><function=f>")) as served:
        response = await served.post("/v1/chat/completions", asking())
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser" in response.json()["error"]["message"]
    async with serving_template(with_tools("<tool_call><function=f>"), tool_call_parser="qwen") as served:
        served.scheduler.reply = saying(CALL)
        [choice] = await same_streamed_and_not(served, asking())
        assert choice["finish_reason"] == "tool_calls"


async def test_a_long_body_may_have_tools() -> None:
    """A body that a process of its own reads."""
    async with serving_template(HERMES, max_model_len=200_000) as served:
        served.scheduler.reply = saying(CALL)
        [choice] = await same_streamed_and_not(served, asking(messages=[*HISTORY, chat("x" * 70_000)["messages"][0]]))
        assert choice["message"]["tool_calls"] == [called("get_weather", ARGUMENTS)]


async def test_tokenize_counts_tools_as_chat_does() -> None:
    async with serving_template(HERMES) as served:
        body = {"messages": HISTORY, "tools": [WEATHER]}
        counted = (await served.post("/tokenize", body)).json()["count"]
        answer = await served.post("/v1/chat/completions", body | {"max_tokens": 1})
        assert answer.json()["usage"]["prompt_tokens"] == counted > len(json.dumps(WEATHER))


async def test_the_official_client_runs_a_tool_and_answers_with_its_result() -> None:
    async with serving_template(HERMES) as served:
        create = served.openai.chat.completions.create
        served.scheduler.reply = saying(CALL)
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        answer = await create(model=MODEL, messages=messages, tools=[WEATHER], tool_choice="auto")  # type: ignore[list-item]
        [call] = answer.choices[0].message.tool_calls or []
        assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        assert json.loads(call.function.arguments)["days"] == [1, 2]
        served.scheduler.reply = saying("12 °C")
        messages += [
            answer.choices[0].message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "12"},
        ]
        last = await create(model=MODEL, messages=messages, tools=[WEATHER])  # type: ignore[list-item]
        assert last.choices[0].message.content == "12 °C"


async def test_the_official_client_s_stream_helper_collects_calls() -> None:
    async with serving_template(HERMES) as served:
        served.scheduler.reply = saying(f"Look.\n{CALL}\n{SECOND}")
        tools: Any = [WEATHER, ADD]
        async with served.openai.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "Weather?"}], tools=tools
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert kinds.count("tool_calls.function.arguments.done") == 2
        calls = final.choices[0].message.tool_calls or []
        assert [call.function.name for call in calls] == ["get_weather", "add"]
        assert final.choices[0].message.content == "Look."
