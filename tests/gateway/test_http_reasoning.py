"""Reasoning: what a model thinks is a field of its own, streamed or not, and is counted."""

from typing import Any

import pytest

from octavo.protocol.messages import Submit
from tests.fakes.gateway_server import chat
from tests.fakes.model_directories import IM_END, text_ids
from tests.fakes.streamed_answers import same_streamed_and_not
from tests.fakes.template_server import (
    HARMONY,
    HARMONY_TOKENS,
    MESSAGES,
    QWEN,
    R1,
    START,
    harmony_ids,
    saying,
    serving_template,
)


def body(**fields: Any) -> dict[str, Any]:
    return chat(max_tokens=200, **fields)


@pytest.mark.parametrize("tokens_per_step", [1, 7])
async def test_thinking_is_a_field_of_its_own_streamed_or_not(tokens_per_step: int) -> None:
    async with serving_template(QWEN) as served:
        served.scheduler.tokens_per_step = tokens_per_step
        served.scheduler.reply = saying("<think>\nI ponder.\n</think>\n\nblue")
        [choice] = await same_streamed_and_not(served, body())
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == ("blue", "I ponder.")
        assert message["reasoning"] == message["reasoning_content"]
        assert choice["finish_reason"] == "stop"


async def test_a_prompt_may_open_the_thinking() -> None:
    async with serving_template(R1) as served:
        served.scheduler.reply = saying("I ponder.\n</think>\n\nblue")
        [choice] = await same_streamed_and_not(served, body())
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("blue", "I ponder.")


async def test_a_long_prompt_may_open_the_thinking_too() -> None:
    """A body that a process of its own reads."""
    async with serving_template(R1, max_model_len=200_000) as served:
        served.scheduler.reply = saying("hm</think>blue")
        [choice] = (await served.chat("x" * 70_000, max_tokens=200))["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("blue", "hm")


async def test_thinking_that_is_switched_off_leaves_plain_content() -> None:
    async with serving_template(QWEN) as served:
        served.scheduler.reply = saying("blue")
        [choice] = await same_streamed_and_not(served, body(chat_template_kwargs={"enable_thinking": False}))
        assert choice["message"] == {"content": "blue", "role": "assistant", "refusal": None}
        [submit, _] = served.scheduler.messages(Submit)
        assert served.scheduler.prompt_of(submit)[-len("</think>\n\n") :] == text_ids("</think>\n\n")


async def test_thinking_that_is_cut_is_reasoning() -> None:
    async with serving_template(QWEN) as served:
        served.scheduler.reply = saying("<think>I ponder and ponder")
        [choice] = await same_streamed_and_not(served, chat(max_tokens=12))
        assert choice["message"]["reasoning"] == "I pon"
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


async def test_tokens_of_the_thinking_are_counted() -> None:
    async with serving_template(QWEN) as served:
        for tokens_per_step in (1, 5):
            served.scheduler.tokens_per_step = tokens_per_step
            served.scheduler.reply = saying("<think>12</think>blue")
            usage = (await served.chat(max_tokens=200, n=2))["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len("<think>12</think>")}
            assert usage["completion_tokens"] == 2 * (len("<think>12</think>blue") + 1)


async def test_reasoning_is_left_out_where_it_is_not_wanted() -> None:
    async with serving_template(QWEN) as served:
        served.scheduler.reply = saying("<think>hm</think>blue")
        [choice] = await same_streamed_and_not(served, body(include_reasoning=False))
        assert choice["message"] == {"content": "blue", "role": "assistant", "refusal": None}


async def test_log_probabilities_are_those_of_all_tokens() -> None:
    async with serving_template(QWEN) as served:
        served.scheduler.reply = saying("<think>hm</think>blue")
        [choice] = await same_streamed_and_not(served, body(logprobs=True))
        tokens = [token["token"] for token in choice["logprobs"]["content"]]
        assert "".join(tokens).startswith("<think>hm</think>blue")


async def test_harmony_has_analysis_and_final_apart() -> None:
    async with serving_template(HARMONY, tokens=HARMONY_TOKENS) as served:
        said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>blue"
        served.scheduler.reply = lambda submit: [*harmony_ids(said), IM_END]
        [choice] = await same_streamed_and_not(served, body())
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("blue", "hm")
        usage = (await served.chat(max_tokens=200))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len("hm") + 1}


async def test_a_setting_names_the_format_or_leaves_thinking_in_the_text() -> None:
    async with serving_template(MESSAGES + START + "{% endif %}", reasoning_parser="deepseek_r1") as served:
        served.scheduler.reply = saying("hm</think>blue")
        [choice] = await same_streamed_and_not(served, body())
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("blue", "hm")
    async with serving_template(QWEN, reasoning_parser="none") as served:
        served.scheduler.reply = saying("<think>hm</think>blue")
        [choice] = await same_streamed_and_not(served, body())
        assert choice["message"] == {"content": "<think>hm</think>blue", "role": "assistant", "refusal": None}


async def test_a_stop_string_counts_in_the_thinking_too() -> None:
    async with serving_template(QWEN) as served:
        served.scheduler.reply = saying("<think>one two three</think>blue")
        [choice] = await same_streamed_and_not(served, body(stop=["two"]))
        assert (choice["message"]["reasoning"], choice["stop_reason"]) == ("one", "two")
