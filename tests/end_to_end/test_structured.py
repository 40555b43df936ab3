"""Structured output of the demo model behind a running server: always valid, whatever happens on the way."""

import json
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pydantic
import pytest
from jsonschema import Draft202012Validator

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.bench.structured import ASKED
from tests.fakes.octavo_server import DEMO, Server, running_server
from tests.fakes.waiting import wait_until

FLAGS = ("--kv-cache-memory-bytes", "128MiB", "--max-model-len", "2k")


@pytest.fixture(scope="module")
def server(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("server"), *FLAGS) as server:
        yield server


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, pydantic.Field(ge=1, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: Annotated[list[Literal["sit", "é", "😀"]], pydantic.Field(max_length=3)]


class Pet(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    is_tame: bool | None


def asked(what: str, schema: Any, **fields: Any) -> dict[str, Any]:
    given = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages = [{"role": "user", "content": f"Make up {what}, and answer in JSON."}]
    return {"messages": messages, "max_tokens": 100, "response_format": given, **fields}


def answers(server: Server, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the text and the finish reason of each choice."""
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return [(choice["message"]["content"], choice["finish_reason"]) for choice in response.json()["choices"]]


def streamed(server: Server, body: dict[str, Any], texts: list[str] | None = None) -> tuple[str, str]:
    """Return the text and the finish reason of a stream; `texts` gets each piece as it comes."""
    pieces, reasons = [] if texts is None else texts, []
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body | {"stream": True}, timeout=120
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                pieces.append(choice["delta"].get("content") or "")
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    [reason] = reasons
    return "".join(pieces), reason


def assert_valid(found: Sequence[tuple[str, str]], schema: Any) -> None:
    """Assert that answers are valid, or cut by length."""
    for text, reason in found:
        if reason == "stop":
            Draft202012Validator(schema).validate(json.loads(text))
        else:
            assert reason == "length"


@pytest.mark.parametrize(("what", "schema"), ASKED)
def test_answers_are_valid_and_a_stream_is_the_same(server: Server, what: str, schema: Any) -> None:
    body = asked(what, schema, seed=3)
    [whole] = answers(server, body)
    assert_valid([whole], schema)
    assert streamed(server, body) == whole


def test_all_choices_are_valid_and_differ(server: Server) -> None:
    found = answers(server, asked("a person", ASKED[0][1], n=4, seed=1))
    assert_valid(found, ASKED[0][1])
    assert len({text for text, _ in found}) == 4
    assert "stop" in [reason for _, reason in found]


def test_an_answer_becomes_a_model_of_pydantic(server: Server) -> None:
    completion = server.client().chat.completions.parse(
        model=DEMO,
        messages=[{"role": "user", "content": "Make up a pet"}],
        response_format=Pet,
        max_tokens=200,
        seed=2,
        temperature=0.5,
    )
    [choice] = completion.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Pet)


@pytest.mark.parametrize("role", ["executor", "scheduler"])
def test_answers_go_on_after_the_death_of(role: str, server: Server) -> None:
    schema = {"type": "array", "items": ASKED[0][1], "minItems": 2, "maxItems": 2}
    bodies = [asked("some people", schema, seed=seed, max_tokens=160) for seed in range(3)]
    undisturbed = [streamed(server, body) for body in bodies]
    pieces: list[list[str]] = [[], [], []]
    with ThreadPoolExecutor(3) as threads:
        streams = [threads.submit(streamed, server, body, texts) for body, texts in zip(bodies, pieces, strict=True)]
        wait_until(lambda: all(len(texts) > 20 for texts in pieces), 60)
        server.child(role).send_signal(signal.SIGKILL)
        found = [stream.result() for stream in streams]
    assert found == undisturbed
    assert_valid(found, schema)


def test_a_schema_that_explodes_slows_no_stream_and_leaves_no_work(server: Server) -> None:
    with ThreadPoolExecutor(1) as threads:
        canary = threads.submit(streamed, server, asked("a person", ASKED[0][1], seed=3))
        for index in range(3):
            schema = {"type": "integer", "multipleOf": 999_983 + index}
            response = httpx.post(f"{server.url}/v1/chat/completions", json=asked("a number", schema), timeout=60)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "response_format.json_schema.schema"
        assert canary.result() == answers(server, asked("a person", ASKED[0][1], seed=3))[0]


def test_the_python_api_follows_each_kind_of_grammar(demo_directory: Path) -> None:
    given = [
        StructuredOutputsParams(json=ASKED[1][1]),
        StructuredOutputsParams(regex=r"\d{3}-[a-c]{1,5}!"),
        StructuredOutputsParams(choice=["yes", "yesterday", "no"]),
        StructuredOutputsParams(grammar='root ::= "SELECT " [a-z] " FROM " ("t" | "u")'),
        StructuredOutputsParams(json_object=True),
    ]
    params = [SamplingParams(max_tokens=60, seed=4, structured_outputs=each) for each in given]
    with LLM(str(demo_directory), kv_cache_memory_bytes="64MiB", max_model_len=512) as llm:
        outputs = [each.outputs[0] for each in llm.generate(["Answer: "] * len(given), params)]
        with pytest.raises(ValueError, match=r"structured_outputs\.regex cannot be used: .*unclosed group"):
            llm.generate("x", SamplingParams(structured_outputs={"regex": "("}))
    texts = [output.text for output in outputs]
    assert [output.finish_reason for output in outputs[:4]] == ["stop"] * 4
    assert_valid([(texts[0], "stop")], ASKED[1][1])
    assert texts[1].endswith("!")
    assert texts[2] in ("yes", "yesterday", "no")
    assert texts[3].startswith("SELECT ")
    assert texts[4].startswith("{")
