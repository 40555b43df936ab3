"""How a listener stops: who is connected is served, whoever comes later is refused, and nobody is reset."""

import asyncio
import errno
import socket
from pathlib import Path

import pytest

from octavo.gateway.http.listener import listen, turn_away
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


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("::", ("127.0.0.1", "::1")),
        ("", ("127.0.0.1", "::1")),
        ("*", ("127.0.0.1", "::1")),
        ("[::]", ("127.0.0.1", "::1")),
        ("[::1]", ("::1",)),
        ("::1", ("::1",)),
        ("0.0.0.0", ("127.0.0.1",)),
        ("localhost", ("localhost",)),
    ],
)
def test_a_listener_takes_both_kinds_of_addresses_and_each_spelling(host: str, reached: tuple[str, ...]) -> None:
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        for address in reached:
            with socket.create_connection((address, port), timeout=10) as client, listener.accept()[0]:
                assert client.getpeername()[1] == port
        if reached == ("::1",):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=10)


def test_a_queue_of_both_kinds_can_be_emptied() -> None:
    with listen("::", 0) as listener:
        turn_away(listener)
        for address in ("127.0.0.1", "::1"):
            with pytest.raises(TimeoutError):
                socket.create_connection((address, listener.getsockname()[1]), timeout=0.2)


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
