"""Server-sent events: one frame an event, comments while nothing happens, and an end that tells failure."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import RequestError, error_body, internal_error, unavailable

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
PLACE = "{text}"

# nginx would hold chunks back without the last.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ChunkWriter:
    """Encodes the chunks of one stream: what they have in common is written once."""

    def __init__(self, head: dict[str, Any], *, usage: bool, encode: Callable[[Any], bytes]) -> None:
        self._encode = encode
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    def choice(self, choice: Any, usage: Any = None) -> bytes:
        """Return the event for a chunk with one choice, and with what it has used so far if that is given."""
        tail = self._tail if usage is None else b'],"usage":' + self._encode(usage) + b"}\n\n"
        return self._head + self._encode(choice) + tail

    def text(self, choice_of: Callable[[str], Any]) -> Callable[[str], bytes]:
        """Return a function that does the same for `choice_of(text)`, where nothing but the text ever changes."""
        encode, (before, _, after) = self._encode, self.choice(choice_of(PLACE)).rpartition(self._encode(PLACE))
        return lambda text: before + encode(text) + after

    def usage(self, usage: Any) -> bytes:
        """Return the event for the chunk that has no choice but the usage."""
        return self._head + b'],"usage":' + self._encode(usage) + b"}\n\n"


def _error_event(error: RequestError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """The response that sends `events`. Whatever ends it (the last event, a failure, the client), `close` is called.

    A RequestError from `events` becomes one error event and the end, without [DONE] and without a finish_reason.
    """

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], keep_alive_s: float) -> None:
        self.status_code, self.media_type, self.background = 200, "text/event-stream", None
        self.init_headers(HEADERS)
        self.events = events
        self.close = close
        self.keep_alive_s = keep_alive_s
        self._now_s = asyncio.get_running_loop().time
        self._last_sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            writing = asyncio.create_task(self._write(send))
            leaving = asyncio.create_task(wait_for_disconnect(receive))
            tasks = [writing, leaving, asyncio.create_task(self._ping(send))]
            await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        except asyncio.CancelledError:  # the server stops, and has waited for this stream as long as it may
            await _cancel(tasks)
            await self._send(send, _error_event(unavailable("the server is stopping")))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _cancel(tasks)
            self.close()

    async def _write(self, send: Send) -> None:
        try:
            async for event in self.events:
                await self._send(send, event)
        except RequestError as error:
            await self._send(send, _error_event(error))
        except Exception:  # the headers are out: this is the only way left to tell, and the log gets it all the same
            await self._send(send, _error_event(internal_error()))
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Send a comment after each `keep_alive_s` of silence, so that no proxy takes the stream for dead."""
        self._last_sent_s = max(self._last_sent_s, self._now_s())
        while True:
            silence_left_s = self._last_sent_s + self.keep_alive_s - self._now_s()
            if silence_left_s > 0:
                await asyncio.sleep(silence_left_s)
            else:
                await self._send(send, PING)

    async def _send(self, send: Send, event: bytes) -> None:
        self._last_sent_s = self._now_s()
        await send({"type": "http.response.body", "body": event, "more_body": True})
