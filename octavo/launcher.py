"""`octavo serve`: start scheduler, executor and gateway, keep them alive, and end them together."""

import errno
import json
import logging
import shlex
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from octavo.errors import ChildRefusedError, CommandError, LaunchError
from octavo.processes import POLL_S, Processes, why_ended_early, with_sockets_in
from octavo.socket_directory import socket_directory
from octavo.streams import OutputEndedError
from protocol.config import Config
from protocol.process import REFUSED, paragraph

logger = logging.getLogger(__name__)

ROLES = ("scheduler", "executor", "gateway")


class Launcher:
    """The three roles of one server on one machine, until a signal.

    Before the server is ready, a child that ends stops everything (it has said why); afterwards it is restarted,
    unless it ends with REFUSED: what it refuses then, it would refuse again.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.processes = Processes(config, ROLES)
        self.stopping = False

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM.

        Raises LaunchError if a process ends before the server is ready, or later says that it cannot start again.
        """
        with _signals(self._request_stop):
            try:
                self.processes.start()
                self._until_ready()
                self._supervise()
            finally:
                self._stop()

    def _request_stop(self) -> None:
        self.stopping = True

    def _until_ready(self) -> None:
        started_s = time.monotonic()
        while not self.stopping:
            if ended := self.processes.ended():
                raise _start_error(ended, self.processes.statuses())
            if answers(health_url(self.config)):
                with suppress(CommandError, OutputEndedError):  # it serves, whether anybody reads that or not
                    print(ready_text(self.config, time.monotonic() - started_s), flush=True)
                return
            time.sleep(POLL_S)

    def _supervise(self) -> None:
        while not self.stopping:
            self.processes.revive()  # also what refuses: the memory that it lacks may be there a moment later
            time.sleep(POLL_S)

    def _stop(self) -> None:
        if self.stopping:
            logger.info("stopping")
        self.processes.stop()


def _start_error(ended: str, statuses: Sequence[int]) -> LaunchError:
    """Return the error of a server one of whose children, as `ended` says, has ended before it was ready."""
    if REFUSED in statuses:
        return ChildRefusedError(f"the {ended}: it says why above")
    return LaunchError(f"nothing is served: {why_ended_early(ended, statuses)}; what it said last is above")


def serve(config: Config, model_directory: Path, served_name: str) -> None:
    """Serve the model in `model_directory` until interrupted. Raises LaunchError."""
    with socket_directory() as directory:
        resolved = msgspec.structs.replace(
            config,
            model=str(model_directory),
            served_model_name=config.served_model_name or (served_name,),
            port=config.port or listening_port(config),
            metrics_port=metrics_listening_port(config),
        )
        Launcher(with_sockets_in(directory, resolved)).run()


def listening_port(config: Config) -> int:
    """Return the port on which the gateway can listen: the configured one, or a free one for 0.

    Raises LaunchError if it could not: found out before minutes of loading.
    """
    return _free_port(config.host, config.port, "--port")


def metrics_listening_port(config: Config) -> int | None:
    """Return the same of the port for metrics alone, None if there is to be none."""
    return None if config.metrics_port is None else _free_port(config.host, config.metrics_port, "--metrics-port")


def _free_port(host: str, port: int, flag: str) -> int:
    try:
        # The gateway chooses among a name's addresses in the same way.
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise LaunchError(f"cannot listen on {host}:{port}: {cause}. {_listen_remedy(error, flag)}") from None


def _listen_remedy(error: Exception, flag: str) -> str:
    match getattr(error, "errno", None):
        case errno.EADDRINUSE:
            return f"Stop what uses it, or choose another with {flag} (0 takes a free one)."
        case errno.EACCES:
            return f"Only root may take ports below 1024 here: choose another with {flag}, such as 8000."
        case _:
            return "--host takes an address or a name of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them."


def health_url(config: Config) -> str:
    return f"http://{_reachable_host(config.host)}:{config.port}/health"


def ready_text(config: Config, seconds: float) -> str:
    """Return what a person sees once requests are served: where, and one to try."""
    url = f"http://{_reachable_host(config.host)}:{config.port}"
    name = config.served_model_name[0]
    authorization = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    body = {"model": name, "messages": [{"role": "user", "content": "What is a page?"}], "max_tokens": 40}
    return (
        f"Octavo serves {paragraph(name)} on {url} (ready in {seconds:.1f} s; Ctrl-C stops it). Try:\n"
        f"  curl {url}/v1/chat/completions{authorization} -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body))}"
    )


def _reachable_host(host: str) -> str:
    """Return an address at which a listener on `host` can be reached from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reachable}]" if ":" in reachable else reachable


def answers(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:  # refused, timed out, or a status that is an error
        return False


@contextmanager
def _signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `request_stop` while the body runs, its clean-up included."""
    former = {number: signal.signal(number, lambda *_: request_stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
