import errno
import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from octavo.errors import LaunchError
from octavo.protocol.config import Config
from octavo.serving.processes import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    STABLE_AFTER_S,
    STOP_GRACE_S,
    Backoff,
    Child,
    Process,
    Processes,
    end_processes,
)


def ended_process(code: str) -> Process:
    process = Process([sys.executable, "-S", "-c", code])
    process.wait()
    return process


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (["raise SystemExit(3)"], "executor ended with status 3"),
        (["import os; os.kill(os.getpid(), 9)"], "executor was ended by signal 9"),
        (["raise SystemExit(1)", "pass"], "rank 0 of the executor ended with status 1"),
    ],
)
def test_who_ended_and_how_is_said(codes: list[str], said: str) -> None:
    child = Child("executor", lambda: [ended_process(code) for code in codes], 60.0)
    assert child.ended() == said
    child.end()


def test_nobody_ended() -> None:
    wait_for_parent = "import os, sys; os.read(int(sys.argv[-1]), 1)"
    child = Child("executor", lambda: [Process([sys.executable, "-S", "-c", wait_for_parent])], 60.0)
    assert child.ended() is None
    child.end()
    assert child.ended() == "executor was ended by signal 15"


def test_waits_double_while_lives_are_short() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(3)] == [FIRST_BACKOFF_S * 2**i for i in range(3)]
    assert [backoff.after(1.0) for _ in range(9)][-1] == LONGEST_BACKOFF_S
    assert backoff.after(STABLE_AFTER_S + 1) == FIRST_BACKOFF_S


def test_what_ended_starts_again_only_after_its_wait() -> None:
    lives: list[Process] = []

    def start() -> list[Process]:
        lives.append(ended_process("pass"))
        return lives[-1:]

    child = Child("scheduler", start, 60.0)
    begun_s = 1e9  # long after the start: the first wait is the shortest
    child.revive(begun_s)
    child.revive(begun_s + FIRST_BACKOFF_S / 2)
    assert len(lives) == 1
    child.revive(begun_s + FIRST_BACKOFF_S)
    assert child.processes == [lives[1]]
    child.end()


def test_who_does_not_end_when_asked_is_killed() -> None:
    deaf = "import os, signal, sys; signal.signal(15, signal.SIG_IGN); print(flush=True); os.read(int(sys.argv[-1]), 1)"
    with Process([sys.executable, "-S", "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end_processes([process], grace_s=0.05)
        assert process.returncode == -signal.SIGKILL
        process.lifeline.close()


def test_an_interruption_while_they_end_kills_all_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Ctrl-C during LLM.close() does."""
    deaf = "import os, signal, sys; signal.signal(15, signal.SIG_IGN); print(flush=True); os.read(int(sys.argv[-1]), 1)"
    processes = Processes(Config(model="m"), ())
    members = [Process([sys.executable, "-S", "-c", deaf], stdout=subprocess.PIPE) for _ in range(3)]
    for process in members:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
    for role, its in (("executor", members[:2]), ("scheduler", members[2:])):
        processes.children[role] = Child(role, partial(list, its), 60.0)
    waits = [KeyboardInterrupt]

    def wait(process: Process, timeout: float | None = None) -> int:
        if waits:
            raise waits.pop()
        return subprocess.Popen.wait(process, timeout)

    monkeypatch.setattr(Process, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        processes.stop()
    assert [process.returncode for process in members] == [-signal.SIGKILL] * 3


def test_a_life_that_cannot_begin_is_tried_again_after_a_longer_wait(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[int | None] = [None, errno.EAGAIN, errno.EAGAIN, None]

    def start() -> list[Process]:
        if (failure := outcomes.pop(0)) is not None:
            raise OSError(failure, os.strerror(failure))
        return [ended_process("pass")]

    child = Child("scheduler", start, 60.0)
    first, now_s = child.processes, 1e9
    child.revive(now_s)
    for wait_s in (FIRST_BACKOFF_S, FIRST_BACKOFF_S * 2, FIRST_BACKOFF_S * 4):
        assert child.processes is first
        now_s += wait_s
        child.revive(now_s)
    assert child.processes is not first
    assert "the scheduler cannot be started: Resource temporarily unavailable; tried again in 2.0 s" in caplog.text
    child.end()


def test_who_refuses_says_so_and_is_started_again_by_who_wants_it() -> None:
    codes = ["raise SystemExit(2)", "pass"]
    processes = Processes(Config(model="m"), ())
    child = processes.children["executor"] = Child("executor", lambda: [ended_process(codes.pop(0))], 60.0)
    assert child.refused() == "executor ended with status 2"
    assert processes.cannot_start(9) == "the executor ended with status 2"
    child.revive(1e9)
    child.revive(2e9)
    assert child.refused() is None
    assert processes.cannot_start(9) is None
    child.end()


def test_a_start_that_the_machine_denies_is_said_and_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model="m", tensor_parallel_size=2)
    processes = Processes(config, ("executor",))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchError, match="the executor cannot be started: No such file or directory"):
        processes.start()
    processes.stop()


def test_lives_that_end_before_they_beat_are_counted_until_one_does() -> None:
    beats = "import os, sys; os.write(int(sys.argv[-1]), b'.')"
    codes = ["pass", "pass", beats, "pass"]
    processes = Processes(Config(model="m"), ())
    child = processes.children["executor"] = Child("executor", lambda: [ended_process(codes.pop(0))], 60.0)
    counts = []
    for now_s in (1e9, 2e9, 3e9, 4e9):
        child.revive(now_s)
        counts.append(child.num_failed_starts)
        assert processes.cannot_start(2) == (
            "the executor has failed to start 2 times" if child.num_failed_starts == 2 else None
        )
        if codes:
            child.revive(now_s + LONGEST_BACKOFF_S)
    assert counts == [1, 2, 0, 1]
    child.end()


def test_a_gateway_has_longer_to_end_by_what_its_streams_are_given() -> None:
    slow = (
        "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.3), sys.exit(7)));"
        "print(flush=True); time.sleep(60)"
    )

    def start() -> list[Process]:
        process = Process([sys.executable, "-S", "-c", slow], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        return [process]

    for stop_grace_s, status in ((0.05, -signal.SIGKILL), (20.0, 7)):
        child = Child("gateway", start, 60.0, stop_grace_s)
        child.end()
        assert child.processes[0].returncode == status


@pytest.mark.parametrize(("role", "expected_s"), [("gateway", STOP_GRACE_S + 30), ("scheduler", STOP_GRACE_S)])
def test_the_wait_for_streams_is_the_gateway_s_alone(role: str, expected_s: float) -> None:
    processes = Processes(Config(model="m", shutdown_timeout_s=30), ())
    assert processes.stop_grace_s(role) == expected_s


def test_a_terminal_obeys_nothing_in_the_log() -> None:
    code = (
        "import logging; from octavo.protocol.process import configure_logging; configure_logging('octavo', 'info');"
        "logging.getLogger('octavo').info('a %s', 'title\\x1b]0;x\\x07\\n\\tb\\x9b')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("I octavo: a title\ufffd]0;x\ufffd\n\ufffdb\ufffd\n")
