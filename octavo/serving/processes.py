"""Starts the child processes of one server, watches them, restarts them when they end, and ends them together."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec

from octavo.errors import LaunchError
from octavo.protocol.config import Config
from octavo.protocol.lifeline import LIFELINE_FLAG, Lifeline
from octavo.protocol.process import REFUSED
from octavo.protocol.settings.loading import child_environ

logger = logging.getLogger(__name__)

STOP_ORDER = ("gateway", "executor", "scheduler")  # clients are told first
STOP_GRACE_S = 8.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
STABLE_AFTER_S = 60.0  # after a life this long, the next restart waits only briefly
SHOW_STACKS_S, KILL_S = 0.5, 5.0  # the time that a hung process has for each
POLL_S = 0.1


class Process(subprocess.Popen[bytes]):
    """One of our processes, run by `command` in a session of its own and tied to this one by a lifeline.

    When this process ends in any way, its end of the lifeline closes and the child stops by itself. Raises OSError if
    the command cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self.lifeline = Lifeline()
        try:
            super().__init__(
                [*command, LIFELINE_FLAG, str(self.lifeline.fd)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[self.lifeline.fd],
                start_new_session=True,  # a Ctrl-C reaches only this process, which then stops its children in order
            )
        except OSError:
            self.lifeline.close()
            raise
        self.lifeline.release()

    def end_hung(self) -> None:
        """Kill it, after it has printed the stacks of its threads (a stopped process cannot)."""
        self.send_signal(signal.SIGQUIT)
        for patience_s, end in ((SHOW_STACKS_S, self.kill), (KILL_S, lambda: None)):
            try:
                self.wait(patience_s)
            except subprocess.TimeoutExpired:
                end()


class Backoff:
    """How long to wait before a process is restarted: the wait doubles each time while lives are short."""

    def __init__(self) -> None:
        self._next_s = FIRST_BACKOFF_S

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait after a life of `lived_s` seconds."""
        wait_s = FIRST_BACKOFF_S if lived_s > STABLE_AFTER_S else self._next_s
        self._next_s = min(2 * wait_s, LONGEST_BACKOFF_S)
        return wait_s


class Child:
    """One role: the processes of its present life, and the time of its next restart.

    `start` begins a life. An executor has one process per rank; they start and end together. A process that does not
    beat for `hang_timeout_s` is killed; a process that is asked to end has `stop_grace_s` for it.
    """

    def __init__(
        self,
        role: str,
        start: Callable[[], Sequence[Process]],
        hang_timeout_s: float,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self.role, self._start, self._hang_timeout_s = role, start, hang_timeout_s
        self._stop_grace_s = stop_grace_s
        self.num_failed_starts = 0  # lives in a row that ended before they began their work
        self.processes = start()
        self._started_at_s = time.monotonic()
        self._restart_at_s: float | None = None
        self._backoff = Backoff()

    def ended(self) -> str | None:
        """Return which process has ended and how, if there is one."""
        for rank, process in enumerate(self.processes):
            if (status := process.poll()) is not None:
                how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
                return f"{self._name(rank)} {how}"
        return None

    def refused(self) -> str | None:
        """Return which process has ended because its settings or model cannot be used at present, if there is one."""
        return self.ended() if REFUSED in (process.poll() for process in self.processes) else None

    def revive(self, now_s: float) -> None:
        """Kill it if it hangs; restart it if it has ended, after a wait that grows while its lives are short.

        Call this often.
        """
        self._end_hung(now_s)
        ended = self.ended()
        if ended is None:
            return
        if self._restart_at_s is None:
            end_processes(self.processes)
            has_worked = any(process.lifeline.has_begun for process in self.processes)
            self.num_failed_starts = 0 if has_worked else self.num_failed_starts + 1
            lived_s = now_s - self._started_at_s
            wait_s = self._backoff.after(lived_s)
            self._restart_at_s = now_s + wait_s
            logger.error("the %s after %.0f s; it starts again in %.1f s", ended, lived_s, wait_s)
        elif now_s >= self._restart_at_s:
            self._restart(now_s)

    def end(self) -> None:
        """Ask its processes to end, and kill those that have not ended in time."""
        try:
            end_processes(self.processes, self._stop_grace_s)
        finally:
            self._close()

    def kill(self) -> None:
        """Kill its processes that have not ended."""
        kill_processes(self.processes)
        self._close()

    def _restart(self, now_s: float) -> None:
        """Begin the next life, or try again later: a machine may have enough processes or memory then."""
        try:
            processes = self._start()
        except OSError as error:
            wait_s = self._backoff.after(0.0)
            self._restart_at_s = now_s + wait_s
            logger.error("the %s cannot be started: %s; tried again in %.1f s", self.role, error.strerror, wait_s)
            return
        self._close()  # `ended` reads the old processes until there are new ones
        self.processes = processes
        self._started_at_s, self._restart_at_s = time.monotonic(), None

    def _end_hung(self, now_s: float) -> None:
        for rank, process in enumerate(self.processes):
            silence_s = process.lifeline.silence_s(now_s)
            if silence_s > self._hang_timeout_s and process.poll() is None:
                logger.error("the %s hangs: no sign of progress for %.0f s; it is ended", self._name(rank), silence_s)
                process.end_hung()

    def _name(self, rank: int) -> str:
        return self.role if len(self.processes) == 1 else f"rank {rank} of the {self.role}"

    def _close(self) -> None:
        for process in self.processes:
            process.lifeline.close()


class Processes:
    """The children of one server on one machine: one Child for each of `roles`. An executor's ranks are one Child.

    Only one thread at a time may use it. It handles no signals. `stderr` is the descriptor of the children's log; None
    means this process's own.
    """

    def __init__(self, config: Config, roles: Sequence[str], *, stderr: int | None = None) -> None:
        self.config, self._roles, self._stderr = config, roles, stderr
        self.children: dict[str, Child] = {}
        self._num_executor_lives = 0

    def start(self) -> None:
        """Start all children. Raises LaunchError; call `stop` also after an error."""
        for role in self._roles:
            try:
                self.children[role] = Child(
                    role, partial(self._start, role), self.config.hang_timeout_s, self.stop_grace_s(role)
                )
            except OSError as error:
                raise LaunchError(
                    f"the {role} cannot be started: {error.strerror}. `ulimit -a` shows what this user may have: "
                    "processes, open files, memory"
                ) from None

    def stop_grace_s(self, role: str) -> float:
        """Return how long a process of `role` may take to end: a gateway gives open streams a while."""
        return STOP_GRACE_S + (self.config.shutdown_timeout_s if role == "gateway" else 0)

    def ended(self) -> str | None:
        """Return which process has ended and how, if there is one."""
        return next((ended for child in self.children.values() if (ended := child.ended())), None)

    def cannot_start(self, num_tries: int) -> str | None:
        """Return which child refuses to start, or failed `num_tries` times in a row before it began its work."""
        for child in self.children.values():
            if refused := child.refused():
                return f"the {refused}"
            if child.num_failed_starts >= num_tries:
                return f"the {child.role} has failed to start {child.num_failed_starts} times"
        return None

    def statuses(self) -> list[int]:
        """Return the exit statuses of processes that have ended; a signal is a negative number."""
        processes = [process for child in self.children.values() for process in child.processes]
        return [status for process in processes if (status := process.poll()) is not None]

    def revive(self) -> None:
        """Restart children that have ended, each after its wait. Call this every POLL_S."""
        for child in self.children.values():
            child.revive(time.monotonic())

    def stop(self) -> None:
        """Ask every child to end, in order, and kill it if it takes too long. The object cannot be used afterwards.

        An interruption kills the children that are left.
        """
        try:
            for role in STOP_ORDER:
                if role in self.children:
                    self.children[role].end()
        finally:
            for child in self.children.values():
                child.kill()

    def _start(self, role: str) -> list[Process]:
        if role != "executor":
            return [self._start_process(role, self.config)]
        self._num_executor_lives += 1
        configs = rank_configs(self.config, self._num_executor_lives)
        return start_together(partial(self._start_process, role, config) for config in configs)

    def _start_process(self, role: str, config: Config) -> Process:
        environ = child_environ(config, os.environ, secrets=role == "gateway")
        return Process([sys.executable, "-P", "-m", f"octavo.{role}"], environ=environ, stderr=self._stderr)


def start_together(starts: Iterable[Callable[[], Process]]) -> list[Process]:
    """Start an executor's ranks. If one raises OSError, the others are ended."""
    with ExitStack() as unless_all_start:
        ranks = []
        for start in starts:
            ranks.append(rank := start())
            unless_all_start.callback(rank.lifeline.close)
            unless_all_start.callback(end_processes, [rank])
        unless_all_start.pop_all()
    return ranks


def why_ended_early(ended: str, statuses: Sequence[int]) -> str:
    """Return the message for a process that ended before the model was ready; `ended` says which and how."""
    if -signal.SIGKILL in statuses:
        return (
            f"the {ended} before the model was ready, which is how a system ends a process when memory runs out "
            "(`dmesg` tells). Take a smaller model, quantization int8 or int4, a smaller kv_cache_memory_bytes, or "
            "free some memory"
        )
    return f"the {ended} before the model was ready"


def end_processes(processes: Sequence[Process], grace_s: float = STOP_GRACE_S) -> None:
    """Ask the processes of one role to end, all at once, and kill those that have not ended after `grace_s`.

    An interruption (Ctrl-C) kills them at once, and is raised when they have ended.
    """
    deadline_s = time.monotonic() + grace_s
    try:
        for process in processes:
            process.send_signal(signal.SIGTERM)  # does nothing to a process that has ended
        with suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(max(0.0, deadline_s - time.monotonic()))
    finally:
        kill_processes(processes)


def kill_processes(processes: Sequence[Process]) -> None:
    """Kill the processes that have not ended, and wait for their end."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def rank_configs(config: Config, life: int) -> list[Config]:
    """Return the Config of each rank of the executor. The ranks of each life meet at an address of their own."""
    if config.tensor_parallel_size == 1:
        return [config]
    address = f"{config.distributed_address}-{life}"
    return [
        msgspec.structs.replace(config, rank=rank, distributed_address=address)
        for rank in range(config.tensor_parallel_size)
    ]


def with_sockets_in(directory: Path, config: Config) -> Config:
    """Return `config` for a server whose processes meet in `directory`."""
    return msgspec.structs.replace(
        config,
        frontend_address=f"ipc://{directory}/frontend",
        backend_address=f"ipc://{directory}/backend",
        distributed_address=f"file://{directory}/ranks",
    )
