"""CPUs that programs use which have nothing to do with this training."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil

from keras_het.loader.host.cpus import busy_and_idle_seconds, own_cpus


class ForeignLoad:
    """How many of the CPUs that this process may run on others used, and nobody.

    Others are all but this process and those that share the host with it by `HostBudget`.

    Attributes:
        cpus: ids of the CPUs that this process may run on.
    """

    def __init__(self) -> None:
        self.cpus = own_cpus()
        self._last = self._sample(())

    @property
    def seconds(self) -> float:
        """Time since the last reading."""
        return time.monotonic() - self._last[0]

    def read(self, friends: Collection[int] = ()) -> tuple[float, float] | None:
        """CPUs of others and idle ones, on average since the last reading.

        Args:
            friends: ids of the processes that share the host with this one.

        Returns:
            None if it is not known: the system does not tell, or a friend is new.
        """
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
