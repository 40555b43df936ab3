"""Copies the standard error of child processes to our own, and keeps its end as the cause of an error."""

import contextlib
import os
import secrets
import threading
from collections.abc import Sequence

from octavo.protocol.process import PROGRAM, REFUSED

NUM_KEPT_BYTES = 16 << 10
NUM_SHOWN_LINES = 15


class ChildLog:
    """A pipe for the standard error of children, copied until `close`.

    With `reasons_last`, the paragraph in which a child says why it does not start is held until `close`, so that it
    comes after the lines of other children. After `release` it is shown at once.
    """

    def __init__(self, *, reasons_last: bool = False) -> None:
        self._holds_reasons = reasons_last
        self._held = b""
        self._line = b""  # the beginning of a line that may be a reason
        self._is_in_line = False  # whether a part of the present line was shown
        self._source, self.descriptor = os.pipe()
        self._end = f"\0{secrets.token_hex(16)}\n".encode()
        self._kept = b""
        self.thread = threading.Thread(target=self._copy, name="octavo-child-log", daemon=True)
        self.thread.start()
        self._is_open = True

    def release(self) -> None:
        """Hold no more reasons: the start is over."""
        self._holds_reasons = False

    def close(self) -> None:
        """Read the rest. Call it after all children have ended; it may be called repeatedly."""
        if not self._is_open:
            return
        self._is_open = False
        # The end of the file may never come: a process that the user forked may hold the pipe open.
        os.write(self.descriptor, self._end)
        self.thread.join()
        os.close(self.descriptor)
        os.close(self._source)

    def cause(self, statuses: Sequence[int]) -> str:
        """Return the children's last words: why a child refuses, or the last lines. `statuses`: how they ended."""
        lines = self._kept.decode(errors="replace").splitlines()
        for line in reversed(lines) if REFUSED in statuses else ():
            name, colon, reason = line.partition(": ")
            if colon and name.startswith(PROGRAM):
                return reason
        return "\n".join(["it said last:", *lines[-NUM_SHOWN_LINES:]]) if lines else "it said nothing"

    def _copy(self) -> None:
        while not self._kept.endswith(self._end):
            chunk = os.read(self._source, 1 << 16)
            self._kept = (self._kept + chunk)[-NUM_KEPT_BYTES:]
            self._show(self._to_show(chunk.removesuffix(self._end)))
        self._kept = self._kept.removesuffix(self._end)
        self._show(self._line + self._held)

    def _show(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads our standard error
            os.write(2, text)

    def _to_show(self, chunk: bytes) -> bytes:
        """Return the part of the log that can be shown at once."""
        if not self._holds_reasons:
            shown, self._held, self._line = self._held + self._line + chunk, b"", b""
            return shown
        parts, self._line, shown = (self._line + chunk).splitlines(keepends=True), b"", b""
        for part in parts:
            if self._is_in_line or not _may_be_reason(part):
                shown += part
                self._is_in_line = not part.endswith((b"\n", b"\r"))
            elif part.endswith(b"\n"):
                self._held += part
            else:
                self._line = part
        return shown


def _may_be_reason(part: bytes) -> bool:
    """Whether the line that begins with `part` may be a reason."""
    begins = PROGRAM.encode()
    return part.startswith(begins) or begins.startswith(part)
