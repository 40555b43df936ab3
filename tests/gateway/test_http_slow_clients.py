"""Clients that take their time: what a head, a body and all bodies together may take of the gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from octavo.gateway.http.body_limits import BodyTimes
from octavo.gateway.http.http_protocol import PIECE_BYTES, BoundedHttpProtocol
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import Served, chat, serving

CHAT = "/v1/chat/completions"
LONG_S = 600.0  # a test that has to wait for this fails
MIB = 1 << 20


class HastyHttpProtocol(BoundedHttpProtocol):
    HEAD_S = 0.2
    UNREAD_BODY_S = 0.2


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*served.address)
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


def head(num_bytes: int | None) -> bytes:
    size = "Transfer-Encoding: chunked" if num_bytes is None else f"Content-Length: {num_bytes}"
    return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{size}\r\n\r\n".encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def code(body: bytes) -> str:
    return str(msgspec.json.decode(body)["error"]["code"])


@pytest.mark.parametrize("size", [1000, None])
async def test_a_body_that_stands_still_is_a_408(tiny_model: Path, scheduler: FakeScheduler, size: int | None) -> None:
    async with (
        serving(tiny_model, scheduler, body_times=BodyTimes(stall_s=0.2, whole_s=LONG_S)) as served,
        connected(served) as (reader, writer),
    ):
        writer.write(head(size) + (b'2\r\n{"\r\n' if size is None else b'{"'))
        status, headers, body = await answer(reader)
        assert (status, code(body), headers["connection"]) == (408, "request_timeout", "close")
        assert await reader.read() == b""


async def test_a_body_that_drips_is_a_408(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with (
        serving(tiny_model, scheduler, body_times=BodyTimes(stall_s=LONG_S, whole_s=0.3)) as served,
        connected(served) as (reader, writer),
    ):
        writer.write(head(MIB))
        answered = asyncio.create_task(answer(reader))
        while not answered.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        status, _, body = await answered
        assert (status, code(body)) == (408, "request_timeout")


async def test_a_body_in_slow_pieces_is_read(tiny_model: Path, scheduler: FakeScheduler) -> None:
    body = msgspec.json.encode(chat())
    async with serving(tiny_model, scheduler) as served, connected(served) as (reader, writer):
        writer.write(head(len(body)))
        for byte in body:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.001)
        assert (await answer(reader))[0] == 200


async def test_a_chunked_body_is_refused_where_it_goes_beyond_the_limit(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    async with serving(tiny_model, scheduler, http=HastyHttpProtocol) as served, connected(served) as (reader, writer):
        writer.write(head(None))
        for _ in range(64):
            writer.write(b"100000\r\n" + b" " * MIB + b"\r\n")
            await writer.drain()
        writer.write(b"1\r\n \r\n")  # and no end
        status, _, body = await answer(reader)
        assert (status, code(body)) == (413, "body_too_large")
        while not reader.at_eof():  # what is still sent is not read for ever
            writer.write(b"1\r\n \r\n")
            with suppress(asyncio.TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(1), 0.02)


async def refusal_of(served: Served, num_bytes: int) -> tuple[int, dict[str, str], bytes]:
    """Announce a body of `num_bytes` and send none of it until it is refused."""
    while True:
        async with connected(served) as (reader, writer):
            writer.write(head(num_bytes))
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    return await answer(reader)


async def test_bodies_are_held_within_a_bound(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler, max_held_body_bytes=3 * MIB) as served, AsyncExitStack() as stack:
        for _ in range(2):
            _, writer = await stack.enter_async_context(connected(served))
            writer.write(head(3 * MIB // 2) + b" " * (MIB + (400 << 10)))
        # Refused by what it announces, before a byte of it is read.
        status, headers, body = await refusal_of(served, MIB)
        assert (status, code(body), headers["retry-after"]) == (429, "overloaded", "1")
        large = b" " * MIB + msgspec.json.encode(chat())
        assert (await served.post(CHAT, large)).status_code == 429
        await served.chat()  # a short one needs no room
        await stack.aclose()
        async with asyncio.timeout(20):
            while (await served.post(CHAT, large)).status_code != 200:
                await asyncio.sleep(0.01)


async def test_a_body_is_not_held_while_its_answer_is_generated(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler, max_held_body_bytes=3 * MIB) as served:
        large = b" " * (2 * MIB)
        assert (await served.post(CHAT, large + msgspec.json.encode(chat()))).status_code == 200  # its reader is there
        scheduler.paused = True
        waiting = [
            asyncio.create_task(served.post(CHAT, large + msgspec.json.encode(chat(stream=stream))))
            for stream in (False, True, False)
            if await asyncio.sleep(0.3) is None
        ]
        await asyncio.sleep(0.3)
        scheduler.paused = False
        assert [(await each).status_code for each in waiting] == [200, 200, 200]


async def test_one_body_always_has_room(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler, max_held_body_bytes=1) as served:
        assert (await served.post(CHAT, b" " * MIB + msgspec.json.encode(chat()))).status_code == 200


@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_head_that_comes_a_byte_at_a_time_is_given_up(
    tiny_model: Path, scheduler: FakeScheduler, num_before: int
) -> None:
    async with (
        serving(tiny_model, scheduler, http=HastyHttpProtocol) as served,
        connected(served) as (reader, writer),
    ):
        for _ in range(num_before):
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await answer(reader))[0] == 200
        ended = asyncio.create_task(reader.read())
        for byte in b"GET /live HTTP/1.1\r\nX: " + b"a" * 10_000:
            if ended.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        assert await ended == b""


async def test_a_part_of_the_next_head_does_not_end_the_answer_before_it(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    async with (
        serving(tiny_model, scheduler, http=HastyHttpProtocol) as served,
        connected(served) as (reader, writer),
    ):
        body = msgspec.json.encode(chat())
        scheduler.paused = True
        writer.write(head(len(body)) + body + b"G")
        await asyncio.sleep(2 * HastyHttpProtocol.HEAD_S)
        scheduler.paused = False
        assert (await answer(reader))[0] == 200
        assert await reader.read() == b""


async def test_an_answer_before_the_body_waits_for_the_rest_and_no_longer(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    async with serving(tiny_model, scheduler, http=HastyHttpProtocol) as served:
        async with connected(served) as (reader, writer):
            writer.write(head(10).replace(CHAT.encode(), b"/nowhere"))
            assert (await answer(reader))[0] == 404
            assert await reader.read() == b""
        async with connected(served) as (reader, writer):
            writer.write(head(10).replace(CHAT.encode(), b"/nowhere"))
            assert (await answer(reader))[0] == 404
            writer.write(b" " * 10 + b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await answer(reader))[0] == 200


async def test_headers_behind_a_body_are_bounded_and_count_for_nothing(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    body = msgspec.json.encode(chat())
    start = head(None) + b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    async with serving(tiny_model, scheduler) as served, connected(served) as (reader, writer):
        writer.write(start + b"X-Request-Id: behind\r\n\r\n")
        status, headers, _ = await answer(reader)
        assert status == 200
        assert headers["x-request-id"] != "behind"
        writer.write(start + b"Name: value\r\n" * 20_000)
        with suppress(ConnectionResetError):  # it still sends
            assert b"invalid_http" in await reader.read()


async def test_an_extension_of_a_chunk_is_bounded(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler) as served, connected(served) as (reader, writer):
        writer.write(head(None) + b"1;" + b"a" * 200_000)
        with suppress(ConnectionResetError):  # it still sends
            assert b"invalid_http" in await reader.read()


async def test_requests_sent_ahead_wait_as_bytes(tiny_model: Path, scheduler: FakeScheduler) -> None:
    """Only what one piece of a read holds has become requests; the answers come in order all the same."""
    request, num_requests = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", 3000
    async with serving(tiny_model, scheduler) as served, connected(served) as (reader, writer):
        writer.write(request * num_requests)
        most = 0
        for _ in range(num_requests):
            assert (await answer(reader))[0] == 200
            most = max(most, *(len(connection.pipeline) for connection in served.server.server_state.connections))
        assert most <= PIECE_BYTES // len(request) + 1


async def test_nonsense_behind_a_request_does_not_take_its_answer(tiny_model: Path, scheduler: FakeScheduler) -> None:
    body = msgspec.json.encode(chat())
    async with serving(tiny_model, scheduler) as served, connected(served) as (reader, writer):
        writer.write(head(len(body)) + body + b"\0nonsense\r\n\r\n")
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""


@pytest.mark.parametrize("is_split", [False, True])
async def test_an_offer_of_http_2_does_not_take_the_body(
    tiny_model: Path, scheduler: FakeScheduler, is_split: bool
) -> None:
    """Java's client offers it in each request over plain HTTP."""
    body = msgspec.json.encode(chat())
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n\r\n"
    pieces = [head(len(body))[:-2] + offer, body]
    async with serving(tiny_model, scheduler) as served, connected(served) as (reader, writer):
        for _ in range(2):
            for piece in pieces if is_split else [b"".join(pieces)]:
                writer.write(piece)
                await asyncio.sleep(0.01)
            assert (await answer(reader))[0] == 200


async def test_answers_make_no_room_for_more_than_they_take_away(tiny_model: Path, scheduler: FakeScheduler) -> None:
    body = msgspec.json.encode(chat(max_tokens=1))
    request = head(len(body)) + body
    sent = request * (48 * MIB // len(request))
    async with serving(tiny_model, scheduler) as served, connected(served) as (reader, writer):
        writer.write(sent)
        for _ in range(100):
            assert (await answer(reader))[0] == 200
        assert writer.transport.get_write_buffer_size() > 32 * MIB  # the rest is in the kernel
        writer.transport.abort()
