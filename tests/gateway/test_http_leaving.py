"""Clients that leave, at any moment and in any way: the log of `python -m octavo.gateway` has no traceback of it."""

import asyncio
import json
import signal
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from octavo.protocol.messages import Submit
from tests.fakes.fake_scheduler import FakeScheduler, running
from tests.fakes.gateway_server import chat, completion
from tests.fakes.model_directories import VOCAB_SIZE
from tests.gateway.test_http_process import gateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAME = "tiny"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of a socket whose close is a reset
WAYS = ("close", "reset", "half close")


@dataclass
class Gateway:
    """A gateway's process, the scheduler behind it, and what it has logged."""

    process: "subprocess.Popen[str]"
    url: str
    log: list[str]
    reading: Thread
    scheduler: FakeScheduler

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def status(self) -> int:
        async with httpx.AsyncClient(timeout=20) as http:
            return (await http.post(self.url + CHAT, json=chat(model=NAME))).status_code

    async def stop(self) -> str:
        """Ask it to stop and return all that it has logged."""
        self.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(self.process.wait, 30) == 0
        self.reading.join()
        return "".join(self.log)


@asynccontextmanager
async def running_gateway(model: Path, directory: Path, *flags: str) -> AsyncIterator[Gateway]:
    scheduler = FakeScheduler(f"ipc://{directory}/s", vocab_size=VOCAB_SIZE)
    settings = {"model": str(model), "schedulers": scheduler.address, "served_model_name": NAME}
    async with running(scheduler):
        with gateway(*flags, **settings) as (process, url, log):
            assert process.stderr is not None
            reading = Thread(target=log.extend, args=(process.stderr,))
            reading.start()
            try:
                found = Gateway(process, url, log, reading, scheduler)
                while await found.status() != 200:
                    pass
                yield found
            finally:
                process.kill()
                reading.join()


def request(path: str, body: dict[str, Any] | None = None, *headers: str) -> bytes:
    content = b"" if body is None else json.dumps(body | {"model": NAME}).encode()
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def leave(address: tuple[str, int], sent: bytes, num_read: int, way: str) -> None:
    """Send this, read up to `num_read` bytes of what comes, and leave."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client, suppress(ConnectionError, TimeoutError):
        client.setblocking(False)
        await loop.sock_connect(client, address)
        await loop.sock_sendall(client, sent)
        if num_read:
            await asyncio.wait_for(loop.sock_recv(client, num_read), 2)
        if way == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        elif way == "half close":
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.01)


def departures(address: tuple[str, int], asked: bytes) -> list[Awaitable[None]]:
    """Every way to leave: in the head, before and in the body, before and in the answer, with more requests sent."""
    cuts = (5, asked.find(b"\r\n\r\n") + 4, len(asked) - 1)
    sent = [(asked[:cut], 0) for cut in cuts] + [(asked * times, size) for times in (1, 4) for size in (0, 1, 400)]
    return [leave(address, data, size, way) for data, size in sent for way in WAYS]


async def test_no_way_to_leave_is_a_traceback(tiny_model: Path, tmp_path: Path) -> None:
    requests = [
        request("/v1/models"),
        request("/nothing"),
        request(CHAT, {"messages": []}),
        request(CHAT, chat()),
        request(CHAT, chat(stream=True, max_tokens=100)),
        request(CHAT, chat(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"),
        request(COMPLETIONS, completion(n=4), "Expect: 100-continue"),
        request(COMPLETIONS, completion(n=4, stream=True)),
        b"nonsense\r\n\r\n",
    ]
    async with running_gateway(tiny_model, tmp_path) as served:
        for asked in requests:
            await asyncio.gather(*departures(served.address, asked), *departures(served.address, asked))
        assert await served.status() == 200
        log = await served.stop()
    assert "Traceback" not in log
    assert " E gateway: " not in log


async def test_a_stop_answers_who_still_sends_and_waits_for_nobody_who_does_not_read(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with running_gateway(tiny_model, tmp_path, "--shutdown-timeout-s", "1") as served:
        served.scheduler.paused = True
        reader, writer = await asyncio.open_connection(*served.address)
        writer.write(request(CHAT, chat(), "X-Request-Id: mine")[:-1])
        with socket.create_connection(served.address) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(request(CHAT, chat(stream=True, max_tokens=4000)))
            await served.scheduler.wait_for(Submit, 2)
            served.scheduler.paused = False
            log = await served.stop()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nx-request-id: mine\r\n" in head
    assert json.loads(body)["error"]["message"] == "the server is stopping"
    assert "Traceback" not in log


@pytest.mark.parametrize("listener", ["uds", "metrics"])
async def test_every_listener_answers_with_an_id(listener: str, tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--uds", str(tmp_path / "http")) if listener == "uds" else ("--metrics-port", "0")
    with gateway(*flags, model=str(tiny_model)) as (process, _, log):
        if listener == "uds":
            reach = lambda: asyncio.open_unix_connection(str(tmp_path / "http"))  # noqa: E731
        else:
            [page] = [line.split(" at ")[1].strip() for line in log if "metrics alone" in line]
            host, port = page.removeprefix("http://").removesuffix("/metrics").split(":")
            reach = lambda: asyncio.open_connection(host, int(port))  # noqa: E731
        lines = ("GET /metrics", "HEAD /metrics", "GET /nothing", "DELETE /metrics", "OPTIONS /metrics", "nonsense")
        for line, status in zip(lines, (200, 200, 404, 405, 405, 400), strict=True):
            reader, writer = await reach()
            version = " HTTP/1.1" if " " in line else ""
            writer.write(f"{line}{version}\r\nHost: x\r\nX-Request-Id: mine\r\nConnection: close\r\n\r\n".encode())
            answer = (await reader.read()).partition(b"\r\n\r\n")[0]
            writer.close()
            assert answer.startswith(f"HTTP/1.1 {status} ".encode())
            ids = [
                value
                for name, _, value in (row.partition(b": ") for row in answer.split(b"\r\n"))
                if name.lower() == b"x-request-id"
            ]
            assert ids == [b"mine"] if status != 400 else len(ids) == 1
        process.kill()
