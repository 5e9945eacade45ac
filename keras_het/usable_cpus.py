"""CPUs that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from keras_het.cgroups import CGROUPS, controller_folders


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
