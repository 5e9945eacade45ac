"""What a job whose loaders wait for I/O tells the others of its host."""

from __future__ import annotations

import dataclasses

from keras_het.planning.loader.window import LoaderWindow

_HIGHEST_IDLE_FRACTION = 0.99
_WAITS = 0.1
"""Idle fraction from which the threads of a pipeline are busy, be it with waiting."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One window of a job whose loaders mostly wait for I/O.

    Args:
        loaders: loaders in effect, n.
        steps: number of steps.
        seconds: their time.
        idle_fraction: part of it in which the device waited.
        began: when the window began, in seconds of a clock that all jobs share.
        ended: when it ended.
        number: number of the division that the job knew when the window began.

    Raises:
        ValueError: if there is no loader, no step or no time.
    """

    loaders: int
    steps: int
    seconds: float
    idle_fraction: float
    began: float
    ended: float
    number: int

    def __post_init__(self) -> None:
        if self.loaders < 1 or self.steps < 1 or not self.seconds > 0:
            raise ValueError(
                "A reading job has loaders, steps and time above zero. Received: "
                f"loaders={self.loaders}, steps={self.steps}, seconds={self.seconds}."
            )

    @property
    def need(self) -> float:
        """Threads that the job needs; see `needed_loaders`."""
        return needed_loaders(self.loaders, self.idle_fraction)

    def joined_to(self, earlier: Reading) -> Reading:
        """This window and the one before it as one, if nothing has changed between them.

        Args:
            earlier: the window before.

        Returns:
            Both; this one alone if loaders or division were others.
        """
        if (earlier.loaders, earlier.number) != (self.loaders, self.number):
            return self
        seconds = earlier.seconds + self.seconds
        waits = earlier.idle_fraction * earlier.seconds + self.idle_fraction * self.seconds
        return dataclasses.replace(
            self,
            steps=earlier.steps + self.steps,
            seconds=seconds,
            idle_fraction=waits / seconds,
            began=earlier.began,
        )


class ReadingJob:
    """Whether the loaders of a job mostly wait for I/O, from window to window.

    Where the device waits, every loader is at work: what it does not compute, and does not wait for
    a CPU, it waits for I/O. Where the device does not wait loaders rest, and what was found before
    holds.
    """

    def __init__(self) -> None:
        self.reads = False

    def observe(self, loaders: int, window: LoaderWindow) -> None:
        """Takes note of a window.

        Args:
            loaders: loaders in effect.
            window: what was measured.
        """
        if window.loader_cpu_seconds is None:
            self.reads = False  # nothing tells reading from computing
        elif window.idle_fraction > _WAITS:
            runs = window.loader_cpu_seconds + (window.loader_queue_seconds or 0.0)
            # a job on the border stays what it was
            limit = 0.6 if self.reads else 0.5
            self.reads = runs < limit * loaders * window.seconds


def needed_loaders(loaders: float, idle_fraction: float) -> float:
    """Loaders with which a device would not wait if a read took as long as it does now.

    The device works 1 - idle = n / r of the time where it waits, so that r = n / (1 - idle).

    Args:
        loaders: loaders in effect, n.
        idle_fraction: part of the time in which the device waits.
    """
    return loaders / (1.0 - min(idle_fraction, _HIGHEST_IDLE_FRACTION))
