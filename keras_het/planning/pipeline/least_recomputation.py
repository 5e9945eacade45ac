"""A lower bound of the time to recompute, for all possible stages at once."""

from __future__ import annotations

import numpy as np

from keras_het.planning.bounded_shares import FloatArray, IntArray


class LeastRecomputation:
    """Lower bounds of the time to recompute: the cheapest fractions of units.

    Args:
        activations: bytes that recomputing each unit frees, float64 [L].
        unit_seconds: what recomputing it costs, float64 [L].
        first: first unit of each stage, int64 [stages].
        end: the unit after the last one of each stage, int64 [stages].
        starts: the fewest bytes that are kept for a run of recomputed units, float64 [stages].
    """

    def __init__(
        self,
        activations: FloatArray,
        unit_seconds: FloatArray,
        first: IntArray,
        end: IntArray,
        starts: FloatArray,
    ) -> None:
        useful = np.flatnonzero(activations > 0)
        rates = unit_seconds[useful] / activations[useful]
        self._order = useful[np.argsort(rates, kind="stable")]
        self._rates = np.append(np.sort(rates, kind="stable"), np.inf)
        self._activations, self._unit_seconds = activations, unit_seconds
        self._first, self._end, self._starts = first, end, starts
        # Of the first units in that order that are in the stage, [units + 1, stages].
        self._sums: tuple[FloatArray, FloatArray] | None = None

    def seconds(self, stages: IntArray, need: FloatArray, in_flight: IntArray) -> FloatArray:
        """Return the bounds for some stages, float64 [stages]; infinite if nothing helps.

        At least one run of units begins somewhere in the stage, where the fewest bytes cross.
        """
        if not len(stages):
            return np.zeros(0)
        freed, spent = self._sums_of_all()
        need = need + self._starts[stages] * in_flight / np.maximum(in_flight - 1, 1)
        # How many units free less than is needed, by halving.
        low, high = np.zeros(len(stages), np.int64), np.full(len(stages), len(self._order))
        while (low < high).any():
            middle = (low + high + 1) // 2
            less = freed[middle, stages] < need
            low, high = np.where(less, middle, low), np.where(less, high, middle - 1)
        left = need - freed[low, stages]
        with np.errstate(invalid="ignore"):
            bounds: FloatArray = (spent[low, stages] + left * self._rates[low]) * (1 - 1e-12)
        return bounds

    def _sums_of_all(self) -> tuple[FloatArray, FloatArray]:
        if self._sums is None:
            order = self._order[:, None]
            inside = (self._first <= order) & (order < self._end)
            start = np.zeros((1, len(self._first)))
            freed = np.cumsum(inside * self._activations[order], axis=0)
            spent = np.cumsum(inside * self._unit_seconds[order], axis=0)
            self._sums = np.concatenate([start, freed]), np.concatenate([start, spent])
        return self._sums
