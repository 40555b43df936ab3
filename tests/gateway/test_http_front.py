"""What stands before the routes: ids of requests, a second header for keys, other base URLs, a proxy's path."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from octavo.protocol.messages import Rejected, Submit
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import MODEL, Served, chat, completion, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(tiny_model: Path, scheduler: FakeScheduler) -> AsyncIterator[Served]:
    async with serving(tiny_model, scheduler, api_key=("sk-one",), root_path="/llm") as served:
        yield served


async def test_every_answer_has_the_client_s_id(guarded: Served) -> None:
    client = guarded.http
    key = {"authorization": "Bearer sk-one", "x-request-id": "my-id-1"}
    answers = {
        200: [
            await client.get("/health", headers=key),
            await client.head("/live", headers=key),
            await client.post(CHAT, json=chat(), headers=key),
            await client.post(CHAT, json=chat(stream=True), headers=key),
        ],
        400: [await client.post(CHAT, json={}, headers=key)],
        401: [await client.get("/v1/models", headers={"x-request-id": "my-id-1"})],
        403: [await client.get("/v1/models", headers={**key, "origin": "null"})],
        404: [await client.get("/nothing", headers=key)],
        405: [await client.get(CHAT, headers=key), await client.options(CHAT, headers=key)],
        413: [await client.post(CHAT, content=b" " * ((64 << 20) + 1), headers=key)],
        415: [await client.post(CHAT, content=b"a", headers={**key, "content-type": "text/plain"})],
    }
    for status, responses in answers.items():
        for response in responses:
            assert (response.status_code, response.headers.get_list("x-request-id")) == (status, ["my-id-1"])


async def test_answers_that_refuse_for_now_and_preflights_have_the_client_s_id(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    origin = "https://app.example"
    async with serving(tiny_model, scheduler, allowed_origins=(origin,)) as served:
        named = {"x-request-id": "my-id-2"}
        preflight = {**named, "origin": origin, "access-control-request-method": "POST"}
        answers = [await served.http.options(CHAT, headers=preflight)]
        answers.append(await served.http.options(CHAT, headers={**preflight, "access-control-request-method": "PUT"}))
        scheduler.rejection = lambda submit: Rejected(submit.request_id, "the queue is full", 1.0)
        answers += [await served.post(CHAT, chat(stream=stream), **named) for stream in (False, True)]
        scheduler.can_progress = False
        while (health := await served.http.get("/health", headers=named)).status_code == 200:
            await asyncio.sleep(0.01)
        answers += [health, await served.post(CHAT, chat(), **named)]
    assert [answer.status_code for answer in answers] == [200, 400, 429, 429, 503, 503]
    assert all(answer.headers.get_list("x-request-id") == ["my-id-2"] for answer in answers)


@pytest.mark.parametrize("given", [b"", b"two words", b"tab\there", "é".encode(), b"x" * 129])
async def test_an_id_that_is_not_sane_is_replaced(served: Served, given: bytes) -> None:
    ids = [(await served.http.get("/live", headers={"x-request-id": given})).headers["x-request-id"] for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)
    assert ids[0] != ids[1]


async def test_what_is_no_http_is_answered_with_an_id(served: Served) -> None:
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(b"nonsense\r\n\r\n")
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert b"\r\nx-request-id: " in answer


async def test_the_log_has_a_request_s_id(
    tiny_model: Path, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "octavo.gateway")
    async with serving(tiny_model, scheduler) as served:
        await served.http.get("/v1/models/a%0Ab", headers={"x-request-id": "abc"})
        failing = asyncio.create_task(served.post(CHAT, chat(max_tokens=400), **{"x-request-id": "failing"}))
        await scheduler.wait_for(Submit, 1)
        scheduler.fail("out of luck")
        assert (await failing).status_code == 500
    lines = [
        (record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("octavo.gateway")
    ]
    assert ("DEBUG", r"request abc: GET /v1/models/a\nb: 404") in lines
    assert ("WARNING", f"request failing: POST {CHAT}: 500") in lines


@pytest.mark.parametrize("authorization", [None, "Basic proxy", "Bearer wrong"])
async def test_a_key_may_come_as_x_api_key(guarded: Served, authorization: str | None) -> None:
    headers = {"authorization": authorization} if authorization else {}
    for key, status in (("sk-one", 200), ("sk-on", 401), ("", 401)):
        response = await guarded.http.get("/v1/models", headers={**headers, "x-api-key": key})
        assert response.status_code == status
    message = (await guarded.http.get("/v1/models")).json()["error"]["message"]
    assert message == "an API key is needed: send Authorization: Bearer KEY, or X-Api-Key: KEY"


async def test_a_base_url_needs_no_v1(served: Served) -> None:
    assert (await served.post("/chat/completions", chat())).status_code == 200
    assert (await served.post("/completions", completion())).status_code == 200
    assert (await served.http.get("/models")).json()["data"][0]["id"] == MODEL
    assert (await served.http.get(f"/models/{MODEL}")).json()["id"] == MODEL
    page = (await served.http.get("/metrics")).text
    assert 'route="/v1/chat/completions"' in page
    assert 'route="/chat/completions"' not in page


async def test_without_v1_a_key_is_needed_too(guarded: Served) -> None:
    assert (await guarded.http.get("/models")).status_code == 401
    assert (await guarded.post("/chat/completions", chat())).status_code == 401


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_a_proxy_may_take_the_root_path_off_or_leave_it(guarded: Served, prefix: str) -> None:
    key = {"authorization": "Bearer sk-one"}
    assert (await guarded.http.get(f"{prefix}/health")).status_code == 200
    assert (await guarded.http.get(f"{prefix}/v1/models")).status_code == 401
    assert (await guarded.http.get(f"{prefix}/v1/models", headers=key)).status_code == 200
    assert (await guarded.http.post(f"{prefix}{CHAT}", json=chat(), headers=key)).status_code == 200


@pytest.mark.parametrize("path", ["/llmx/health", "/llm", "/llm/llm/health", "/llm//health", "//llm/health"])
async def test_nothing_but_the_root_path_itself_is_taken_off(guarded: Served, path: str) -> None:
    request = guarded.http.build_request("GET", "/", headers={"authorization": "Bearer sk-one"})
    request.url = request.url.copy_with(raw_path=path.encode())
    assert (await guarded.http.send(request)).status_code == 404


@pytest.mark.parametrize(
    ("target", "status"),
    [("OPTIONS *", 401), ("GET http://x/v1/models", 401), ("GET http://x/health", 200), ("GET /health?a=%2f", 200)],
)
async def test_every_form_of_target_is_guarded(guarded: Served, target: str, status: int) -> None:
    reader, writer = await asyncio.open_connection(*guarded.address)
    writer.write(f"{target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


async def test_the_most_log_probabilities_can_be_set(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler, max_logprobs=2) as served:
        await served.chat(logprobs=True, top_logprobs=2)
        await served.complete(logprobs=2)
        chats = await served.post(CHAT, chat(logprobs=True, top_logprobs=3))
        completions = await served.post("/v1/completions", completion(logprobs=3))
    for response, param in ((chats, "top_logprobs"), (completions, "logprobs")):
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert "--max-logprobs" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["websocket", "h2c"])
async def test_an_upgrade_is_not_taken_and_the_request_is_guarded_and_answered(guarded: Served, kind: str) -> None:
    for key, status in (("", 401), ("X-Api-Key: sk-one\r\n", 200)):
        reader, writer = await asyncio.open_connection(*guarded.address)
        head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{key}Connection: Upgrade\r\nUpgrade: {kind}\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(10):
            answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
