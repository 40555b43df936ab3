"""How many threads compute: one for each physical core that this process may use."""

import os
from collections.abc import Iterable
from pathlib import Path

from octavo.executor.machine.cgroups import ROOT, group_directories, read_integer


def choose_num_threads(
    override: int | None = None, affinity: Iterable[int] | None = None, root: Path = ROOT, *, num_sharing: int = 1
) -> tuple[int, str]:
    """Return how many threads to compute with, and why, for the log.

    `affinity` lists the CPUs that this process may run on (default: the system's answer). Two hardware threads of one
    core share its arithmetic units: they count once. A control group's quota is rounded down, but is at least one;
    `num_sharing` processes that compute at the same time divide the threads in the same way.
    """
    if override is not None:
        return override, "as set by num_threads"
    num_threads, reason = _usable_cores(affinity, root)
    if num_sharing > 1:
        return max(1, num_threads // num_sharing), f"one of {num_sharing} parts; {reason}"
    return num_threads, reason


def _usable_cores(affinity: Iterable[int] | None, root: Path) -> tuple[int, str]:
    cpus = set(os.sched_getaffinity(0) if affinity is None else affinity)
    num_cores = count_cores(cpus, root)
    quota = cpu_quota(root)
    if quota is not None and quota < num_cores:
        return max(1, int(quota)), f"the control group's quota is {quota:g} CPUs"
    return num_cores, f"physical cores among the {len(cpus)} CPUs this process may use"


def count_cores(cpus: Iterable[int], root: Path = ROOT) -> int:
    """Return the number of physical cores of `cpus`; a CPU of unknown topology counts as one core."""
    return len({_siblings(cpu, root) for cpu in cpus})


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many CPUs' time the control groups of this process allow; None without a limit."""
    quotas = [quota for group in group_directories("cpu", root) if (quota := _group_quota(group)) is not None]
    return min(quotas, default=None)


def _siblings(cpu: int, root: Path) -> str:
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return f"cpu{cpu}"


def _group_quota(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except OSError:
        quota_us, period_us = read_integer(group / "cpu.cfs_quota_us"), read_integer(group / "cpu.cfs_period_us")
        return quota_us / period_us if quota_us and period_us and quota_us > 0 else None
    return None if quota == "max" else int(quota) / int(period)
