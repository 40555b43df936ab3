"""Completions: every form of prompt, echo and log probabilities, streamed and not."""

import asyncio
from itertools import chain
from typing import Any

import pytest

from octavo.protocol.messages import Submit
from tests.fakes.gateway_server import MODEL, Served, completion
from tests.fakes.model_directories import IM_END, text_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")


def saying(text: str) -> Any:
    return lambda submit: text_ids(text)


async def test_an_answer_has_openai_s_shape(served: Served) -> None:
    served.scheduler.reply = saying(" there")
    answer = await served.complete(max_tokens=6)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)
    assert answer["choices"] == [
        {"index": 0, "text": " there", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_sixteen_tokens_unless_told_otherwise(served: Served) -> None:
    assert (await served.complete(max_tokens=None))["usage"]["completion_tokens"] == 16
    assert (await served.complete("x" * 508, max_tokens=None))["usage"]["completion_tokens"] == 4


PROMPTS: dict[str, tuple[Any, list[list[int]]]] = {
    "a string": ("hi", [text_ids("hi")]),
    "strings": (["hi", "you"], [text_ids("hi"), text_ids("you")]),
    "ids": ([5, 6, 7], [[5, 6, 7]]),
    "lists of ids": ([[5, 6], [1023]], [[5, 6], [1023]]),
    "one string in a list": (["hi"], [text_ids("hi")]),
    "control tokens": ("hi<|im_end|>", [[*text_ids("hi"), IM_END]]),
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_every_form_of_prompt(served: Served, name: str) -> None:
    prompt, token_ids = PROMPTS[name]
    answer = await served.complete(prompt, n=2)
    submits = await served.scheduler.wait_for(Submit, 2 * len(token_ids))
    by_index = {int(submit.request_id.rpartition("-")[2]): submit for submit in submits}
    asked = [served.scheduler.prompt_of(by_index[index]) for index in range(2 * len(token_ids))]
    assert asked == [ids for ids in token_ids for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(token_ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, token_ids))
    assert answer["usage"]["completion_tokens"] == 16 * len(token_ids)


async def test_prompts_of_a_batch_answer_as_they_do_alone(served: Served) -> None:
    together = await served.complete(["one", "two"], seed=3, n=2)
    alone = [await served.complete(prompt, seed=3, n=2) for prompt in ("one", "two")]
    texts = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in together["choices"]] == texts


SAME_STREAMED_AND_NOT: dict[str, Any] = {
    "text": {},
    "logprobs": {"logprobs": 2},
    "logprobs of the token alone": {"logprobs": 0},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "echo of ids": {"echo": True, "prompt": text_ids("née")},
    "prompt logprobs alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "several": {"prompt": ["a", "b"], "n": 2, "seed": 1, "echo": True, "logprobs": 1},
    "a stop string": {"stop": "re", "max_tokens": 20, "logprobs": 1},
}


@pytest.mark.parametrize("name", SAME_STREAMED_AND_NOT)
async def test_a_stream_says_what_the_answer_says(served: Served, name: str) -> None:
    if "seed" not in SAME_STREAMED_AND_NOT[name]:
        served.scheduler.reply = saying(" 龜 there é")
    body = completion(**SAME_STREAMED_AND_NOT[name])
    answer = (await served.post("/v1/completions", body)).json()
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = await served.stream("/v1/completions", body | options)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], answer["usage"])
    for choice in answer["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert joined_logprobs(own) == choice["logprobs"]


def joined_logprobs(parts: list[Any]) -> Any:
    lists = [part["logprobs"] for part in parts if part["logprobs"]]
    return {name: list(chain(*(part[name] for part in lists))) for name in lists[0]} if lists else None


async def test_each_chunk_has_the_usage_so_far_when_asked_for(served: Served) -> None:
    served.scheduler.reply = saying("yes")
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = completion(["ab", "cde"], max_tokens=2, echo=True, stream_options=options)
    *chunks, last = await served.stream("/v1/completions", body)
    for index, num_prompt_tokens in enumerate((2, 3)):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2]
        assert {usage["total_tokens"] - usage["completion_tokens"] for usage in usages} == {num_prompt_tokens}
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (5, 4)


async def test_the_body_of_guidellm_is_taken_on_both_routes(served: Served) -> None:
    """What guidellm's OpenAI backend sends with a number of output tokens."""
    fields = {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 5, "max_completion_tokens": 5, "stop": None, "ignore_eos": True,
    }  # fmt: skip
    for path, asked in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ):
        chunks = await served.stream(f"/v1/{path}", fields | asked)
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        assert chunks[-2]["usage"]["completion_tokens"] == 5


async def test_max_completion_tokens_is_max_tokens(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 1, "stop": None, "ignore_eos": True}
    assert (await served.post("/v1/completions", body)).json()["usage"]["completion_tokens"] == 1
    answer = await served.complete("a", max_tokens=None, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


async def test_the_until_of_evaluations_may_have_64_strings(served: Served) -> None:
    """lm-eval sends `until` of its task and the text of the end; tasks on code have more than four."""
    served.scheduler.reply = saying("    return 1\nprint(f(2))")
    until = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "<|endoftext|>"]
    for stop in (until, [f"never {index}" for index in range(58)] + until):
        answer = await served.complete(max_tokens=50, temperature=0, seed=1234, stop=stop)
        [choice] = answer["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("    return 1", "\nprint")


async def test_logprobs_are_parallel_lists(served: Served) -> None:
    served.scheduler.reply = saying("aé!")
    logprobs = (await served.complete(max_tokens=4, logprobs=1))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-(token_id % 7) - 0.5 for token_id in text_ids("aé!")]
    # The likeliest token and the one that was taken.
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2, 2]


async def test_offsets_count_the_special_tokens_of_an_echoed_prompt(served: Served) -> None:
    """As `a<|endoftext|>b` gives 0, 1, 14, 15; what is generated goes on where the prompt ends."""
    served.scheduler.reply = saying("cd")
    prompt = "a<|im_end|>b"
    for asked in (prompt, [*text_ids("a"), IM_END, *text_ids("b")]):
        for hidden in (True, False):
            fields = {"echo": True, "logprobs": 1, "max_tokens": 2, "skip_special_tokens": hidden}
            [choice] = (await served.complete(asked, **fields))["choices"]
            assert choice["text"] == prompt + "cd"
            assert choice["logprobs"]["tokens"] == ["a", "<|im_end|>", "b", "c", "d"]
            assert choice["logprobs"]["text_offset"] == [0, 1, 11, 12, 13]


async def test_zero_logprobs_are_those_of_the_tokens_themselves(served: Served) -> None:
    logprobs = (await served.complete(max_tokens=4, logprobs=0))["choices"][0]["logprobs"]
    tops = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    assert logprobs["top_logprobs"] == [{token: logprob} for token, logprob in tops]


async def test_a_prompt_is_scored_without_generating(served: Served) -> None:
    answer = await served.complete("scored", echo=True, logprobs=1, max_tokens=0)
    [choice] = answer["choices"]
    assert choice["text"] == "scored"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == list("scored")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == [-(token_id % 7) - 0.5 for token_id in text_ids("cored")]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 0,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_control_tokens_show_only_when_asked_for(served: Served) -> None:
    served.scheduler.reply = lambda submit: [*text_ids("a"), IM_END, *text_ids("b")]
    hidden = await served.complete(max_tokens=3, ignore_eos=True)
    shown = await served.complete(max_tokens=3, ignore_eos=True, skip_special_tokens=False)
    assert hidden["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "a<|im_end|>b"


async def test_log_probabilities_of_more_prompt_than_an_answer_holds_are_refused(served: Served) -> None:
    """400,000 tokens with 20 alternatives each are 67 MB between two processes, and 500 MB of JSON."""
    usual, served.scheduler.max_model_len = served.scheduler.max_model_len, 1 << 19
    try:
        async with asyncio.timeout(10):
            while (await served.http.get("/v1/models")).json()["data"][0]["max_model_len"] != 1 << 19:
                await asyncio.sleep(0.01)
        body = completion([5] * 400_000, echo=True, logprobs=20, max_tokens=1)
        response = await served.post("/v1/completions", body)
    finally:
        served.scheduler.max_model_len = usual
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
    assert "400000 prompt tokens take 64 MiB, of 32 at most" in response.json()["error"]["message"]
    async with asyncio.timeout(10):
        while (await served.http.get("/v1/models")).json()["data"][0]["max_model_len"] != usual:
            await asyncio.sleep(0.01)
