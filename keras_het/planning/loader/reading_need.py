"""Number of threads needed by a job whose loaders wait for I/O."""

from __future__ import annotations

import dataclasses

from keras_het.planning.loader.window import LoaderWindow

_WAITS = 0.1
"""Idle fraction above which all threads of a pipeline are busy or waiting."""
_HIGHEST_IDLE_FRACTION = 0.99
_AVERAGED_SECONDS = 4.0
"""Averaging time: each job's share of a disk fluctuates within seconds."""
_CHANGED = 1.25
"""Ratio above which a need counts as changed: each division costs handovers."""
_SHORTEST_SECONDS = 15.0
_SHORTEST_IN_WINDOWS = 4.0
_OTHER_STEPS_OF_A_MOVE = 32
"""Steps of the buffer, and of the window after it."""


@dataclasses.dataclass(frozen=True)
class ReadingNeed:
    """Announcement to the host's other jobs by a job whose loaders mostly wait for I/O.

    Args:
        threads: number of loaders with which its device would not wait, r; 1 or more.
        until: time after which it no longer counts as reading unless it announces again, in seconds
            of a clock that all jobs share.

    Raises:
        ValueError: if it needs no thread.
    """

    threads: float
    until: float

    def __post_init__(self) -> None:
        if not self.threads >= 1:
            raise ValueError(f"A job that reads needs a thread. Received: {self.threads}.")


class ReadingJob:
    """Whether a job's loaders mostly wait for I/O, from window to window, and its need.

    While the device waits, every loader is busy: time in which it neither computes nor waits for a
    CPU is I/O wait. While the device does not wait, loaders rest, and the earlier finding holds.

    While it waits, the device works a fraction 1 - idle = n / r of the time, so r = n / (1 - idle).
    """

    def __init__(self) -> None:
        self._reads = False
        self._work = 0.0
        self._told = 0.0

    def observe(self, loaders: int, window: LoaderWindow, now: float) -> ReadingNeed | None:
        """Take a window.

        Args:
            loaders: loaders in effect, n.
            window: the measurements.
            now: time, in seconds of a clock that all jobs share.

        Returns:
            The job's need, unchanged unless it differs by a quarter; None if its loaders do not
            mostly wait for I/O.
        """
        did_read, self._reads = self._reads, self._still_reads(loaders, window)
        if not self._reads:
            return None
        work = (1.0 - min(window.idle_fraction, _HIGHEST_IDLE_FRACTION)) / loaders
        weight = min(window.seconds / _AVERAGED_SECONDS, 1.0) if did_read else 1.0
        self._work += weight * (work - self._work)
        need = 1.0 / self._work
        if not did_read or not 1.0 / _CHANGED < need / self._told < _CHANGED:
            self._told = need
        return ReadingNeed(self._told, now + _seconds_until_the_next(loaders, window))

    def _still_reads(self, loaders: int, window: LoaderWindow) -> bool:
        if window.loader_cpu_seconds is None:
            return False  # nothing distinguishes reading from computing
        if window.idle_fraction <= _WAITS:
            return self._reads
        runs = window.loader_cpu_seconds + (window.loader_queue_seconds or 0.0)
        # Hysteresis: a borderline job keeps its classification.
        limit = 0.6 if self._reads else 0.5
        return runs < limit * loaders * window.seconds


def _seconds_until_the_next(loaders: int, window: LoaderWindow) -> float:
    """Return the time within which a reading job has another window: it may validate or save.

    A job in the middle of a move reads too, but has no window until its loaders' batches are used.
    """
    move = (2 * loaders + _OTHER_STEPS_OF_A_MOVE) * window.seconds / window.steps
    return max(_SHORTEST_SECONDS, _SHORTEST_IN_WINDOWS * window.seconds, 1.5 * move)
