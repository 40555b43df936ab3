"""The gateway as users meet it: uvicorn on a free port, with a fake scheduler behind it, in one event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai

from octavo.gateway.__main__ import DrainingServer, uvicorn_config
from octavo.gateway.http.app import create_app
from octavo.gateway.http.body_limits import BodyTimes
from octavo.gateway.http.http_protocol import BoundedHttpProtocol
from octavo.gateway.http.listener import listen
from octavo.protocol.config import Config
from tests.fakes.fake_scheduler import FakeScheduler, running

MODEL = "tiny/model"
KEEP_ALIVE_S = 0.05


@dataclass
class Served:
    """A running gateway: where it is, the scheduler behind it, and the clients that talk to it."""

    url: str
    scheduler: FakeScheduler
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    server: DrainingServer

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self.http.post(path, content=content, headers=headers)

    async def chat(self, content: Any = "hi", **fields: Any) -> Any:
        """Return the answer to a chat request that must succeed."""
        response = await self.post("/v1/chat/completions", chat(content, **fields))
        assert response.status_code == 200, response.text
        return response.json()

    async def complete(self, prompt: Any = "hi", **fields: Any) -> Any:
        response = await self.post("/v1/completions", completion(prompt, **fields))
        assert response.status_code == 200, response.text
        return response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the chunks of a stream, having checked every byte of its framing."""
        async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            raw = await response.aread()
        return parse_events(raw)


def parse_events(raw: bytes) -> list[Any]:
    """Return what the events of a complete stream hold. Fails on anything but one line of JSON a frame."""
    *frames, rest = raw.split(b"\n\n")
    assert rest == b"", "the last frame is not finished"
    frames = [frame for frame in frames if frame != b": ping"]
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    *events, last = [frame.removeprefix(b"data: ") for frame in frames]
    assert last == b"[DONE]"
    return [msgspec.json.decode(event) for event in events]


def dechunked(raw: bytes) -> bytes:
    """Return the body in complete chunks (RFC 9112, section 7.1)."""
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body, raw = body + raw[: int(size, 16)], raw[int(size, 16) + 2 :]
    return body


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8} | fields


def completion(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8} | fields


@asynccontextmanager
async def serving(
    directory: Path,
    scheduler: FakeScheduler,
    *,
    body_times: BodyTimes = BodyTimes(),  # noqa: B008  (frozen)
    http: type[BoundedHttpProtocol] = BoundedHttpProtocol,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve the model in `directory` with `settings` of Config; the scheduler has answered once when this returns."""
    async with running(scheduler):
        names = {"served_model_name": (MODEL, "alias"), "schedulers": (scheduler.address,)}
        config = Config(model=str(directory), **(names | settings))
        app = create_app(config, keep_alive_s=KEEP_ALIVE_S, body_times=body_times)
        with listen("127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server_config = uvicorn_config(app, config)
            server_config.http = http
            server = DrainingServer(server_config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                async with (
                    httpx.AsyncClient(base_url=url, timeout=20) as client,
                    openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20) as sdk,
                ):
                    await _until_healthy(client, scheduler)
                    yield Served(url, scheduler, client, sdk, server)
            finally:
                server.should_exit = True
                await task


async def _until_healthy(http: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
    async with asyncio.timeout(10):
        while scheduler.can_progress and not scheduler.frozen and (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)
