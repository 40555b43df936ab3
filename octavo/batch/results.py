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
    """What results belong to: the first `num_prompts` prompts, their digest, and the parameters.

    Of the results, `num_failed` are of prompts that could not be answered, the last of them at `last_failed`.
    """

    num_prompts: int
    digest: str
    parameters: Mapping[str, Any]
    num_failed: int = 0
    last_failed: int = -1


class Results:
    """An open file of results, which no other process writes meanwhile. `num_done` is how many there are.

    `begun` is the run that they are of, None if there are none. Nothing is changed before `belong_to`.
    """

    def __init__(self, path: Path, file: FileIO, *, overwrite: bool = False) -> None:
        """Raise CommandError if nobody knows whose results there are, and they are not to be overwritten."""
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
        """How many results say that there is no answer."""
        if self._run is None:
            return 0
        # One is counted before it is added, and this process may have ended between the two.
        return self._run.num_failed - (self._run.last_failed >= self.num_done)

    def belong_to(self, num_prompts: int, digest: str, parameters: Mapping[str, Any]) -> None:
        """Write down which run the results are of, and remove what is none of them. Raises CommandError."""
        with _writing(self.path):
            self._file.truncate(self._num_bytes)
        self._note(Run(num_prompts, digest, parameters, self.num_failed))

    def add(self, line: str, *, failed: bool = False) -> None:
        """Add the next result; once this returns, no end of this process can undo it. Raises CommandError."""
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
    """Open `path` for adding results to those that it has, or, to `overwrite`, has not. Raises CommandError."""
    with _writing(path):
        file = path.open("ab+", buffering=0)  # what is added is out at once, and nothing is left to write at the end
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{path} is being written by another octavo generate") from None
        yield Results(path, file, overwrite=overwrite)


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
    """Return the number of lines that end, and of the bytes they take: what follows was torn by a kill."""
    num_lines = num_bytes = position = 0
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        num_lines += chunk.count(b"\n")
        if b"\n" in chunk:
            num_bytes = position + chunk.rindex(b"\n") + 1
        position += len(chunk)
    return num_lines, num_bytes
