"""uvicorn's HTTP protocol with limits on the bytes before a request's body, and on every wait for a client."""

import asyncio
from typing import Any

import httptools
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.gateway.http.errors import error_body
from octavo.gateway.http.request_id import new_request_id
from octavo.gateway.request_error import RequestError

MAX_HEAD_BYTES = 64 << 10  # request line and headers, or trailers after a chunked body; the last piece may exceed it
PIECE_BYTES = 16 << 10  # the most that the parser gets at once: it bounds the requests that begin in one piece
LAST_REQUEST_S = 1.0  # for the first request of a connection, once the server is told to stop


class UnchunkedCycle(RequestResponseCycle):
    """An answer over HTTP/1.0, which has no chunks: an answer without a length ends when the connection closes."""

    async def send(self, message: ASGISendEvent) -> None:
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class HeldFlow(FlowControl):
    """Reads nothing while received bytes are not parsed; an application that waits for its client would read more."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. The parser accepts a head of any length, in time that grows with its square: we close it earlier.

    The parser gets the bytes in pieces, and no piece while a request waits for the answer to an earlier one. So
    requests that a client sends ahead stay bytes of one read, which are few, and do not become request objects.

    While no answer is being sent there is one deadline: for the first byte of a head (uvicorn's own wait ends with any
    byte), then for the whole head, and after an early answer for the rest of the body, which nobody reads.
    """

    HEAD_S = 30.0  # from the first byte of a head to its last
    UNREAD_BODY_S = 5.0  # if the connection closes while the client sends, the client may lose the answer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unfed = b""  # received, and not yet given to the parser
        self._is_refused = False  # the bytes were not HTTP: no more are read
        self._num_heads = 0  # complete heads
        self._num_parts = 0  # complete heads and messages, and pieces of bodies
        self._is_in_head = True
        self._has_head_begun = False
        self._num_head_bytes = 0  # of pieces that contained only a part of a head or of trailers
        self._deadline: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._answer: RequestResponseCycle | None = None  # being sent now; `cycle` is of the last request that was read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: HeldFlow = HeldFlow(transport)
        self._wait(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        if self._answer is not None:
            self._answer.disconnected = not self._answer.response_complete
            self._answer.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if not self._is_refused:
            self._unfed += data
            self._feed()

    def _feed(self) -> None:
        while self._unfed and not self.pipeline and not self.transport.is_closing():
            piece, self._unfed = self._unfed[:PIECE_BYTES], self._unfed[PIECE_BYTES:]
            num_parts = self._num_parts
            self._parse(piece)
            self._num_head_bytes = self._num_head_bytes + len(piece) if self._num_parts == num_parts else 0
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The request line and headers are longer than {MAX_HEAD_BYTES} bytes.")
        was_held, self.flow.is_held = self.flow.is_held, bool(self._unfed)
        if self._unfed:
            self.flow.pause_reading()
        elif was_held:
            self.flow.resume_reading()

    def _parse(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(piece[upgrade.args[0] :])

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read the request as plain HTTP/1.1. Clients offer HTTP/2 with `Upgrade: h2c`, and take HTTP/1.1 as well.

        The parser stops after a head with an offer, so a new parser gets the head without it.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_head_begun = True
        if self._deadline is not None and not self._is_stopping:
            self._wait(self.HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # no route uses trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")  # an exception in a callback makes the parser fail: a 400
            return
        self._stop_waiting()
        self._num_parts += 1
        self._num_heads += 1
        self._is_in_head = self._has_head_begun = False
        super().on_headers_complete()
        if self._is_stopping:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answer = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.__class__ = UnchunkedCycle  # uvicorn made the cycle, and has not run it yet
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_parts += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_parts += 1
        self._is_in_head = True
        super().on_message_complete()
        if self._deadline is not None:
            self._wait(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._feed()
        if (
            self.cycle.response_complete and not self.transport.is_closing()
        ):  # otherwise the next request is being answered already
            self._wait_for_client()

    def _wait_for_client(self) -> None:
        if not self._is_in_head:
            self._wait(self.UNREAD_BODY_S)
        else:
            self._wait(self.HEAD_S if self._has_head_begun else self.timeout_keep_alive)

    def shutdown(self) -> None:
        """Called when the server is told to stop: close, but only after a present answer or a request just sent."""
        self._is_stopping = True
        if self._num_heads:
            super().shutdown()
        else:
            self._wait(LAST_REQUEST_S)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with the usual error envelope, and close, after the answers that are due."""
        self._is_refused, self._unfed = True, b""
        if self._is_answering():
            self.cycle.keep_alive = False
            return
        body = error_body(RequestError(msg, code="invalid_http"))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _is_answering(self) -> bool:
        """Whether the next bytes belong to an answer that has begun, or whose request has arrived completely."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return bool(self.pipeline) or self.cycle.response_started or not self.cycle.more_body

    def _wait(self, seconds: float) -> None:
        """Close the connection in `seconds`; this replaces an earlier deadline."""
        self._stop_waiting()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
