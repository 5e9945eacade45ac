"""Memory still available to this process."""

from __future__ import annotations

from pathlib import Path

import psutil

from keras_het.cgroups import CGROUPS, controller_folders, memory_of


def available_memory(cgroups: Path = CGROUPS, membership: Path | None = None) -> int:
    """Return the available bytes: of the host, bounded by what the limits of the cgroups leave.

    Files that the kernel caches in memory and no process uses count as available.
    """
    available = int(psutil.virtual_memory().available)
    for folder in controller_folders("memory", cgroups, membership):
        bounds = memory_of(folder)
        if bounds is not None:
            available = min(available, max(bounds[0] - bounds[1], 0))
    return available
