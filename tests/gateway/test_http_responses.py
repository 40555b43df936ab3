"""OpenAI's Responses API: an adapter over the path of chats, used as its official client uses it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pydantic
import pytest
import pytest_asyncio

from octavo.gateway.http.door import SHORT_BYTES
from octavo.protocol.messages import Rejected, Submit
from tests.fakes.gateway_server import MODEL, Served
from tests.fakes.model_directories import text_ids
from tests.fakes.template_server import saying, serving_template, with_tools

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def thinker() -> AsyncIterator[Served]:
    """A gateway whose model thinks and calls tools."""
    async with serving_template(with_tools("<tool_call> <think></think>")) as served:
        yield served


def asking(given: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_output_tokens": 200, "input": given} | fields


async def prompt_of(served: Served, body: dict[str, Any]) -> str:
    """Return the prompt that a body makes, as text."""
    served.scheduler.received.clear()
    response = await served.post(PATH, body | {"max_output_tokens": 1})
    assert response.status_code == 200, response.text
    [submit] = served.scheduler.messages(Submit)
    names = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    prompt = served.scheduler.prompt_of(submit)
    return b"".join(names[i].encode() if i in names else bytes([i - 3]) for i in prompt).decode()


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]


async def same_streamed_and_not(served: Served, body: dict[str, Any]) -> Any:
    """Return the answer, which is also that of the last event of a stream whose events are whole and in order."""
    whole = (await served.post(PATH, body)).json()
    async with served.http.stream("POST", PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        raw = (await response.aread()).decode()
    frames = [frame.split("\n") for frame in raw.removesuffix("\n\n").split("\n\n") if frame != ": ping"]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name.removeprefix("event: ") for name, _ in frames] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert (final["usage"], final["incomplete_details"]) == (whole["usage"], whole["incomplete_details"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    pieces = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
    for index, item in enumerate(final["output"]):
        kind = pieces.get(item["type"], "response.function_call_arguments")
        mine = [event for event in events if event.get("output_index") == index]
        text = "".join(event["delta"] for event in mine if event["type"] == f"{kind}.delta")
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        kinds = [event["type"] for event in mine if event["type"] != f"{kind}.delta"]
        part = [] if item["type"] == "function_call" else ["response.content_part"]
        assert kinds == [
            "response.output_item.added",
            *(f"{name}.added" for name in part),
            f"{kind}.done",
            *(f"{name}.done" for name in part),
            "response.output_item.done",
        ]
    return whole


async def test_a_text_streamed_and_not(served: Served) -> None:
    served.scheduler.reply, served.scheduler.num_cached_tokens = saying("blue, 世界"), 16
    try:
        whole = await same_streamed_and_not(served, asking(metadata={"a": "b"}, temperature=0.5))
    finally:
        served.scheduler.num_cached_tokens = 0
    prompt = len(served.scheduler.prompt_of(served.scheduler.messages(Submit)[-1]))
    num_tokens = len(text_ids("blue, 世界")) + 1
    assert whole["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 16},
        "output_tokens": num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + num_tokens,
    }
    assert (whole["object"], whole["status"], whole["error"], whole["store"]) == ("response", "completed", None, False)
    assert (whole["metadata"], whole["temperature"]) == ({"a": "b"}, 0.5)
    [item] = whole["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "blue, 世界", "annotations": [], "logprobs": []}],
    }


async def test_an_answer_that_is_cut_is_incomplete(served: Served) -> None:
    served.scheduler.reply = saying("one two three")
    whole = await same_streamed_and_not(served, asking(max_output_tokens=3))
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("tokens_per_step", [1, 9])
async def test_thinking_words_and_calls_are_items(thinker: Served, tokens_per_step: int) -> None:
    thinker.scheduler.tokens_per_step = tokens_per_step
    thinker.scheduler.reply = saying(f"<think>Hm.</think>\n\nLet me look.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}")
    whole = await same_streamed_and_not(thinker, asking(tools=[WEATHER]))
    thought, words, *calls = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert words["content"][0]["text"] == "Let me look."
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("get_weather", '{"city": "Rome"}'),
        ("get_weather", '{"city": "Oslo"}'),
    ]
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_items_reach_the_template(thinker: Served) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "A city."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny", "id": None},
        {"role": "user", "content": "And now?"},
    ]
    prompt = await prompt_of(thinker, asking(items, instructions="Be brief.", tools=[WEATHER]))
    assert prompt.partition("</tools>")[2] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRome?<|im_end|>\n"
        '<|im_start|>assistant\nLet me look.<think>A city.</think><made>get_weather {"city": "Rome"}</made><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ("auto", False),
        ("none", False),
        ("required", True),
        ({"type": "function", "name": "get_weather"}, True),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
            True,
        ),
    ],
)
async def test_choices_among_tools(thinker: Served, choice: Any, is_forced: bool) -> None:
    thinker.scheduler.received.clear()
    response = await thinker.post(PATH, asking(tools=[WEATHER], tool_choice=choice))
    assert response.status_code == 200, response.text
    assert bool(thinker.scheduler.messages(Submit)[-1].grammar) == is_forced


async def test_the_official_client(served: Served) -> None:
    served.scheduler.reply = saying('{"name":"Bo"}')

    class Person(pydantic.BaseModel):
        name: str

    parsed = await served.openai.responses.parse(model=MODEL, input="hi", text_format=Person)
    assert parsed.output_parsed == Person(name="Bo")
    assert served.scheduler.messages(Submit)[-1].grammar
    answer = await served.openai.responses.create(model=MODEL, input="hi", instructions="Be brief.", store=False)
    assert answer.output_text == '{"name":"Bo"}'
    async with served.openai.responses.stream(model=MODEL, input="hi") as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert text == (await stream.get_final_response()).output_text == '{"name":"Bo"}'


async def test_a_long_body_is_answered_as_well(served: Served) -> None:
    served.scheduler.reply = saying("blue")
    whole = await same_streamed_and_not(served, asking("ab" * SHORT_BYTES, truncation="auto"))
    assert whole["output"][0]["content"][0]["text"] == "blue"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": ["hi"]}, "input[0]"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "x"}, "conversation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"max_tokens": 5}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_a_wrong_body_is_refused_by_name(served: Served, fields: Any, param: str) -> None:
    response = await served.post(PATH, asking(**fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert served.scheduler.messages(Submit) == []


async def test_a_full_queue_is_a_429_before_any_event(served: Served) -> None:
    served.scheduler.rejection = lambda submit: Rejected(submit.request_id, "full", 1.0)
    assert (await served.post(PATH, asking(stream=True))).status_code == 429


async def test_a_stream_that_fails_ends_with_an_error_event(served: Served) -> None:
    served.scheduler.reply, served.scheduler.paused = saying("blue"), True
    async with served.http.stream("POST", PATH, json=asking(stream=True)) as response:
        served.scheduler.fail("the executor is gone")
        served.scheduler.paused = False
        raw = (await response.aread()).decode()
    name, data = raw.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["type"], event["message"]) == ("event: error", "error", "the executor is gone")
