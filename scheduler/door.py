"""Who may connect to the scheduler's tcp:// addresses: a thread asks for keys, another says whom it turned away.

Neither turns with the scheduler's loop: strangers who knock cost it nothing, however many there are.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import zmq
from zmq.auth.thread import ThreadAuthenticator

from protocol.handshakes import REFUSED, HandshakeEvent, monitor, receive_event
from protocol.link_keys import ServerKeys

logger = logging.getLogger(__name__)

COMPLAINT_INTERVAL_S = 10.0


class Admission:
    """Whom zmq.auth is to admit, in its own form."""

    def __init__(self, admitted: frozenset[bytes]) -> None:
        self._admitted = admitted

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._admitted


@contextmanager
def keep_door(context: "zmq.Context[zmq.Socket[bytes]]", *links: ServerKeys | None) -> Iterator[None]:
    """Admit to each link those with its keys while the context lasts. Enter before anything is bound."""
    keys = [each for each in links if each is not None]
    if not keys:
        yield
        return
    authenticator = ThreadAuthenticator(context)
    for each in keys:
        authenticator.configure_curve_callback(each.kind, Admission(each.admitted))
    authenticator.start()
    try:
        yield
    finally:
        authenticator.stop()


@contextmanager
def report_refused(socket: "zmq.Socket[bytes]", address: str, keys: ServerKeys | None) -> Iterator[None]:
    """Log, seldom, that somebody was turned away from `socket`, while the context lasts."""
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
    said_s, num_unsaid = -COMPLAINT_INTERVAL_S, 0
    while (event := receive_event(listener)).kind != zmq.EVENT_MONITOR_STOPPED:
        if time.monotonic() - said_s < COMPLAINT_INTERVAL_S:
            num_unsaid += 1
            continue
        logger.warning("turned somebody away from %s: %s (and %d before)", address, _why(event, kind), num_unsaid)
        said_s, num_unsaid = time.monotonic(), 0


def _why(event: HandshakeEvent, kind: str) -> str:
    if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"its key is not the one of {kind}s"
    if event.value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "it has no key"
    return "it does not have this scheduler's public key"
