"""Calls a function that may hang, such as one that uses a network, with a limit of time."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float | None, call: Callable[[], Result]) -> Result:
    """Return the result of `call`, or raise its error. Raises TimeoutError if it takes longer than `seconds`.

    `call` runs in a thread. After the time is over, or after Ctrl-C, the thread is left alone: name resolution cannot
    be interrupted, and a download in many threads only when all of them have their files.
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
