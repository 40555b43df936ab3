"""What child processes write to their standard error: passed on to ours, its end kept for an error's cause."""

import contextlib
import os
import secrets
import threading

NUM_KEPT_BYTES = 16 << 10
NUM_SHOWN_LINES = 15


class ChildLog:
    """A pipe for the standard error of children, copied until `close`."""

    def __init__(self) -> None:
        self._source, self.descriptor = os.pipe()
        self._end = f"\0{secrets.token_hex(16)}\n".encode()
        self._kept = b""
        self._thread = threading.Thread(target=self._copy, name="octavo-child-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read what is left. To be called once no child lives."""
        # The end of the file may never come: a process that the user forked holds the pipe open as well.
        os.write(self.descriptor, self._end)
        self._thread.join()
        os.close(self.descriptor)
        os.close(self._source)

    def cause(self) -> str:
        """Return what the children said last: their one line about why they end if there is one, or all lines."""
        lines = self._kept.decode(errors="replace").splitlines()
        for line in reversed(lines):
            name, colon, reason = line.partition(": ")
            if colon and name.startswith("python -m "):
                return reason
        return "\n".join(["it said last:", *lines[-NUM_SHOWN_LINES:]]) if lines else "it said nothing"

    def _copy(self) -> None:
        while not self._kept.endswith(self._end):
            chunk = os.read(self._source, 1 << 16)
            self._kept = (self._kept + chunk)[-NUM_KEPT_BYTES:]
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, chunk.removesuffix(self._end))
        self._kept = self._kept.removesuffix(self._end)
