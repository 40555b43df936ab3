"""The executor's socket to its scheduler."""

import zmq

from octavo.protocol.handshakes import HandshakeWatch
from octavo.protocol.link_keys import ClientKeys
from octavo.protocol.sockets import connect_dealer

Socket = zmq.Socket[bytes]


def connect(
    context: zmq.Context[Socket],
    address: str,
    identity: str,
    keys: ClientKeys | None = None,
    *,
    is_silent: bool = False,
) -> tuple[Socket, HandshakeWatch]:
    """Return a socket to the scheduler, and the watch of its handshakes.

    The socket queues nothing while no scheduler is there: the next scheduler would first read old messages.
    """
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IMMEDIATE, 1)
    handshakes = HandshakeWatch(socket, address, has_keys=keys is not None, is_silent=is_silent)
    return connect_dealer(socket, address, identity, keys), handshakes
