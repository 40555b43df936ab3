"""Messages that arrive at one ROUTER, decoded. Malformed ones are dropped, and logged at a bounded rate."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec
import zmq

logger = logging.getLogger(__name__)

COMPLAINT_INTERVAL_S = 1.0
GENERATED_PREFIX = b"\0"  # of identities that libzmq makes up; no other identity may begin so

Received = TypeVar("Received")


class Inbox(Generic[Received]):
    """One socket's messages, each with the identity of its sender."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        decode: Callable[[bytes], Received],
        sender: str,
        clock: Callable[[], float],
    ) -> None:
        self._socket = socket
        self._decode = decode
        self._sender = sender
        self._clock = clock
        self.is_drained = True  # no message was left at the end of the last `take`
        self._complained_s = -math.inf
        self._num_unlogged = 0

    def take(self, limit: int) -> Iterator[tuple[bytes, Received]]:
        """Yield the messages that have arrived, at most `limit`; never waits.

        Messages under an identity that libzmq made up are dropped: their sender gave no identity, or an old connection
        of a peer that came back left them behind.
        """
        self.is_drained = False
        for _ in range(limit):
            try:
                identity, *payload = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                self.is_drained = True
                return
            if identity.startswith(GENERATED_PREFIX):
                self.complain("it is without the identity of its sender")
                continue
            if len(payload) != 1:
                self.complain(f"it is malformed, with {len(payload)} frames")
                continue
            try:
                message = self._decode(payload[0])
            except msgspec.MsgspecError as error:
                self.complain(f"it is malformed: {error}")
                continue
            yield identity, message

    def complain(self, problem: str) -> None:
        """Log why a message was dropped, at most once a second."""
        now_s = self._clock()
        if now_s - self._complained_s < COMPLAINT_INTERVAL_S:
            self._num_unlogged += 1
            return
        logger.warning("dropped a message from %s: %s (and %d before)", self._sender, problem, self._num_unlogged)
        self._complained_s, self._num_unlogged = now_s, 0
