"""The lifeline: a socket pair by which parent and child notice each other's end, and the parent a child that is stuck.

The child beats from the loop that does its work, never from a thread of its own: a stuck loop falls silent even if
other threads run. Before its first beat the child loads, and its parent expects nothing.
"""

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable

LIFELINE_FLAG = "--lifeline-fd"
INTERVAL_S = 1.0  # between beats of a healthy process, busy or idle, at most
LONGEST_TURN_S = 2.0  # that one look of the parent adds to a silence, at most
GRACE_S = 10.0  # between the SIGTERM after the parent's end and the forced exit


class Heart:
    """The child's end. Without a socket nobody listens."""

    def __init__(self, lifeline: socket.socket | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket, self._clock = lifeline, clock
        self._due_s = clock()

    def beat(self) -> None:
        """Tell the parent that the calling loop has come around. A call costs next to nothing."""
        if self._socket is None or (now_s := self._clock()) < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        with contextlib.suppress(OSError):  # the buffer is full of beats, or the parent is gone: no matter here
            self._socket.send(b".", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def end_with_parent(self) -> None:
        """From here on, a thread ends this process when its parent is gone: by SIGTERM, and after GRACE_S by force."""
        if self._socket is not None:
            threading.Thread(target=self._wait_for_end, args=(self._socket,), name="lifeline", daemon=True).start()

    def _wait_for_end(self, lifeline: socket.socket) -> None:
        try:
            while lifeline.recv(1):
                pass
        except ConnectionResetError:
            pass  # the parent ended without reading the last beats
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE_S)
        os._exit(1)


# A fork copies this process's ends. The copies would keep children alive after this process is gone.
_of_this_process: "weakref.WeakSet[Lifeline]" = weakref.WeakSet()


def _close_copies() -> None:
    for lifeline in list(_of_this_process):
        lifeline.close()


os.register_at_fork(after_in_child=_close_copies)


class Lifeline:
    """The parent's end and, until `release`, the child's end, whose `fd` the child inherits."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.has_begun = False  # whether a beat of the child has been read
        self._silence_s = 0.0
        self._looked_s = 0.0
        _of_this_process.add(self)

    @property
    def fd(self) -> int:
        return self._theirs.fileno()

    def release(self) -> None:
        """Close the child's end here. Call this after the child was started, or failed to start."""
        self._theirs.close()

    def close(self) -> None:
        """Let go of the child: a living child then ends by itself."""
        self._theirs.close()
        self._ours.close()

    def silence_s(self, now_s: float) -> float:
        """Return for how long the child has not beaten; 0 before its first beat. Call this about every second.

        Only time in which this process looked counts: if both processes were frozen and thawed together, the child is
        not to blame.
        """
        elapsed_s = min(now_s - self._looked_s, LONGEST_TURN_S) if self.has_begun else 0.0
        self._looked_s = now_s
        if self._take_beats():
            self.has_begun, self._silence_s = True, 0.0
        else:
            self._silence_s += elapsed_s
        return self._silence_s

    def _take_beats(self) -> bool:
        """Read all beats that have come; return whether there were any."""
        has_beaten = False
        try:
            while self._ours.recv(4096):
                has_beaten = True
        except (BlockingIOError, ConnectionResetError):
            pass
        return has_beaten
