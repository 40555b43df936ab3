"""The control groups of this process, of versions 1 and 2. The limits of its group and of all parents hold."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def group_directories(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the directories of this process's groups for a version 1 `controller` and for version 2, innermost first.

    `root` holds proc and sys. In a container the path in /proc may be the host's: a missing directory is skipped.
    """
    base = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounts = [base, base / "unified"]
        elif controller in controllers.split(","):
            mounts = [base / controllers, base / controller]
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for group in (relative, *relative.parents):
                if (mount / group).is_dir():
                    yield mount / group


def memory_limits(root: Path = ROOT) -> list[int]:
    """Return the limits in bytes of this process's groups that have one."""
    return [limit for group in group_directories("memory", root) if (limit := memory_limit(group))]


def memory_limit(group: Path) -> int | None:
    """Return a group's limit in bytes, for either version; None without one."""
    return read_integer(group / "memory.max") or read_integer(group / "memory.limit_in_bytes")


def read_integer(path: Path) -> int | None:
    """Return the file's number; None if there is no such file or no number in it ("max")."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].lstrip("-").isdigit() else None


def read_table(path: Path) -> dict[str, int]:
    """Return the numbers of lines such as "MemAvailable:  123 kB" or "inactive_file 123", in bytes."""
    rows = (line.split() for line in _lines(path))
    return {
        row[0].rstrip(":"): int(row[1]) * (1024 if row[2:] == ["kB"] else 1)
        for row in rows
        if len(row) > 1 and row[1].isdigit()
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
