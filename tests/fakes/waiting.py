"""How tests wait: for a condition, with a limit that only a failure reaches."""

import time
from collections.abc import Callable

from octavo.protocol.lifeline import Lifeline

LONGEST_PAUSE_S = 0.05


def wait_until(is_true: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Return soon after the condition holds; fail if it does not in time."""
    deadline_s, pause_s = time.monotonic() + timeout_s, 0.001
    while not is_true():
        assert time.monotonic() < deadline_s, f"not so within {timeout_s} s"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)


def has_beaten(lifeline: Lifeline) -> bool:
    """Return whether the child at the other end has, at any time, shown progress: only then can it fall silent."""
    return any(lifeline.silence_s(now_s) for now_s in (0.0, 1.0, 2.0))
