"""CPUs that are idle, and memory that is available, to this process."""

from __future__ import annotations

import math
import time
from pathlib import Path

import psutil

from keras_het.cgroups import CGROUPS, controller_folders, cpu_seconds_of, memory_of
from keras_het.usable_cpus import own_cpus, quota_of


class IdleCpus:
    """CPUs usable by this process that were idle since the last query, within its quotas."""

    def __init__(self, cgroups: Path = CGROUPS, membership: Path | None = None) -> None:
        folders = {
            folder: quota_of(folder) for folder in controller_folders("cpu", cgroups, membership)
        }
        self._quotas = {folder: quota for folder, quota in folders.items() if quota < math.inf}
        self._cgroups = cgroups
        self._cpus = own_cpus()
        self._last = self._sample()

    def read(self) -> float:
        last, self._last = self._last, self._sample()
        seconds = self._last[0] - last[0]
        if seconds <= 0:
            return 0.0
        idle = min(max((self._last[1] - last[1]) / seconds, 0.0), float(len(self._cpus)))
        for folder, quota in self._quotas.items():
            idle = min(idle, quota - (self._last[2][folder] - last[2][folder]) / seconds)
        return max(idle, 0.0)

    def _sample(self) -> tuple[float, float, dict[Path, float]]:
        used = {folder: cpu_seconds_of(folder, self._cgroups) for folder in self._quotas}
        return time.monotonic(), busy_and_idle_seconds(self._cpus)[1], used


def busy_and_idle_seconds(cpus: frozenset[int]) -> tuple[float, float]:
    """Return the time that CPUs were busy, with any process, and idle; zeros if it is hidden."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (psutil.Error, OSError, RuntimeError, ValueError, IndexError):
        return 0.0, 0.0  # a container that hides it: no CPU is known to be idle
    chosen = [times[cpu] for cpu in cpus if cpu < len(times)] or times
    # guests' time is in `user`, and time that the hypervisor gave away belongs to no process here
    names = ("user", "nice", "system", "irq", "softirq")
    busy = sum(getattr(entry, name, 0.0) for entry in chosen for name in names)
    # a CPU whose threads wait for the disk is free
    return busy, sum(entry.idle + getattr(entry, "iowait", 0.0) for entry in chosen)


def available_memory(cgroups: Path = CGROUPS, membership: Path | None = None) -> int:
    """Available bytes of the host, unused cached files included, bounded by the cgroups' limits."""
    available = int(psutil.virtual_memory().available)
    for folder in controller_folders("memory", cgroups, membership):
        bounds = memory_of(folder)
        if bounds is not None:
            available = min(available, max(bounds[0] - bounds[1], 0))
    return available
