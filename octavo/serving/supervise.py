"""`octavo supervise`: the parent of one process, or of an executor's ranks, at home or as process 1 of a container.

It restarts the process when it ends or hangs, forwards the signals that ask it to end, and reaps what others left.
"""

import ctypes
import itertools
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial

from octavo.errors import LaunchError
from octavo.protocol.config import PREFIX
from octavo.protocol.process import REFUSED
from octavo.serving.child_log import ChildLog
from octavo.serving.processes import POLL_S, STOP_GRACE_S, Child, Process, kill_processes, start_together

FORWARDED = (signal.SIGINT, signal.SIGTERM)
LOOK_S = 1.0  # how often the beats are checked
PR_SET_CHILD_SUBREAPER = 36


def supervise(
    command: Sequence[str], hang_timeout_s: float, stop_grace_s: float = STOP_GRACE_S, *, num_ranks: int = 1
) -> int:
    """Keep `command`, one of our processes, running until a signal; return the status with which it ended at last.

    The signal is passed on, and the process is killed if it has not ended `stop_grace_s` later. This also returns if
    the process refuses to start, because a restart would not help. With `num_ranks`, the command is an executor's and
    runs once per rank; the status is that of rank 0. Raises LaunchError if the command cannot be run.
    """
    adopt_orphans()
    with _signals() as signals, _meeting(num_ranks) as directory, _log(num_ranks) as stderr:
        child = _started(command, hang_timeout_s, num_ranks, directory, stderr)
        while not signals.asked:
            if child.refused():
                child.end()
                return REFUSED
            child.revive(time.monotonic())
            is_running = all(process.returncode is None for process in child.processes)
            signals.wait(LOOK_S if is_running else POLL_S)
            reap_orphans({process.pid for process in child.processes})
        return _end(child.processes, signals.asked[0], stop_grace_s)


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose parent has ended, like process 1."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(child_pids: Container[int]) -> None:
    """Reap every ended child except `child_pids`, whose statuses are for their Popen objects."""
    try:
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and (
            ended.si_pid not in child_pids
        ):
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        pass  # there are no children


class Signals:
    """The signals that this process got, and a wait that every signal ends."""

    def __init__(self, wakeup: int) -> None:
        self.asked: list[int] = []  # FORWARDED ones, in order
        self._wakeup = wakeup

    def wait(self, seconds: float) -> None:
        """Wait for a signal or the end of a child, and no longer than `seconds`."""
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
    former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # an ignored signal would not end a wait
    former_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(former_wakeup)
        for number, action in former.items():
            signal.signal(number, action)
        for end in (reader, writer):
            os.close(end)


def _meeting(num_ranks: int) -> AbstractContextManager[str]:
    """Return a context with a private directory in which ranks meet; with no directory for a single rank."""
    if num_ranks == 1:
        return nullcontext("")
    try:
        return tempfile.TemporaryDirectory(prefix="octavo-ranks-")
    except OSError as error:
        raise LaunchError(f"ranks need a directory to meet in: {error}") from None


@contextmanager
def _log(num_ranks: int) -> Iterator[int | None]:
    """Yield the descriptor of the ranks' log, in which the reason of a refusal comes last. None for a single rank.

    All ranks must have ended at the end of the context.
    """
    if num_ranks == 1:
        yield None
        return
    with closing(ChildLog(reasons_last=True)) as log:
        yield log.descriptor


def _started(
    command: Sequence[str], hang_timeout_s: float, num_ranks: int, directory: str, stderr: int | None
) -> Child:
    lives = itertools.count(1)

    def start() -> list[Process]:
        if num_ranks == 1:
            return [Process(command)]
        address = f"file://{directory}/{next(lives)}"  # each life has its own
        return start_together(partial(_start_rank, command, rank, address, stderr) for rank in range(num_ranks))

    try:
        return Child(f"process {shlex.join(command)}", start, hang_timeout_s)
    except OSError as error:
        raise LaunchError(f"cannot run {command[0]}: {error.strerror}") from None


def _start_rank(command: Sequence[str], rank: int, address: str, stderr: int | None) -> Process:
    where = {f"{PREFIX}RANK": str(rank), f"{PREFIX}DISTRIBUTED_ADDRESS": address}
    return Process(command, environ={**os.environ, **where}, stderr=stderr)


def _end(processes: Sequence[Process], number: int, grace_s: float) -> int:
    """Forward a signal, kill processes that do not end in time, and return the first one's status in a shell's form."""
    for process in processes:
        process.send_signal(number)
    deadline_s = time.monotonic() + grace_s
    with suppress(subprocess.TimeoutExpired):
        for process in processes:
            process.wait(max(0.0, deadline_s - time.monotonic()))
    kill_processes(processes)
    status = processes[0].wait()
    return status if status >= 0 else 128 - status
