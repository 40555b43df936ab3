"""Prompts are encoded in steps, in threads. The number of prompts that are being encoded is bounded."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.gateway.request_error import overloaded
from octavo.gateway.text.steps import Steps, next_step

Result = TypeVar("Result")

MAX_ENCODINGS = 1024
NUM_THREADS = 2
RETRY_AFTER_S = 1.0


class Encodings:
    """Encodings take turns, so that short ones end first. If a client leaves, its encoding gets no more turns."""

    def __init__(self) -> None:
        self._num_running = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="encode")

    async def run(self, steps: Steps[Result]) -> Result:
        """Return the result of `steps`. Raises RequestError (429) if too many encodings are running."""
        if self._num_running >= MAX_ENCODINGS:
            message = f"{self._num_running} other prompts are being tokenized: send the request again later"
            raise overloaded(message, RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        self._num_running += 1
        try:
            while True:
                # One call per step: encodings take turns, and a cancelled encoding does not begin its next step.
                result = await loop.run_in_executor(self._threads, next_step, steps)
                if result is not None:
                    return result[0]
        finally:
            self._num_running -= 1

    def close(self) -> None:
        """End the threads, after the steps that are queued for them."""
        self._threads.shutdown()
