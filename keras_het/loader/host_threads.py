"""Threads of a pipeline's own pool: CPU time, priority, and the host's activity meanwhile."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from keras_het.usable_cpus import (
    CGROUPS,
    TASKS,
    controller_folders,
    cpu_seconds_of,
    memory_of,
    own_cpus,
    quota_of,
    times_of_thread,
)

if TYPE_CHECKING:
    import tensorflow as tf

_creating = threading.Lock()


class LoaderThreads:
    """Threads that were started while a pipeline's iterator was made, if any."""

    def __init__(self) -> None:
        self.ids: frozenset[int] = frozenset()
        self._nice = 0

    @contextlib.contextmanager
    def started_here(self) -> Iterator[None]:
        with _creating:
            before = _thread_ids()
            yield
            started = _thread_ids() - before
        of_python = {thread.native_id for thread in threading.enumerate()}
        self.ids = frozenset(started - of_python)

    def times(self) -> tuple[float, float] | None:
        """CPU time used so far, and time waited for a CPU; None if the system hides it."""
        if not self.ids:
            return None
        try:
            ran, waited = zip(*map(times_of_thread, self.ids), strict=True)
        except (OSError, ValueError):
            return None
        return sum(ran), sum(waited)

    def lower_priority(self, nice: int) -> bool:
        """Let everything else run first when CPUs are scarce: above all the training step."""
        before, self._nice = self._nice, nice
        if nice == before or not self.ids:
            return True
        own = os.getpriority(os.PRIO_PROCESS, 0)
        is_permitted = True
        for thread in self.ids:
            try:
                os.setpriority(os.PRIO_PROCESS, thread, min(own + nice, 19))
            except PermissionError:
                is_permitted = False
            except OSError:
                pass  # it has ended
        return is_permitted


def start(dataset: tf.data.Dataset) -> tf.data.Iterator:
    """Return a new iterator; `threads_of` gives its threads if it has a private pool."""
    if not dataset.options().threading.private_threadpool_size:
        return iter(dataset)
    threads = LoaderThreads()
    with threads.started_here():
        iterator = iter(dataset)
    iterator.keras_het_threads = threads
    return iterator


def threads_of(iterator: object) -> LoaderThreads:
    """Return the threads of an iterator's own pool, none if they are unknown."""
    return getattr(iterator, "keras_het_threads", None) or LoaderThreads()


def _thread_ids() -> set[int]:
    try:
        return {int(name) for name in os.listdir(TASKS)}  # noqa: PTH208 - called often
    except OSError:
        return set()


class HostSums:
    """Sums over the parts of a window; time between two parts does not count."""

    def __init__(self) -> None:
        self._idle = IdleCpus()
        self._mark: tuple[float, tuple[float, float] | None] | None = None
        self._clear()

    def begin(self, threads: LoaderThreads) -> None:
        self._clear()
        self.mark(threads)

    def mark(self, threads: LoaderThreads) -> None:
        self._idle.read()
        self._mark = time.monotonic(), threads.times()

    def add(self, threads: LoaderThreads) -> None:
        if self._mark is None:
            return
        start, before = self._mark
        seconds = max(time.monotonic() - start, 0.0)
        times = threads.times()
        self._seconds += seconds
        self._idle_seconds += seconds * self._idle.read()
        if times is None or before is None:
            self._knows_cpu = False
        else:
            self._cpu += max(times[0] - before[0], 0.0)
            self._queue += max(times[1] - before[1], 0.0)
        self._mark = None

    @property
    def idle_cpus(self) -> float:
        return self._idle_seconds / self._seconds if self._seconds > 0 else 0.0

    @property
    def loader_cpu_seconds(self) -> float | None:
        return self._cpu if self._knows_cpu else None

    @property
    def loader_queue_seconds(self) -> float | None:
        return self._queue if self._knows_cpu else None

    def _clear(self) -> None:
        self._seconds = self._idle_seconds = self._cpu = self._queue = 0.0
        self._knows_cpu = True


class ForeignLoad:
    """CPUs of this process used by programs that do not share the host with it, and idle ones."""

    def __init__(self) -> None:
        self.cpus = own_cpus()
        self._last = self._sample(())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._last[0]

    def read(self, friends: Collection[int] = ()) -> tuple[float, float] | None:
        """Return the CPUs used by others and the idle ones, on average since the last reading."""
        last, self._last = self._last, self._sample(friends)
        seconds = self._last[0] - last[0]
        busy, idle = (now - before for now, before in zip(self._last[1], last[1], strict=True))
        if seconds <= 0 or busy + idle <= 0 or not self._last[2].keys() <= last[2].keys():
            return None
        known = sum(now - last[2][process] for process, now in self._last[2].items())
        return max(busy - known, 0.0) / seconds, max(idle, 0.0) / seconds

    def _sample(
        self, friends: Collection[int]
    ) -> tuple[float, tuple[float, float], dict[int | None, float]]:
        used = {process: _cpu_seconds(process) for process in (None, *friends)}
        found = {process: seconds for process, seconds in used.items() if seconds is not None}
        return time.monotonic(), busy_and_idle_seconds(self.cpus), found


def _cpu_seconds(process: int | None) -> float | None:
    try:
        times = psutil.Process(process).cpu_times()
    except (psutil.Error, OSError, RuntimeError, ValueError):
        return None
    return float(times.user + times.system)


_IDLE = 0.1
"""Idle part of the CPUs from which on no process is in another's way."""
_MUCH, _LITTLE = 1 / 3, 1 / 6
"""Parts of the CPUs used by others, from which and up to which they count as busy."""
_SECONDS = 0.25
"""Least time that a reading covers: the system counts in hundredths of a second."""
_BUSY_READINGS = 6
"""Readings in a row until others count as busy: a job sharing the host reports it within 1 s."""
_CALM_READINGS = 12


class LoaderPriority:
    """The nice value of a pipeline's own threads: they yield to training steps alone."""

    # A step takes a few milliseconds and then leaves the CPU. Another program that computes without
    # end would have priority forever: while others keep the host busy, and until that is known, the
    # threads have the priority of their process.

    def __init__(self, nice: int, load: ForeignLoad | None = None) -> None:
        self._nice = nice
        self._load = load if load is not None or not nice else ForeignLoad()
        self._gives_way = False
        self._calm_readings = 1
        self._in_a_row = 0

    @property
    def value(self) -> int:
        """Nice value of the threads now, relative to that of this process."""
        return self._nice if self._gives_way else 0

    def observe(self, friends: Collection[int] = ()) -> bool:
        """Look at the host, if the last look was a while ago."""
        load = self._load
        if load is None or load.seconds < _SECONDS:
            return False
        found = load.read(friends)
        if found is None:
            self._in_a_row = 0
            return False
        foreign, idle = (number / len(load.cpus) for number in found)
        are_busy = idle < _IDLE and foreign > (_MUCH if self._gives_way else _LITTLE)
        self._in_a_row = self._in_a_row + 1 if are_busy == self._gives_way else 0
        if self._in_a_row < (_BUSY_READINGS if self._gives_way else self._calm_readings):
            return False
        self._gives_way, self._in_a_row = not self._gives_way, 0
        self._calm_readings = max(self._calm_readings, _CALM_READINGS)
        return True

    def cost_threads(self) -> None:
        """Yield again only after four times as long: reverting cost this user new threads."""
        self._calm_readings *= 4


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
