"""Memory still available to this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from keras_het.cgroups import CGROUPS, controller_folders

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage, and reclaimable part of it, of cgroups of versions 2 and 1."""


def available_memory(cgroups: Path = CGROUPS, membership: Path | None = None) -> int:
    """Return the available bytes: of the host, bounded by what the limits of the cgroups leave.

    Files that the kernel caches in memory and no process uses count as available.

    Args:
        cgroups: where the cgroup file systems are mounted.
        membership: file that names the cgroups of the process, that of this process by default.

    Reference:
        https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files and
        https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    available = int(psutil.virtual_memory().available)
    for folder in controller_folders("memory", cgroups, membership):
        left = _left_in(folder)
        available = available if left is None else min(available, left)
    return available


def _left_in(folder: Path) -> int | None:
    """Return the bytes that the limit of a cgroup leaves, None without a limit."""
    for limit, used, unused in _FILES:
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            free = int((folder / limit).read_text()) - int((folder / used).read_text())
            return max(free + _statistic(folder, unused), 0)
    return None


def _statistic(folder: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
