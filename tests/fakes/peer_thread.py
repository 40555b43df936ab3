"""One life of a fake peer, in a thread: it can be frozen, and killed without a word."""

import threading
from abc import ABC, abstractmethod
from typing import Self


class PeerThread(ABC):
    """Runs `_run` while the context lasts. `_run` ends soon after `_stop` is set, and stands still at `_running`."""

    def __init__(self) -> None:
        self.error: AssertionError | None = None  # what it found wrong with what it was told
        self._stop = threading.Event()
        self._running = threading.Event()  # cleared: frozen
        self._running.set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End without a word."""
        self._stop.set()
        self._running.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def freeze(self) -> None:
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    def check(self) -> None:
        """Raise what was found wrong."""
        if self.error is not None:
            raise self.error

    @abstractmethod
    def _run(self) -> None: ...
