"""`python -m octavo.gateway` as a process: what it says, how it stops, what it refuses, what it does not load."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.protocol.config import Config
from octavo.serving.listening import is_healthy as is_healthy_at
from octavo.serving.processes import Process
from tests.fakes.fake_scheduler import FakeScheduler, running
from tests.fakes.gateway_server import chat
from tests.fakes.model_directories import VOCAB_SIZE
from tests.fakes.waiting import has_beaten, wait_until

COMMAND = [sys.executable, "-P", "-m", "octavo.gateway"]
ROOT = Path(__file__).parents[2]


def environ(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    return kept | {"PYTHONPATH": str(ROOT)} | {f"OCTAVO_{name.upper()}": value for name, value in settings.items()}


def run(*flags: str, **settings: str) -> Any:
    return subprocess.run([*COMMAND, *flags], env=environ(**settings), capture_output=True, text=True, timeout=60)


@contextmanager
def gateway(*flags: str, **settings: str) -> Iterator[tuple["subprocess.Popen[str]", str, list[str]]]:
    """Run a gateway on a free port; give the process, its address, and what it logged until it listened."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *flags], env=environ(**settings), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process, process.stderr:
        try:
            lines: list[str] = []
            while not (found := re.search(r"listening on (http://\S+|unix:\S+)", lines[-1] if lines else "")):
                lines.append(process.stderr.readline())
                assert lines[-1], "it ended: " + "".join(lines)
            yield process, found[1], lines
        finally:
            process.kill()


async def test_it_stops_in_order_with_a_stream_open(tiny_model: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        scheduler = FakeScheduler(f"ipc://{directory}/s", vocab_size=VOCAB_SIZE)
        settings = {"model": str(tiny_model), "schedulers": scheduler.address, "shutdown_timeout_s": "1"}
        async with running(scheduler), httpx.AsyncClient(timeout=20) as http:
            with gateway(**settings) as (process, url, _):
                while not await is_healthy(http, url):
                    pass
                scheduler.paused = True
                body = chat(stream=True, model=None)
                async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    assert response.status_code == 200
                    process.send_signal(signal.SIGINT)
                    said = await response.aread()
                    assert b"the server is stopping" in said
                    assert b"[DONE]" not in said
                assert process.wait(20) == 0


async def test_a_stream_that_ends_in_time_is_whole(tiny_model: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        scheduler = FakeScheduler(f"ipc://{directory}/s", vocab_size=VOCAB_SIZE)
        settings = {"model": str(tiny_model), "schedulers": scheduler.address, "shutdown_timeout_s": "60"}
        async with running(scheduler), httpx.AsyncClient(timeout=20) as http:
            with gateway(**settings) as (process, url, _):
                while not await is_healthy(http, url):
                    pass
                scheduler.paused = True
                body = chat(stream=True, model=None)
                async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                    assert response.status_code == 200
                    process.send_signal(signal.SIGTERM)
                    while await is_healthy(http, url):
                        pass
                    scheduler.paused = False
                    assert (await response.aread()).endswith(b"data: [DONE]\n\n")
                assert process.wait(20) == 0


async def is_healthy(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/health")).status_code == 200
    except httpx.TransportError:
        return False


def test_it_beats_and_ends_with_its_parent(tiny_model: Path) -> None:
    with Process([*COMMAND, "--port", "0"], environ=environ(model=str(tiny_model))) as process:
        wait_until(lambda: has_beaten(process.lifeline))
        process.lifeline.close()
        assert process.wait(20) == 0


async def test_metrics_alone_need_no_key_and_are_all_there_is(tiny_model: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        scheduler = FakeScheduler(f"ipc://{directory}/s", vocab_size=VOCAB_SIZE)
        settings = {"model": str(tiny_model), "schedulers": scheduler.address, "api_key": "k", "metrics_port": "0"}
        async with running(scheduler), httpx.AsyncClient(timeout=20) as http:
            with gateway(**settings) as (process, url, lines):
                [page] = [found[1] for line in lines if (found := re.search(r"at (http://\S+)/metrics", line))]
                while not await is_healthy(http, url):
                    pass
                assert (await http.get(f"{url}/metrics")).status_code == 401
                key = {"Authorization": "Bearer k"}
                scheduler.paused = True
                body = chat(stream=True, model=None)
                async with http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=key) as response:
                    assert response.status_code == 200
                    for path in ("/", "/health", "/v1/models", "/metrics/", "/metrics/x"):
                        assert (await http.get(page + path)).status_code == 404
                    assert (await http.post(f"{page}/metrics")).status_code == 405
                    process.send_signal(signal.SIGTERM)
                    shown = await http.get(f"{page}/metrics")  # it is there as long as somebody streams
                    assert 'octavo:http_requests_total{method="GET",route="unknown",status="401"} 1.0' in shown.text
                    assert b"the server is stopping" in await response.aread()
                assert process.wait(20) == 0
            for ended in (url, page):
                with pytest.raises(httpx.ConnectError):
                    await http.get(f"{ended}/metrics")


def test_an_open_address_without_a_key_is_warned_about(tiny_model: Path) -> None:
    with gateway("--host", "0.0.0.0", model=str(tiny_model)) as (_, _, lines):
        assert [line for line in lines if "no API key is set" in line]
    with gateway("--host", "0.0.0.0", "--api-key", "k", model=str(tiny_model)) as (_, _, lines):
        assert not [line for line in lines if " W gateway" in line]
        assert [line for line in lines if " I gateway" in line]


async def test_a_key_may_come_from_the_variable(tiny_model: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        scheduler = FakeScheduler(f"ipc://{directory}/s", vocab_size=VOCAB_SIZE)
        settings = {"model": str(tiny_model), "schedulers": scheduler.address, "api_key": "my-secret-key"}
        async with running(scheduler), httpx.AsyncClient(timeout=20) as http:
            with gateway(**settings) as (_, url, _):
                while not await is_healthy(http, url):
                    pass
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
                    assert (await client.with_options(api_key="my-secret-key").models.list()).data


@pytest.mark.parametrize("flags", [("--port",), ("--port", "0", "--metrics-port")])
def test_a_port_that_is_taken_is_named(flags: tuple[str, ...], tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run(*flags, str(port), model=str(tiny_model))
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert str(port) in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "/nowhere"}, "/nowhere"),
        ({"port": "http"}, "port cannot be 'http'"),
        ({"prot": "1"}, "did you mean OCTAVO_PORT?"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(tiny_model: Path, settings: dict[str, str], words: str) -> None:
    ended = run(**({"model": str(tiny_model)} | settings))
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert words in line


def test_it_never_loads_torch(tiny_model: Path) -> None:
    program = (
        "import sys; from octavo.gateway.http.app import create_app; from octavo.protocol.config import Config;"
        f"create_app(Config(model={str(tiny_model)!r}));"
        "assert 'transformers' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", program], env=environ(), check=True, timeout=60)


@pytest.mark.parametrize(
    ("host", "shown", "addresses"),
    [
        ("::", r"http://\[::\]:", ("127.0.0.1", "[::1]")),
        ("", r"http://\[::\]:", ("127.0.0.1", "[::1]")),
        ("[::1]", r"http://\[::1\]:", ("[::1]",)),
    ],
)
def test_it_and_its_metrics_listen_on_ipv4_and_ipv6(
    tiny_model: Path, host: str, shown: str, addresses: tuple[str, ...]
) -> None:
    with gateway("--host", host, "--metrics-port", "0", model=str(tiny_model)) as (process, url, lines):
        assert re.match(shown, url)
        assert process.stderr is not None
        text = "".join(lines)
        while not (metrics := re.search(r"metrics alone, for anyone, at (http://\S+)/metrics", text)):
            text += process.stderr.readline()
        assert re.match(shown, metrics[1])
        for address in addresses:
            assert httpx.get(f"http://{address}:{url.rpartition(':')[2]}/live", timeout=20).status_code == 200
            page = httpx.get(f"http://{address}:{metrics[1].rpartition(':')[2]}/metrics", timeout=20)
            assert page.status_code == 200
        assert ("anyone may use it" in text) == (host != "[::1]")


def test_an_idle_connection_outlives_those_of_proxies_unless_a_flag_says_otherwise(tiny_model: Path) -> None:
    assert Config().keep_alive_timeout_s > 90  # what Go's proxies keep one
    with gateway("--keep-alive-timeout-s", "1", model=str(tiny_model)) as (_, url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            said = b""
            while data := client.recv(4096):  # until it is closed
                said += data
    assert said.startswith(b"HTTP/1.1 200 ")


def test_it_listens_on_a_unix_socket_and_takes_it_away(tiny_model: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/http"
        with socket.socket(socket.AF_UNIX) as left:  # by one that was killed
            left.bind(path)
        with gateway("--uds", path, model=str(tiny_model)) as (process, url, lines):
            assert url == f"unix:{path}"
            assert "anyone may use it" not in "".join(lines)
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=20) as http:
                assert http.get("http://localhost/live").status_code == 200
            assert not is_healthy_at(Config(uds=path))  # it has no scheduler
            second = run("--uds", path, model=str(tiny_model))
            assert (second.returncode, "Address already in use" in second.stderr) == (2, True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert not os.path.exists(path)
        assert not is_healthy_at(Config(uds=path))


@pytest.mark.parametrize("name", ["file", "nowhere/http", "x" * 200])
def test_a_path_that_cannot_be_a_socket_is_refused_and_nothing_is_removed(tiny_model: Path, name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "file").write_text("mine")
        ended = run("--uds", f"{directory}/{name}", model=str(tiny_model))
        assert (ended.returncode, f"cannot listen at {directory}/{name}: " in ended.stderr) == (2, True)
        assert Path(directory, "file").read_text() == "mine"
