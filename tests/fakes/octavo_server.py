"""Whole servers for tests: `octavo serve` as a process on a free loopback port, ended by its process id."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil

from tests.fakes.waiting import wait_until

START_TIMEOUT_S = 180.0
DEMO = "SmolLM2-135M-Instruct"
SERVE = ("octavo", "serve")
ROLES = ("scheduler", "executor", "gateway")


@dataclass
class Server:
    """A running `octavo serve` and how to reach it."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def client(self, api_key: str = "EMPTY", **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=120, **options)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0, timeout=120)

    def child(self, role: str) -> psutil.Process:
        """Return the process of `role` that lives now; of the executor's ranks, one."""
        for child in psutil.Process(self.process.pid).children():
            if f"octavo.{role}" in child.cmdline():
                return child
        raise LookupError(f"no {role} is running")

    def rank(self, rank: int) -> psutil.Process:
        """Return the executor's process of that rank that lives now."""
        for child in psutil.Process(self.process.pid).children():
            if "octavo.executor" in child.cmdline() and child.environ().get("OCTAVO_RANK", "0") == str(rank):
                return child
        raise LookupError(f"no rank {rank} is running")

    def metric(self, name: str) -> float | None:
        """Return the sum of a metric's samples on the gateway's page; None before the scheduler's first Stats."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(values) if values else None


class Stream(threading.Thread):
    """One streamed completion of `length` tokens, read in the background."""

    def __init__(self, server: Server, prompt: str, length: int) -> None:
        super().__init__(daemon=True)
        self.texts: list[str] = []
        self.finish_reasons: list[str] = []
        self.usage: int | None = None
        self.error: Exception | None = None
        self._request = {
            "model": DEMO,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0.8,
            "seed": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {"ignore_eos": True},
        }
        self._client = server.client()
        self.start()

    def run(self) -> None:
        try:
            for chunk in self._client.completions.create(**self._request):
                if chunk.usage is not None:
                    self.usage = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    self.texts.append(choice.text)
                    self.finish_reasons.extend([choice.finish_reason] if choice.finish_reason else [])
        except (openai.OpenAIError, httpx.HTTPError) as error:
            self.error = error

    def result(self) -> tuple[str, list[str], int | None]:
        self.join(120)
        assert not self.is_alive(), "the stream did not end"
        assert self.error is None
        return "".join(self.texts), self.finish_reasons, self.usage


@contextmanager
def running_server(
    directory: Path, *arguments: str, environ: dict[str, str] | None = None, command: Sequence[str] = SERVE
) -> Iterator[Server]:
    """Run `octavo serve`, or another `command`, with `arguments`, its output in `directory`, until the context ends."""
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", "0", *arguments],
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
