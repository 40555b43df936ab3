"""POST /tokenize and /detokenize, as vLLM has them: what a prompt costs is known before it is sent."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.asking.encode import MAX_TOKENS
from octavo.gateway.http.door import SHORT_BYTES
from octavo.gateway.text.tokenizer import Tokenizer
from octavo.protocol.messages import Submit, unpack_ids
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import MODEL, Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["hi", "Grüße, 世界 😀\n", "<|im_start|>user", " " * 20]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi <|im_end|>", "name": "bo"}]


async def tokenize(served: Served, **body: Any) -> Any:
    response = await served.post("/tokenize", body)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(served: Served, path: str, body: Any) -> tuple[int, str | None, str]:
    response = await served.post(path, body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


@pytest.mark.parametrize("text", TEXTS)
async def test_a_text_has_the_tokens_that_a_completion_is_given(served: Served, text: str) -> None:
    answer = await tokenize(served, model=MODEL, prompt=text)
    usage = (await served.complete(text, max_tokens=1))["usage"]
    [submit] = served.scheduler.messages(Submit)
    assert answer == {
        "count": usage["prompt_tokens"],
        "max_model_len": 512,
        "tokens": unpack_ids(submit.prompt_token_ids).tolist(),
        "token_strs": None,
    }
    assert len(answer["tokens"]) == answer["count"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"thinking": None}},
    ],
)
async def test_messages_have_the_tokens_that_a_chat_is_given(served: Served, fields: dict[str, Any]) -> None:
    answer = await tokenize(served, messages=MESSAGES, add_special_tokens=False, **fields)
    body = {"messages": MESSAGES, "max_tokens": 1} | fields
    usage = (await served.post("/v1/chat/completions", body)).json()["usage"]
    [submit] = served.scheduler.messages(Submit)
    assert answer["count"] == len(answer["tokens"]) == usage["prompt_tokens"]
    assert answer["tokens"] == unpack_ids(submit.prompt_token_ids).tolist()


async def test_special_tokens_are_added_unless_they_are_not_wanted(
    metaspace: Tokenizer, tiny_model: Path, scheduler: FakeScheduler, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copy(metaspace.path, model)
    with_bos, without = metaspace.encode_now("hi"), metaspace.encode_now("hi", add_special_tokens=False)
    assert with_bos != without
    async with serving(model, scheduler) as served:
        assert (await tokenize(served, prompt="hi"))["tokens"] == with_bos
        assert (await tokenize(served, prompt="hi", add_special_tokens=True))["tokens"] == with_bos
        assert (await tokenize(served, prompt="hi", add_special_tokens=False))["tokens"] == without
        assert (await tokenize(served, prompt=""))["count"] == len(with_bos) - len(without)


async def test_tokens_are_named_as_the_vocabulary_has_them(served: Served, tiny_model: Path) -> None:
    answer = await tokenize(served, prompt="<|im_end|> é", return_token_strs=True)
    tokenizer = Tokenizer(tiny_model)
    assert [tokenizer.token_id(name) for name in answer["token_strs"]] == answer["tokens"]
    assert answer["token_strs"][0] == "<|im_end|>"
    assert answer["token_strs"][1].startswith("Ġ")


@pytest.mark.parametrize("text", ["", *TEXTS])
async def test_tokens_are_the_text_again(served: Served, text: str) -> None:
    tokens = (await tokenize(served, prompt=text))["tokens"]
    response = await served.post("/detokenize", {"model": MODEL, "tokens": tokens})
    assert (response.status_code, response.json()) == (200, {"prompt": text})


async def test_a_text_longer_than_the_context_is_counted(served: Served) -> None:
    for text in ("a b " * 600, "a b " * SHORT_BYTES):  # one is read by the gateway, one by a process for long bodies
        answer = await tokenize(served, prompt=text)
        assert answer["count"] == len(answer["tokens"]) > answer["max_model_len"] == 512
        response = await served.post("/detokenize", {"tokens": answer["tokens"]})
        assert response.json() == {"prompt": text}


async def test_a_text_of_too_many_tokens_is_refused(served: Served) -> None:
    for body in ({"prompt": "😀" * MAX_TOKENS}, {"messages": [{"role": "user", "content": "😀" * MAX_TOKENS}]}):
        response = await served.post("/tokenize", body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, next(iter(body)))
        assert f"at most {MAX_TOKENS} tokens" in error["message"]


async def test_a_long_body_means_what_a_short_one_means(served: Served) -> None:
    padding = b" " * SHORT_BYTES
    for body in (
        b'{"prompt": "hi ho", "return_token_strs": true}',
        b'{"messages": [{"role": "user", "content": "hi"}]}',
    ):
        short, long = await served.post("/tokenize", body), await served.post("/tokenize", body + padding)
        assert short.status_code == 200
        assert long.json() == short.json()
    for body in (b'{"tokens": [5, 6]}', b'{"tokens": []}', b'{"tokens": [-1]}', b'{"tokens": [5], "model": "x"}'):
        short, long = await served.post("/detokenize", body), await served.post("/detokenize", body + padding)
        assert (long.status_code, long.json()) == (short.status_code, short.json())


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt", "invalid_value"),
        ({"prompt": ["a", "b"]}, "prompt", "invalid_type"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "invalid_value"),
        ({"prompt": "a", "promt": 1}, "promt", "unknown_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens", "unsupported_parameter"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"prompt": "a", "tools": []}, "tools", "invalid_value"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template", "unsupported_parameter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "invalid_value",
        ),
    ],
)
async def test_what_tokenize_cannot_do_is_refused_by_name(served: Served, body: Any, param: str, code: str) -> None:
    assert await refusal(served, "/tokenize", body) == (400, param, code)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "tokens", "missing_required_parameter"),
        ({"tokens": "hi"}, "tokens", "invalid_type"),
        ({"tokens": [1, True]}, "tokens[1]", "invalid_type"),
        ({"tokens": [1, -1]}, "tokens", "invalid_token_id"),
        ({"tokens": [1 << 40]}, "tokens", "invalid_token_id"),
        ({"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens", "unknown_parameter"),
    ],
)
async def test_what_detokenize_cannot_do_is_refused_by_name(served: Served, body: Any, param: str, code: str) -> None:
    assert await refusal(served, "/detokenize", body) == (400, param, code)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_a_model_that_is_not_served_is_not_found(served: Served, path: str, body: dict[str, Any]) -> None:
    assert await refusal(served, path, body | {"model": "other"}) == (404, "model", "model_not_found")
    assert (await served.post(path, body | {"model": "alias"})).status_code == 200
    assert (await served.post(path, body | {"model": None})).status_code == 200
    assert not served.scheduler.messages(Submit)
