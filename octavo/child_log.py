"""What child processes write to their standard error: passed on to ours, its end kept for an error's cause."""

import os
import threading

NUM_KEPT_BYTES = 16 << 10
NUM_SHOWN_LINES = 15


class ChildLog:
    """A pipe for the standard error of children. It copies until all ends of the pipe are closed."""

    def __init__(self) -> None:
        self._source, self.descriptor = os.pipe()
        self._kept = b""
        self._thread = threading.Thread(target=self._copy, name="octavo-child-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read what is left. To be called once no child lives."""
        os.close(self.descriptor)
        self._thread.join()
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
        while chunk := os.read(self._source, 1 << 16):
            self._kept = (self._kept + chunk)[-NUM_KEPT_BYTES:]
            try:
                os.write(2, chunk)
            except OSError:  # nobody reads it
                continue
