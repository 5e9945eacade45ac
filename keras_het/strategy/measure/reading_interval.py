"""Interval between readings: long when steps are short, so that reading costs little."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keras_het.strategy.measure.compute_times import StepTimes

# Reading and deciding takes about 0.3 ms of Python: 3 % of this.
LONG_STEP_SECONDS = 0.01
MOST_CALLS = 16
_MOST_STEPS = 64


class ReadingInterval:
    """Schedule of the executions after which the measurements should be read.

    Measured steps wait in a ring, so none is lost. The interval depends only on compute times,
    which are identical bit by bit on all workers, so all read, and change shares, after the same
    step.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._interval = 1

    def is_due(self) -> bool:
        """Tell whether to read now; called after every execution."""
        self._calls += 1
        return self._calls >= self._interval

    def groups(self, steps: Sequence[StepTimes]) -> list[list[StepTimes]]:
        """Group steps that count as one: short ones read together that had the same shares.

        Their median is less noisy than each, and costs the policy a single observation.
        """
        grouped: list[list[StepTimes]] = []
        for step in steps:
            together = self._interval > 1 and bool(grouped)
            if together and (step.shares == grouped[-1][-1].shares).all():
                grouped[-1].append(step)
            else:
                grouped.append([step])
        return grouped

    def was_read(self, steps: Sequence[StepTimes]) -> None:
        """Take note of the steps read, and start the next interval."""
        calls, self._calls = max(self._calls, 1), 0
        slowest = max((float(step.seconds.max()) for step in steps[-MOST_CALLS:]), default=0.0)
        if slowest > 0:
            steps_each = max(len(steps) / calls, 1.0)
            wanted = math.ceil(LONG_STEP_SECONDS / slowest / steps_each)
            most = max(int(_MOST_STEPS / steps_each), 1)
            self._interval = max(1, min(wanted, MOST_CALLS, most))
