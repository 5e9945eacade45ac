"""The cgroups of this process, by controller, and what they have used."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage, and reclaimable part of it, of cgroups of versions 2 and 1."""


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
    """Return the memory limit of a cgroup and what it uses in bytes, None without a limit.

    Files that the kernel caches in memory and no process uses do not count as used.
    """
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
