"""Work in steps: between two steps it can be stopped, or continue in another thread."""

from collections.abc import Generator
from typing import Any, TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def next_step(steps: Steps[Result]) -> tuple[Result] | None:
    """Do the next step. Return the result of all steps in a tuple, or None if there are more steps."""
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None


def finished(steps: Generator[Any, None, Result]) -> Result:
    """Do all steps in this thread, and return their result."""
    while (result := next_step(steps)) is None:
        pass
    return result[0]
