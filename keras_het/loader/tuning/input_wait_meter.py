"""Waiting time of each step for its data."""

from __future__ import annotations

import collections

import numpy as np

from keras_het.planning.argument_checks import check_number
from keras_het.planning.shares import FloatArray


class InputWaitMeter:
    """Time and input wait of the latest steps, and their sums.

    The wait is exact: it is the time between requesting a batch and receiving it. On a device that
    works asynchronously it is an upper bound of the device's idle time.

    Args:
        memory: number of steps to keep.

    Attributes:
        steps: number of steps so far.
        seconds: their time.
        input_wait_seconds: part of that time in which they waited for data.
    """

    def __init__(self, memory: int = 4096) -> None:
        check_number("memory", memory, least=1, whole=True)
        self._latest: collections.deque[tuple[float, float]] = collections.deque(maxlen=memory)
        self.steps = 0
        self.seconds = self.input_wait_seconds = 0.0

    def add(self, seconds: float, input_wait_seconds: float, steps: int = 1) -> None:
        """Add one step, or several that ran at once.

        Args:
            seconds: from the request for their batches to the request for the next ones.
            input_wait_seconds: part of that time in which they waited.
            steps: number of steps.
        """
        self._latest.append((seconds, input_wait_seconds))
        self.steps += steps
        self.seconds += seconds
        self.input_wait_seconds += input_wait_seconds

    @property
    def idle_fraction(self) -> float:
        """Part of the time in which the device waited for data."""
        return self.input_wait_seconds / self.seconds if self.seconds else 0.0

    @property
    def input_waits(self) -> FloatArray:
        """Wait of the latest executions in seconds, the oldest first, float64."""
        return np.array([wait for _, wait in self._latest])

    @property
    def step_times(self) -> FloatArray:
        """Times of the latest executions in seconds, waits included, the oldest first, float64."""
        return np.array([seconds for seconds, _ in self._latest])

    def to_dict(self) -> dict[str, float]:
        """The sums and the quantiles of the latest waits, for JSON."""
        waits = self.input_waits
        median, high = np.quantile(waits, [0.5, 0.95]) if len(waits) else (0.0, 0.0)
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "input_wait_seconds": self.input_wait_seconds,
            "idle_fraction": self.idle_fraction,
            "median_wait_seconds": float(median),
            "p95_wait_seconds": float(high),
        }
