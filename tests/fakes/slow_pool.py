"""Threads that are late."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class SlowPool(ThreadPoolExecutor):
    """Threads that begin late with two of three tasks."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(4)
        self.delay_s, self._num_tasks = delay_s, 0

    def submit(self, task: Callable[..., Any], /, *given: Any, **named: Any) -> "Future[Any]":
        self._num_tasks += 1
        delay_s = self.delay_s if self._num_tasks % 3 else 0.0

        def run() -> Any:
            time.sleep(delay_s)
            return task(*given, **named)

        return super().submit(run)
