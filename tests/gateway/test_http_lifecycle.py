"""How requests end: clients that leave, schedulers that go, failures in the middle, silence."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from octavo.protocol.messages import Abort, Rejected, Submit
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import MODEL, Served, chat, completion, dechunked, parse_events, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@asynccontextmanager
async def connection(served: Served, path: str, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request on a connection of its own, which is closed at the end of the context."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = msgspec.json.encode(body)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def aborted(served: Served, count: int) -> set[str]:
    """Return which of a test's own requests were aborted, once there are `count`: an Abort of another may come late."""

    def own() -> set[str]:
        submitted = {submit.request_id for submit in served.scheduler.messages(Submit)}
        return submitted & {abort.request_id for abort in served.scheduler.messages(Abort)}

    await until(lambda: len(own()) >= count)
    return own()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat(max_tokens=400)), (COMPLETIONS, completion(max_tokens=400))])
async def test_a_client_that_leaves_aborts_what_runs(
    served: Served, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with connection(served, path, body | {"n": 3, "stream": stream}) as reader:
        submits = await served.scheduler.wait_for(Submit, 3)
        await until(lambda: all(record.num_tokens for record in served.scheduler.records.values()))
        served.scheduler.paused = True
        if stream:
            await reader.readuntil(b"data: ")
    assert await aborted(served, 3) == {submit.request_id for submit in submits}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_is_queued(served: Served, stream: bool) -> None:
    served.scheduler.paused = True
    async with connection(served, CHAT, chat(stream=stream)) as reader:
        [submit] = await served.scheduler.wait_for(Submit)
        if stream:
            await reader.readuntil(b": ping")
    assert await aborted(served, 1) == {submit.request_id}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_it_is_admitted(served: Served, stream: bool) -> None:
    served.scheduler.frozen = True
    async with connection(served, CHAT, chat(stream=stream)) as reader:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)  # no header before it is admitted
    served.scheduler.frozen = False
    served.scheduler.paused = True
    [submit] = await served.scheduler.wait_for(Submit)
    assert await aborted(served, 1) == {submit.request_id}


async def test_a_client_that_leaves_in_the_middle_of_its_body(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"prompt"')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await served.complete()
    assert len(served.scheduler.messages(Submit)) == 1


async def test_a_client_that_leaves_with_more_requests_sent_aborts_the_first(served: Served) -> None:
    """Only the first is answered, and the connection knows the last as well: it is the first that has to end."""
    host, port = served.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    served.scheduler.paused = True
    content = msgspec.json.encode(chat(max_tokens=400))
    asked = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    writer.write(asked * 3)
    [submit] = await served.scheduler.wait_for(Submit)
    writer.close()
    assert await aborted(served, 1) == {submit.request_id}
    assert len(served.scheduler.messages(Submit)) == 1


async def test_choices_start_together_or_not_at_all(served: Served) -> None:
    served.scheduler.paused = True

    def reject_the_second(submit: Submit) -> Rejected | None:
        return Rejected(submit.request_id, "full", 1.0) if submit.request_id.endswith("-1") else None

    served.scheduler.rejection = reject_the_second
    response = await served.post(COMPLETIONS, completion(n=3))
    assert response.status_code == 429
    admitted = {submit.request_id for submit in served.scheduler.messages(Submit) if submit.request_id[-2:] != "-1"}
    assert admitted <= await aborted(served, len(admitted))


async def test_a_finished_request_is_not_aborted(served: Served) -> None:
    await served.chat(n=2)
    await served.stream(CHAT, chat(n=2))
    await served.chat(stop="w", max_tokens=20)  # this one the gateway ends itself
    last = served.scheduler.messages(Submit)[-1]
    assert await aborted(served, 1) == {last.request_id}


async def test_a_silent_stream_is_kept_alive_by_comments(served: Served) -> None:
    served.scheduler.paused = True
    async with connection(served, CHAT, chat(stream=True, max_tokens=3)) as reader:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"content-type: text/event-stream" in head
        assert b"cache-control: no-cache" in head
        assert b"x-accel-buffering: no" in head
        silence = b"".join([await reader.readuntil(b": ping\n\n\r\n") for _ in range(2)])
        served.scheduler.paused = False
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
    assert parse_events(dechunked(silence + rest))[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_failure_in_the_middle_is_one_error_event(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler) as served:
        whole = asyncio.create_task(served.post(CHAT, chat(max_tokens=400)))
        async with connection(served, CHAT, chat(stream=True, max_tokens=400)) as reader:
            await reader.readuntil(b"\r\n\r\n")
            stream = await served.openai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=400
            )
            await anext(stream)
            await scheduler.wait_for(Submit, 3)
            scheduler.paused = True
            scheduler.restart(model_fingerprint="another model")
            rest = await reader.readuntil(b"\r\n0\r\n\r\n")
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
        response = await whole
    *_, last, end = dechunked(rest).split(b"\n\n")
    error = msgspec.json.decode(last.removeprefix(b"data: "))["error"]
    assert end == b""
    assert set(error) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in rest
    assert b'"finish_reason":"' not in rest
    assert response.status_code == 500
    assert response.json()["error"]["message"] == error["message"]


async def test_health_tells_of_executors_that_hold_memory_for_nothing(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    async with serving(tiny_model, scheduler) as served:
        assert (await served.http.get("/health")).json() == {"status": "ok"}
        scheduler.num_idle_executors = 1
        async with asyncio.timeout(10):
            while "warning" not in (health := await served.http.get("/health")).json():
                await asyncio.sleep(0.01)
        assert health.status_code == 200
        assert "1 executor holds memory for nothing" in health.json()["warning"]
        scheduler.can_progress, scheduler.num_idle_executors = False, 2
        async with asyncio.timeout(10):
            while (health := await served.http.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
        assert "2 executors hold memory for nothing" in health.json()["error"]["message"]


async def test_no_work_is_taken_while_none_can_progress(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler) as served:
        assert (await served.http.get("/health")).status_code == 200
        scheduler.can_progress = False
        async with asyncio.timeout(10):
            while (await served.http.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
        health = await served.http.get("/health")
        assert (health.status_code, health.json()["error"]["type"]) == (503, "service_unavailable_error")
        for path, body in ((CHAT, chat()), (CHAT, chat(stream=True)), (COMPLETIONS, completion())):
            response = await served.post(path, body)
            assert (response.status_code, response.json()["error"]["type"]) == (503, "service_unavailable_error")
        assert (await served.http.get("/v1/models")).status_code == 200
        scheduler.can_progress = True
        async with asyncio.timeout(10):
            while (await served.http.get("/health")).status_code != 200:
                await asyncio.sleep(0.01)
        await served.chat()


async def test_the_log_says_when_the_model_is_ready_and_when_it_no_longer_is(
    tiny_model: Path, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler.can_progress = False
    with caplog.at_level("INFO", "octavo.gateway.link.client"):
        async with serving(tiny_model, scheduler):
            for can_progress in (True, False, True):
                said = len(caplog.messages)
                scheduler.can_progress = can_progress
                await until(lambda said=said: len(caplog.messages) > said)
    assert caplog.messages == [
        "the model is ready: requests are answered from now on",
        f"{scheduler.address} makes no progress: new requests get a 503 until it does",
        "the model is ready: requests are answered from now on",
    ]


async def test_without_a_scheduler_there_is_a_503(tiny_model: Path, scheduler: FakeScheduler) -> None:
    scheduler.frozen = True
    async with serving(tiny_model, scheduler) as served:
        assert (await served.http.get("/health")).status_code == 503
        assert (await served.http.get("/live")).json() == {"status": "ok"}
        assert (await served.post(CHAT, chat())).status_code == 503
        [model, _] = (await served.http.get("/v1/models")).json()["data"]
        assert model["max_model_len"] is None
        scheduler.frozen = False


async def test_a_stream_goes_on_after_the_scheduler_came_back(served: Served) -> None:
    undisturbed = await served.chat(seed=3, max_tokens=40)
    stream = asyncio.create_task(served.stream(CHAT, chat(seed=3, max_tokens=40)))
    await served.scheduler.wait_for(Submit, 2)
    served.scheduler.restart()
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in await stream)
    assert text == undisturbed["choices"][0]["message"]["content"]


async def test_frames_of_a_hundred_streams_are_whole(served: Served) -> None:
    streams = [served.stream(CHAT, chat("🫠" * (index % 7), seed=index, max_tokens=9)) for index in range(100)]
    for chunks in await asyncio.gather(*streams):
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def sent_raw(served: Served, *pieces: bytes) -> bytes:
    """Return all that comes back on a connection of its own, up to its end."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(10):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b""  # refused while it was still being sent
    finally:
        writer.close()


async def test_what_is_no_http_gets_the_envelope_too(served: Served) -> None:
    head, _, body = (await sent_raw(served, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert msgspec.json.decode(body)["error"]["code"] == "invalid_http"


async def test_a_head_without_end_is_refused(served: Served) -> None:
    header = b"X-Long: " + b"a" * (1 << 20)
    for head in (b"GET /health HTTP/1.1\r\n" + header, b"GET /" + b"a" * (1 << 20)):
        answer = await sent_raw(served, head)
        assert not answer or b'"code":"invalid_http"' in answer
    await served.chat()


async def test_long_bodies_and_many_requests_are_no_long_heads(served: Served) -> None:
    body = msgspec.json.encode(completion("x", max_tokens=1, metadata={"a": "b" * 300_000}))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    requests = (head + b"\r\n" + body) * 3 + head + b"Connection: close\r\n\r\n" + body
    answers = await sent_raw(served, requests[:-700_001], requests[-700_001:])
    assert (answers.count(b"HTTP/1.1 200 "), answers.count(b"HTTP/1.1 ")) == (4, 4)


@pytest.mark.parametrize("keep", ["", "Connection: keep-alive\r\n"])
@pytest.mark.parametrize("stream", [True, False])
async def test_over_http_1_0_no_answer_is_chunked_and_its_end_is_the_close(
    served: Served, stream: bool, keep: str
) -> None:
    content = msgspec.json.encode(chat(stream=stream))
    head = f"POST {CHAT} HTTP/1.0\r\n{keep}Content-Length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(head.encode() + content)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head_bytes, _, body = answer.partition(b"\r\n\r\n")
    assert head_bytes.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head_bytes
    assert b"connection: close" in head_bytes
    if stream:
        assert len(parse_events(body)) > 1
    else:
        assert msgspec.json.decode(body)["object"] == "chat.completion"
        assert f"content-length: {len(body)}".encode() in head_bytes


async def test_over_http_1_0_an_error_and_a_head_have_a_length_too(served: Served) -> None:
    for request in (b"GET /nothing HTTP/1.0\r\n\r\n", b"HEAD /v1/models HTTP/1.0\r\n\r\n"):
        reader, writer = await asyncio.open_connection(*served.address)
        writer.write(request)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"content-length: " in head
        assert b"transfer-encoding" not in head
        assert bool(body) == request.startswith(b"GET")
