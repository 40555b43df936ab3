"""Real processes that die: streams go on without a token lost or repeated, and nothing outlives the launcher."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.octavo_server import ROLES, Server, Stream, running_server
from tests.fakes.waiting import wait_until

FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", "128MiB", "--max-model-len", "2k", "--peer-timeout-s", "3")
HANG_TIMEOUT_S = "10"  # longer than a scheduler is frozen here


@pytest.fixture(scope="module")
def server(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all deaths but its own: each test leaves it well."""
    with running_server(tmp_path_factory.mktemp("server"), *FLAGS, "--hang-timeout-s", HANG_TIMEOUT_S) as server:
        yield server


@pytest.mark.parametrize("role", ["executor", "scheduler"])
def test_streams_survive_the_death_of(role: str, server: Server) -> None:
    prompts = [f"Chapter {i}. It was" for i in range(4)]
    undisturbed = [stream.result() for stream in [Stream(server, prompt, 48) for prompt in prompts]]
    streams = [Stream(server, prompt, 48) for prompt in prompts]
    wait_until(lambda: all(len(stream.texts) > 4 for stream in streams), 60)
    victim = server.child(role)
    victim.send_signal(signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed
    assert [(finishes, usage) for _, finishes, usage in undisturbed] == [(["length"], 48)] * 4
    assert server.child(role).pid != victim.pid
    wait_until(lambda: _healthy(server), 60)


def test_a_frozen_scheduler_only_delays(server: Server) -> None:
    expected = Stream(server, "The frozen page", 40).result()
    stream = Stream(server, "The frozen page", 40)
    wait_until(lambda: len(stream.texts) > 4, 60)
    scheduler = server.child("scheduler")
    scheduler.suspend()
    threading.Event().wait(6)  # longer than the heartbeats' patience
    scheduler.resume()
    assert stream.result() == expected


def test_a_hung_executor_is_replaced_and_its_streams_go_on(server: Server) -> None:
    expected = Stream(server, "The stuck page", 40).result()
    stream = Stream(server, "The stuck page", 40)
    wait_until(lambda: len(stream.texts) > 4, 60)
    hung = server.child("executor")
    hung.suspend()  # it will not end when asked
    assert stream.result() == expected
    assert server.child("executor").pid != hung.pid
    assert "the executor hangs: no sign of progress for 1" in server.log.read_text()


def test_a_dead_gateways_requests_are_aborted(server: Server) -> None:
    stream = Stream(server, "Once", 1500)
    wait_until(lambda: len(stream.texts) > 2, 60)
    server.child("gateway").send_signal(signal.SIGKILL)
    stream.join(30)
    assert stream.error is not None, "a stream cut short is not a finished one"
    wait_until(lambda: _healthy(server), 60)
    wait_until(lambda: server.metric("octavo:num_requests_running") == 0, 20)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_child_survives_the_launcher(how: signal.Signals, demo_directory: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, *FLAGS) as server:
        children = [server.child(role) for role in ROLES]
        server.process.send_signal(how)
        server.process.wait(30)
        _, alive = psutil.wait_procs(children, timeout=15)
        assert not alive
        if how != signal.SIGKILL:
            assert server.process.returncode == 0


def test_no_child_survives_a_launcher_that_dies_while_loading(demo_directory: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "serve", "--port", "0", *FLAGS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    launcher = psutil.Process(process.pid)
    wait_until(lambda: len(launcher.children()) == len(ROLES), 60)
    children = launcher.children()
    process.kill()
    process.wait(10)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def _healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.HTTPError:
        return False
