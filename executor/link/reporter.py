"""A thread that reports how far the step has come."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing

import zmq

from octavo.executor.link.connection import Socket, connect
from octavo.executor.step.progress import StepProgress
from octavo.protocol.link_keys import ClientKeys
from octavo.protocol.messages import Progress, encode
from octavo.protocol.sockets import new_identity, try_send

INTERVAL_S = 0.5
LONGEST_BEGIN_S = 1.0  # a started thread runs after this time at the latest


class ProgressReporter(AbstractContextManager["ProgressReporter"]):
    """A thread with its own socket, which reports every half second how far the step has come and how much of the
    device's memory is used, even while the step's thread is busy."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        address: str,
        keys: ClientKeys | None,
        incarnation: str,
        progress: StepProgress,
        used_bytes: Callable[[], int],
    ) -> None:
        self._socket, self._handshakes = connect(context, address, new_identity(), keys, is_silent=True)
        self._incarnation = incarnation
        self._progress = progress
        self._used_bytes = used_bytes
        self._has_begun, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> "ProgressReporter":
        try:
            self._thread.start()
        except BaseException:  # a signal came; the thread may run already
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _stop(self) -> None:
        """Let the thread close its socket. Another thread that closed the socket in use would wait for ever."""
        self._ended.set()
        if self._has_begun.wait(LONGEST_BEGIN_S):
            self._thread.join()

    def _run(self) -> None:
        self._has_begun.set()
        with self._socket as socket, closing(self._handshakes):
            while not self._ended.wait(INTERVAL_S):
                self._handshakes.look()
                step_id, layers_done = self._progress.step_id, self._progress.layers_done
                message = Progress(self._incarnation, step_id, layers_done, self._used_bytes())
                try_send(socket, [encode(message)])
