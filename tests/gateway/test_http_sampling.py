"""What reaches the scheduler for what a request says."""

from pathlib import Path
from typing import Any

import pytest

from octavo.protocol.messages import Submit
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import Served, serving
from tests.fakes.model_directories import IM_END, write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def submitted(served: Served, **fields: Any) -> Submit:
    await served.chat(**fields)
    return served.scheduler.messages(Submit)[-1]


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": (
        {},
        {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "num_logprobs": None},
    ),
    "end": ({}, {"eos_token_ids": (IM_END,), "stop_token_ids": (), "min_tokens": 0, "logit_bias": ()}),
    "temperature": ({"temperature": 0}, {"temperature": 0.0}),
    "nulls": ({"temperature": None, "top_p": None, "seed": None, "n": None}, {"temperature": 1.0, "top_p": 1.0}),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}),
    "top_k": ({"top_k": 7}, {"top_k": 7}),
    "top_k off": ({"top_k": -1}, {"top_k": 0}),
    "min_p": ({"min_p": 0.1}, {"min_p": 0.1}),
    "penalties": (
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
    ),
    "seed": ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    "negative seed": ({"seed": -1}, {"seed": 2**64 - 1}),
    "ignore_eos": ({"ignore_eos": True}, {"eos_token_ids": ()}),
    "stop ids": ({"stop_token_ids": [9, 8]}, {"stop_token_ids": (9, 8), "eos_token_ids": (IM_END,)}),
    "min_tokens": ({"min_tokens": 8}, {"min_tokens": 8, "max_tokens": 8}),
    "logit_bias": ({"logit_bias": {"9": -100, "5": 1.5}}, {"logit_bias": ((5, 1.5), (9, -100.0))}),
    "logprobs": ({"logprobs": True}, {"num_logprobs": 0}),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 20}, {"num_logprobs": 20}),
    "no logprobs": ({"logprobs": False}, {"num_logprobs": None}),
}


@pytest.mark.parametrize("name", FIELDS)
async def test_fields_arrive(served: Served, name: str) -> None:
    fields, expected = FIELDS[name]
    sampling = (await submitted(served, **fields)).sampling
    assert {field: getattr(sampling, field) for field in expected} == expected


NEUTRAL: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "logit_bias": {},
    "n": 1,
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "functions": None,
    "audio": None,
    "prompt_logprobs": None,
    "stop": [],
    "user": "ada",
    "metadata": {"trace": "1"},
    "store": True,
    "service_tier": "auto",
    "priority": 0,
    "stream_options": None,
    "stream": False,
    "include_reasoning": False,
    "chat_template_kwargs": {"enable_thinking": False, "thinking": None},
    "reasoning_effort": None,
    "function_call": "auto",
    "vllm_xargs": {},
    "a_name_that_nobody_knows": None,
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
    "moderation": {"model": "omni-moderation-latest"},
}
COMMON = ("a_name_that_nobody_knows", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "moderation")


async def test_neutral_and_advisory_fields_are_taken(served: Served) -> None:
    await served.chat(**NEUTRAL)
    for name, value in NEUTRAL.items():
        await served.chat(**{name: value})
    await served.chat(tools=[], tool_choice="auto", stream_options={"include_usage": False, "unknown": None})
    await served.complete(best_of=1, suffix=None, stream_options=None, **{name: NEUTRAL[name] for name in COMMON})


async def test_chat_template_kwargs_that_are_nested_deeply_are_a_400(tmp_path: Path, scheduler: FakeScheduler) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ x }}")
    async with serving(tmp_path, scheduler) as served:
        for depth in (700, 900):
            nested = b'{"a":' * depth + b"1" + b"}" * depth
            body = b'{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"x":' + nested + b"}}"
            response = await served.post("/v1/chat/completions", body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["message"]) in (
                ("chat_template_kwargs", "what the chat template is given is nested too deeply"),
                ("chat_template_kwargs", "the body is nested too deeply"),
                (None, "the body is nested too deeply"),
            )


async def test_books_in_messages_and_parts_change_nothing(served: Served) -> None:
    """Histories come back with what clients and providers note in them."""
    plain = await submitted(served)
    books = {
        "id": "msg_1", "metadata": {"x": 1}, "timestamp": 1700000000, "created_at": "today", "refusal": None,
        "annotations": [{"type": "url_citation"}], "cache_control": {"type": "ephemeral"}, "audio": None,
        "prompt_cache_breakpoint": {"mode": "explicit"}, "provider_specific_fields": {"x": 1}, "tool_calls": [],
        "reasoning_content": "", "a_name_that_nobody_knows": None,
    }  # fmt: skip
    marks = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}, "unknown": None}
    for fields in (books, *({name: value} for name, value in books.items())):
        for content in ("hi", [{"type": "text", "text": "hi"} | marks]):
            noted = await submitted(served, messages=[{"role": "user", "content": content} | fields])
            assert served.scheduler.prompt_of(noted) == served.scheduler.prompt_of(plain)


async def test_a_hint_names_a_field_of_the_place_that_is_wrong(served: Served) -> None:
    """`temperature` is a field of the body, not of a message."""
    for wrong, hint in ({"temperatur": 1}, None), ({"metadat": 1}, "did you mean metadata?"):
        body = {"messages": [{"role": "user", "content": "hi"} | wrong]}
        message = (await served.post("/v1/chat/completions", body)).json()["error"]["message"]
        assert hint in message if hint else "did you mean" not in message


async def test_an_unset_field_is_the_generation_config_s(tmp_path: Path, scheduler: FakeScheduler) -> None:
    defaults = {"temperature": 0.25, "top_p": 0.75, "top_k": 5, "repetition_penalty": 1.25, "max_new_tokens": 3}
    write_tiny_model(tmp_path, **defaults)
    async with serving(tmp_path, scheduler) as served:
        sampling = (await submitted(served, max_tokens=None)).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.75, 5)
        assert (sampling.repetition_penalty, sampling.max_tokens) == (1.25, 3)
        sampling = (await submitted(served, temperature=1.5, top_k=0)).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.5, 0.75, 0)


async def test_drawn_seeds_repeat_with_the_configured_seed(tiny_model: Path, scheduler: FakeScheduler) -> None:
    lives = []
    for seed in (5, 5, 6):
        async with serving(tiny_model, scheduler, seed=seed) as served:
            lives.append([(await submitted(served)).sampling.seed for _ in range(3)])
    assert lives[0] == lives[1] != lives[2]
    assert len(set(lives[0])) == 3


async def test_seeds_are_drawn_anew_without_one(served: Served) -> None:
    seeds = {(await submitted(served)).sampling.seed for _ in range(3)}
    assert len(seeds) == 3


async def test_equal_prompts_draw_a_seed_each_unless_one_is_given(served: Served) -> None:
    answer = await served.complete(["a", "a", "a", "a"], temperature=1)
    assert len({submit.sampling.seed for submit in served.scheduler.messages(Submit)}) == 4
    assert len({choice["text"] for choice in answer["choices"]}) == 4
    given = await served.complete(["a", "a", "a", "a"], temperature=1, seed=7)
    assert {submit.sampling.seed for submit in served.scheduler.messages(Submit)[4:]} == {7}
    assert len({choice["text"] for choice in given["choices"]}) == 1


async def test_a_cache_salt_travels(served: Served) -> None:
    assert (await submitted(served, cache_salt="pepper")).cache_salt == "pepper"
