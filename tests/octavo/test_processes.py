import signal
import subprocess
import sys

import pytest

from octavo.processes import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    STABLE_AFTER_S,
    Backoff,
    Child,
    Process,
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
