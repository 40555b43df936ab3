"""The widely used fields and routes that vLLM adds to OpenAI's API."""

from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.http.door import SHORT_BYTES
from octavo.protocol.messages import Submit
from tests.fakes.fake_scheduler import FakeScheduler, computed_reply
from tests.fakes.gateway_server import MODEL, Served, chat, completion, serving
from tests.fakes.model_directories import IM_END, text_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = text_ids("hi")


async def answer(served: Served, path: str, body: dict[str, Any]) -> Any:
    response = await served.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def answer_in_words(served: Served) -> None:
    served.scheduler.reply = lambda submit: [*text_ids("blue"), IM_END]


async def prompt_ids(served: Served) -> list[int]:
    return served.scheduler.prompt_of(served.scheduler.messages(Submit)[-1])


async def test_completions_answer_with_token_ids(served: Served) -> None:
    answer_in_words(served)
    [choice] = (await answer(served, COMPLETIONS, completion("hi", return_token_ids=True)))["choices"]
    assert choice["prompt_token_ids"] == HI
    assert choice["token_ids"] == [*text_ids("blue"), IM_END]
    [plain] = (await answer(served, COMPLETIONS, completion("hi")))["choices"]
    assert not {"prompt_token_ids", "token_ids", "prompt_logprobs"} & plain.keys()


async def test_chats_answer_with_token_ids(served: Served) -> None:
    answer_in_words(served)
    whole = await answer(served, CHAT, chat("hi", return_token_ids=True))
    assert whole["prompt_token_ids"] == await prompt_ids(served)
    assert whole["choices"][0]["token_ids"] == [*text_ids("blue"), IM_END]
    plain = await answer(served, CHAT, chat("hi"))
    assert not {"prompt_token_ids", "prompt_logprobs"} & plain.keys()
    assert "token_ids" not in plain["choices"][0]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat("hi", n=2)), (COMPLETIONS, completion("hi", n=2))])
async def test_streams_have_the_token_ids_of_the_whole_answer(served: Served, path: str, body: dict[str, Any]) -> None:
    served.scheduler.reply = lambda submit: [*text_ids("blue 世"), *computed_reply(submit)[:3], IM_END]
    body = body | {"return_token_ids": True, "seed": 3}
    chunks = await served.stream(path, body)
    whole = await answer(served, path, body)
    for choice in whole["choices"]:
        mine = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == choice["index"]]
        ids = [token for chunk in mine for token in chunk["choices"][0].get("token_ids", [])]
        assert ids == choice["token_ids"]
        heads = [chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids") for chunk in mine]
        assert heads[0] == await prompt_ids(served)
        assert not any(heads[1:])


async def test_tokens_of_log_probabilities_are_named_by_id(served: Served) -> None:
    answer_in_words(served)
    fields = {"return_tokens_as_token_ids": True}
    of_chat = await answer(served, CHAT, chat("hi", logprobs=True, top_logprobs=1, **fields))
    entries = of_chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in [*text_ids("blue"), IM_END]]
    assert entries[0]["top_logprobs"][0]["token"] == f"token_id:{text_ids('blue')[0] + 1}"
    of_text = await answer(served, COMPLETIONS, completion("hi", logprobs=1, **fields))
    logprobs = of_text["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in [*text_ids("blue"), IM_END]]
    assert f"token_id:{text_ids('blue')[0]}" in logprobs["top_logprobs"][0]


@pytest.mark.parametrize("num", [0, 2])
async def test_a_prompt_has_its_log_probabilities(served: Served, num: int) -> None:
    of_text = (await answer(served, COMPLETIONS, completion("hi", prompt_logprobs=num)))["choices"][0]
    of_chat = await answer(served, CHAT, chat("hi", prompt_logprobs=num))
    first, second = of_text["prompt_logprobs"]
    assert first is None
    assert list(second) == [str(HI[1] + k) for k in range(num + 1)]
    own = second[str(HI[1])]
    assert (own["logprob"], own["rank"], own["decoded_token"]) == (-(HI[1] % 7) - 0.5, HI[1] + 1, "i")
    assert len(of_chat["prompt_logprobs"]) == len(await prompt_ids(served))
    assert "prompt_logprobs" not in of_chat["choices"][0]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "789"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "012"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "789"),
        ({"truncate_prompt_tokens": 10}, "0123456789"),
        ({"truncate_prompt_tokens": -1}, "0123456789"),
    ],
)
async def test_a_long_prompt_is_truncated(served: Served, fields: dict[str, Any], kept: str) -> None:
    usage = (await answer(served, COMPLETIONS, completion("0123456789", **fields)))["usage"]
    assert await prompt_ids(served) == text_ids(kept)
    assert usage["prompt_tokens"] == len(kept)


async def test_a_prompt_beyond_the_context_is_truncated_to_what_leaves_room(served: Served) -> None:
    text = "ab" * SHORT_BYTES  # a body that is read by a process of its own
    for path, body in ((COMPLETIONS, completion(text)), (CHAT, chat(text))):
        whole = await answer(served, path, body | {"truncate_prompt_tokens": -1, "max_tokens": 12})
        assert whole["usage"]["prompt_tokens"] == 500
        assert len(await prompt_ids(served)) == 500


async def test_an_echo_of_a_truncated_prompt_is_its_rest(served: Served) -> None:
    answer_in_words(served)
    body = completion("0123456789", truncate_prompt_tokens=2, echo=True)
    assert (await answer(served, COMPLETIONS, body))["choices"][0]["text"] == "89blue"


@pytest.mark.parametrize("pads", [False, True])
async def test_a_chat_echoes_the_message_that_it_continues(served: Served, pads: bool) -> None:
    """Also in a body that is so long that another process reads it."""
    answer_in_words(served)
    asked = {"role": "user", "content": " " * SHORT_BYTES if pads else "colour?"}
    body = chat() | {"messages": [asked, {"role": "assistant", "content": "It is "}], "continue_final_message": True}
    body |= {"echo": True, "truncate_prompt_tokens": 400}
    whole = (await answer(served, CHAT, body))["choices"][0]["message"]["content"]
    streamed = [chunk["choices"][0]["delta"].get("content", "") for chunk in await served.stream(CHAT, body)]
    assert whole == "".join(streamed) == "It is blue"
    body["messages"] = [asked]
    del body["continue_final_message"]
    assert (await answer(served, CHAT, body))["choices"][0]["message"]["content"] == "blue"


async def test_a_request_can_stand_back_and_name_its_answer(served: Served) -> None:
    for path, body, prefix in ((CHAT, chat(), "chatcmpl"), (COMPLETIONS, completion(), "cmpl")):
        whole = await answer(served, path, body | {"priority": 7, "request_id": "mine/1"})
        assert whole["id"] == f"{prefix}-mine/1"
        assert served.scheduler.messages(Submit)[-1].priority == 7


async def test_two_answers_of_one_name_do_not_disturb_each_other(served: Served) -> None:
    ids = set()
    for _ in range(2):
        await answer(served, CHAT, chat(request_id="same"))
        ids.add(served.scheduler.messages(Submit)[-1].request_id)
    assert len(ids) == 2


WRONG = [
    ({"priority": -1}, "priority"),
    ({"request_id": "two words"}, "request_id"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion())])
async def test_a_wrong_value_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    response = await served.post(path, body | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert served.scheduler.messages(Submit) == []


async def test_two_numbers_of_a_prompts_likeliest_tokens_must_agree(served: Served) -> None:
    body = completion(echo=True, logprobs=2)
    response = await served.post(COMPLETIONS, body | {"prompt_logprobs": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")
    both = (await answer(served, COMPLETIONS, body | {"prompt_logprobs": 2}))["choices"][0]
    assert len(both["prompt_logprobs"]) == len(both["logprobs"]["tokens"]) - 8 == len(HI)


async def test_ping_says_what_health_says(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler, api_key=("key",)) as served:
        ping, health = [await served.http.get(path) for path in ("/ping", "/health")]
        assert (ping.status_code, ping.json()) == (health.status_code, health.json()) == (200, {"status": "ok"})


async def test_the_load_is_what_is_in_flight(served: Served) -> None:
    async def load() -> int:
        return int((await served.http.get("/load")).json()["server_load"])

    assert await load() == 0
    served.scheduler.paused = True
    async with served.http.stream("POST", COMPLETIONS, json=completion(n=3, stream=True)):
        assert await load() == 3
        served.scheduler.paused = False


async def test_settings_are_shown_without_secrets(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler, api_key=("a-secret",), max_logprobs=5) as served:
        assert (await served.http.get("/server_info")).status_code == 401
        response = await served.http.get("/server_info", headers={"Authorization": "Bearer a-secret"})
    info = response.json()
    assert "a-secret" not in response.text
    assert (info["models"][0], info["tasks"], info["max_model_len"]) == (MODEL, ["generate", "embed"], 512)
    assert info["settings"]["max_logprobs"] == 5
    assert "api_key" not in info["settings"]
    assert "dtype" not in info["settings"]  # which a gateway does not read
