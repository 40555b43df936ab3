"""The turns of what encodes prompts: in threads, a slice at a time, a bounded number at once."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.request_error import overloaded
from gateway.steps import Steps, next_step

Result = TypeVar("Result")

SHORT_CHARACTERS = 16 << 10  # one or two slices: they have threads of their own, and wait for no long one
MAX_SHORT = 1024
MAX_LONG = 16
RETRY_AFTER_S = 1.0


class Encodings:
    """Long encodings take turns, so the shorter of them ends first; those whose client left take no more turns."""

    def __init__(self) -> None:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._short = _Lane("short", max_running=MAX_SHORT, num_threads=2)
        self._long = _Lane("long", max_running=MAX_LONG, num_threads=min(4, max(1, num_cores // 4)))

    async def run(self, steps: Steps[Result], num_characters: int) -> Result:
        """Return what `steps` return. Raises RequestError (429) if too many encodings are under way."""
        lane = self._short if num_characters <= SHORT_CHARACTERS else self._long
        return await lane.run(steps)

    def close(self) -> None:
        """End the threads; the slices that they were asked for are done first."""
        self._short.close()
        self._long.close()


class _Lane:
    def __init__(self, name: str, max_running: int, num_threads: int) -> None:
        self._name, self._max_running, self._num_running = name, max_running, 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"encode-{name}")

    async def run(self, steps: Steps[Result]) -> Result:
        if self._num_running >= self._max_running:
            message = (
                f"{self._num_running} other {self._name} prompts are being tokenized: send the request again later"
            )
            raise overloaded(message, RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        self._num_running += 1
        try:
            while True:
                # One call a slice: whoever asked first is next, and a slice that nobody waits for is not begun.
                result = await loop.run_in_executor(self._threads, next_step, steps)
                if result is not None:
                    return result[0]
        finally:
            self._num_running -= 1

    def close(self) -> None:
        self._threads.shutdown()
