"""What the system says about this process, its cgroups and the machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from keras_het.usable_cpus import (
    CGROUPS,
    controller_folders,
    cpu_seconds_of,
    memory_of,
    own_cpus,
    quota_of,
    statistic_of,
)

_UNAVAILABLE = (psutil.Error, OSError, RuntimeError, ValueError, AttributeError)
"""What psutil raises where a container hides a value, or the system does not have it."""
_DEVICES = Path("/sys")


class HostValues:
    """The part of `HARDWARE` that is the same for all replicas of this process."""

    # Where a cgroup has a CPU quota or a memory limit, the tightest one bounds the machine's
    # values. Disks and network cards are those of the machine: what lies on top of them
    # (partitions, mirrors, bridges) would count the same bytes twice.

    def __init__(self, cgroups: Path = CGROUPS, membership: Path | None = None) -> None:
        self._cgroups = cgroups
        self._process = psutil.Process()
        self._cpu_groups = list(controller_folders("cpu", cgroups, membership))
        self._memory_groups = list(controller_folders("memory", cgroups, membership))
        self._disks: dict[str, bool] = {}
        self._cards: dict[str, bool] = {}
        self._last: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return the values by their name in `HARDWARE`; those that are unknown are missing."""
        quotas = {folder: quota_of(folder) for folder in self._cpu_groups}
        quotas = {folder: quota for folder, quota in quotas.items() if quota < math.inf}
        last, self._last = self._last, self._totals(quotas)
        rise = {
            name: total - last[name]
            for name, total in self._last.items()
            # a counter that goes back was reset, or its device removed
            if name in last and total >= last[name]
        }
        values = {
            "keras_het.cpu.budget": min([float(len(own_cpus())), *quotas.values()]),
            "process.memory.usage": _number(lambda: self._process.memory_info().rss),
            **self._memory(),
            **_rates(rise, quotas),
        }
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def _totals(self, limited: Iterable[Path]) -> dict[str, float]:
        totals = {
            "seconds": time.monotonic(),
            "process.cpu": time.process_time(),
            "process.disk": _number(lambda: _bytes(self._process.io_counters())),
            "disk": _number(lambda: self._of_machine(_disk_counters(), self._disks, "block")),
            "network": _number(lambda: self._of_machine(_net_counters(), self._cards, "class/net")),
        }
        for folder in limited:
            totals[f"used {folder}"] = cpu_seconds_of(folder, self._cgroups)
            totals[f"stopped {folder}"] = _stopped_seconds(folder)
        times = _value(psutil.cpu_times)
        if times is not None:
            # waiting for the disk is idle; what a hypervisor took is not
            totals["idle"] = times.idle + getattr(times, "iowait", 0.0)
            # guests' time is in `user` already
            totals["all"] = sum(times) - sum(
                getattr(times, n, 0.0) for n in ("guest", "guest_nice")
            )
        return totals

    def _memory(self) -> dict[str, float]:
        machine = _value(psutil.virtual_memory)
        limit = float(machine.total) if machine else math.inf
        used = float(machine.total - machine.available) if machine else math.nan
        for folder in self._memory_groups:
            bounds = memory_of(folder)
            if bounds is not None and bounds[0] < limit:
                limit, used = map(float, bounds)
        limit = limit if limit < math.inf else math.nan
        return {"system.memory.usage": used, "system.memory.limit": limit}

    def _of_machine(self, counters: Mapping[str, Any], known: dict[str, bool], kind: str) -> float:
        for name in counters.keys() - known.keys():
            known[name] = (_DEVICES / kind / name / "device").exists()
        own = [name for name in counters if known[name]]
        # in a container all devices are virtual
        chosen = own or [name for name in counters if not name.startswith(("lo", "ram"))]
        return sum(_bytes(counters[name]) for name in chosen)


def _rates(rise: Mapping[str, float], quotas: Mapping[Path, float]) -> dict[str, float]:
    seconds = rise.get("seconds", 0.0)
    if seconds <= 0:
        return {}
    if quotas:
        tightest = min(quotas, key=lambda folder: quotas[folder])
        busy = rise.get(f"used {tightest}", math.nan) / (seconds * quotas[tightest])
    else:
        busy = 1 - rise.get("idle", math.nan) / (rise.get("all") or math.nan)
    return {
        "keras_het.cpu.throttled": _throttled(rise, quotas, seconds),
        "process.cpu.usage": rise.get("process.cpu", math.nan) / seconds,
        "process.disk.io": rise.get("process.disk", math.nan) / seconds,
        "system.cpu.utilization": math.nan if math.isnan(busy) else min(max(busy, 0.0), 1.0),
        "system.disk.io": rise.get("disk", math.nan) / seconds,
        "system.network.io": rise.get("network", math.nan) / seconds,
    }


def _throttled(rise: Mapping[str, float], groups: Iterable[Path], seconds: float) -> float:
    """The part of the time in which a quota stopped the process, 0 without one."""
    parts = [0.0]
    for folder in groups:
        stopped = rise.get(f"stopped {folder}", math.nan)
        used = rise.get(f"used {folder}", math.nan)
        # The kernel adds up the times of all CPUs, both of those that ran and were then stopped.
        parts.append(min(stopped / ((stopped + used) or 1.0), stopped / seconds))
    return math.nan if any(map(math.isnan, parts)) else max(parts)


def _stopped_seconds(folder: Path) -> float:
    """Time in which a quota stopped a cgroup's threads, of all its CPUs together."""
    for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):  # versions 2 and 1
        value = statistic_of(folder / "cpu.stat", name)
        if value is not None:
            return value * unit
    return math.nan


def _disk_counters() -> Mapping[str, Any]:
    return psutil.disk_io_counters(perdisk=True) or {}


def _net_counters() -> Mapping[str, Any]:
    return psutil.net_io_counters(pernic=True) or {}


def _bytes(counters: Any) -> float:
    if hasattr(counters, "bytes_sent"):
        return float(counters.bytes_sent + counters.bytes_recv)
    return float(counters.read_bytes + counters.write_bytes)


def _value(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except _UNAVAILABLE:
        return None


def _number(read: Callable[[], float]) -> float:
    value = _value(read)
    return math.nan if value is None else float(value)
