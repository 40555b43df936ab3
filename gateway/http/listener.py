"""The socket that the gateway listens on. A gateway stops listening without losing connections that were made."""

import ctypes
import errno
import logging
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from octavo.protocol.tcp import bind

logger = logging.getLogger(__name__)

BACKLOG = 2048
SOCKET_MODE = 0o660  # of a Unix socket: a proxy is in this user's group
SO_ATTACH_FILTER = 26  # of Linux on the architectures that Python's wheels are built for
# In the kernel's packet filter language, over a TCP header: drop a segment that asks for a new connection (of the flags
# in byte 13, SYN without ACK), and keep all others. An instruction is: code, jump if true, jump if false, operand.
NO_NEW_CONNECTIONS = (
    (0x30, 0, 0, 13),  # load the byte
    (0x54, 0, 0, 0x12),  # keep its bits SYN and ACK
    (0x15, 0, 1, 0x02),  # if only SYN is set
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep
)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host`, which `bind` resolves. Raises OSError or UnicodeError."""
    listener = bind(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    # Connections inherit the option. Without it each small write waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextmanager
def listening_at(path: str) -> Iterator[socket.socket]:
    """Listen on a Unix socket at `path`, for this user and group, as long as the context lasts. Raises OSError.

    An old socket without a listener is replaced; any other file at `path` stays.
    """
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        made = os.stat(path).st_ino
        try:
            os.chmod(path, SOCKET_MODE)  # before anybody can connect
            listener.listen(BACKLOG)
            yield listener
        finally:
            with suppress(OSError):
                if os.stat(path).st_ino == made:  # not another server's
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                return
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def turn_away(listener: socket.socket) -> None:
    """Let no new connection into the queue of `listener`, so that the server can accept all that wait in it.

    A close alone resets the connections in the queue. They are established, and a proxy may have sent a request over
    one, which it must not send to another gateway. A client that is turned away tries again after a second and is
    refused once the listener is closed: a proxy can then safely use another gateway. On other systems than Linux the
    listener is only closed.
    """
    if sys.platform != "linux" or listener.family == socket.AF_UNIX:
        return
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in NO_NEW_CONNECTIONS)
    program = ctypes.create_string_buffer(instructions)
    option = struct.pack("HP", len(NO_NEW_CONNECTIONS), ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, option)
    except OSError as error:  # a sandbox may have no packet filters
        logger.warning("connections that are being made now may be reset: %s", error)
