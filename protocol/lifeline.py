"""What ties a process to its parent: one socket pair, through which each notices that the other is gone or stuck.

The child beats from the loop that does its work, never from a thread of its own: a loop that is stuck falls silent,
whatever else in the process still runs. Until the first beat (it loads) nothing is expected of it.
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
INTERVAL_S = 1.0  # between beats; a process that is well beats at least this often, busy or idle
LONGEST_TURN_S = 2.0  # what one look of the parent adds to a silence, at most
GRACE_S = 10.0  # between being asked to end because the parent is gone, and ending


class Heart:
    """The child's end; without a socket, nobody listens."""

    def __init__(self, lifeline: socket.socket | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket, self._clock = lifeline, clock
        self._due_s = clock()

    def beat(self) -> None:
        """Say that the loop which calls this has come around. It costs next to nothing, however often it is called."""
        if self._socket is None or (now_s := self._clock()) < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        with contextlib.suppress(OSError):  # the parent has beats enough to read, or is gone: not this loop's business
            self._socket.send(b".", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def end_with_parent(self) -> None:
        """From now on, end this process when its parent is gone: in order, or else after GRACE_S."""
        if self._socket is not None:
            threading.Thread(target=self._wait_for_end, args=(self._socket,), name="lifeline", daemon=True).start()

    def _wait_for_end(self, lifeline: socket.socket) -> None:
        try:
            while lifeline.recv(1):
                pass
        except ConnectionResetError:
            pass  # it went without having read the last beats
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE_S)
        os._exit(1)


# A fork has copies of its parent's ends, which would keep children alive when the parent itself is gone.
_of_this_process: "weakref.WeakSet[Lifeline]" = weakref.WeakSet()


def _close_copies() -> None:
    for lifeline in list(_of_this_process):
        lifeline.close()


os.register_at_fork(after_in_child=_close_copies)


class Lifeline:
    """The parent's end, and until `release` the child's too: `fd` is for the child to inherit."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.has_begun = False  # whether the child has ever beaten, as far as this end has looked
        self._silence_s = 0.0
        self._looked_s = 0.0
        _of_this_process.add(self)

    @property
    def fd(self) -> int:
        return self._theirs.fileno()

    def release(self) -> None:
        """Leave the child's end to the child. To be called once it has been started, or could not be."""
        self._theirs.close()

    def close(self) -> None:
        """Let go of the child: if it lives, it ends by itself."""
        self._theirs.close()
        self._ours.close()

    def silence_s(self, now_s: float) -> float:
        """Return for how long the child has not beaten; 0 before it first did. To be called every second or so.

        Only time in which this process looked counts: where both were frozen and thawed together, the child has done
        nothing wrong.
        """
        elapsed_s = min(now_s - self._looked_s, LONGEST_TURN_S) if self.has_begun else 0.0
        self._looked_s = now_s
        if self._take_beats():
            self.has_begun, self._silence_s = True, 0.0
        else:
            self._silence_s += elapsed_s
        return self._silence_s

    def _take_beats(self) -> bool:
        """Read all that has come, and return whether anything had."""
        has_beaten = False
        try:
            while self._ours.recv(4096):
                has_beaten = True
        except (BlockingIOError, ConnectionResetError):
            pass
        return has_beaten
