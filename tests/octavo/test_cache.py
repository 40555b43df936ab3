"""What the cache holds is whole, whoever builds it, however often, and whatever kills them."""

import errno
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from octavo.errors import ModelError
from octavo.models.cache import build_once, models_directory, require_space


def build_half_and_die(partial: Path) -> None:
    partial.mkdir()
    (partial / "config.json").write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)


def build_whole(partial: Path) -> None:
    partial.mkdir()
    (partial / "weights").write_text("all")


def test_a_killed_build_is_not_taken_for_whole(tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"
    child = multiprocessing.get_context("spawn").Process(target=build_once, args=(target, build_half_and_die))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not target.exists()
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == [".tiny.partial"]

    assert build_once(target, build_whole) == target
    assert [path.name for path in target.iterdir()] == ["weights"]
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == ["tiny"]


def test_simultaneous_builders_build_once(tmp_path: Path) -> None:
    target, built, all_here = tmp_path / "tiny", [], threading.Barrier(4)

    def build(partial: Path) -> None:
        built.append(partial)
        build_whole(partial)

    def resolve() -> None:
        all_here.wait()
        assert (build_once(target, build) / "weights").read_text() == "all"

    threads = [threading.Thread(target=resolve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(partial: Path) -> None:
        partial.mkdir()
        raise ModelError("not this one")

    with pytest.raises(ModelError, match="not this one"):
        build_once(tmp_path / "tiny", build)
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    def build(partial: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial))

    with pytest.raises(ModelError, match=r"the disk is full.*XDG_CACHE_HOME"):
        build_once(tmp_path / "tiny", build)


def test_a_cache_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"Not a directory.*XDG_CACHE_HOME"):
        build_once(tmp_path / "file" / "models" / "tiny", build_whole)


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"converting it needs 1,000,000,000,000 MB in .* free there"):
        require_space(tmp_path, 10**18, "converting it")
    require_space(tmp_path, 1, "converting it")


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_directory() == tmp_path / "octavo" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert models_directory() == Path("/home/someone/.cache/octavo/models")
