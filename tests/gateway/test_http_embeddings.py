"""POST /v1/embeddings: texts or token ids in, vectors out, as OpenAI has it."""

import base64
from array import array
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.http.door import SHORT_BYTES
from octavo.gateway.openai.embeddings import MAX_INPUTS
from octavo.protocol.messages import Rejected, Submit
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import MODEL, Served, serving
from tests.fakes.model_directories import text_ids
from tests.fakes.toy_model import EMBEDDING_SIZE, embedding_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


def vector(token_ids: list[int]) -> list[float]:
    return floats(embedding_of(token_ids))


def floats(packed: bytes) -> list[float]:
    unpacked = array("f")
    unpacked.frombytes(packed)
    return unpacked.tolist()


async def embed(served: Served, **body: Any) -> Any:
    response = await served.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", [text_ids("hi")]),
        (["hi", "Grüße"], [text_ids("hi"), text_ids("Grüße")]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        (["hi", "hi"], [text_ids("hi"), text_ids("hi")]),
    ],
)
async def test_each_input_gets_its_vector_in_order(served: Served, given: Any, prompts: list[list[int]]) -> None:
    num_tokens = sum(map(len, prompts))
    assert await embed(served, model=MODEL, input=given) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector(prompt)} for index, prompt in enumerate(prompts)
        ],
        "model": MODEL,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    submits = served.scheduler.messages(Submit)
    assert {(submit.task, submit.sampling.max_tokens) for submit in submits} == {("embed", 0)}
    assert len({submit.body_id for submit in submits}) == 1


async def test_base64_has_the_same_numbers(served: Served) -> None:
    answer = await embed(served, input="hi", encoding_format="base64")
    assert floats(base64.b64decode(answer["data"][0]["embedding"])) == vector(text_ids("hi"))


async def test_a_shortened_vector_has_length_one(served: Served) -> None:
    [entry] = (await embed(served, input=[7, 8, 9], dimensions=2))["data"]
    first, second, *_ = vector([7, 8, 9])
    length = (first**2 + second**2) ** 0.5
    assert entry["embedding"] == pytest.approx([first / length, second / length])


async def test_the_official_client(served: Served) -> None:
    """It asks for base64 by itself."""
    answer = await served.openai.embeddings.create(model=MODEL, input=["hi", "you"])
    assert [entry.embedding for entry in answer.data] == [vector(text_ids("hi")), vector(text_ids("you"))]


async def test_a_long_body_gives_the_same_vectors(served: Served) -> None:
    texts = [f"{'a' * 400}{index}" for index in range(SHORT_BYTES // 400)]
    answer = await embed(served, input=texts)
    assert [entry["embedding"] for entry in answer["data"]] == [vector(text_ids(text)) for text in texts]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": None}, "input", "invalid_type"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": ["hi", ""]}, "input", "invalid_value"),
        ({"input": ["hi", 7]}, "input[1]", "invalid_type"),
        ({"input": [[]]}, "input[0]", "invalid_value"),
        ({"input": [5000]}, "input", "invalid_token_id"),
        ({"input": 7}, "input", "invalid_type"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "invalid_value"),
        ({"input": "a" * 600}, "input", "context_length_exceeded"),
        ({"input": "hi", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "hi", "dimensions": EMBEDDING_SIZE + 1}, "dimensions", "invalid_value"),
        ({"input": "hi", "encoding_format": "int8"}, "encoding_format", "unsupported_value"),
        ({"input": "hi", "messages": [{"role": "user", "content": "hi"}]}, "messages", "unsupported_parameter"),
        ({"input": "hi", "dimension": 3}, "dimension", "unknown_parameter"),
    ],
)
async def test_a_wrong_body_is_refused_by_name(served: Served, body: Any, param: str, code: str) -> None:
    response = await served.post("/v1/embeddings", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert served.scheduler.messages(Submit) == []


async def test_a_model_that_only_generates_refuses(tiny_model: Path, scheduler: FakeScheduler) -> None:
    scheduler.tasks = ("generate",)
    async with serving(tiny_model, scheduler) as served:
        response = await served.post("/v1/embeddings", {"input": "hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_task")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_a_model_that_only_embeds_refuses_to_generate(
    path: str, body: Any, tiny_model: Path, scheduler: FakeScheduler
) -> None:
    scheduler.tasks = ("embed",)
    async with serving(tiny_model, scheduler) as served:
        response = await served.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unsupported_task")
        assert "/v1/embeddings" in error["message"]


async def test_a_full_queue_is_a_429(served: Served) -> None:
    served.scheduler.rejection = lambda submit: Rejected(submit.request_id, "full", 1.0)
    response = await served.post("/v1/embeddings", {"input": ["a", "b"]})
    assert response.status_code == 429
    assert response.headers["Retry-After"]
