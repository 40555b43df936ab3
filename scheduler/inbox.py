"""What arrives at one ROUTER, decoded; what is not a message is logged, seldom, and dropped."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec
import zmq

logger = logging.getLogger(__name__)

COMPLAINT_INTERVAL_S = 1.0
GENERATED = b"\0"  # what an identity that libzmq makes begins with, and no other may

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
        self.is_drained = True  # nothing was left at the end of the last `take`
        self._complained_s = -math.inf
        self._num_unsaid = 0

    def take(self, limit: int) -> Iterator[tuple[bytes, Received]]:
        """Yield what has arrived, after at most `limit` frames; never waits.

        Nothing is taken from an identity that libzmq made up: what an old connection left behind of a peer that came
        back comes under one, and so does whoever gave no name.
        """
        self.is_drained = False
        for _ in range(limit):
            try:
                identity, *payload = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                self.is_drained = True
                return
            if identity.startswith(GENERATED):
                self.complain("a message without the identity of its sender")
                continue
            if len(payload) != 1:
                self.complain(f"a message of {len(payload)} frames")
                continue
            try:
                message = self._decode(payload[0])
            except msgspec.MsgspecError as error:
                self.complain(str(error))
                continue
            yield identity, message

    def complain(self, problem: str) -> None:
        """Log what is wrong with a message that is dropped, at most once a second."""
        now_s = self._clock()
        if now_s - self._complained_s < COMPLAINT_INTERVAL_S:
            self._num_unsaid += 1
            return
        logger.warning("dropped what %s sent: %s (and %d before)", self._sender, problem, self._num_unsaid)
        self._complained_s, self._num_unsaid = now_s, 0
