"""The sockets of both links: the scheduler binds a ROUTER, everyone else connects a DEALER.

No send blocks, no queue grows beyond the high-water mark, and a send to an absent peer fails at once
(ROUTER_MANDATORY). Each life of a process has a random identity; a connection with a known identity takes that identity
over (ROUTER_HANDOVER).
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import zmq

from octavo.protocol.link_keys import TCP, ClientKeys, ServerKeys

MAX_MESSAGE_BYTES = 64 << 20
MAX_IPC_PATH_BYTES = 107  # of a Unix socket's path, without the closing zero
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 4000
HANDSHAKE_MS = 5000  # for a handshake; then the connection is closed

AnySocket = TypeVar("AnySocket", bound="zmq.Socket[bytes]")


def new_identity() -> str:
    """Return a random name for one life of a process: an incarnation, a gateway_id, a socket's identity."""
    return os.urandom(8).hex()


def configure(socket: AnySocket, *, high_water_mark: int = 1000) -> AnySocket:
    """Return `socket` with the options that both ends of both links share."""
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.SNDHWM, high_water_mark)
    socket.set(zmq.RCVHWM, high_water_mark)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    return socket


def bind_router(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ServerKeys | None = None, **options: int
) -> "zmq.Socket[bytes]":
    """Return a ROUTER bound to `address`; hold the address first. Raises ValueError if it cannot be bound.

    With `keys`, every TCP peer must show a key, and `scheduler/door.py` says whether the key is admitted. Without a
    running door nobody is admitted.
    """
    socket = configure(context.socket(zmq.ROUTER), **options)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.ROUTER_HANDOVER, 1)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if keys is not None and address.startswith(TCP):
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.own.secret)
        socket.set(zmq.ZAP_DOMAIN, keys.kind.encode())
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ValueError(f"cannot listen on {address}: {error.strerror}") from None
    return socket


def connect_dealer(
    socket: AnySocket, address: str, identity: str, keys: ClientKeys | None = None, **options: int
) -> AnySocket:
    """Return `socket`, a DEALER of any context, connected under `identity`. The peer may start later.

    `keys` are for TCP: the socket then speaks only to the scheduler that has the secret key.
    """
    configure(socket, **options)
    if keys is not None and address.startswith(TCP):
        socket.set(zmq.CURVE_PUBLICKEY, keys.own.public)
        socket.set(zmq.CURVE_SECRETKEY, keys.own.secret)
        socket.set(zmq.CURVE_SERVERKEY, keys.scheduler)
    socket.set(zmq.IDENTITY, identity.encode())
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(address)
    return socket


def try_send(socket: "zmq.Socket[bytes]", frames: Sequence[bytes]) -> bool:
    """Send without blocking. Return False, and queue nothing, if the peer is gone or its queue is full."""
    try:
        socket.send_multipart(frames, zmq.DONTWAIT)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH, errno.ECONNRESET):
            return False
        raise
    return True


@contextmanager
def hold_address(address: str) -> Iterator[None]:
    """Hold an ipc address for one process while the context lasts; other transports guard their addresses themselves.

    A second bind on a live ipc path would silently take the path over. A missing directory is made, as a private one.
    Raises ValueError if the path is too long, its directory is not private, or another process holds the address.
    """
    if not address.startswith("ipc://"):
        yield
        return
    path = Path(address.removeprefix("ipc://"))
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ValueError(
            f"the socket path {path} is longer than {MAX_IPC_PATH_BYTES} bytes: choose a shorter directory"
        )
    try:
        _ensure_private(path.parent)
    except OSError as error:
        raise ValueError(f"no directory for sockets can be made at {path.parent}: {error.strerror}") from None
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"{address} is in use by another process") from None
    try:
        yield
    finally:
        os.close(lock)  # the file stays: without it two processes could hold two files of one name


def _ensure_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"{directory} must belong to this user and be closed to others (chmod 700)")
