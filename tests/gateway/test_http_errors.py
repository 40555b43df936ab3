"""Bad requests: a 400 that names the field, in one envelope, and nobody else notices."""

import asyncio
from typing import Any

import msgspec
import openai
import pytest

from octavo.protocol.messages import Rejected, Submit
from tests.fakes.gateway_server import Served, chat, completion
from tests.fakes.model_directories import text_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def raw(fields: str) -> bytes:
    return b'{"messages":[{"role":"user","content":"hi"}],' + fields.encode() + b"}"


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **fields}]}


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}
NOT_FINITE = ("NaN", "Infinity", "-Infinity", "1e999")

# path, body, the field that is named
BAD: list[tuple[str, Any, str | None]] = [
    *[(CHAT, raw(f'"{name}":{value}'), name) for name in NUMBERS for value in NOT_FINITE],
    *[(CHAT, chat(**{name: value}), name) for name in NUMBERS for value in ("NaN", 1000, -3, True, [], {})],
    (CHAT, raw('"logit_bias":{"5":NaN}'), "logit_bias.5"),
    (CHAT, raw('"metadata":{"a":[1,{"b":NaN}]}'), "metadata.a[1].b"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(top_k=1.5), "top_k"),
    (CHAT, chat(top_k=2**80), "top_k"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=2000), "n"),
    (CHAT, chat(seed=2**63), "seed"),
    (CHAT, chat(seed="1"), "seed"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=513), "max_tokens"),
    (CHAT, chat(max_tokens=None, max_completion_tokens=513), "max_completion_tokens"),
    (CHAT, chat(max_tokens=4, max_completion_tokens=5), "max_tokens"),
    (CHAT, chat(min_tokens=9, max_tokens=8), "min_tokens"),
    (CHAT, chat(logit_bias={"abc": -5}), "logit_bias"),
    (CHAT, chat(logit_bias={"-1": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"1024": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 1, "05": -1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias[...]"),
    (CHAT, chat(logit_bias={"5": "x"}), "logit_bias[...]"),
    (CHAT, chat(stop=["a"] * 65), "stop"),
    (CHAT, chat(stop=["a" * 1024] * 4 + ["a"]), "stop"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=["a", ""]), "stop"),
    (CHAT, chat(stop=5), "stop"),
    (CHAT, chat(stop="x" * 1025), "stop"),
    (CHAT, chat(stop=["a", "x" * 1025]), "stop[1]"),
    (CHAT, chat(stop_token_ids=[10**3000]), "stop_token_ids"),
    (CHAT, chat(stop=["a", 5]), "stop[1]"),
    (CHAT, chat(stop_token_ids=[99999999], min_tokens=5), "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids"),
    (CHAT, chat(logprobs=1), "logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (CHAT, chat(prompt_logprobs=-1), "prompt_logprobs"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream=False, stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(stream=True, stream_options={"include_usages": True}), "stream_options.include_usages"),
    (CHAT, chat(stream=True, stream_options={"continuous_usage_stats": 1}), "stream_options.continuous_usage_stats"),
    (CHAT, chat(cache_salt=""), "cache_salt"),
    (CHAT, chat(temprature=1), "temprature"),
    (CHAT, chat(model=5), "model"),
    (CHAT, {"model": "tiny/model"}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": [5]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 16385}, "messages"),
    (CHAT, message(content="x", role="robot" * 1000), "messages[0].role"),
    (CHAT, chat(**{"x" * 1000: 1}), "x" * 100 + "..."),
    (CHAT, message(content=5), "messages[0].content"),
    (CHAT, message(content=None), "messages[0].content"),
    (CHAT, message(), "messages[0].content"),
    (CHAT, message(content=[]), "messages[0].content"),
    (CHAT, message(content="x", role="robot"), "messages[0].role"),
    (CHAT, message(content="x", colour=1), "messages[0].colour"),
    (CHAT, message(content="x", tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].function"),
    (CHAT, message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (CHAT, message(content=[IMAGE]), "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "system", "content": "refuse"}]}, "messages"),
    (CHAT, chat(chat_template="{{ 1 }}"), "chat_template"),
    (CHAT, chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
    (CHAT, chat(tools=[{"type": "custom", "custom": {"name": "f"}}]), "tools[0].type"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(unheard_of=False), "unheard_of"),
    (CHAT, chat(chat_template_kwargs={"enable_thinking": True}), "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"add_generation_prompt": False}), "chat_template_kwargs"),
    (CHAT, message(content="x", reasoning_content="I think"), "messages[0].reasoning_content"),
    (CHAT, message(content="x", nothing=None, colour=1), "messages[0].colour"),
    (CHAT, message(content=[{"type": "text", "text": "x", "colour": 1}]), "messages[0].content[0].colour"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities"),
    (CHAT, chat(functions=[{"name": "f"}]), "functions"),
    (CHAT, chat(audio={"voice": "x"}), "audio"),
    (CHAT, chat(prediction={"type": "content"}), "prediction"),
    (CHAT, chat(priority=False), "priority"),
    (CHAT, chat("x" * 600), "messages"),
    (CHAT, chat("x" * 600, max_tokens=None), "messages"),
    (CHAT, chat("x" * 1_000_000), "messages"),
    (COMPLETIONS, completion(prompt=None), "prompt"),
    (COMPLETIONS, {"model": "tiny/model"}, "prompt"),
    (COMPLETIONS, completion(prompt=""), "prompt"),
    (COMPLETIONS, completion(prompt=[]), "prompt"),
    (COMPLETIONS, completion(prompt=[[]]), "prompt[0]"),
    (COMPLETIONS, completion(prompt=5), "prompt"),
    (COMPLETIONS, completion(prompt=[0, -1]), "prompt"),
    (COMPLETIONS, completion(prompt=[2_000_000_000]), "prompt"),
    (COMPLETIONS, completion(prompt=[4611686018427387904]), "prompt"),
    (COMPLETIONS, completion(prompt=[2**90]), "prompt"),
    (COMPLETIONS, completion(prompt=[10**3000]), "prompt"),
    (COMPLETIONS, completion(prompt=[[1]] * 1025), "prompt"),
    (COMPLETIONS, completion(prompt=[1, True]), "prompt[1]"),
    (COMPLETIONS, completion(prompt=[True]), "prompt[0]"),
    (COMPLETIONS, completion(prompt=[1, 2.0]), "prompt[1]"),
    (COMPLETIONS, completion(prompt=[1, "a"]), "prompt[1]"),
    (COMPLETIONS, completion(prompt=["a", 1]), "prompt[1]"),
    (COMPLETIONS, completion(prompt=[[1], 2]), "prompt[1]"),
    (COMPLETIONS, completion(prompt=[[1], [2, "a"]]), "prompt[1][1]"),
    (COMPLETIONS, completion(prompt=["a"] * 600, n=2), "n"),
    (COMPLETIONS, completion(prompt=["a"] * 1025), "prompt"),
    (COMPLETIONS, completion(prompt="x" * 512), "prompt"),
    (COMPLETIONS, completion(prompt="x" * 1_000_000), "prompt"),
    (COMPLETIONS, completion(max_tokens=0), "max_tokens"),
    (COMPLETIONS, completion(max_tokens=None, max_completion_tokens=0), "max_completion_tokens"),
    (COMPLETIONS, completion(max_tokens=None, max_completion_tokens=512), "max_completion_tokens"),
    (COMPLETIONS, completion(max_tokens=4, max_completion_tokens=5), "max_tokens"),
    (COMPLETIONS, completion(logprobs=21), "logprobs"),
    (COMPLETIONS, completion(logprobs=True), "logprobs"),
    (COMPLETIONS, completion(best_of=2), "best_of"),
    (COMPLETIONS, completion(suffix="x"), "suffix"),
    (COMPLETIONS, completion(messages=[]), "messages"),
]  # fmt: skip


async def test_bad_bodies_are_refused_by_name_and_touch_nobody(served: Served) -> None:
    served.scheduler.reply = lambda submit: text_ids("canary ") * 64
    undisturbed = joined(await served.stream(CHAT, chat(max_tokens=400)))
    canary = asyncio.create_task(served.stream(CHAT, chat(max_tokens=400)))
    await served.scheduler.wait_for(Submit, 2)
    for path, body, param in BAD:
        for stream in (b"", b'"stream":true,'):
            content = body if isinstance(body, bytes) else msgspec.json.encode(body)
            if b'"stream"' in content and stream:
                continue
            response = await served.post(path, content.replace(b"{", b"{" + stream, 1))
            told = (content[:200], response.text)
            assert response.status_code == 400, told
            [(name, error)] = response.json().items()
            assert (name, set(error)) == ("error", {"message", "type", "param", "code"}), told
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), told
            assert len(error["message"]) < 300, told
            assert not any(word in error["message"] for word in ("Struct", "msgspec", "Traceback", "$", "`")), told
    assert joined(await canary) == undisturbed
    assert len(served.scheduler.messages(Submit)) == 2
    await served.chat()


def joined(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)


MALFORMED: list[tuple[bytes, str]] = [
    (b"", "the body is empty"),
    (b"  \n", "the body is empty"),
    (b"{", "line 1 column 2"),
    (b'{"model": "m",\n "messages": [}', "line 2 column 15"),
    (b'{"temperature": 1,}', "line 1 column 19"),
    (b'{"temperature": 1 # hot\n}', "line 1 column 19 (JSON has no comments)"),
    (b'{\n// hot\n"temperature": 1}', "line 2 column 1 (JSON has no comments)"),
    (b'{"messages": [{"role":"user"}]} x', "line 1 column 33"),
    (b"{'temperature': 1}", "line 1 column 2"),
    (b'{"user":"\xff"}', "UTF-8"),
    ('{"user":"é"}'.encode("utf-16"), "UTF-8"),
    (b'{"user":"\\ud800"}', "surrogate"),
    (b"[" * 100_000, "expected object"),
    (b'{"metadata":{"a":' + b"[" * 100_000, "nested too deeply"),
    (b'{"metadata":{"a":' + b"[" * 600 + b"NaN" + b"]" * 600 + b"}}", "nested too deeply"),
    (b'{"metadata":{"a":' + b"[" * 600 + b'"\\ud800"' + b"]" * 600 + b"}}", "nested too deeply"),
    (b"[]", "expected object, got array"),
    (b"null", "expected object, got null"),
    (b'"x"', "expected object, got string"),
]


@pytest.mark.parametrize(("body", "words"), MALFORMED, ids=[str(body[:24]) for body, _ in MALFORMED])
async def test_malformed_json_is_shown_where_it_is(served: Served, body: bytes, words: str) -> None:
    response = await served.post(CHAT, body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temprature": 1}, "did you mean temperature?"),
        ({"temperature": "hot"}, "temperature: expected number or null, got string"),
        ({"temperature": 3}, "temperature: expected number <= 2.0"),
        ({"response_format": {"type": "structural_tag"}}, "response_format of type 'structural_tag' is not supported"),
        ({"stop_token_ids": [4096]}, "token id 4096 is not in the vocabulary (0 to 1023)"),
        ({"max_tokens": 500}, "the prompt has 21 tokens and max_tokens is 500"),
        ({"model": "gpt-9"}, "there is no model 'gpt-9'; served: tiny/model, alias"),
    ],
)
async def test_messages_say_what_would_be_right(served: Served, fields: dict[str, Any], words: str) -> None:
    response = await served.post(CHAT, chat(**fields))
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"temperature": "hot"}, "invalid_type"),
        ({"stream": 1}, "invalid_type"),
        ({"temperature": 3}, "invalid_value"),
        ({"top_k": -2}, "invalid_value"),
        ({"messages": []}, "invalid_value"),
        ({"logit_bias": {"5": 101}}, "invalid_value"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "unsupported_value"),
        ({"temprature": 1}, "unknown_parameter"),
    ],
)
async def test_the_code_tells_a_wrong_type_from_a_value_out_of_range(
    served: Served, fields: dict[str, Any], code: str
) -> None:
    response = await served.post(CHAT, chat(**fields))
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


async def test_a_prompt_beyond_the_window_is_told_apart(served: Served) -> None:
    for stream in (False, True):
        for num_characters in (512, 513, 5120):
            response = await served.post(COMPLETIONS, completion("x" * num_characters, stream=stream))
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert f"{num_characters} tokens" in error["message"]
    assert (await served.complete("x" * 511, max_tokens=None))["usage"]["completion_tokens"] == 1


# What makes a ContextWindowExceededError of litellm (is_error_str_context_window_exceeded, which reads lower case) and
# an OpenAIContextOverflowError of langchain-openai (_handle_openai_bad_request).
LITELLM_OVERFLOW, LANGCHAIN_OVERFLOW = "this model's maximum context length is", "prompt is too long"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, completion("x" * 513)),
        (COMPLETIONS, completion("x" * 1_000_000)),
        (COMPLETIONS, completion([5] * 513)),
        (COMPLETIONS, completion("x" * 500, max_tokens=20)),
        (CHAT, chat("x" * 600)),
        (CHAT, chat("x" * 1_000_000)),
        (CHAT, chat(max_tokens=513)),
    ],
)
async def test_clients_recognise_what_is_beyond_the_context(served: Served, path: str, body: dict[str, Any]) -> None:
    response = await served.post(path, body)
    message = response.json()["error"]["message"]
    assert message.startswith("the prompt is too long: this model's maximum context length is 512 tokens, ")
    assert LITELLM_OVERFLOW in message.lower()
    with pytest.raises(openai.BadRequestError) as caught:
        await served.openai.post(path.removeprefix("/v1"), body=body, cast_to=object)
    assert LANGCHAIN_OVERFLOW in caught.value.message  # both see it through the SDK


async def test_large_and_compressed_bodies(served: Served) -> None:
    async def endless() -> Any:
        for _ in range(65):
            yield b" " * (1 << 20)

    too_large = await served.http.post(CHAT, content=endless())
    assert too_large.status_code == 413
    assert too_large.json()["error"]["code"] == "body_too_large"
    for fields in (b'"prompt":[' + b"1," * (1 << 20), b'"metadata":{"a":[' + b"[]," * (1 << 20)):
        many = await served.post(COMPLETIONS, b"{" + fields + b"1]}}")
        assert (many.status_code, many.json()["error"]["code"]) == (413, "body_too_large")
    compressed = await served.post(CHAT, b"\x1f\x8b", **{"content-encoding": "gzip"})
    assert compressed.status_code == 415


async def test_work_on_prompts_ends_with_the_first_that_is_too_long(served: Served) -> None:
    response = await served.post(COMPLETIONS, completion(["x" * 513, "y" * 2000], max_tokens=1))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "513 tokens" in response.json()["error"]["message"]


async def test_paths_and_methods_that_are_not_there(served: Served) -> None:
    for path in ("/", "/v1", "/v1/chat/completions/", "/v2/models", "/v1//models"):
        response = await served.http.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
    wrong = await served.http.get(CHAT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert (await served.http.delete("/v1/models")).status_code == 405
    head = await served.http.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert "server" not in head.headers


async def test_a_full_queue_is_a_429_before_any_header_of_a_stream(served: Served) -> None:
    served.scheduler.rejection = lambda submit: Rejected(submit.request_id, "the queue is full", 2.6)
    for stream in (False, True):
        response = await served.post(CHAT, chat(stream=stream))
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert response.json()["error"]["type"] == "rate_limit_error"


async def test_what_can_never_be_served_is_a_400(served: Served) -> None:
    served.scheduler.rejection = lambda submit: Rejected(submit.request_id, "it does not fit the pool")
    response = await served.post(CHAT, chat())
    assert (response.status_code, response.json()["error"]["message"]) == (400, "it does not fit the pool")
