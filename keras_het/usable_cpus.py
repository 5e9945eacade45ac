"""CPUs that this process may use, and what the cgroups of this process allow and have used."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
TASKS = Path("/proc/self/task")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage, and reclaimable part of it, of cgroups of versions 2 and 1."""


def usable_cpus(cgroups: Path = CGROUPS, membership: Path | None = None) -> float:
    """Return the CPUs that this process may use: its affinity, bounded by its cgroups' quotas."""
    return min([float(len(own_cpus())), *own_quotas(cgroups, membership).values()])


def own_cpus() -> frozenset[int]:
    """Return the ids of the CPUs that this process may run on: its affinity."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota_of(folder: Path) -> float:
    """Return the CPUs that a cgroup may use at a time, infinite without a quota."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()[:2]
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        microseconds = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
        return microseconds / period_us if microseconds > 0 else math.inf
    return math.inf


def own_quotas(cgroups: Path = CGROUPS, membership: Path | None = None) -> dict[str, float]:
    """Return the CPUs that the cgroups of this process may use at once, if they have a quota."""
    quotas = {}
    for folder in controller_folders("cpu", cgroups, membership):
        quota = quota_of(folder)
        if quota < math.inf:
            quotas[_identity(folder)] = quota
    return quotas


def _identity(folder: Path) -> str:
    # not its path: in containers each process's group has the same one
    with contextlib.suppress(OSError):
        status = folder.stat()
        return f"{status.st_dev}:{status.st_ino}"
    return str(folder)


def controller_folders(
    controller: str, cgroups: Path = CGROUPS, membership: Path | None = None
) -> Iterator[Path]:
    """Yield the cgroup of this process that has a controller, then its ancestors."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (membership or Path("/proc/self/cgroup")).read_text().splitlines()
    for line in lines:
        _, names, path = line.split(":", 2)
        root = _root_of(controller, names, cgroups)
        if root is None:
            continue
        folder = root / path.lstrip("/")
        # in a container the path may be that of the host: the root is then this process's group
        while not folder.exists() and folder != root:
            folder = folder.parent
        while True:
            yield folder
            if folder == root:
                break
            folder = folder.parent


def _root_of(controller: str, names: str, cgroups: Path) -> Path | None:
    """Return the mount point of the hierarchy, None if it does not have this controller."""
    if names == "":  # version 2 has all controllers
        mounts = [cgroups]
    elif controller in names.split(","):
        mounts = [cgroups / names, cgroups / controller]
    else:
        mounts = []
    return next((mount for mount in mounts if mount.exists()), None)


def times_of_thread(thread: str | int) -> tuple[float, float]:
    """Return for how many seconds a thread of this process has run, and waited for a CPU."""
    ran, waited = (TASKS / str(thread) / "schedstat").read_text().split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


def cpu_seconds_of(folder: Path, cgroups: Path = CGROUPS) -> float:
    """Return the CPU time that a cgroup has used; if it is hidden, that of this process."""
    usage = statistic_of(folder / "cpu.stat", "usage_usec")
    if usage is not None:
        return usage / 1e6
    _, *path = folder.relative_to(cgroups).parts or ("",)
    # version 1 may have the controllers cpu and cpuacct in separate hierarchies
    for account in (folder, cgroups.joinpath("cpuacct", *path)):
        with contextlib.suppress(OSError, ValueError):
            return int((account / "cpuacct.usage").read_text()) / 1e9
    return time.process_time()


def memory_of(folder: Path) -> tuple[int, int] | None:
    """Return the memory limit of a cgroup and what it uses in bytes, None without a limit."""
    # Files that the kernel caches in memory and no process uses do not count as used.
    for limit, used, unused in _MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            bounds = int((folder / limit).read_text()), int((folder / used).read_text())
            cached = statistic_of(folder / "memory.stat", unused) or 0
            return bounds[0], bounds[1] - cached
    return None


def statistic_of(path: Path, name: str) -> int | None:
    """Return a number of a cgroup's statistics file, None if it is not there."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return None
