"""The standard streams of a command, of which any may be closed or full: what cannot be read or written is an error.

Python leaves out of sys the streams that are closed, and tells nobody whose OSError a failed `print` is.
"""

import io
import os
import sys
from typing import Any

from octavo.errors import CommandError


class OutputEndedError(Exception):
    """The reader of standard output has closed it."""


def open_standard_streams() -> None:
    """Give the process all three streams. Failed writes to standard output raise CommandError or OutputEndedError."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), encoding="utf-8")  # reading fails, as if closed
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    given = sys.stdout
    assert isinstance(given, io.TextIOWrapper)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Output(given.fileno(), "wb", closefd=False)),
        encoding=given.encoding,
        errors=given.errors,
        line_buffering=given.line_buffering,
        write_through=given.write_through,
    )


class _Output(io.FileIO):
    """Fails once. After that, writes are dropped: Python writes the rest of its buffers when the process ends."""

    _failed = False

    def write(self, data: Any, /) -> int:
        if self._failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:
            self._failed = True
            raise OutputEndedError from None
        except OSError as error:
            self._failed = True
            raise CommandError(f"standard output cannot be written: {error.strerror}") from None
