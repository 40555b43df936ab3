"""`octavo supervise`, with a child that does as its test asks."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.fakes.waiting import wait_until


def child(behaviour: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "tests.fakes.supervised", behaviour, str(directory)]


def lives(directory: Path) -> list[int]:
    """Return the process ids of all lives of the child."""
    path = directory / "lives"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def supervise_to_the_end(behaviour: str, directory: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "octavo", "supervise", *flags, "--", *child(behaviour, directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@contextmanager
def supervising(behaviour: str, directory: Path) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-m", "octavo", "supervise", "--", *child(behaviour, directory)])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def test_a_process_that_ends_starts_again_until_it_says_that_it_cannot(tmp_path: Path) -> None:
    done = supervise_to_the_end("fails", tmp_path)
    assert done.returncode == 2
    assert len(lives(tmp_path)) == 2
    [line] = done.stderr.splitlines()
    assert "tests.fakes.supervised" in line
    assert "ended with status 1" in line
    assert "it starts again in 0.5 s" in line


def test_a_process_that_hangs_shows_where_and_is_ended_before_the_next_begins(tmp_path: Path) -> None:
    done = supervise_to_the_end("hangs", tmp_path, "--hang-timeout-s", "2")
    assert done.returncode == 2
    assert len(lives(tmp_path)) == 2
    assert "hangs: no sign of progress for" in done.stderr
    assert "in stand_still" in done.stderr
    assert "was ended by signal 9" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_orphans_are_reaped_and_signals_passed_on(number: signal.Signals, tmp_path: Path) -> None:
    with supervising("stays", tmp_path) as supervisor:
        wait_until((tmp_path / "orphan").exists, 30)
        orphan = psutil.Process(int((tmp_path / "orphan").read_text()))
        assert orphan.ppid() == supervisor.pid
        orphan.kill()
        wait_until(lambda: not psutil.pid_exists(orphan.pid), 10)  # a zombie would exist
        supervisor.send_signal(number)
        assert supervisor.wait(30) == 10 + number
    assert len(lives(tmp_path)) == 1


def test_a_process_that_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    code = "import sys, octavo.serving.supervise as s; sys.exit(s.supervise(sys.argv[1:], 9, stop_grace_s=.2))"
    supervisor = subprocess.Popen([sys.executable, "-c", code, *child("ignores", tmp_path)])
    wait_until((tmp_path / "ready").exists, 30)
    supervisor.terminate()
    assert supervisor.wait(30) == 128 + signal.SIGKILL
    assert not psutil.pid_exists(lives(tmp_path)[0])


def test_the_process_ends_with_its_supervisor(tmp_path: Path) -> None:
    with supervising("stays", tmp_path) as supervisor:
        wait_until((tmp_path / "orphan").exists, 30)
        psutil.Process(int((tmp_path / "orphan").read_text())).kill()
        supervisor.kill()
        [pid] = lives(tmp_path)
        wait_until(lambda: not psutil.pid_exists(pid), 10)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--", "no-such-program"], 1, "octavo: cannot run no-such-program: No such file or directory\n"),
        (
            ["--hang-timeout-s", "1", "--", "true"],
            2,
            "octavo: hang_timeout_s cannot be '1': it is a number of at least 2\n",
        ),
        ([], 2, "octavo supervise: the following arguments are required: COMMAND\n"),
    ],
)
def test_what_cannot_be_supervised_is_said(arguments: list[str], status: int, said: str) -> None:
    command = [sys.executable, "-m", "octavo", "supervise", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, said)


def test_all_ranks_run_meet_end_and_start_again_together(tmp_path: Path) -> None:
    """Rank 1 ends in its first life."""
    command = [sys.executable, "-m", "octavo", "supervise", "--all-ranks", "--", *child("ranks", tmp_path)]
    supervisor = subprocess.Popen(command, env={**os.environ, "OCTAVO_TENSOR_PARALLEL_SIZE": "3"})
    wait_until((tmp_path / "ranks").exists)
    wait_until(lambda: len((tmp_path / "ranks").read_text().splitlines()) == 6)
    met = [line.split() for line in (tmp_path / "ranks").read_text().splitlines()]
    places: dict[str, list[str]] = {}
    for rank, address in met:
        places.setdefault(address, []).append(rank)
    assert [sorted(ranks) for ranks in places.values()] == [["0", "1", "2"]] * 2
    directories = {Path(address.removeprefix("file://")).parent for address in places}
    assert [stat.S_IMODE(directory.stat().st_mode) for directory in directories] == [0o700]
    supervisor.terminate()
    assert supervisor.wait(30) == 128 + signal.SIGTERM
    assert not any(psutil.pid_exists(pid) for pid in lives(tmp_path))
    assert not any(directory.exists() for directory in directories)


def test_ranks_that_refuse_to_start_end_all_of_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo", "supervise", "--all-ranks", "--", *child("refuses", tmp_path)]
    done = subprocess.run(command, env={**os.environ, "OCTAVO_TENSOR_PARALLEL_SIZE": "2"}, timeout=60)
    assert done.returncode == 2
    assert lives(tmp_path)  # it is a rank that refuses, and not the command
    assert not any(psutil.pid_exists(pid) for pid in lives(tmp_path))


def test_why_a_rank_refuses_comes_last(tmp_path: Path) -> None:
    """The other rank goes on to talk until it has been asked to end."""
    command = [sys.executable, "-m", "octavo", "supervise", "--all-ranks", "--", *child("talks", tmp_path)]
    environ = {**os.environ, "OCTAVO_TENSOR_PARALLEL_SIZE": "2"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    *others, last = done.stderr.splitlines()
    assert last == "python -m octavo.executor: there is no room: make some"
    assert set(others) == {"still here"}


def test_all_ranks_of_one_are_one_process_that_meets_nobody(tmp_path: Path) -> None:
    done = supervise_to_the_end("fails", tmp_path, "--all-ranks")
    assert done.returncode == 2
    assert len(lives(tmp_path)) == 2
