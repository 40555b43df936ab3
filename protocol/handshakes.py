"""Handshakes that fail: a process whose key is wrong says so, and is there when it, or the scheduler, is put right."""

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
RECONNECT_S = 1.0  # after a handshake that libzmq does not try again
NUM_TOLERATED = 2  # connections that break may be a scheduler's end; more in a row are not


class HandshakeEvent(NamedTuple):
    kind: int
    value: int  # an error of the protocol (zmq.PROTOCOL_ERROR_…), or a status of the authentication


def monitor(socket: "zmq.Socket[Any]", events: int) -> "zmq.Socket[bytes]":
    """Return what tells of `events` of `socket`, which may be of any context."""
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
    """Watches the handshakes of one DEALER with the scheduler at `address`, from before it connects on."""

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
        self._num_failed = 0  # since the last that succeeded
        self._complained_s = -math.inf
        self._reconnect_s = math.inf

    def look(self) -> None:
        """Take note of what has happened: log it, seldom, and connect again where libzmq has given up."""
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
        """Watch no more; call it before the socket is closed."""
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
                "it refuses this process's key. It was started with others, or this is the key of another kind of"
                " process; restart both with the directories of one `octavo keys DIR`"
            )
        if self._has_keys:
            return (
                "it has another key than scheduler.key in link_keys_dir, or none. Restart both with the directories"
                " of one `octavo keys DIR`"
            )
        return "it ends the handshake, probably since it asks for a key: set --link-keys-dir"
