"""`octavo serve`: starts scheduler, executor and gateway, keeps them alive, and ends them together."""

import json
import logging
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ChildRefusedError, CommandError, LaunchError
from octavo.protocol.config import Config
from octavo.protocol.process import REFUSED, paragraph
from octavo.serving.child_log import ChildLog
from octavo.serving.listening import is_healthy, server_url, with_ports
from octavo.serving.processes import POLL_S, Processes, why_ended_early, with_sockets_in
from octavo.serving.socket_directory import socket_directory
from octavo.streams import OutputEndedError

logger = logging.getLogger(__name__)

ROLES = ("scheduler", "executor", "gateway")


class Launcher:
    """The three roles of one server on one machine, until a signal.

    Before the server is ready, a child that ends stops everything, and the last lines of `log` say why. Afterwards a
    child that ends is restarted.
    """

    def __init__(self, config: Config, log: ChildLog) -> None:
        self.config, self.log = config, log
        self.processes = Processes(config, ROLES, stderr=log.descriptor)
        self.stopping = False

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM.

        Raises LaunchError if a process ends before the server is ready.
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
            if is_healthy(self.config):
                self.log.release()
                with suppress(CommandError, OutputEndedError):  # the server works even if nobody reads this text
                    print(ready_text(self.config, time.monotonic() - started_s), flush=True)
                return
            time.sleep(POLL_S)

    def _supervise(self) -> None:
        while not self.stopping:
            self.processes.revive()  # also one that refuses: there may be enough memory a moment later
            time.sleep(POLL_S)

    def _stop(self) -> None:
        if self.stopping:
            logger.info("stopping")
        self.processes.stop()


def _start_error(ended: str, statuses: Sequence[int]) -> LaunchError:
    """Return the error for a child that has ended before the server was ready; `ended` says which and how."""
    if REFUSED in statuses:
        return ChildRefusedError(f"the {ended}: it says why")
    return LaunchError(f"nothing is served: {why_ended_early(ended, statuses)}; what it said last is above")


def serve(config: Config, model_directory: Path, served_name: str) -> None:
    """Serve the model in `model_directory` until interrupted. Raises LaunchError."""
    with socket_directory() as directory, closing(ChildLog(reasons_last=True)) as log:
        resolved = msgspec.structs.replace(
            config,
            model=str(model_directory),
            served_model_name=config.served_model_name or (served_name,),
        )
        Launcher(with_sockets_in(directory, with_ports(resolved)), log).run()


def ready_text(config: Config, seconds: float) -> str:
    """Return the text for the user once requests are served: the address, and a request to try."""
    url = "http://localhost" if config.uds else server_url(config)
    where, socket_flag = (config.uds, f" --unix-socket {shlex.quote(config.uds)}") if config.uds else (url, "")
    name = config.served_model_name[0]
    authorization = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    route, body = _example(Path(config.model), name)
    return (
        f"Octavo serves {paragraph(name)} on {where} (ready in {seconds:.1f} s; Ctrl-C stops it). Try:\n"
        f"  curl{socket_flag} {url}{route}{authorization} -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body))}"
    )


def _example(model_directory: Path, name: str) -> tuple[str, dict[str, Any]]:
    """Return a route and a body to try: a checkpoint of sentence-transformers makes vectors."""
    if (model_directory / "modules.json").is_file():
        return "/v1/embeddings", {"model": name, "input": "What is a page?"}
    question = {"role": "user", "content": "What is a page?"}
    return "/v1/chat/completions", {"model": name, "messages": [question], "max_tokens": 40}


@contextmanager
def _signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `request_stop` while the body runs, including its clean-up."""
    former = {number: signal.signal(number, lambda *_: request_stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
