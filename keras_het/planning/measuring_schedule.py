"""Which steps of a training are measured, where measuring stops a device."""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np
from numpy.typing import ArrayLike

FIRST_STEPS = 4
BURST = 8
"""Measured steps in a row after a sign of change."""
FIRST_INTERVAL, LONGEST_INTERVAL = 8, 64
_JUMP = 1.3
_LONGEST_WAIT = 8 * BURST
_KEPT = 32
# A sign of change is this many times the usual deviation: two such steps in a row seldom come by
# chance. Of normal deviations the usual one, the median, is two thirds of the standard deviation.
_DEVIATIONS = 4.0


class MeasuringSchedule:
    """Measures every K-th step, and several in a row at first and after a sign of change."""

    # Signs that come to nothing are followed less and less often. All inputs are equal bit by bit
    # on all workers, which have to measure the same steps: the sums of a measured step have more
    # numbers.

    def __init__(self) -> None:
        self.interval, self.step = FIRST_INTERVAL, 0
        self._burst, self._since = FIRST_STEPS, 0
        self._wait = self._earliest = 0
        self._shares = np.zeros(0, np.int64)
        self._seconds_per_sample: np.ndarray | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be measured."""
        return self._burst > 0 or self._since + 1 >= self.interval

    def step_ended(self) -> None:
        """Count a step."""
        if self.is_due:
            self._burst, self._since = max(self._burst - 1, 0), 0
        else:
            self._since += 1
        self.step += 1

    def watch_closely(self) -> None:
        """Measure the next steps one by one, unless others were so a short time ago."""
        if self.step >= self._earliest:
            self._burst = BURST
            self._wait = min(max(2 * self._wait, BURST), _LONGEST_WAIT)
            self._earliest = self.step + BURST + self._wait

    def observe(self, shares: ArrayLike, seconds: ArrayLike) -> None:
        """Look for a sign of change in the shares and seconds of a measured step."""
        samples = np.asarray(shares)
        found = np.where(samples > 0, np.asarray(seconds) / np.maximum(samples, 1), np.nan)
        is_same_batch = samples.sum() == self._shares.sum()
        if is_same_batch and (samples != self._shares).any():  # what came of the last sign
            self._burst, self._wait, self._earliest = BURST, 0, 0
        elif self._seconds_per_sample is not None:
            ratio = found / self._seconds_per_sample
            if ((ratio > _JUMP) | (ratio < 1 / _JUMP)).any():  # False for NaN
                self.watch_closely()
        self._shares, self._seconds_per_sample = samples, found


class MeasuringCost:
    """The interval that keeps the cost of measuring in a budget, by the ends of steps."""

    # A step takes W seconds; a measured one and the next, which its host begins late, take 2 W + c.
    # With every K-th step measured, measuring takes the part c / (K W) of the time.

    def __init__(self, budget: float = 0.02) -> None:
        self._budget = budget
        self._plain: deque[float] = deque(maxlen=_KEPT)
        self._pairs: deque[float] = deque(maxlen=_KEPT)
        self._deviations: deque[float] = deque(maxlen=_KEPT)
        self._latest: list[tuple[bool, float]] = []
        self._num_unusual = 0

    def observe(self, was_measured: bool, seconds: float) -> bool:
        """Record a step, and tell whether it is the second in a row of unusual length."""
        before, self._latest = self._latest, [*self._latest[-1:], (was_measured, seconds)]
        if was_measured or not before:
            return False
        durations = self._plain
        if before[-1][0]:
            if len(before) == 2 and before[0][0]:
                return False  # in a burst, hosts have no time to get ahead
            durations, seconds = self._pairs, before[-1][1] + seconds
        if not (durations and self._plain):
            durations.append(seconds)
            return False
        usual = statistics.median(durations)
        durations.append(seconds)
        ratio = 1 + (seconds - usual) / statistics.median(self._plain)
        deviation = statistics.median(self._deviations) if self._deviations else 0.0
        limit = max(_JUMP, 1 + _DEVIATIONS * deviation)
        self._deviations.append(abs(ratio - 1))
        is_usual = 1 / limit <= ratio <= limit
        self._num_unusual = 0 if is_usual else self._num_unusual + 1
        return self._num_unusual == 2

    def restart(self) -> None:
        """Forget durations that are no longer usual, and leave out a pause before the next step."""
        self._plain.clear()
        self._latest, self._num_unusual = [], 0

    @property
    def interval(self) -> int:
        """Every how many steps one may be measured; 0 as long as that is not known."""
        if not self._plain or not self._pairs:
            return 0
        step = statistics.median(self._plain)
        cost = max(statistics.median(self._pairs) - 2 * step, 0.0)
        wanted = math.ceil(cost / (self._budget * step))
        return max(FIRST_INTERVAL, min(wanted, LONGEST_INTERVAL))
