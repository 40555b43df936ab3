"""Where a server's processes meet: short enough, private, and gone with the server, however that ended."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.serving.socket_directory import socket_directory

ROOT = Path(__file__).parents[2]
KILLED = """
import os
from octavo.serving.socket_directory import socket_directory
with socket_directory() as path:
    (path / "frontend").touch()
    print(path, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of a test's own, with a path that is short."""
    with tempfile.TemporaryDirectory(prefix="runtime-", dir="/tmp") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)


def test_it_is_private_and_goes(parent: Path) -> None:
    with socket_directory() as path:
        assert path.parent == parent
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert list(parent.iterdir()) == []


def test_that_of_a_killed_server_goes_with_the_next_start_and_no_other(parent: Path) -> None:
    for name in ("octavo-results", "octavo-12345678"):
        (parent / name).mkdir()
    with socket_directory() as living:
        killed = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, text=True, stdout=subprocess.PIPE)
        left = Path(killed.stdout.strip())
        assert left.is_dir()
        assert left.parent == parent
        with socket_directory():
            assert not left.exists()
            assert living.is_dir()
    assert sorted(os.listdir(parent)) == ["octavo-12345678", "octavo-results"]


def test_a_path_that_is_too_long_for_a_socket_is_not_used(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = parent / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with socket_directory() as path:
        assert path.parent == Path("/tmp")
