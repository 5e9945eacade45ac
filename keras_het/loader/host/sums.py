"""Activity of a host and a pipeline's threads while steps were measured."""

from __future__ import annotations

import time

from keras_het.loader.host.cpus import IdleCpus
from keras_het.loader.host.threads import LoaderThreads


class HostSums:
    """Sums over the parts of a window; time between two parts does not count."""

    def __init__(self) -> None:
        self._idle = IdleCpus()
        self._mark: tuple[float, tuple[float, float] | None] | None = None
        self._clear()

    def begin(self, threads: LoaderThreads | None) -> None:
        """Start a new window."""
        self._clear()
        self.mark(threads)

    def mark(self, threads: LoaderThreads | None) -> None:
        """Start a part."""
        self._idle.read()
        self._mark = time.monotonic(), threads.times() if threads is not None else None

    def add(self, threads: LoaderThreads | None) -> None:
        """End a part."""
        if self._mark is None:
            return
        start, before = self._mark
        seconds = max(time.monotonic() - start, 0.0)
        times = threads.times() if threads is not None else None
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
        """Average number of idle CPUs."""
        return self._idle_seconds / self._seconds if self._seconds > 0 else 0.0

    @property
    def loader_cpu_seconds(self) -> float | None:
        """CPU time of the pipeline's threads; None if unknown."""
        return self._cpu if self._knows_cpu else None

    @property
    def loader_queue_seconds(self) -> float | None:
        """Time that the pipeline's threads waited for a CPU; None if unknown."""
        return self._queue if self._knows_cpu else None

    def _clear(self) -> None:
        self._seconds = self._idle_seconds = self._cpu = self._queue = 0.0
        self._knows_cpu = True
