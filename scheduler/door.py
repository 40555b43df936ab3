"""Who may connect to the scheduler's tcp:// addresses: one thread checks keys, another logs who was turned away.

Neither runs in the scheduler's loop, so strangers cost the loop nothing, however many there are.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import zmq
from zmq.auth.thread import ThreadAuthenticator

from octavo.protocol.handshakes import REFUSED, HandshakeEvent, monitor, receive_event
from octavo.protocol.link_keys import ServerKeys

logger = logging.getLogger(__name__)

COMPLAINT_INTERVAL_S = 10.0


class AdmittedKeys:
    """The keys that may connect, in the form that zmq.auth asks for."""

    def __init__(self, admitted: frozenset[bytes]) -> None:
        self._admitted = admitted

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._admitted


@contextmanager
def keep_door(context: "zmq.Context[zmq.Socket[bytes]]", *links: ServerKeys | None) -> Iterator[None]:
    """While the context lasts, admit to each link the peers that have its keys. Enter before any socket is bound."""
    keys = [each for each in links if each is not None]
    if not keys:
        yield
        return
    authenticator = ThreadAuthenticator(context)
    for each in keys:
        authenticator.configure_curve_callback(each.kind, AdmittedKeys(each.admitted))
    authenticator.start()
    try:
        yield
    finally:
        authenticator.stop()


@contextmanager
def report_refused(socket: "zmq.Socket[bytes]", address: str, keys: ServerKeys | None) -> Iterator[None]:
    """While the context lasts, log at a bounded rate that somebody was turned away from `socket`."""
    if keys is None:
        yield
        return
    listener = monitor(socket, REFUSED | zmq.EVENT_MONITOR_STOPPED)
    thread = threading.Thread(target=partial(_report, listener, address, keys.kind), name="door", daemon=True)
    thread.start()
    try:
        yield
    finally:
        socket.disable_monitor()
        thread.join()
        listener.close()


def _report(listener: "zmq.Socket[bytes]", address: str, kind: str) -> None:
    logged_s, num_unlogged = -COMPLAINT_INTERVAL_S, 0
    while (event := receive_event(listener)).kind != zmq.EVENT_MONITOR_STOPPED:
        if time.monotonic() - logged_s < COMPLAINT_INTERVAL_S:
            num_unlogged += 1
            continue
        logger.warning("turned somebody away from %s: %s (and %d before)", address, _why(event, kind), num_unlogged)
        logged_s, num_unlogged = time.monotonic(), 0


def _why(event: HandshakeEvent, kind: str) -> str:
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"its key is not the one of {kind}s"
    if event.value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "it has no key"
    return "it does not have this scheduler's public key"
