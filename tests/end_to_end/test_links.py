"""Scheduler, gateway and executor as processes that meet by tcp://, as on several machines."""

import json
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack, contextmanager
from urllib.error import HTTPError

import pytest

from tests.fakes.commands import ENGINE_FLAGS, start, tiny_checkpoint
from tests.fakes.waiting import wait_until

FREE = "tcp://0.0.0.0:5570"


def run(module, *arguments):
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=60)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The directories that `octavo keys` makes."""
    directory = tmp_path_factory.mktemp("keys") / "keys"
    done = run("octavo", "keys", str(directory))
    assert done.returncode == 0, done.stderr
    for kind in ("scheduler", "gateway", "executor"):
        assert f"python -m octavo.{kind} --link-keys-dir {directory / kind}" in done.stdout
    return directory


class Process:
    """One that runs, and what it has logged."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def end(self):
        self.process.terminate()
        self.process.wait(20)
        self._reader.join()

    def _read(self):
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line)

    @property
    def log(self):
        return "".join(self.lines)


@contextmanager
def running(module, *arguments):
    process = Process(start(module, *map(str, arguments), stdout=subprocess.DEVNULL))
    try:
        yield process
    finally:
        process.end()


def completion(port):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"prompt": "The first page", "max_tokens": 8, "temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request, timeout=60))


def is_healthy(port):
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).status == 200
    except (HTTPError, OSError):
        return False


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("scheduler", ["--frontend-address", FREE, "--backend-address", "tcp://0.0.0.0:5571"]),
        ("scheduler", ["--backend-address", "tcp://*:5571"]),
        ("executor", ["--model", "DIRECTORY", "--backend-address", "tcp://scheduler:5571"]),
        ("executor", ["--model", "x", "-tp", "2", "--rank", "1", "--distributed-address", "tcp://10.0.0.1:29500"]),
        ("gateway", ["--model", "MODEL", "--schedulers", "tcp://scheduler:5570"]),
        ("gateway", ["--model", "MODEL", "--schedulers", "tcp://127.0.0.1:1", "--schedulers", "tcp://[::]:5570"]),
    ],
)
def test_an_address_that_other_machines_reach_is_no_start_without_keys(module, arguments, model):
    done = run(f"octavo.{module}", *[model if each == "MODEL" else each for each in arguments])
    assert done.returncode == 2
    assert "--insecure-links" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"python -m octavo.{module}: ")


def test_the_probe_says_what_its_scheduler_lacks():
    done = subprocess.run(
        [sys.executable, "-m", "octavo.scheduler.probe"],
        env={"OCTAVO_FRONTEND_ADDRESS": "tcp://10.0.0.1:1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "octavo keys" in done.stderr


def test_insecure_links_is_said_in_the_log():
    port = free_port()
    links = ("--frontend-address", f"tcp://0.0.0.0:{port}", "--backend-address", f"tcp://127.0.0.1:{free_port()}")
    with running("scheduler", *links, "--insecure-links") as scheduler:
        wait_until(lambda: "gateways at tcp://0.0.0.0" in scheduler.log)
    assert f"tcp://0.0.0.0:{port} is without keys" in scheduler.log


def test_keys_are_not_made_over_others(keys):
    secret = (keys / "scheduler" / "scheduler.key_secret").read_bytes()
    done = run("octavo", "keys", str(keys))
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert (keys / "scheduler" / "scheduler.key_secret").read_bytes() == secret


def test_with_keys_a_server_of_three_machines_answers_and_nobody_else_is_heard(keys, model):
    frontend, backend, http, bare_http = free_port(), free_port(), free_port(), free_port()
    served = ("--model", model, "--served-model-name", "tiny")
    with ExitStack() as stack:
        scheduler = stack.enter_context(
            running(
                "scheduler",
                *("--frontend-address", f"tcp://0.0.0.0:{frontend}", "--backend-address", f"tcp://0.0.0.0:{backend}"),
                *("--link-keys-dir", keys / "scheduler"),
            )
        )
        executor_flags = ("--model", model, *ENGINE_FLAGS, "--num-threads", 1)
        link = ("--backend-address", f"tcp://127.0.0.1:{backend}")
        mistaken = stack.enter_context(running("executor", *executor_flags, *link))
        executor = stack.enter_context(
            running("executor", *executor_flags, *link, "--link-keys-dir", keys / "executor")
        )
        gateway_flags = (*served, "--schedulers", f"tcp://127.0.0.1:{frontend}")
        stack.enter_context(running("gateway", *gateway_flags, "--port", http, "--link-keys-dir", keys / "gateway"))
        bare = stack.enter_context(running("gateway", *gateway_flags, "--port", bare_http))
        wait_until(lambda: is_healthy(http), 120)
        assert completion(http)["usage"]["completion_tokens"] == 8
        probe = subprocess.run(
            [sys.executable, "-m", "octavo.scheduler.probe"],
            env={
                "OCTAVO_FRONTEND_ADDRESS": f"tcp://0.0.0.0:{frontend}",
                "OCTAVO_LINK_KEYS_DIR": str(keys / "scheduler"),
                "PATH": "",
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (probe.returncode, probe.stderr) == (0, "")
        for process in (bare, mistaken):
            wait_until(lambda process=process: "asks for a key: set --link-keys-dir" in process.log, 120)
        assert not is_healthy(bare_http)
        assert "welcomed by scheduler" in executor.log
        assert "welcomed by scheduler" not in mistaken.log
        assert "turned somebody away" in scheduler.log
        assert completion(http)["usage"]["completion_tokens"] == 8
