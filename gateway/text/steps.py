"""Work that is done in steps: between two of them it can be left, or another thread can go on with it."""

from collections.abc import Generator
from typing import Any, TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def next_step(steps: Steps[Result]) -> tuple[Result] | None:
    """Do the next step. Return what the steps return in a tuple, or None if there are more."""
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None


def finished(steps: Generator[Any, None, Result]) -> Result:
    """Do all the steps in this thread, and return what they return."""
    while (result := next_step(steps)) is None:
        pass
    return result[0]
