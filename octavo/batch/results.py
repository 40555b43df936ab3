"""The file of results. At every moment it holds the results of the first prompts, in order, and nothing else.

A second file beside it (`results.txt.run.json` for `results.txt`) describes the run: its prompts, and every parameter
that changes results. It is written before the first result, so that a later run can compare itself with it.
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
    """The run that results belong to: the first `num_prompts` prompts, their digest, and the parameters.

    `num_failed` prompts could not be answered; `last_failed` is the index of the last of them.
    """

    num_prompts: int
    digest: str
    parameters: Mapping[str, Any]
    num_failed: int = 0
    last_failed: int = -1


class Results:
    """An open file of results, locked against other processes. It has `num_done` results.

    `begun` is the run of these results, or None if there are no results. Nothing is changed before `belong_to`.
    """

    def __init__(self, path: Path, file: FileIO, *, overwrite: bool = False) -> None:
        """Raises CommandError if the run of the results is not known and `overwrite` is false."""
        self.path, self._file = path, file
        self.begun: Run | None = None
        self.num_done = self._num_bytes = 0
        if not overwrite and file.seek(0, os.SEEK_END) > 0:
            self.begun = _known_run(path)
            self.num_done, self._num_bytes = _whole_lines(file)
            if self.num_done > self.begun.num_prompts:
                raise _unknown(path)
        self._run = self.begun

    @property
    def num_failed(self) -> int:
        """How many results have an error instead of an answer."""
        if self._run is None:
            return 0
        # A failure is counted before its result is added, and the process may have ended in between.
        return self._run.num_failed - (self._run.last_failed >= self.num_done)

    def belong_to(self, num_prompts: int, digest: str, parameters: Mapping[str, Any]) -> None:
        """Write the run of the results down, and remove lines that are not its results. Raises CommandError."""
        with _writing(self.path):
            self._file.truncate(self._num_bytes)
        self._note(Run(num_prompts, digest, parameters, self.num_failed))

    def add(self, line: str, *, failed: bool = False) -> None:
        """Add the next result. After this returns, no end of the process can lose it. Raises CommandError."""
        if failed:
            assert self._run is not None  # `belong_to` comes first
            counted = {"num_failed": self.num_failed + 1, "last_failed": self.num_done}
            self._note(msgspec.structs.replace(self._run, **counted))
        rest = memoryview(line.encode() + b"\n")
        with _writing(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]
        self.num_done += 1

    def _note(self, run: Run) -> None:
        target = _run_path(self.path)
        partial = target.with_name(target.name + ".partial")
        with _writing(target):
            with partial.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(run)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        self._run = run


@contextmanager
def open_results(path: Path, *, overwrite: bool = False) -> Iterator[Results]:
    """Open `path` to add results to the present ones, or to replace them if `overwrite`. Raises CommandError."""
    with _writing(path):
        file = path.open("ab+", buffering=0)  # each result is written at once
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{path} is being written by another octavo generate") from None
        yield Results(path, file, overwrite=overwrite)


def check_same_run(path: Path, begun: Run, parameters: Mapping[str, Any]) -> None:
    """Raise CommandError if the results in `path` have other parameters. It names the first difference."""
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


def _known_run(path: Path) -> Run:
    try:
        return msgspec.json.decode(_run_path(path).read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError):
        raise _unknown(path) from None


def _unknown(path: Path) -> CommandError:
    return CommandError(
        f"{path} is there already and not known to be of this command: give another --output-path, or --overwrite"
    )


def _whole_lines(file: FileIO) -> tuple[int, int]:
    """Return the number of complete lines and their bytes. An incomplete last line is left of a killed process."""
    num_lines = num_bytes = position = 0
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        num_lines += chunk.count(b"\n")
        if b"\n" in chunk:
            num_bytes = position + chunk.rindex(b"\n") + 1
        position += len(chunk)
    return num_lines, num_bytes
