import subprocess
import sys
import time

import pytest

from octavo.launcher import Child


def ended_process(code: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
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
    assert Child("executor", [ended_process(code) for code in codes], time.monotonic()).ended() == said


def test_nobody_ended() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert Child("executor", [process], time.monotonic()).ended() is None
    process.communicate(b"\n")
