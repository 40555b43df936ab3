"""Handshakes that fail: the process says why, and tries again, so that it connects once the keys are right."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
FAILED = REFUSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
COMPLAINT_INTERVAL_S = 10.0
RECONNECT_S = 1.0  # after a refused handshake, which libzmq itself does not repeat
NUM_TOLERATED = 2  # broken connections in a row that may just be the scheduler's end


class HandshakeEvent(NamedTuple):
    kind: int
    value: int  # zmq.PROTOCOL_ERROR_…, or a status of the authentication


def monitor(socket: "zmq.Socket[Any]", events: int) -> "zmq.Socket[bytes]":
    """Return a socket on which the `events` of `socket`, of any context, arrive."""
    address = f"inproc://handshakes-{id(socket)}-{time.monotonic_ns()}"
    socket.monitor(address, events)
    listener: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR, socket_class=zmq.Socket)
    listener.set(zmq.LINGER, 0)
    listener.connect(address)
    return listener


def receive_event(listener: "zmq.Socket[bytes]") -> HandshakeEvent:
    """Wait for the next event and return it."""
    message = recv_monitor_message(listener)
    return HandshakeEvent(int(message["event"]), int(message["value"]))


class HandshakeWatch:
    """Watches the handshakes of one DEALER with the scheduler at `address`; made before the DEALER connects."""

    def __init__(
        self,
        socket: "zmq.Socket[Any]",
        address: str,
        *,
        has_keys: bool,
        is_silent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._address, self._has_keys, self._clock = socket, address, has_keys, clock
        self._is_silent = is_silent
        self._listener = monitor(socket, FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._num_failed = 0  # since the last success
        self._complained_s = -math.inf
        self._reconnect_s = math.inf

    def look(self) -> None:
        """Handle new events: log a failure, at a bounded rate, and connect again after libzmq gave up."""
        for event in self._events():
            if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_failed, self._reconnect_s = 0, math.inf
                continue
            self._num_failed += 1
            if event.kind & REFUSED:
                self._reconnect_s = self._clock() + RECONNECT_S
            if event.kind & REFUSED or self._num_failed > NUM_TOLERATED:
                self._complain(event)
        if self._clock() >= self._reconnect_s:
            self._reconnect_s = math.inf
            self._socket.disconnect(self._address)
            self._socket.connect(self._address)

    def close(self) -> None:
        """Stop watching. Call this before the socket is closed."""
        self._socket.disable_monitor()
        self._listener.close()

    def _events(self) -> Iterator[HandshakeEvent]:
        while self._listener.poll(0):
            yield receive_event(self._listener)

    def _complain(self, event: HandshakeEvent) -> None:
        if not self._is_silent and self._clock() - self._complained_s >= COMPLAINT_INTERVAL_S:
            self._complained_s = self._clock()
            logger.warning("no link to the scheduler at %s: %s", self._address, self._why(event))

    def _why(self, event: HandshakeEvent) -> str:
        if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                "it refuses this process's key. The scheduler has keys of another `octavo keys DIR`, or this key is of"
                " another kind of process; restart both with the directories of one `octavo keys DIR`"
            )
        if self._has_keys:
            return (
                "its key is not scheduler.key in link_keys_dir, or it has no key. Restart both with the directories of"
                " one `octavo keys DIR`"
            )
        return "it ends the handshake, probably because it asks for a key: set --link-keys-dir"
