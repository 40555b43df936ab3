"""`octavo supervise`: the parent of one process, at home or as process 1 of a container.

It restarts the process when it ends or hangs, forwards the signals that ask it to end, and reaps what others left.
"""

import ctypes
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octavo.errors import LaunchError
from octavo.processes import POLL_S, STOP_GRACE_S, Child, Process
from protocol.process import REFUSED

FORWARDED = (signal.SIGINT, signal.SIGTERM)
LOOK_S = 1.0  # a look at the beats, unless a signal comes before
PR_SET_CHILD_SUBREAPER = 36


def supervise(command: Sequence[str], hang_timeout_s: float, stop_grace_s: float = STOP_GRACE_S) -> int:
    """Keep `command`, one of our processes, running until a signal; return the status with which it ended at last.

    The signal is passed on, and the process killed if it has not ended `stop_grace_s` later. It ends by itself where
    the process refuses to start, which no further life would mend. Raises LaunchError if the command cannot be run.
    """
    adopt_orphans()
    with _signals() as signals:
        child = _started(command, hang_timeout_s)
        while not signals.asked:
            if child.refused():
                return REFUSED
            child.revive(time.monotonic())
            process = child.processes[0]
            signals.wait(LOOK_S if process.returncode is None else POLL_S)
            reap_orphans(process.pid)
        return _end(child.processes[0], signals.asked[0], stop_grace_s)


def adopt_orphans() -> None:
    """Have the system make descendants whose parent has ended children of this process, as it does for process 1."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(child_pid: int) -> None:
    """Take note of the end of every process but `child_pid`, whose status is for its Popen: zombies go away."""
    try:
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child_pid:
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        pass  # there is none at all


class Signals:
    """What this process was asked for, and a wait that every signal ends."""

    def __init__(self, wakeup: int) -> None:
        self.asked: list[int] = []  # FORWARDED ones, in order
        self._wakeup = wakeup

    def wait(self, seconds: float) -> None:
        """Wait for a signal, the end of a child included, and no longer than `seconds`."""
        if select.select([self._wakeup], [], [], seconds)[0]:
            os.read(self._wakeup, 4096)

    def ask(self, number: int, *_: object) -> None:
        self.asked.append(number)


@contextmanager
def _signals() -> Iterator[Signals]:
    """Receive signals while the body runs."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signals = Signals(reader)
    former = {number: signal.signal(number, signals.ask) for number in FORWARDED}
    former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # only then does it end a wait
    former_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(former_wakeup)
        for number, action in former.items():
            signal.signal(number, action)
        for end in (reader, writer):
            os.close(end)


def _started(command: Sequence[str], hang_timeout_s: float) -> Child:
    try:
        return Child(f"process {shlex.join(command)}", lambda: [Process(command)], hang_timeout_s)
    except OSError as error:
        raise LaunchError(f"cannot run {command[0]}: {error.strerror}") from None


def _end(process: Process, number: int, grace_s: float) -> int:
    """Forward a signal, kill what has not ended in time, and return the status as a shell would."""
    process.send_signal(number)
    try:
        status = process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return status if status >= 0 else 128 - status
