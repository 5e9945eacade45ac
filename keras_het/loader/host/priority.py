"""Priority of a loader's threads."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil

from keras_het.loader.host.cpus import busy_and_idle_seconds, own_cpus


class ForeignLoad:
    """CPUs usable by this process that other processes used, and idle ones.

    Other processes are all except this one and those that share the host with it by `HostBudget`.
    """

    def __init__(self) -> None:
        self.cpus = own_cpus()
        self._last = self._sample(())

    @property
    def seconds(self) -> float:
        """Time since the last reading."""
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
    """CPU time of a process, by default this one; None if it is gone."""
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
    """The nice value of a pipeline's own threads: they yield to training steps alone.

    A step takes a few milliseconds and then leaves the CPU: yielding to it costs a loader little.
    Another program that computes without end would have priority forever: while others keep the
    host busy, and until that is known, the threads have the priority of their process.
    """

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
