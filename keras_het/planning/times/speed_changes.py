"""Detection of replicas that have become slower or faster than their time models say."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keras_het.planning.shares import FloatArray, IntArray

# A deviation from the model counts from one standard deviation up to three (so that an outlier is
# not a change), and means a change when the counts of successive steps sum to more than this: four
# slow or three fast steps that are far off, or more that are less far off. Outliers are slow.
_CHANGE_LIMITS = np.array([[7.5], [5.5]])
_LARGEST_DEVIATION = 3.0
_LEAST_DEVIATION_UNIT = 0.02
_SIGNS = np.array([[1.0], [-1.0]])
# A ratio to the model is sudden if its logarithm exceeds five standard deviations, and this.
_SUDDEN_DEVIATIONS = 5.0
_LEAST_SUDDEN = 0.2
# Two sudden ratios are alike if their logarithms differ by no more than this. Outliers rarely are.
_ALIKE_DEVIATIONS = 4.0
_LEAST_ALIKE = 0.15
# A single step shows a change up to this factor. Beyond it, a device has stopped for a moment.
_LARGEST_FACTOR = 4.0
_MOST_TRUST = 5

BoolArray = NDArray[np.bool_]


class SpeedChanges:
    """Distinguishes a change of speed from noise and outliers, for each replica.

    Small changes show in two-sided cumulative sums of the deviations from the model (CUSUM). A
    sudden one shows in two successive steps that deviate by the same factor. A single step suffices
    if the replica became faster, or if earlier changes began in that way: a device that slows down
    again and again is believed at once, until such a step turns out to be an outlier.

    Args:
        num_replicas: number of replicas, n.

    Reference:
        Page, "Continuous inspection schemes", Biometrika 41, 1954. The rest is ours.
    """

    def __init__(self, num_replicas: int) -> None:
        # Row 0: slower than the model; row 1: faster.
        self._sums = np.zeros((2, num_replicas))
        self._runs = np.zeros((2, num_replicas), np.int64)
        # Logarithm of the last ratio, and how many sudden ones in a row were like it.
        self._factor = np.zeros(num_replicas)
        self._repeats = np.zeros(num_replicas, np.int64)
        # Changes less twice the outliers, of what began with a sudden step.
        self._trust = -1
        self._believed = np.zeros(num_replicas, np.bool_)

    def observe(
        self,
        ratio: FloatArray,
        judged: BoolArray,
        repeated: BoolArray,
        noise: float,
    ) -> IntArray:
        """Add the times of one step.

        Args:
            ratio: measured over predicted time, float64 [n]; 1 where not judged.
            judged: whether the time and the model are known well enough to compare, bool [n].
            repeated: whether the step before had the same share, bool [n]. Where lines are only
                approximations, another share can deviate by a large factor.
            noise: relative standard deviation of a time.

        Returns:
            For each replica, in how many of the latest steps it has had another speed, int64 [n]; 0
            if no change was found.
        """
        unit = max(noise, _LEAST_DEVIATION_UNIT)
        gradual = self._gradual(ratio, judged, unit)
        abrupt = self._abrupt(ratio, judged & repeated, unit)
        # Sums can have begun to grow with an outlier long before.
        steps = np.where(abrupt, abrupt, gradual)
        self.forget(steps > 0)
        return steps

    def forget(self, replicas: BoolArray | int) -> None:
        """Drop what is known of the latest steps of replicas, bool [n] or one index."""
        self._sums[:, replicas] = 0.0
        self._runs[:, replicas] = 0
        self._repeats[replicas] = 0

    def _gradual(self, ratio: FloatArray, judged: BoolArray, unit: float) -> IntArray:
        deviation = np.clip((ratio - 1.0) / unit, -_LARGEST_DEVIATION, _LARGEST_DEVIATION)
        sums = np.maximum(self._sums + _SIGNS * deviation - 1.0, 0.0)
        np.copyto(self._sums, sums, where=judged)
        np.copyto(self._runs, np.where(sums > 0, self._runs + 1, 0), where=judged)
        found = judged & (self._sums > _CHANGE_LIMITS)
        return np.where(found, self._runs, 0).max(axis=0)

    def _abrupt(self, ratio: FloatArray, judged: BoolArray, unit: float) -> IntArray:
        factor = np.log(ratio)
        sudden = judged & (np.abs(factor) > max(_SUDDEN_DEVIATIONS * unit, _LEAST_SUDDEN))
        alike = np.abs(factor - self._factor) < max(_ALIKE_DEVIATIONS * unit, _LEAST_ALIKE)
        repeats = np.where(sudden, np.where(alike, self._repeats, 0) + 1, 0)
        plausible = sudden & (np.abs(factor) < np.log(_LARGEST_FACTOR))
        faster = plausible & (factor < 0)
        first = plausible & ~faster & (repeats == 1) & (self._trust >= 0)
        found = faster | first | (repeats >= (2 if self._trust > -_MOST_TRUST else 3))
        self._learn(judged, sudden, faster, repeats)
        np.copyto(self._believed, first, where=judged)
        np.copyto(self._factor, factor, where=judged)
        np.copyto(self._repeats, repeats, where=judged)
        return np.where(found, repeats, 0)

    def _learn(
        self, judged: BoolArray, sudden: BoolArray, faster: BoolArray, repeats: IntArray
    ) -> None:
        """Count a change or an outlier where the step before was a sudden one."""
        was_slow = judged & (self._repeats > 0) & (self._factor > 0)
        outliers = (was_slow & (repeats < 2)) | (judged & self._believed & faster)
        changes = (was_slow & (repeats == 2)) | (judged & self._believed & ~sudden)
        trust = self._trust + int(changes.any()) - 2 * int(outliers.any())
        self._trust = min(max(trust, -_MOST_TRUST), _MOST_TRUST)
