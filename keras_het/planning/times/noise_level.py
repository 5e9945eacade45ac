"""How much compute times vary from step to step."""

from __future__ import annotations

import math

import numpy as np

from keras_het.planning.bounded_shares import FloatArray

# Assumed before anything is measured, as if so many differences had been seen.
PRIOR_NOISE = 0.03
PRIOR_DIFFERENCES = 4.0
MEMORY = 256.0
# E|x - y| of two standard normal numbers
_MEAN_DIFFERENCE = 2 / math.sqrt(math.pi)


class NoiseLevel:
    """Relative standard deviation of one compute time, over all replicas.

    Taken from differences of successive times with the same share, which need no model. Large
    differences are cut, so that outliers and changes of speed count little.
    """

    def __init__(self) -> None:
        self._noise = PRIOR_NOISE
        self._weight = PRIOR_DIFFERENCES

    @property
    def value(self) -> float:
        """The relative standard deviation."""
        return self._noise

    def add(self, seconds: FloatArray, seconds_before: FloatArray) -> None:
        """Adds the times of two successive steps with the same shares.

        Args:
            seconds: later times, float64 [k].
            seconds_before: earlier times, float64 [k].
        """
        count = len(seconds)
        if not count:
            return
        differences = np.abs(seconds / seconds_before - 1.0) / _MEAN_DIFFERENCE
        mean = float(np.minimum(differences, 3.0 * self._noise).sum()) / count
        self._weight = min(self._weight + count, MEMORY + count)
        self._noise += (mean - self._noise) * count / self._weight
