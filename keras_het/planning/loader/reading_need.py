"""How many threads a job needs whose loaders wait for I/O."""

from __future__ import annotations

import dataclasses

from keras_het.planning.loader.window import LoaderWindow

_WAITS = 0.1
"""Idle fraction from which the threads of a pipeline are busy, be it with waiting."""
_HIGHEST_IDLE_FRACTION = 0.99
_AVERAGED_SECONDS = 4.0
"""What each job has of a disk goes up and down within seconds."""
_CHANGED = 1.25
"""Ratio from which a need is another one: each division costs handovers."""
_SHORTEST_SECONDS = 15.0
_SHORTEST_IN_WINDOWS = 4.0
_OTHER_STEPS_OF_A_MOVE = 32
"""Of the buffer, and of the window after it."""


@dataclasses.dataclass(frozen=True)
class ReadingNeed:
    """What a job whose loaders mostly wait for I/O tells the others of its host.

    Args:
        threads: loaders with which its device would not wait, r; 1 or more.
        until: time from which it no longer reads unless it says so again, in seconds of a clock
            that all jobs share.

    Raises:
        ValueError: if it needs no thread.
    """

    threads: float
    until: float

    def __post_init__(self) -> None:
        if not self.threads >= 1:
            raise ValueError(f"A job that reads needs a thread. Received: {self.threads}.")


class ReadingJob:
    """Whether the loaders of a job mostly wait for I/O, from window to window, and its need.

    Where the device waits, every loader is at work: what it does not compute, and does not wait for
    a CPU, it waits for I/O. Where the device does not wait loaders rest, and what was found before
    holds.

    The device works a part 1 - idle = n / r of the time where it waits, so that r = n / (1 - idle).
    """

    def __init__(self) -> None:
        self._reads = False
        self._work = 0.0
        self._told = 0.0

    def observe(self, loaders: int, window: LoaderWindow, now: float) -> ReadingNeed | None:
        """Takes a window.

        Args:
            loaders: loaders in effect, n.
            window: what was measured.
            now: time, in seconds of a clock that all jobs share.

        Returns:
            What the job needs, the same as before unless it differs by a quarter; None if its
            loaders do not mostly wait for I/O.
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
            return False  # nothing tells reading from computing
        if window.idle_fraction <= _WAITS:
            return self._reads
        runs = window.loader_cpu_seconds + (window.loader_queue_seconds or 0.0)
        # a job on the border stays what it was
        limit = 0.6 if self._reads else 0.5
        return runs < limit * loaders * window.seconds


def _seconds_until_the_next(loaders: int, window: LoaderWindow) -> float:
    """Time within which a job that still reads has another window: it may validate, or save.

    One that moves reads too, but has no window until its loaders' batches are used.
    """
    move = (2 * loaders + _OTHER_STEPS_OF_A_MOVE) * window.seconds / window.steps
    return max(_SHORTEST_SECONDS, _SHORTEST_IN_WINDOWS * window.seconds, 1.5 * move)
