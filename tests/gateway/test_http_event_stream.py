"""The response of a stream, without a server: what it sends and that it closes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from octavo.gateway.http.sse import EventStream
from octavo.gateway.openai.chunk_writer import DONE


class Exchange:
    """Both ends of one ASGI response: collects what is sent; the client leaves when `gone` is set."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.gone = asyncio.Event()
        self.num_closed = 0

    async def run(self, events: AsyncIterator[bytes]) -> None:
        await EventStream(events, self._close, keep_alive_s=60)({}, self._receive, self._send)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def _receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def _close(self) -> None:
        self.num_closed += 1


async def test_a_stream_ends_with_its_last_event() -> None:
    async def events() -> AsyncIterator[bytes]:
        yield DONE

    exchange = Exchange()
    await exchange.run(events())
    assert (exchange.body, exchange.sent[-1]["more_body"], exchange.num_closed) == (DONE, False, 1)


async def test_an_unexpected_exception_is_told_and_raised() -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        raise ZeroDivisionError

    exchange = Exchange()
    with pytest.raises(ZeroDivisionError):
        await exchange.run(events())
    error = msgspec.json.decode(exchange.body.split(b"\n\n")[1].removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"]) == ("internal_server_error", "internal_error")
    assert exchange.sent[-1]["more_body"]  # so that the server cuts the connection instead of ending it in order
    assert exchange.num_closed == 1


async def test_a_client_that_leaves_ends_the_events() -> None:
    ended = []

    async def events() -> AsyncIterator[bytes]:
        try:
            exchange.gone.set()
            await asyncio.Event().wait()
            yield b""
        finally:
            ended.append(True)

    exchange = Exchange()
    await exchange.run(events())
    assert (ended, exchange.num_closed) == ([True], 1)
