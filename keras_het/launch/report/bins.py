"""Steps put together to as many points as a plot can show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from keras_het.planning.diagnosis.middles import medians
from keras_het.planning.diagnosis.recording import Floats, Integers


@dataclasses.dataclass(frozen=True)
class Bins:
    """Neighbouring rows of a recording, B bins with about as many rows each."""

    rows: Integers
    steps: Integers

    def medians(self, values: Floats) -> Floats:
        """Return the lower median of each bin; NaN where nothing is known."""
        return self._of(values, medians)

    def lowest(self, values: Floats) -> Floats:
        """Return the lowest value of each bin; NaN where nothing is known."""
        return self._of(values, lambda each: np.fmin.reduce(each, axis=0))

    def highest(self, values: Floats) -> Floats:
        """Return the highest value of each bin; NaN where nothing is known."""
        return self._of(values, lambda each: np.fmax.reduce(each, axis=0))

    def _of(self, values: Floats, function: Callable[[Floats], Floats]) -> Floats:
        parts = [
            function(values[begin:end])
            for begin, end in zip(self.rows[:-1], self.rows[1:], strict=True)
        ]
        return np.array(parts, np.float64).reshape(len(parts), *values.shape[1:])


def bins_of(steps: Integers, every: Integers, most: int) -> Bins:
    """Cut rows into bins."""
    if not len(steps):
        return Bins(np.zeros(1, np.int64), np.zeros(1, np.int64))
    number = min(most, len(steps))
    rows = np.arange(number + 1) * len(steps) // number
    end = int(steps[-1]) + int(every[-1])
    begins = np.append(steps[rows[:-1]], end)
    return Bins(rows.astype(np.int64), begins.astype(np.int64))
