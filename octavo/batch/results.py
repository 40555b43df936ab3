"""The file of results, which at every moment holds the results of the first prompts, in order, and nothing else.

Beside it lies a file that says which run it is of (`results.txt` has `results.txt.run.json`): the prompts and all that
their results depend on. It is there before the first result is, so that results can be told to be of this run or not.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import CommandError

CHUNK_BYTES = 1 << 20


class Run(msgspec.Struct, frozen=True):
    """What results belong to: the first `num_prompts` prompts, their digest, and the parameters."""

    num_prompts: int
    digest: str
    parameters: Mapping[str, Any]


class Results:
    """An open file of results, which no other process writes meanwhile. `num_done` is how many there are."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path, self._file = path, file
        self.num_done = _repair(file)

    def begun_by(self) -> Run | None:
        """Return which run the results are of; None if there are none. Raises CommandError if nobody knows."""
        if self.num_done == 0:
            return None
        try:
            return msgspec.json.decode(_run_path(self.path).read_bytes(), type=Run)
        except (OSError, msgspec.DecodeError):
            raise CommandError(
                f"{self.path} is there already and not known to be of this command: give another --output-path, or"
                " --overwrite"
            ) from None

    def belong_to(self, run: Run) -> None:
        """Write down that the results are of `run`, before the first is added. Raises CommandError."""
        target = _run_path(self.path)
        partial = target.with_name(target.name + ".partial")
        with _writing(target):
            with partial.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(run)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)

    def add(self, line: str) -> None:
        """Add the next result; once this returns, no end of this process can undo it. Raises CommandError."""
        rest = memoryview(line.encode() + b"\n")
        with _writing(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]
        self.num_done += 1


@contextmanager
def open_results(path: Path, *, overwrite: bool = False) -> Iterator[Results]:
    """Open `path` for adding results, a half-written last line removed. Raises CommandError."""
    with _writing(path):
        file = path.open("ab+", buffering=0)  # what is added is out at once, and nothing is left to write at the end
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{path} is being written by another octavo generate") from None
        if overwrite:
            file.truncate(0)
        yield Results(path, file)


def check_same_run(path: Path, begun: Run, parameters: Mapping[str, Any]) -> None:
    """Raise CommandError if the results in `path` are of other parameters: it names the first."""
    for name in sorted(begun.parameters.keys() | parameters.keys()):
        before, now = begun.parameters.get(name), parameters.get(name)
        if before != now:
            raise CommandError(
                f"{path} was begun with {name} {_shown(before)}, and now it is {_shown(now)}: results of both do not"
                " belong into one file. Give another --output-path, or --overwrite"
            )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the body into a CommandError about writing to `path`."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from None


def _run_path(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")


def _shown(value: Any) -> str:
    return "unset" if value is None else msgspec.json.encode(value).decode()


def _repair(file: FileIO) -> int:
    """Remove what follows the last end of line, and return the number of lines."""
    num_lines = num_bytes = position = 0
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        num_lines += chunk.count(b"\n")
        if b"\n" in chunk:
            num_bytes = position + chunk.rindex(b"\n") + 1
        position += len(chunk)
    file.truncate(num_bytes)
    return num_lines
