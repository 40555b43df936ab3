import os
import subprocess
import sys

import pytest

from octavo.serving.child_log import ChildLog


def log_of(*writings: bytes, reasons_last: bool = False) -> ChildLog:
    """Return a closed log after children that wrote `writings`, of which a stranger still holds the pipe."""
    log = ChildLog(reasons_last=reasons_last)
    held = os.dup(log.descriptor)
    for writing in writings:
        code = f"import sys; sys.stderr.buffer.write({writing!r})"
        subprocess.run([sys.executable, "-S", "-c", code], stderr=log.descriptor, check=True)
    log.close()
    os.close(held)
    return log


def test_all_is_passed_on_and_the_one_line_of_who_refuses_is_the_cause(capfd: pytest.CaptureFixture[str]) -> None:
    written = b"10:00:00 I executor: import\npython -m octavo.executor: there is no room: make some\n"
    log = log_of(written, b"10:00:01 I scheduler: bye\n")
    assert capfd.readouterr().err == written.decode() + "10:00:01 I scheduler: bye\n"
    assert log.cause([0, 2]) == "there is no room: make some"
    assert log.cause([1]).startswith("it said last:\n10:00:00 I executor: import\n")


def test_without_such_a_line_the_last_lines_are(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"line {number}" for number in range(5000)]
    cause = log_of("\n".join(lines).encode()).cause([2])
    assert cause.splitlines() == ["it said last:", *lines[-15:]]
    assert len(capfd.readouterr().err.splitlines()) == 5000


@pytest.mark.parametrize(
    "writings",
    [
        [
            b"10:00 I executor: import\npython -m octavo.gateway: no tokenizer\n10:01 I scheduler: x\n",
            b"bar 1%\rbar 2%\r",
            b"end",
        ],
        [
            b"10:00 I executor: import\npyth",
            b"on -m octavo.gateway: no tok",
            b"enizer\n10:01 I scheduler: x\nbar 1%\rbar 2%\rend",
        ],
        [
            b"10:00 I executor: import\n10:01 I sch",
            b"eduler: x\nbar 1%\rbar 2%\r",
            b"python -m octavo.gateway: no tokenizer\nend",
        ],
    ],
)
def test_a_reason_is_put_last(writings: list[bytes], capfd: pytest.CaptureFixture[str]) -> None:
    log = log_of(*writings, reasons_last=True)
    first = "10:00 I executor: import\n10:01 I scheduler: x\nbar 1%\rbar 2%\rend"
    assert capfd.readouterr().err == first + "python -m octavo.gateway: no tokenizer\n"
    assert log.cause([2]) == "no tokenizer"


def test_a_reason_is_shown_at_once_after_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    log = ChildLog(reasons_last=True)
    os.write(log.descriptor, b"python -m octavo.executor: no room\n")
    log.release()
    os.write(log.descriptor, b"10:00 I gateway: x\n")
    log.close()
    assert capfd.readouterr().err == "python -m octavo.executor: no room\n10:00 I gateway: x\n"


def test_silence_is_said_too() -> None:
    assert log_of().cause([1]) == "it said nothing"
