"""A server as processes: started, measured from outside, and ended with all that it started."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from octavo.bench.serve.client import ROUTES, Sender, Server, first_model, open_session
from octavo.bench.serve.requests import bodies, random_requests
from octavo.bench.serve.work import Work
from octavo.bench.versus.plan import ServerPlan
from octavo.errors import CommandError

PROBE = Work(num_prompts=1, input_len="4", output_len="1")
POLL_S = 0.05
END_TIMEOUT_S = 30.0
MAX_LOG_CHARACTERS = 600


class ServerProcess:
    """A server that was started. `first_token_s` is how long it took from there to the first token that it gave."""

    def __init__(self, process: "subprocess.Popen[bytes]", server: Server, start_s: float, log: Path) -> None:
        self.server = server
        self._process, self._start_s, self._log = process, start_s, log

    def pss_bytes(self) -> int:
        """Return the memory of all its processes, what they share counted once."""
        total = 0
        for process in _tree(self._process.pid):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    async def first_token_s(self, timeout_s: float) -> float:
        """Ask until it answers. Raises CommandError if it ends, or does not within `timeout_s` of its start."""
        async with open_session(self.server) as session:
            while time.perf_counter() - self._start_s < timeout_s:
                if self._process.poll() is not None:
                    raise CommandError(f"the server ended with status {self._process.returncode}: {self._last_words()}")
                asked_s = time.perf_counter()
                with suppress(CommandError):
                    body = bodies(random_requests(PROBE), PROBE, await first_model(session, self.server))
                    load = await Sender(session, self.server.base_url + ROUTES[PROBE.endpoint]).send_closed(body, 1)
                    if load.was_interrupted:
                        raise KeyboardInterrupt
                    [record] = load.records
                    if record.failure is None:
                        return asked_s + record.start_s + record.ttft_s - self._start_s
                await asyncio.sleep(POLL_S)
        raise CommandError(f"the server gave no token within {timeout_s:g} s: {self._last_words()}")

    def _last_words(self) -> str:
        return f"{self._log} ends with: {self._log.read_text(errors='replace')[-MAX_LOG_CHARACTERS:]}"


@contextmanager
def started(plan: ServerPlan, log: Path, timeout_s: float) -> Iterator[ServerProcess]:
    """Start a server in a session of its own, its output in `log`, and end all of its processes afterwards.

    `timeout_s` is what one answer may take. Raises CommandError if it cannot be started.
    """
    port = _free_port()
    arguments, environ = plan.arguments(port), os.environ | plan.environ
    start_s = time.perf_counter()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                arguments,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"{arguments[0]} cannot be started: {error.strerror}") from None
    try:
        yield ServerProcess(process, Server(f"http://127.0.0.1:{port}", None, timeout_s), start_s, log)
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the group politely, then whatever is left of its processes."""
    family = _tree(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    _, left = psutil.wait_procs(family, END_TIMEOUT_S if process.poll() is not None else 0)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
