"""How much memory this machine has, how much of it is left, and how much this process uses."""

from pathlib import Path

import torch

from octavo.executor.machine.cgroups import (
    ROOT,
    group_directories,
    memory_limit,
    memory_limits,
    read_integer,
    read_table,
)


def usable_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process may still use: the system's available memory, within its groups' limits.

    File pages that a group could drop count as available, as the system counts them. Raises ValueError without
    /proc/meminfo.
    """
    available = read_table(root / "proc/meminfo").get("MemAvailable")
    if available is None:
        raise ValueError("cannot tell how much memory is available: set --kv-cache-memory-bytes")
    rooms = [room for group in group_directories("memory", root) if (room := _group_room(group)) is not None]
    return max(0, min([available, *rooms]))


def free_device_bytes(device: torch.device, utilization: float) -> int:
    """Return how much of a GPU's memory is free below `utilization`. Loaded weights are not free."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free))


def total_bytes(device: torch.device, root: Path = ROOT) -> int:
    """Return the size of a GPU's memory; on the CPU, of the system's, or the least limit of this process's groups."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return min([read_table(root / "proc/meminfo").get("MemTotal", 0), *memory_limits(root)])


def used_bytes(device: torch.device, root: Path = ROOT) -> int:
    """Return how much of a GPU's memory this process holds through torch; on the CPU, its resident memory.

    Any thread may call this. It never waits for the device.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return read_table(root / "proc/self/status").get("VmRSS", 0)


def _group_room(group: Path) -> int | None:
    """Return a control group's limit less its use; None without a limit."""
    limit = memory_limit(group)
    used = read_integer(group / "memory.current") or read_integer(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    table = read_table(group / "memory.stat")
    return limit - used + table.get("total_inactive_file", table.get("inactive_file", 0))
