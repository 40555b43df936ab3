"""How a listener stops: who is connected is served, whoever comes later is refused, and nobody is reset."""

import asyncio
import errno
import socket
from pathlib import Path

import pytest

from gateway.listener import listen, turn_away
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import serving


def connecting(listener: socket.socket) -> socket.socket:
    """Return a socket that has asked to be connected to `listener`, which on the loopback is all that it takes."""
    client = socket.socket()
    client.setblocking(False)
    assert client.connect_ex(listener.getsockname()) in (0, errno.EINPROGRESS)
    return client


def test_a_queue_can_be_emptied_for_good() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.setblocking(False)
        with connecting(listener), connecting(listener):
            turn_away(listener)
            with connecting(listener):
                for _ in range(2):
                    listener.accept()[0].close()
                with pytest.raises(BlockingIOError):
                    listener.accept()


def test_a_connection_that_was_made_stays() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted = listener.accept()[0]
        turn_away(listener)
        listener.close()
        with accepted:
            client.sendall(b"request")
            assert accepted.recv(7) == b"request"
            accepted.sendall(b"answer")
            assert client.recv(6) == b"answer"


async def test_a_connection_that_has_not_asked_yet_is_answered_once_more(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    async with serving(tiny_model, scheduler) as served:
        reader, writer = await asyncio.open_connection(*served.address)
        served.server.should_exit = True
        async with asyncio.timeout(10):
            while served.server.servers[0].is_serving():
                await asyncio.sleep(0.001)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close\r\n" in answer


async def test_a_request_that_comes_before_the_scheduler_has_answered_waits_for_it(
    tiny_model: Path, scheduler: FakeScheduler
) -> None:
    scheduler.frozen = True
    async with serving(tiny_model, scheduler) as served:
        asking = asyncio.create_task(served.complete())
        await asyncio.sleep(0)
        assert not served.server.started
        scheduler.frozen = False
        await asking
