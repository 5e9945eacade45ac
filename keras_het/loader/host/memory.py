"""Memory still available to this process."""

from __future__ import annotations

from pathlib import Path

import psutil

from keras_het.cgroups import CGROUPS, controller_folders, memory_of


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
        bounds = memory_of(folder)
        if bounds is not None:
            available = min(available, max(bounds[0] - bounds[1], 0))
    return available
