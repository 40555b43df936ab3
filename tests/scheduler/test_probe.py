"""`python -m octavo.scheduler.probe`: ready means that a scheduler answers and its executor is alive."""

import os
import subprocess
import sys
from pathlib import Path

from octavo.scheduler.probe import ask, reachable
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.scheduler_thread import SchedulerThread, socket_directory, toy_config
from tests.fakes.waiting import wait_until

ROOT = Path(__file__).parents[2]


def test_it_tells_a_loading_executor_from_one_that_serves_and_one_that_is_gone():
    with socket_directory() as directory, SchedulerThread(toy_config(directory, peer_timeout_s=0.3)) as scheduler:
        assert "no scheduler with an executor answers" in ask(scheduler.config.frontend_address, 0.1)
        with FakeExecutor(scheduler.config.backend_address, num_blocks=10):
            wait_until(lambda: not ask(scheduler.config.frontend_address, 1.0))
        wait_until(
            lambda: ask(scheduler.config.frontend_address, 1.0) == "the scheduler has no executor that makes progress"
        )


def probe(**settings: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    command = [sys.executable, "-m", "octavo.scheduler.probe"]
    return subprocess.run(command, cwd=ROOT, env=kept | settings, capture_output=True, text=True)


def test_the_exit_status_and_one_line_say_it():
    with socket_directory() as directory, SchedulerThread(toy_config(directory)) as scheduler:
        address = scheduler.config.frontend_address
        with FakeExecutor(scheduler.config.backend_address, num_blocks=10):
            wait_until(lambda: not ask(address, 1.0))
            done = probe(OCTAVO_FRONTEND_ADDRESS=address)
            assert (done.returncode, done.stderr) == (0, "")
        for settings in ({"OCTAVO_FRONTEND_ADDRESS": f"ipc://{directory}/none"}, {"OCTAVO_FRONTEND": address}):
            lost = probe(**settings)
            assert lost.returncode == 1
            assert len(lost.stderr.splitlines()) == 1


def test_it_asks_on_this_machine_where_the_scheduler_listens_everywhere():
    assert reachable("tcp://0.0.0.0:5555") == reachable("tcp://*:5555") == "tcp://localhost:5555"
    assert reachable("ipc:///run/octavo/frontend") == "ipc:///run/octavo/frontend"
