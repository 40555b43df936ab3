"""`octavo bench gateway`: how many tokens one gateway streams for a second of its CPU time.

A gateway as users run it, a scheduler that has every token at once, and a client that reads and hardly looks.
"""

import argparse
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.bench.flags import not_negative, positive
from octavo.bench.instant_scheduler import InstantScheduler
from octavo.bench.results import write_results
from octavo.errors import ChildRefusedError, CommandError
from octavo.gateway.text.tokenizer import Tokenizer
from octavo.models.resolve import resolve_model
from octavo.protocol.config import Config
from octavo.protocol.settings.loading import child_environ
from octavo.serving.listening import is_healthy, with_ports
from octavo.serving.processes import POLL_S, Process, end_processes
from octavo.serving.socket_directory import socket_directory

SUMMARY = "time the gateway's work for a streamed token"
TEXT = (
    "An octavo is a book whose sheets were folded three times, so that each gives eight leaves. The word is Latin for"
    " “in the eighth”, and says how large the pages are: about as high as a hand is long, small enough to be carried."
    " Printers used it for what was to be read everywhere, and left the folio to what was to be kept in one place.\n\n"
)
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CPU_CLOCK_OF_PROCESS = 2  # with the process's id, Linux's number of that clock, as clock_getcpuclockid(3) gives it
READ_BYTES = 1 << 16
LAST_BYTES = 1024  # of an answer, in which its usage is
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
STREAM_TIMEOUT_S = 60.0


def describe(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start a gateway with a scheduler that has every token at once, stream from it, and count the tokens for each"
        " second of the gateway's CPU time. A row for each endpoint and length of text."
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="whose tokenizer and chat template are used (default: the demo)"
    )
    parser.add_argument("--streams", type=positive, default=64, metavar="N", help="at a time (default: 64)")
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[128, 1024, 4096],
        metavar="N",
        help="in each stream; one row each (default: 128 1024 4096)",
    )
    parser.add_argument(
        "--endpoints", nargs="+", choices=list(PATHS), default=list(PATHS), help="(default: completions chat)"
    )
    parser.add_argument(
        "--step-ms",
        type=not_negative,
        default=0,
        metavar="MS",
        help="between two tokens of a stream (default: 0, at once)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    parser.set_defaults(run=run)


def run(flags: Mapping[str, Any]) -> int:
    rows = []
    with open_rig(flags["model"], flags["streams"], flags["step_ms"] / 1000) as rig:
        rig.stream("completions", num_tokens=16)
        for endpoint in flags["endpoints"]:
            for num_tokens in flags["tokens"]:
                rows.append(
                    {"endpoint": endpoint, "num_tokens": num_tokens, **rig.stream(endpoint, num_tokens)._asdict()}
                )
                lines = table(rows)
                print("\n".join(lines if len(rows) == 1 else lines[-1:]), flush=True)
    if flags["json"]:
        write_results(flags["json"], "gateway", flags, rows)
    return 0


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the rows in Markdown."""
    return [
        "| endpoint | tokens a stream | tokens a CPU second | CPU ms a request | tokens a second |",
        "|---|---|---|---|---|",
        *(
            f"| {row['endpoint']} | {row['num_tokens']} | {row['tokens_per_cpu_s']:,.0f}"
            f" | {1000 * row['cpu_s_per_request']:.2f} | {row['tokens_per_s']:,.0f} |"
            for row in rows
        ),
    ]


class Outcome(NamedTuple):
    """One round of streams."""

    tokens_per_cpu_s: float  # of the gateway's, from the first token on
    cpu_s_per_request: float  # of the gateway's, up to then
    tokens_per_s: float  # of time


@contextmanager
def open_rig(model: str | None, num_streams: int, step_s: float) -> Iterator["Rig"]:
    """Yield a gateway that is ready, and what is around it. Raises ModelError or LaunchError."""
    directory = resolve_model(model, needs_weights=False).directory
    with socket_directory() as sockets:
        tokenizer = Tokenizer(directory)
        config = Config(model=str(directory), frontend_address=f"ipc://{sockets}/frontend", port=0, log_level="warning")
        config = with_ports(config)
        token_ids = tokenizer.encode_now(TEXT, add_special_tokens=False)
        with (
            InstantScheduler(config.frontend_address, token_ids, step_s=step_s) as scheduler,
            gateway(config) as process,
        ):
            yield Rig(config, scheduler, process.pid, num_streams)


@contextmanager
def gateway(config: Config) -> Iterator[Process]:
    """Run a gateway while the context lasts; it is ready. Raises ChildRefusedError if it ends before."""
    process = Process(
        [sys.executable, "-P", "-m", "octavo.gateway"], environ=child_environ(config, os.environ, secrets=False)
    )
    try:
        while not is_healthy(config):
            if process.poll() is not None:
                raise ChildRefusedError("the gateway ended: it says why above")
            time.sleep(POLL_S)
        yield process
    finally:
        end_processes([process])
        process.lifeline.close()


class Rig:
    """A gateway, its scheduler, and the client."""

    def __init__(self, config: Config, scheduler: InstantScheduler, pid: int, num_streams: int) -> None:
        self._config, self._scheduler, self._num_streams = config, scheduler, num_streams
        self._cpu_clock = ~pid << 3 | CPU_CLOCK_OF_PROCESS

    def stream(self, endpoint: str, num_tokens: int) -> Outcome:
        """Read as many streams at once as the rig has, of `num_tokens` each.

        Raises CommandError for another answer, after which the rig is of no more use.
        """
        before_cpu_s = self._cpu_s()
        with selectors.DefaultSelector() as selector, ExitStack() as connections:
            streams = [connections.enter_context(self._connect()) for _ in range(self._num_streams)]
            for stream in streams:
                stream.sendall(self._request(endpoint, num_tokens))
                selector.register(stream, selectors.EVENT_READ, bytearray())
            for stream in streams:
                _read_head(stream)
            began_cpu_s, began_s = self._cpu_s(), time.monotonic()
            self._scheduler.begin()
            for answer in _read_all(selector):
                _check(answer, num_tokens)
        total = self._num_streams * num_tokens
        cpu_s, elapsed_s = self._cpu_s() - began_cpu_s, time.monotonic() - began_s
        return Outcome(total / cpu_s, (began_cpu_s - before_cpu_s) / self._num_streams, total / elapsed_s)

    def _cpu_s(self) -> float:
        return time.clock_gettime(self._cpu_clock)

    def _connect(self) -> socket.socket:
        return socket.create_connection((self._config.host, self._config.port), timeout=STREAM_TIMEOUT_S)

    def _request(self, endpoint: str, num_tokens: int) -> bytes:
        asked = {"prompt": TEXT} if endpoint == "completions" else {"messages": [{"role": "user", "content": TEXT}]}
        options = {"max_tokens": num_tokens, "stream": True, "stream_options": {"include_usage": True}}
        body = msgspec.json.encode({**asked, **options})
        fields = f"Host: bench\r\nConnection: close\r\nContent-Length: {len(body)}"
        return f"POST {PATHS[endpoint]} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body


def _read_head(connection: socket.socket) -> None:
    """Read the head of an answer: the request was admitted. Raises CommandError if it was not."""
    head = b""
    while b"\r\n\r\n" not in head:
        received = connection.recv(READ_BYTES)
        head += received
        if not received:
            break
    if not head.startswith(b"HTTP/1.1 200 "):
        while received := connection.recv(READ_BYTES):
            head += received
        raise CommandError(f"the gateway answered: {head.decode(errors='replace')}")


def _read_all(selector: selectors.BaseSelector) -> Iterator[bytes]:
    """Yield the last bytes of each answer, once it is complete. Raises CommandError if nothing comes any more."""
    while selector.get_map():
        ready = selector.select(STREAM_TIMEOUT_S)
        if not ready:
            raise CommandError(f"the gateway has sent nothing for {STREAM_TIMEOUT_S:.0f} seconds")
        for key, _ in ready:
            received = key.fileobj.recv(READ_BYTES)  # type: ignore[union-attr]
            key.data[:] = key.data[-LAST_BYTES:] + received
            if not received or key.data.endswith(END):
                selector.unregister(key.fileobj)
                yield bytes(key.data)


def _check(answer: bytes, num_tokens: int) -> None:
    """Raise CommandError unless an answer ends as a stream of so many tokens does."""
    if f'"completion_tokens":{num_tokens},'.encode() not in answer or not answer.endswith(END):
        raise CommandError(f"the gateway answered otherwise than expected: {answer[-LAST_BYTES:]!r}")
