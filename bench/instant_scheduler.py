"""A scheduler without an executor: it admits everything and has the next token of every sequence at once.

It speaks to one gateway as the real one does, one message a step with a token for each stream; nothing is lost between
two processes of one machine that live as long as it, so it sends nothing again.
"""

import threading
import time
from collections.abc import Sequence

import zmq

from octavo.protocol.messages import (
    Abort,
    Admitted,
    Hello,
    Output,
    Outputs,
    Ready,
    Submit,
    ToGateway,
    decode_to_scheduler,
    encode,
    pack_ids,
)
from octavo.protocol.sockets import bind_router, try_send

POLL_MS = 10
RETRY_S = 0.001  # between tries to send to a gateway whose queue is full
MAX_QUEUED_MESSAGES = 16  # on each end of the socket: steps that the gateway is behind


class InstantScheduler:
    """Serves at `address` in a thread of its own while the context lasts.

    Each sequence gets `token_ids` over and over, from when `begin` is called; steps are `step_s` apart.
    """

    def __init__(self, address: str, token_ids: Sequence[int], *, step_s: float = 0.0) -> None:
        self._address, self._step_s = address, step_s
        self._tokens = [pack_ids([token_id]) for token_id in token_ids]
        self._vocab_size = max(token_ids) + 1
        self._submits: list[Submit] = []
        self._identity = b""
        self._may_begin, self._is_stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def begin(self) -> None:
        """Send the tokens of the requests that were admitted."""
        self._may_begin.set()

    def __enter__(self) -> "InstantScheduler":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with (
            zmq.Context() as context,
            bind_router(context, self._address, high_water_mark=MAX_QUEUED_MESSAGES) as socket,
        ):
            while not self._is_stopping.is_set():
                if self._may_begin.is_set():
                    self._may_begin.clear()
                    submits, self._submits = self._submits, []
                    self._stream(socket, submits)
                elif socket.poll(POLL_MS):
                    self._receive(socket)

    def _stream(self, socket: "zmq.Socket[bytes]", submits: Sequence[Submit]) -> None:
        """Send every token of these requests, a step at a time."""
        started_s = time.monotonic()
        for index in range(max(submit.sampling.max_tokens for submit in submits)):
            while socket.poll(0):
                self._receive(socket)
            token = self._tokens[index % len(self._tokens)]
            outputs = [
                Output(submit.request_id, index, token, "length" if index + 1 == submit.sampling.max_tokens else None)
                for submit in submits
                if index < submit.sampling.max_tokens
            ]
            self._send(socket, Outputs(outputs))
            if self._is_stopping.wait(max(0.0, started_s + (index + 1) * self._step_s - time.monotonic())):
                return

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        self._identity, frame = socket.recv_multipart()
        match decode_to_scheduler(frame):
            case Hello():
                self._send(socket, Ready("instant", "fingerprint", self._vocab_size, 1 << 20, 16, 1 << 16, 1 << 16))
            case Submit() as submit:
                self._submits.append(submit)
                self._send(socket, Admitted(submit.request_id))
            case Abort():
                pass

    def _send(self, socket: "zmq.Socket[bytes]", message: ToGateway) -> None:
        frame = encode(message)
        while not try_send(socket, [self._identity, frame]) and not self._is_stopping.wait(RETRY_S):
            pass
