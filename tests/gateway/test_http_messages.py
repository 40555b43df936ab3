"""Anthropic's Messages API: an adapter over the path of chats, used as its official client uses it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from octavo.gateway.http.door import SHORT_BYTES
from octavo.protocol.messages import Rejected, Submit
from tests.fakes.gateway_server import MODEL, Served
from tests.fakes.model_directories import IM_END, text_ids
from tests.fakes.template_server import QWEN, saying, serving_template, with_tools

PATH = "/v1/messages"
HERMES = with_tools("<tool_call> <think></think>")
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'

pytestmark = pytest.mark.asyncio(loop_scope="module")


def message(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": content}]} | fields


def client(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="any", max_retries=0)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def thinker() -> AsyncIterator[Served]:
    """A gateway whose model thinks and calls tools."""
    async with serving_template(HERMES) as served:
        yield served


async def prompt_of(served: Served, body: dict[str, Any]) -> str:
    """Return the prompt that a body makes, as text."""
    served.scheduler.received.clear()
    response = await served.post(PATH, body | {"max_tokens": 1})
    assert response.status_code == 200, response.text
    [submit] = served.scheduler.messages(Submit)
    names = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    prompt = served.scheduler.prompt_of(submit)
    return b"".join(names[i].encode() if i in names else bytes([i - 3]) for i in prompt).decode()


async def streamed(served: Served, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the events of a stream, whose frames are checked."""
    async with served.http.stream("POST", PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        raw = (await response.aread()).decode()
    events = []
    for frame in raw.removesuffix("\n\n").split("\n\n"):
        if frame != ": ping":
            name, data = frame.split("\n")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


async def same_streamed_and_not(served: Served, body: dict[str, Any]) -> Any:
    """Return the answer, which the official client also puts together of a stream; each block begins and ends once."""
    whole = (await served.post(PATH, body)).json()
    async with client(served) as sdk, sdk.messages.stream(**body) as stream:
        final = await stream.get_final_message()
    shown = [block.model_dump(include=set(given)) for block, given in zip(final.content, whole["content"], strict=True)]
    assert shown == whole["content"]
    assert (final.stop_reason, final.stop_sequence) == (whole["stop_reason"], whole["stop_sequence"])
    assert final.usage.output_tokens == whole["usage"]["output_tokens"]
    kinds = [(name, data.get("index")) for name, data in await streamed(served, body) if name != "content_block_delta"]
    blocks = [
        (name, index)
        for index in range(len(whole["content"]))
        for name in ("content_block_start", "content_block_stop")
    ]
    assert kinds == [("message_start", None), *blocks, ("message_delta", None), ("message_stop", None)]
    return whole


async def test_a_text_streamed_and_not(served: Served) -> None:
    served.scheduler.reply, served.scheduler.num_cached_tokens = saying("blue, 世界"), 16
    try:
        whole = await same_streamed_and_not(served, message())
    finally:
        served.scheduler.num_cached_tokens = 0
    assert whole.pop("id").startswith("msg-")
    prompt = len(served.scheduler.prompt_of(served.scheduler.messages(Submit)[-1]))
    assert whole == {
        "type": "message",
        "model": MODEL,
        "role": "assistant",
        "content": [{"type": "text", "text": "blue, 世界"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 16,
            "output_tokens": len(text_ids("blue, 世界")) + 1,
            "cache_read_input_tokens": 16,
        },
    }


async def test_an_answer_says_why_it_ended(served: Served) -> None:
    served.scheduler.reply = saying("one two three")
    stopped = await same_streamed_and_not(served, message(stop_sequences=[" tw", "zzz"]))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " tw")
    assert stopped["content"] == [{"type": "text", "text": "one"}]
    cut = await same_streamed_and_not(served, message(max_tokens=3))
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


async def test_fields_reach_the_scheduler(served: Served) -> None:
    await served.post(PATH, message(temperature=0.5, top_p=0.25, top_k=7, metadata={"user_id": "me"}))
    sampling = served.scheduler.messages(Submit)[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 7, 200)


async def test_max_tokens_are_cut_to_what_fits(served: Served) -> None:
    """Agents ask for as many as the service's own models may write."""
    assert (await served.post(PATH, message(max_tokens=32_000))).status_code == 200
    submit = served.scheduler.messages(Submit)[-1]
    assert submit.sampling.max_tokens == 512 - len(served.scheduler.prompt_of(submit))


async def test_thinking_is_a_block_of_its_own(thinker: Served) -> None:
    thinker.scheduler.reply = saying("<think>Hm, blue.</think>\n\nblue")
    for tokens_per_step in (1, 8):
        thinker.scheduler.tokens_per_step = tokens_per_step
        asked = message(max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024})
        whole = await same_streamed_and_not(thinker, asked)
        assert whole["content"] == [
            {"type": "thinking", "thinking": "Hm, blue.", "signature": ""},
            {"type": "text", "text": "blue"},
        ]
    for thinking in (None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        whole = await same_streamed_and_not(thinker, message(thinking=thinking) if thinking else message())
        assert whole["content"] == [{"type": "text", "text": "blue"}]


@pytest.mark.parametrize("tokens_per_step", [1, 9])
async def test_calls_are_blocks_of_their_own(thinker: Served, tokens_per_step: int) -> None:
    thinker.scheduler.tokens_per_step = tokens_per_step
    thinker.scheduler.reply = saying(f"Let me look.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}")
    whole = (await thinker.post(PATH, message(tools=[WEATHER]))).json()
    text, *calls = whole["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "get_weather", {"city": "Rome"}),
        ("tool_use", "get_weather", {"city": "Oslo"}),
    ]
    assert len({call["id"] for call in calls}) == 2
    assert whole["stop_reason"] == "tool_use"
    async with client(thinker) as sdk, sdk.messages.stream(**message(tools=[WEATHER])) as stream:
        final = await stream.get_final_message()
    inputs = [block.input for block in final.content if block.type == "tool_use"]
    assert inputs == [{"city": "Rome"}, {"city": "Oslo"}]
    assert final.stop_reason == "tool_use"


async def test_choices_among_tools(thinker: Served) -> None:
    for choice, is_forced in (
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "get_weather"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
    ):
        thinker.scheduler.received.clear()
        response = await thinker.post(PATH, message(tools=[WEATHER], tool_choice=choice))
        assert response.status_code == 200, response.text
        assert bool(thinker.scheduler.messages(Submit)[-1].grammar) == is_forced
    assert "get_weather" not in await prompt_of(thinker, message(tools=[WEATHER], tool_choice={"type": "none"}))


async def test_a_schema_is_followed(thinker: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for fields in (
        {"output_format": {"type": "json_schema", "schema": schema}},
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    ):
        thinker.scheduler.received.clear()
        assert (await thinker.post(PATH, message(**fields))).status_code == 200
        assert '"integer"' in thinker.scheduler.messages(Submit)[-1].grammar


async def test_a_conversation_with_calls_reaches_the_template(thinker: Served) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Rome?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A city.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "gone", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    prompt = await prompt_of(thinker, message(messages=turns, system=system, tools=[WEATHER]))
    assert prompt.startswith("<tools>")
    assert prompt.partition("</tools>")[2] == (
        "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n<|im_start|>user\nRome?<|im_end|>\n"
        '<|im_start|>assistant\nLet me look.<think>A city.</think><made>get_weather {"city": "Rome"}</made><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>tool\nError: gone<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_an_answer_goes_on_from_a_last_turn_of_the_assistant(thinker: Served) -> None:
    turns = [{"role": "user", "content": "colour?"}, {"role": "assistant", "content": "It is"}]
    assert (await prompt_of(thinker, message(messages=turns))).endswith("<|im_start|>assistant\nIt is")


async def test_thinking_is_turned_off_unless_it_is_asked_for() -> None:
    async with serving_template(QWEN) as served:
        assert (await prompt_of(served, message())).endswith("<think>\n\n</think>\n\n")
        asked = message(thinking={"type": "enabled", "budget_tokens": 1024})
        assert (await prompt_of(served, asked)).endswith("assistant\n")


async def test_tokens_are_counted(thinker: Served) -> None:
    body = message("How many?", tools=[WEATHER], system="Be brief.")
    del body["max_tokens"]
    async with client(thinker) as sdk:
        count = await sdk.messages.count_tokens(**body)
    await thinker.post(PATH, body | {"max_tokens": 1})
    assert count.input_tokens == len(thinker.scheduler.prompt_of(thinker.scheduler.messages(Submit)[-1]))
    assert thinker.scheduler.messages(Submit)[-1].sampling.max_tokens == 1


async def test_a_long_body_is_answered_as_well(thinker: Served) -> None:
    thinker.scheduler.reply = saying("blue")
    padding = {"type": "text", "text": "hi", "cache_control": {"padding": " " * SHORT_BYTES}}
    whole = await same_streamed_and_not(thinker, message([padding], tools=[WEATHER]))
    assert whole["content"] == [{"type": "text", "text": "blue"}]


async def test_the_official_client(served: Served) -> None:
    served.scheduler.reply = saying("blue")
    async with client(served) as sdk:
        answer = await sdk.messages.create(**message(system="Be brief."))
        assert answer.content[0].model_dump(include={"type", "text"}) == {"type": "text", "text": "blue"}
        async with sdk.messages.stream(**message()) as stream:
            assert "".join([text async for text in stream.text_stream]) == "blue"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]}, "role"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "role"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [WEATHER, WEATHER]}, "two tools"),
    ({"tool_choice": {"type": "any"}}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
    ({"container": "x"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"max_token": 5}, "max_token"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt is too long"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
async def test_a_wrong_body_is_refused_in_anthropics_envelope(served: Served, fields: Any, words: str) -> None:
    response = await served.post(PATH, message(**fields))
    answer = response.json()
    assert (response.status_code, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in answer["error"]["message"]
    assert served.scheduler.messages(Submit) == []


async def test_errors_have_the_types_of_the_official_client(served: Served) -> None:
    async with client(served) as sdk:
        with pytest.raises(anthropic.NotFoundError, match="no model"):
            await sdk.messages.create(**message(model="other"))
        served.scheduler.rejection = lambda submit: Rejected(submit.request_id, "full", 1.0)
        with pytest.raises(anthropic.RateLimitError, match="full"):
            await sdk.messages.create(**message())
        served.scheduler.rejection = lambda submit: None
    response = await served.http.get(PATH)
    assert (response.status_code, response.json()["type"]) == (405, "error")
    other = await served.http.get("/v1/messagesx")
    assert "message" in other.json()["error"]
    assert "type" not in other.json()


async def test_a_stream_that_fails_ends_with_an_error_event(served: Served) -> None:
    served.scheduler.reply = lambda submit: [*text_ids("blue"), IM_END]
    served.scheduler.paused = True
    async with served.http.stream("POST", PATH, json=message(stream=True)) as response:
        served.scheduler.fail("the executor is gone")
        served.scheduler.paused = False
        raw = (await response.aread()).decode()
    *_, last = raw.removesuffix("\n\n").split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"] == {"type": "api_error", "message": "the executor is gone"}
