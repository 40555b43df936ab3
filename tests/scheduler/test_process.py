"""`python -m octavo.scheduler` as a process: its settings, its signals, its death."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.protocol.lifeline import LIFELINE_FLAG, Lifeline
from octavo.protocol.sampling import Sampling
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.fake_gateway import FakeGateway
from tests.fakes.scheduler_thread import socket_directory
from tests.fakes.toy_model import expected_output
from tests.fakes.waiting import has_beaten, wait_until

ROOT = Path(__file__).parents[2]
SAMPLING = Sampling(max_tokens=300, seed=1)


@pytest.fixture
def directory():
    with socket_directory() as path:
        yield path


def environ(directory: Path, **settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    addresses = {f"OCTAVO_{side}_ADDRESS": f"ipc://{directory}/{side.lower()}" for side in ("FRONTEND", "BACKEND")}
    return {**kept, **addresses, **settings}


def start(environment: dict[str, str], *arguments: str, **options) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "octavo.scheduler", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def process(directory):
    """A scheduler that answers, with an executor and a gateway."""
    environment = environ(directory)
    with start(environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def executor(directory):
    with FakeExecutor(f"ipc://{directory}/backend", num_blocks=100, step_s=0.002) as executor:
        yield executor


@pytest.fixture
def gateway(directory, executor):
    with FakeGateway(f"ipc://{directory}/frontend") as gateway:
        yield gateway


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(process, gateway, number):
    gateway.wait_ready()
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert errors.count("gateways at ipc://") == 1  # the line at the start


def test_streams_outlive_a_killed_scheduler(process, gateway, directory):
    gateway.wait_ready()
    streams = [gateway.start(f"r{number}", [1, number], SAMPLING) for number in range(3)]
    wait_until(lambda: all(stream.token_ids for stream in streams))
    process.kill()
    process.wait(10)
    with start(environ(directory)) as second:
        try:
            gateway.wait_all()
        finally:
            second.kill()
    for stream in streams:
        assert (stream.token_ids, stream.finish_reason) == expected_output(stream.prompt_token_ids, SAMPLING)
        assert stream.num_submits > 1


def test_it_beats_and_ends_with_its_parent(directory):
    lifeline = Lifeline()
    with start(environ(directory), LIFELINE_FLAG, str(lifeline.fd), pass_fds=[lifeline.fd]) as process:
        lifeline.release()
        wait_until(lambda: has_beaten(lifeline))
        lifeline.close()
        assert process.wait(10) == 0
        process.communicate()


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({"OCTAVO_MAX_NUM_SEQ": "1"}, [], "did you mean OCTAVO_MAX_NUM_SEQS?"),
        ({}, ["--max-num-seqs", "none"], "max_num_seqs cannot be 'none'"),
        ({}, ["--max-num-sequences", "1"], "did you mean --max-num-seqs?"),
        ({}, ["--backend-address", "ipc:///" + "x" * 120], "longer than 107 bytes"),
        ({}, ["--backend-address", "tcp://nowhere"], "backend_address cannot be 'tcp://nowhere'"),
        ({}, ["--backend-address", "tcp://127.0.0.1:1-x"], "127.0.0.1:1-x"),
    ],
)
def test_a_wrong_setting_is_one_line(directory, settings, arguments, words):
    with start(environ(directory, **settings), *arguments) as process:
        output, errors = process.communicate(timeout=10)
    assert process.returncode == 2
    assert output == ""
    assert words in errors
    assert errors.count("\n") == 1


def test_a_second_scheduler_on_one_address_says_so(process, gateway, directory):
    gateway.wait_ready()
    with start(environ(directory)) as second:
        _, errors = second.communicate(timeout=10)
    assert second.returncode == 2
    assert "in use by another process" in errors


def test_help_names_every_setting(directory):
    with start(environ(directory), "--help") as process:
        output, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "--max-num-batched-tokens N" in output
    assert "--lifeline-fd" not in output
