"""The user's cache of models, and the one way to add a directory to it: whole or not at all."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.errors import ModelError


def models_directory() -> Path:
    """`$XDG_CACHE_HOME/octavo/models`, or `~/.cache/octavo/models`. Not created here."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "octavo" / "models"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, after `build(partial)` has made it if it was not there.

    `build` writes a file or fills a directory at `partial`, beside `target`; a rename then makes it appear in one
    step, so a file or directory named `target` is always whole. A lock lets one process build while others wait for
    its result. So a partial that exists was left by a process that died.
    Raises ModelError if the disk is full or the cache cannot be written.
    """
    if target.exists():
        return target
    with writing_to(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                _build(target, build)
    return target


def require_space(directory: Path, needed_bytes: int, purpose: str, variable: str = "XDG_CACHE_HOME") -> None:
    """Raise ModelError unless `directory`'s disk has `needed_bytes` free; the environment variable `variable` moves
    the directory."""
    present = next(path for path in (directory, *directory.parents) if path.exists())
    free_bytes = shutil.disk_usage(present).free
    if free_bytes < needed_bytes:
        raise ModelError(
            f"{purpose} needs {needed_bytes / 1e6:,.0f} MB in {directory}, but only {free_bytes / 1e6:,.0f} MB "
            f"are free there. Free some space, or set {variable} to a directory on a larger disk."
        )


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Turn an OSError of the body into a ModelError about writing to `directory`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cause = "the disk is full" if full else f"{error.filename or directory}: {error.strerror or error}"
        raise ModelError(
            f"cannot write to the model cache {directory}: {cause}. "
            "Make it writable, free some space, or set XDG_CACHE_HOME to another directory."
        ) from error


def _build(target: Path, build: Callable[[Path], None]) -> None:
    partial = target.with_name(f".{target.name}.partial")
    _remove(partial)
    try:
        build(partial)
        os.replace(partial, target)
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel gives up when this process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
