"""`octavo serve`: start scheduler, executor and gateway, keep them alive, and end them together."""

import dataclasses
import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from protocol.config import Config, child_environ
from protocol.process import LIFELINE_FLAG, REFUSED

logger = logging.getLogger(__name__)

ROLES = ("scheduler", "executor", "gateway")
STOP_ORDER = ("gateway", "executor", "scheduler")  # clients are told first
STOP_GRACE_S = 8.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
STABLE_AFTER_S = 60.0  # a life this long makes the next restart prompt again
POLL_S = 0.1


class LaunchError(Exception):
    """The server cannot start; the message says why, or that the process which failed has said it."""


class ChildRefusedError(LaunchError):
    """A process does not start, and has said why in one paragraph: there is nothing to add."""


@dataclasses.dataclass
class Child:
    """One role: the processes of this life of it, and when the next may begin.

    There are several of an executor's ranks, which live and die together.
    """

    role: str
    processes: list[subprocess.Popen[bytes]]
    started_at_s: float
    backoff_s: float = FIRST_BACKOFF_S
    restart_at_s: float | None = None

    def ended(self) -> str | None:
        """Return which process has ended and how, if there is one."""
        for rank, process in enumerate(self.processes):
            if (status := process.poll()) is not None:
                name = self.role if len(self.processes) == 1 else f"rank {rank} of the {self.role}"
                how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
                return f"{name} {how}"
        return None

    def refused(self) -> bool:
        """Return whether a process ended because it cannot start, and has said why."""
        return any(process.poll() == REFUSED for process in self.processes)


class Launcher:
    """The three roles of one server on one machine.

    A pipe ties every child to this process: when it ends, however it ends, its end of the pipe closes and they stop.
    Before the server is ready, a child that ends stops everything (it has said why); afterwards it is restarted.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.children: dict[str, Child] = {}
        self._num_lives = 0  # of all roles
        self.lifeline, self._lifeline_end = os.pipe()
        os.set_inheritable(self.lifeline, True)
        self.stopping = False

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM. Raises LaunchError if a process ends before the server is ready."""
        with _signals(self._request_stop):
            try:
                self.children = {role: self._start(role) for role in ROLES}
                self._until_ready()
                self._supervise()
            finally:
                self._stop()

    def _request_stop(self) -> None:
        self.stopping = True

    def _start(self, role: str) -> Child:
        self._num_lives += 1
        configs = rank_configs(self.config, self._num_lives) if role == "executor" else [self.config]
        return Child(role, [self._start_process(role, config) for config in configs], time.monotonic())

    def _start_process(self, role: str, config: Config) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", role, LIFELINE_FLAG, str(self.lifeline)],
            env=child_environ(config, os.environ, secrets=role == "gateway"),
            stdin=subprocess.DEVNULL,
            pass_fds=[self.lifeline],
            start_new_session=True,  # a Ctrl-C reaches this process alone, which then stops them in order
        )

    def _until_ready(self) -> None:
        started_s = time.monotonic()
        while not self.stopping:
            for child in self.children.values():
                if ended := child.ended():
                    raise _start_error(child, ended)
            if _answers(health_url(self.config)):
                print(ready_text(self.config, time.monotonic() - started_s), flush=True)
                return
            time.sleep(POLL_S)

    def _supervise(self) -> None:
        while not self.stopping:
            for child in self.children.values():
                self._revive(child, time.monotonic())
            time.sleep(POLL_S)

    def _revive(self, child: Child, now_s: float) -> None:
        """Restart `child` if it has ended, after a wait that grows while its lives are short."""
        ended = child.ended()
        if ended is None:
            return
        if child.restart_at_s is None:
            _end(child.processes)
            lived_s = now_s - child.started_at_s
            child.backoff_s = FIRST_BACKOFF_S if lived_s > STABLE_AFTER_S else child.backoff_s
            child.restart_at_s = now_s + child.backoff_s
            logger.error("the %s after %.0f s; it starts again in %.1f s", ended, lived_s, child.backoff_s)
        elif now_s >= child.restart_at_s:
            backoff_s = min(child.backoff_s * 2, LONGEST_BACKOFF_S)
            self.children[child.role] = dataclasses.replace(self._start(child.role), backoff_s=backoff_s)

    def _stop(self) -> None:
        """End every child: ask, in order, and kill what has not ended in time."""
        if self.stopping:
            logger.info("stopping")
        for role in STOP_ORDER:
            if role in self.children:
                _end(self.children[role].processes)
        os.close(self._lifeline_end)
        os.close(self.lifeline)


def _start_error(child: Child, ended: str) -> LaunchError:
    """Return the error of a server whose child, as `ended` says, has ended before it was ready."""
    if child.refused():
        return ChildRefusedError(f"the {ended}: it says why above")
    if any(process.poll() == -signal.SIGKILL for process in child.processes):
        return LaunchError(
            f"nothing is served: the {ended} before it was ready, which is how a system ends a process when memory "
            "runs out (`dmesg` tells). Take a smaller model, --quantization int8 or int4, a smaller "
            "--kv-cache-memory-bytes, or free some memory."
        )
    return LaunchError(f"nothing is served: the {ended} before it was ready; what it said last is above.")


def rank_configs(config: Config, life: int) -> list[Config]:
    """Return the Config of each rank of the executor, which meet where no other life of it does."""
    if config.tensor_parallel_size == 1:
        return [config]
    address = f"{config.distributed_address}-{life}"
    return [
        msgspec.structs.replace(config, rank=rank, distributed_address=address)
        for rank in range(config.tensor_parallel_size)
    ]


def serve(config: Config, model_directory: Path, served_name: str) -> None:
    """Serve the model in `model_directory` until interrupted. Raises LaunchError."""
    with socket_directory() as directory:
        resolved = msgspec.structs.replace(
            config,
            model=str(model_directory),
            served_model_name=config.served_model_name or (served_name,),
            port=config.port or listening_port(config),
            frontend_address=f"ipc://{directory}/frontend",
            backend_address=f"ipc://{directory}/backend",
            distributed_address=f"file://{directory}/ranks",
        )
        Launcher(resolved).run()


def listening_port(config: Config) -> int:
    """Return the port on which the gateway can listen: the configured one, or a free one for 0.

    Raises LaunchError if it could not: found out before minutes of loading.
    """
    try:
        # The gateway chooses among a name's addresses in the same way.
        family, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise LaunchError(f"cannot listen on {config.host}:{config.port}: {cause}. {_listen_remedy(error)}") from None


def _listen_remedy(error: Exception) -> str:
    match getattr(error, "errno", None):
        case errno.EADDRINUSE:
            return "Stop what uses it, or choose another with --port (0 takes a free one)."
        case errno.EACCES:
            return "Only root may take ports below 1024 here: choose another with --port, such as 8000."
        case _:
            return "--host takes an address or a name of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them."


@contextmanager
def socket_directory() -> Iterator[Path]:
    """Make a private directory for one server's sockets, short enough for a socket's path; it goes with the server."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(tempfile.mkdtemp(prefix="octavo-", dir=base if base and os.access(base, os.W_OK) else "/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def health_url(config: Config) -> str:
    return f"http://{_reachable_host(config.host)}:{config.port}/health"


def ready_text(config: Config, seconds: float) -> str:
    """Return what a person sees once requests are served: where, and one to try."""
    url = f"http://{_reachable_host(config.host)}:{config.port}"
    name = config.served_model_name[0]
    authorization = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    message = '{"role": "user", "content": "What is a page?"}'
    return (
        f"Octavo serves {name} on {url} (ready in {seconds:.1f} s; Ctrl-C stops it). Try:\n"
        f"  curl {url}/v1/chat/completions{authorization} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", "messages": [{message}], "max_tokens": 40}}\''
    )


def _reachable_host(host: str) -> str:
    """Return an address at which a listener on `host` can be reached from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable


def _answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:  # refused, timed out, or a status that is an error
        return False


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes of one role: ask all at once, and kill what has not ended in time."""
    deadline_s = time.monotonic() + STOP_GRACE_S
    for process in processes:
        process.send_signal(signal.SIGTERM)  # nothing is sent to one that has ended
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `request_stop` while the body runs, its clean-up included."""
    former = {number: signal.signal(number, lambda *_: request_stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
