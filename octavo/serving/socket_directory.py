"""The private directory for one server's sockets. Directories of killed servers are removed.

A server holds a lock in its directory as long as it lives. A directory whose lock is free is left of a killed server.
Directories with similar names but without a lock are left alone.
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
    """Make a private directory for one server's sockets, with a short path; it is removed at the end of the context.

    Directories of killed servers are removed first. Raises LaunchError if the directory cannot be made.
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
    """Return this user's runtime directory, or /tmp if there is none or the path of a socket in it is too long."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    fits = base and len(os.fsencode(base)) + NUM_NAME_BYTES <= MAX_IPC_PATH_BYTES
    return Path(base) if base and fits and os.access(base, os.W_OK) else Path("/tmp")


def _hold(directory: Path) -> int:
    """Return the lock of a new directory, held until it is closed. It is never visible there without being held."""
    made = directory / f"{LOCK}.new"
    lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    made.rename(directory / LOCK)
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Remove the directories of this user's servers that were killed."""
    for directory in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, held, or removed by another process meanwhile
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid() and not directory.is_symlink():
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
