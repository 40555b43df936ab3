"""Server-sent events: one frame per event, comments while there is none, and an error event if the stream fails."""

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.gateway.http.errors import error_body, internal_error
from octavo.gateway.request_error import RequestError, unavailable

PING = b": ping\n\n"

# Without X-Accel-Buffering nginx holds chunks back.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def error_event(error: RequestError) -> bytes:
    """Return the event with which a stream ends that fails."""
    return b"data: " + error_body(error) + b"\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected. Call this after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """The response that sends `events`. At its end (the last event, a failure, a client that left) it calls `close`.

    A RequestError from `events` becomes one error event and the end, without [DONE] and without a finish_reason.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        keep_alive_s: float,
        error_event: Callable[[RequestError], bytes] = error_event,
    ) -> None:
        self.status_code, self.media_type, self.background = 200, "text/event-stream", None
        self.init_headers(HEADERS)
        self.events = events
        self.close = close
        self.keep_alive_s = keep_alive_s
        self._error_event = error_event
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
        except asyncio.CancelledError:  # the server stops, and its time to wait for this stream is over
            await _cancel(tasks)
            await self._send(send, self._error_event(unavailable("the server is stopping")))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _cancel(tasks)
            self.close()

    async def _write(self, send: Send) -> None:
        try:
            async for event in self.events:
                await self._send(send, event)
        except RequestError as error:
            await self._send(send, self._error_event(error))
        except Exception:  # the headers are sent, so only an event can tell the client; the log gets the exception too
            await self._send(send, self._error_event(internal_error()))
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
