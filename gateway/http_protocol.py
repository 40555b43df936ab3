"""uvicorn's HTTP protocol with bounds: on the bytes before a request's body, and on every wait for a client."""

import asyncio
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.errors import RequestError, error_body
from gateway.request_id import new_request_id

MAX_HEAD_BYTES = 64 << 10  # request line and headers; one read may bring more
LAST_REQUEST_S = 1.0  # to a connection without any, once the server is told to stop


class UnchunkedCycle(RequestResponseCycle):
    """An answer over HTTP/1.0, which knows no chunks: what has no length ends with the connection."""

    async def send(self, message: ASGISendEvent) -> None:
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. The parser takes a head of any length, and time by its square; we close it before.

    While no answer is under way there is one deadline: for the first byte of a head (uvicorn's own wait ends with any
    byte), from there on for the whole head, and after an early answer for the rest of the body that nobody reads.
    """

    HEAD_S = 30.0  # from its first byte to its last
    UNREAD_BODY_S = 5.0  # a close while the client sends may cost it the answer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_heads = 0  # complete ones
        self._is_in_head = True
        self._has_head_begun = False
        self._num_head_bytes = 0  # of reads that brought nothing but a part of the present one
        self._deadline: asyncio.TimerHandle | None = None
        self._is_stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head, num_heads = self._is_in_head, self._num_heads
        super().data_received(data)
        is_only_head = was_in_head and self._is_in_head and self._num_heads == num_heads
        self._num_head_bytes = self._num_head_bytes + len(data) if is_only_head else 0
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request line and headers are longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_head_begun = True
        if self._deadline is not None and not self._is_stopping:
            self._wait(self.HEAD_S)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._num_heads += 1
        self._is_in_head = self._has_head_begun = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = UnchunkedCycle  # uvicorn makes it, and has not run it yet
        if self._is_stopping:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()
        if self._deadline is not None:
            self._wait(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # else the next one was sent already
            self._wait_for_client()

    def _wait_for_client(self) -> None:
        if not self._is_in_head:
            self._wait(self.UNREAD_BODY_S)
        else:
            self._wait(self.HEAD_S if self._has_head_begun else self.timeout_keep_alive)

    def shutdown(self) -> None:
        """Called when the server is told to stop: close, but after the answer under way or a request just sent."""
        self._is_stopping = True
        if self._num_heads:
            super().shutdown()
        else:
            self._wait(LAST_REQUEST_S)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the one envelope, and close."""
        body = error_body(RequestError(msg, code="invalid_http"))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _wait(self, seconds: float) -> None:
        """Close the connection in `seconds`, and not at a deadline that was set before."""
        self._stop_waiting()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
