"""The private directory in which one server's processes meet, and the end of those whose servers were killed.

Who makes one holds a lock in it as long as it lives. A directory with such a lock that nobody holds belongs to no
server any more; whatever else has a similar name has no such lock, and is left alone.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octavo.errors import LaunchError
from octavo.protocol.sockets import MAX_IPC_PATH_BYTES

PREFIX = "octavo-"
LOCK = "server.lock"
NUM_NAME_BYTES = len(f"/{PREFIX}12345678/frontend")  # of the longest socket's path, below the directory's parent


@contextmanager
def socket_directory() -> Iterator[Path]:
    """Make a private directory for one server's sockets, short enough for a socket's path; it goes with the server.

    Those of servers that were killed go first. Raises LaunchError if none can be made.
    """
    parent = _parent()
    _remove_abandoned(parent)
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = _hold(path)
    except OSError as error:
        raise LaunchError(f"no directory for sockets can be made in {parent}: {error.strerror}") from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _parent() -> Path:
    """Return the directory of this user's sockets, or /tmp if there is none or a socket's path in it is too long."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    fits = base and len(os.fsencode(base)) + NUM_NAME_BYTES <= MAX_IPC_PATH_BYTES
    return Path(base) if base and fits and os.access(base, os.W_OK) else Path("/tmp")


def _hold(directory: Path) -> int:
    """Return the lock of a new directory, held until it is closed: it appears there only when it is held."""
    made = directory / f"{LOCK}.new"
    lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    made.rename(directory / LOCK)
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of this user's servers that were killed."""
    for directory in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another's, held, or removed by another meanwhile
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid() and not directory.is_symlink():
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
