"""Work on a prompt that goes on when a test says so."""

import asyncio
import threading

from octavo.gateway.text.steps import Steps


class Work:
    """Steps that are counted, each of which waits until it is allowed."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._allowed = threading.Semaphore(0)

    def steps(self, num: int) -> Steps[str]:
        for _ in range(num):
            self.num_begun += 1
            assert self._allowed.acquire(timeout=20)
            yield
        return "done"

    def allow(self, num: int = 1) -> None:
        self._allowed.release(num)

    async def begun(self, num: int) -> None:
        async with asyncio.timeout(20):
            while self.num_begun < num:
                await asyncio.sleep(0.001)
