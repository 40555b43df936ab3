"""Chat: the shapes of answers and chunks, and that a stream says the same as an answer in one piece."""

from itertools import chain
from typing import Any

import pytest

from octavo.protocol.messages import Submit
from tests.fakes.gateway_server import MODEL, Served, chat
from tests.fakes.model_directories import IM_END, text_ids

PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NUM_PROMPT_TOKENS = len("user\nhi\nassistant\n") + 3
HARD_TEXT = "naïve 🫠🥹 龜𠮷 👨‍👩‍👧 é\n\ttab  two"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def saying(text: str, *, end: bool = True) -> Any:
    return lambda submit: text_ids(text) + ([IM_END] if end else [])


async def test_an_answer_has_openai_s_shape(served: Served) -> None:
    served.scheduler.reply = saying("hello")
    answer = await served.chat()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["system_fingerprint"] == "fp_fingerprint"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"content": "hello", "role": "assistant", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": NUM_PROMPT_TOKENS,
        "completion_tokens": 6,
        "total_tokens": NUM_PROMPT_TOKENS + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_begins_with_the_role_and_ends_with_the_finish(served: Served) -> None:
    served.scheduler.reply = saying("hello")
    chunks = await served.stream("/v1/chat/completions", chat())
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"content": "", "role": "assistant"}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert all(isinstance(chunk["choices"][0]["delta"]["content"], str) for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "hello"


async def test_no_delta_but_the_first_and_the_last_is_empty(served: Served) -> None:
    served.scheduler.reply = saying("abcabcabX🫠")
    chunks = await served.stream("/v1/chat/completions", chat(stop=["abcabX!", "zzzz"], max_tokens=64))
    contents = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(contents) == "abcabcabX🫠"
    assert all(contents[1:-1])


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}, {}])
async def test_usage_comes_last_and_only_when_asked_for(served: Served, options: dict[str, bool] | None) -> None:
    chunks = await served.stream("/v1/chat/completions", chat(stream_options=options))
    if options == {"include_usage": True}:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 8
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)


async def test_each_chunk_has_the_usage_so_far_when_asked_for(served: Served) -> None:
    served.scheduler.reply = saying("yes", end=False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    for logprobs in (False, True):
        body = chat(n=2, max_tokens=3, seed=1, logprobs=logprobs, stream_options=options)
        *chunks, last = await served.stream("/v1/chat/completions", body)
        for index in range(2):
            usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 3]
            assert {usage["prompt_tokens"] for usage in usages} == {NUM_PROMPT_TOKENS}
            assert usages[-1]["total_tokens"] == NUM_PROMPT_TOKENS + 3
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    alone = await served.stream("/v1/chat/completions", chat(stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in alone)


SAME_STREAMED_AND_NOT = {
    "text": ({}, saying("plain")),
    "any Unicode": ({"max_tokens": 200}, saying(HARD_TEXT)),
    "cut inside a character": ({"max_tokens": 10}, saying(HARD_TEXT[:5] + "龜𠮷")),
    "bytes that are no text": ({"max_tokens": 60}, lambda submit: [200 + i % 50 for i in range(60)]),
    "a stop string over tokens": ({"stop": ["four five"], "max_tokens": 99}, saying("one two three four five six")),
    "two stop strings": ({"stop": ["xyz", "ee fo"], "max_tokens": 99}, saying("one two three four five six")),
    "the stop string shown": ({"stop": "wo", "include_stop_str_in_output": True}, saying("one two three")),
    "logprobs": ({"logprobs": True, "top_logprobs": 3, "max_tokens": 30}, saying("née 🫠 fin")),
    "logprobs without alternatives": ({"logprobs": True}, saying("abc")),
    "several choices": ({"n": 3, "seed": 7, "max_tokens": 20}, None),
    "a seed": ({"seed": -5, "temperature": 1.0}, None),
}


@pytest.mark.parametrize("name", SAME_STREAMED_AND_NOT)
async def test_a_stream_says_what_the_answer_says(served: Served, name: str) -> None:
    fields, reply = SAME_STREAMED_AND_NOT[name]
    served.scheduler.reply = reply or served.scheduler.reply
    answer = await served.chat(**fields)
    options = {"stream_options": {"include_usage": True}}
    chunks = await served.stream("/v1/chat/completions", chat(**fields, **options))
    assert [joined(chunks, choice["index"]) for choice in answer["choices"]] == [
        {
            "text": choice["message"]["content"],
            "logprobs": choice["logprobs"] and choice["logprobs"]["content"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in answer["choices"]
    ]
    assert chunks[-1]["usage"] == answer["usage"]


def joined(chunks: list[Any], index: int) -> dict[str, Any]:
    """Return what the chunks of one choice say together; it ends exactly once, in its last chunk."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] is not None for choice in own] == [False] * (len(own) - 1) + [True]
    logprobs = [choice["logprobs"]["content"] for choice in own if choice["logprobs"]]
    return {
        "text": "".join(choice["delta"]["content"] for choice in own),
        "logprobs": list(chain(*logprobs)) if logprobs else None,
        "finish_reason": own[-1]["finish_reason"],
        "stop_reason": own[-1]["stop_reason"],
    }


async def test_logprobs_name_tokens_and_their_bytes(served: Served) -> None:
    served.scheduler.reply = saying("é", end=False)
    answer = await served.chat(logprobs=True, top_logprobs=2, max_tokens=2)
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert first["bytes"] + second["bytes"] == list("é".encode())
    assert first["token"] == "\ufffd"
    assert [len(token["top_logprobs"]) for token in (first, second)] == [2, 2]
    assert first["logprob"] == -(text_ids("é")[0] % 7) - 0.5


async def test_the_finish_reason_is_length_when_max_tokens_are_spent(served: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = await served.chat(**{"max_tokens": None, name: 3})
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3


async def test_max_tokens_is_the_room_that_is_left_unless_given(served: Served) -> None:
    answer = await served.chat(max_tokens=None)
    assert answer["usage"]["total_tokens"] == served.scheduler.max_model_len


async def test_what_stops_is_named(served: Served) -> None:
    served.scheduler.reply = saying("one two three")
    by_string = (await served.chat(stop=["wo", "ree"], max_tokens=50))["choices"][0]
    assert (by_string["message"]["content"], by_string["finish_reason"]) == ("one t", "stop")
    assert by_string["stop_reason"] == "wo"
    [stop_id] = text_ids("w")
    by_id = (await served.chat(stop_token_ids=[stop_id], max_tokens=50))["choices"][0]
    assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", stop_id)


async def test_a_stop_string_that_is_a_special_token_stops_at_it(served: Served) -> None:
    served.scheduler.reply = lambda submit: [*text_ids("one"), IM_END, *text_ids("two")]
    for fields in ({}, {"skip_special_tokens": False}):
        [choice] = (await served.chat(stop=["<|im_end|>", "zzz"], ignore_eos=True, **fields))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")
        assert choice["stop_reason"] == "<|im_end|>"
    [submit, _] = served.scheduler.messages(Submit)
    assert submit.sampling.stop_token_ids == (IM_END,)
    fields = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    [shown] = (await served.chat(stop="<|im_end|>", ignore_eos=True, **fields))["choices"]
    assert (shown["message"]["content"], shown["stop_reason"]) == ("one<|im_end|>", "<|im_end|>")
    [ended] = (await served.chat(stop="<|im_end|>"))["choices"]
    assert (ended["message"]["content"], ended["stop_reason"]) == ("one", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_special_token_among_other_text_of_a_stop_string_is_found_where_texts_show_it(
    served: Served, stream: bool
) -> None:
    served.scheduler.reply = lambda submit: [*text_ids("xa"), IM_END, *text_ids("by")]

    async def ended(**fields: Any) -> tuple[str, str, str | None]:
        body = chat(ignore_eos=True, max_tokens=5, **fields)
        if stream:
            choices = [chunk["choices"][0] for chunk in await served.stream("/v1/chat/completions", body)]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            return text, choices[-1]["finish_reason"], choices[-1]["stop_reason"]
        [choice] = (await served.chat(ignore_eos=True, max_tokens=5, **fields))["choices"]
        return choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]

    assert await ended(stop="a<|im_end|>b") == ("xaby", "length", None)
    assert await ended(stop="a<|im_end|>b", skip_special_tokens=False) == ("x", "stop", "a<|im_end|>b")
    assert await ended(stop="ab") == ("x", "stop", "ab")
    assert await ended(stop="ab", skip_special_tokens=False) == ("xa<|im_end|>by", "length", None)


async def test_usage_counts_up_to_the_token_that_completed_a_stop_string(served: Served) -> None:
    served.scheduler.tokens_per_step = 5
    served.scheduler.reply = saying("one two three")
    answer = await served.chat(stop="two", max_tokens=50)
    assert answer["usage"]["completion_tokens"] == len("one two")


async def test_content_parts_are_one_string(served: Served) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "blue"}]
    await served.chat("Say blue")
    await served.chat(parts)
    plain, split = await served.scheduler.wait_for(Submit, 2)
    assert plain.prompt_token_ids == split.prompt_token_ids


async def test_messages_that_templates_take(served: Served) -> None:
    messages = [
        {"role": "developer", "content": "be brief", "name": None},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "user", "content": "go on", "name": "ada"},
    ]
    answer = await served.chat(messages=messages)
    text = "system\nbe brief\nuser\n\nassistant\n\nuser\ngo on\nassistant\n"
    assert answer["usage"]["prompt_tokens"] == len(text) + 9


async def test_the_last_message_can_be_gone_on_with(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    answered = len("user\nhi\nassistant\nWell\n") + 4  # and four control tokens
    gone_on_with = await served.chat(messages=messages, continue_final_message=True)
    assert gone_on_with["usage"]["prompt_tokens"] == answered - len("\n") - 1
    neither = await served.chat(messages=messages, add_generation_prompt=False, top_logprobs=0)
    assert neither["usage"]["prompt_tokens"] == answered


async def test_choices_share_a_seed_and_differ(served: Served) -> None:
    first, again, single = [await served.chat(seed=11, n=n, max_tokens=12) for n in (3, 3, 1)]
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert len(set(texts)) == 3
    assert single["choices"][0]["message"]["content"] == texts[0]
    assert first["usage"]["completion_tokens"] == 36
    assert first["usage"]["prompt_tokens"] == NUM_PROMPT_TOKENS


async def test_every_name_of_the_model_answers_under_itself(served: Served) -> None:
    assert (await served.chat(model="alias"))["model"] == "alias"
    assert (await served.chat(model=None))["model"] == MODEL
