"""Whole servers for tests: `octavo serve` as a process on a free loopback port, ended by its process id."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil

from tests.fakes.waiting import wait_until

START_TIMEOUT_S = 180.0
ROLES = ("scheduler", "executor", "gateway")


@dataclass
class Server:
    """A running `octavo serve` and how to reach it."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0, timeout=120, **options)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0, timeout=120)

    def child(self, role: str) -> psutil.Process:
        """Return the process of `role` that lives now."""
        for child in psutil.Process(self.process.pid).children():
            if role in child.cmdline():
                return child
        raise LookupError(f"no {role} is running")

    def metric(self, name: str) -> float | None:
        """Return the sum of a metric's samples on the gateway's page; None before the scheduler's first Stats."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(values) if values else None


@contextmanager
def running_server(directory: Path, *arguments: str, environ: dict[str, str] | None = None) -> Iterator[Server]:
    """Run `octavo serve` with `arguments`, its output in `directory`, until the context ends."""
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", "--port", "0", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environ or {})},
        )
    try:
        wait_until(lambda: "Octavo serves" in log.read_text() or process.poll() is not None, START_TIMEOUT_S)
        assert process.poll() is None, log.read_text()
        [address] = [line for line in log.read_text().splitlines() if line.startswith("Octavo serves")]
        yield Server(process, log, address.split(" on ")[1].split(" ")[0])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
