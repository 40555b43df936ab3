"""A server of OpenAI's API whose every answer is known, in a thread of its own, to test what loads servers."""

import argparse
import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

MODEL = "fake"
KEY = "right"


class FakeOpenAI:
    """Answers each request with `max_tokens` chunks; `ways` says of which, by number from 0, what goes wrong instead.

    refuse: a 429. error: an event with an error after the first chunk. cut: the connection ends there. plain: no usage.
    short: one token less than asked. hold: nothing comes until the client leaves. meet: it begins once as many as
    `meeting_size` of this way are under way.
    """

    def __init__(self, ways: Mapping[int, str], needs_key: bool, meeting_size: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.connections: set[tuple[str, int]] = set()  # by the client's end of them
        self.most_under_way = 0
        self.port = 0
        self._ways, self._needs_key = ways, needs_key
        self._under_way = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._meeting = asyncio.Barrier(meeting_size)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, is_listening: threading.Event) -> None:
        self._loop.run_until_complete(self._serve(is_listening))
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _serve(self, is_listening: threading.Event) -> None:
        runner = web.AppRunner(self.application(), shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        is_listening.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if self._needs_key and request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        return web.json_response({"data": [{"id": MODEL}, {"id": "another"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        way = self._ways.get(len(self.bodies))
        body = await request.json()
        self.bodies.append(body)
        if request.transport is not None:
            self.connections.add(request.transport.get_extra_info("peername"))
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            return await self._stream(request, body, way)
        finally:
            self._under_way -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], way: str | None) -> web.StreamResponse:
        if way == "refuse":
            return web.json_response({"error": {"message": "full"}}, status=429)
        if way == "meet":
            await self._meeting.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events(request.path, body, way):
            await response.write(event)
        if way == "hold":
            await asyncio.Event().wait()
        if way == "cut" and request.transport is not None:
            request.transport.abort()
        return response


def events(path: str, body: dict[str, Any], way: str | None = None) -> Iterator[bytes]:
    """Yield the events of an answer to `body`, each as many bytes as one write has."""
    is_chat = path.endswith("chat/completions")
    if is_chat:
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    num_tokens = body["max_tokens"] - (way == "short")
    for number in range(1 if way in ("error", "cut", "hold") else num_tokens):
        text = ' said "text":'
        yield event({"choices": [{"delta": {"content": text}} if is_chat else {"text": f"{text}{number}"}]})
    if way in ("cut", "hold"):
        return
    if way == "error":
        yield event({"error": {"message": "out of blocks"}})
        return
    yield event({"choices": [{"delta": {}} if is_chat else {"text": "", "finish_reason": "length"}], "usage": None})
    if way != "plain":
        yield event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": num_tokens}})
    yield b"data: [DONE]\n\n"


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


@contextmanager
def fake_openai(
    ways: Mapping[int, str] | None = None, *, needs_key: bool = False, meeting_size: int = 1
) -> Iterator[FakeOpenAI]:
    server, is_listening = FakeOpenAI(ways or {}, needs_key, meeting_size), threading.Event()
    thread = threading.Thread(target=server.run, args=(is_listening,))
    thread.start()
    try:
        assert is_listening.wait(10)
        yield server
    finally:
        server.stop()
        thread.join(10)


def main() -> None:
    """Serve in a process of its own until it is told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    port = parser.parse_args().port
    web.run_app(FakeOpenAI({}, False, 1).application(), host="127.0.0.1", port=port, print=lambda line: None)


if __name__ == "__main__":
    main()
