"""A call that may hang, as one into a network does, and how long it is waited for."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float | None, call: Callable[[], Result]) -> Result:
    """Return what `call` returns. Raises what it raises, and TimeoutError if it takes longer than `seconds`, if any.

    It runs in a thread, which is left alone then, and when Ctrl-C interrupts the wait: resolving a name can be
    interrupted by nothing, and a download in many threads only once all of them have their files.
    """
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
