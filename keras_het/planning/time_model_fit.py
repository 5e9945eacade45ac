"""Time models of all replicas, updated from compute times, and changes of their speed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keras_het.planning.shares import MAX_TOTAL, FloatArray, IntArray
from keras_het.planning.time_model import (
    LinearTimeModel,
    MicroBatchTimeModel,
    further_parts,
)

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
    """Distinguishes a change of speed from noise and outliers, for each replica."""

    # Small changes show in two-sided cumulative sums of the deviations from the model (CUSUM: Page,
    # Biometrika 41, 1954), a sudden one in two successive steps that deviate by the same factor. A
    # single step suffices if the replica became faster, or if earlier changes began in that way,
    # until such a step turns out to be an outlier.

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
        """Add a step's ratios to predicted times; return for how many steps each has changed."""
        # Only where `judged`; 0 if no change was found. Where the step before had another share
        # (not `repeated`), lines that are approximations can deviate by a large factor.
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


# Two shares identify a line if the larger one is at least this many times the smaller one.
MIN_SPREAD = 1.1
# A slope is at least this fraction of time per sample, so that no device looks infinitely fast.
MIN_SLOPE_FRACTION = 0.05
# Uncertainty of the earlier fixed part: its standard deviation as a fraction of the compute time.
FIXED_PART_DEVIATION = 0.5
# The fraction of the fixed part that each further part costs, before a share was cut. The first
# shares that are cut show if it is more; too much would keep shares from being cut at all.
PART_FRACTION = 0.5
_MIN_NOISE = 0.01


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurement of one replica with one share."""

    share: int
    seconds: float
    count: int


def measurements(shares: Sequence[int], seconds: Sequence[float]) -> list[Measurement]:
    """Group observations by share, with their lower medians: outliers are slow."""
    grouped: dict[int, list[float]] = {}
    for share, value in zip(shares, seconds, strict=True):
        grouped.setdefault(share, []).append(value)
    return [
        Measurement(int(share), float(sorted(values)[(len(values) - 1) // 2]), len(values))
        for share, values in grouped.items()
    ]


def fit_line(
    points: Iterable[Measurement], fixed_before: float, noise: float
) -> tuple[float, float, bool]:
    """Fit t(n) = fixed + slope n with fixed >= 0 and slope > 0."""
    # Minimizes squared relative errors, weighted by counts, plus the squared distance to the
    # previously known fixed part (a ridge): sum_g c_g / sigma^2 ((f + s n_g) / t_g - 1)^2 + ((f -
    # f_0) / (0.5 mean t))^2. With one share, the fixed part keeps its value. A share measured once
    # counts only if no other was measured more often.
    chosen = list(points)
    chosen = [point for point in chosen if point.count > 1] or chosen
    fixed, slope = _ridge(chosen, fixed_before, max(noise, _MIN_NOISE))
    if fixed < 0:
        fixed, slope = 0.0, _slope_for(chosen, 0.0)
    smallest_slope = MIN_SLOPE_FRACTION * min(point.seconds / point.share for point in chosen)
    if slope < smallest_slope:
        slope = smallest_slope
        total = sum(point.count for point in chosen)
        rest = sum(point.count * (point.seconds - slope * point.share) for point in chosen)
        fixed = max(rest / total, 0.0)
    shares = [point.share for point in chosen]
    return fixed, slope, max(shares) >= MIN_SPREAD * min(shares)


def _ridge(points: list[Measurement], fixed_before: float, noise: float) -> tuple[float, float]:
    mean = sum(point.seconds for point in points) / len(points)
    prior = 1.0 / (FIXED_PART_DEVIATION * mean) ** 2
    a11, a12, a22, b1, b2 = prior, 0.0, 0.0, prior * fixed_before, 0.0
    for point in points:
        weight = point.count / (noise * point.seconds) ** 2
        a11 += weight
        a12 += weight * point.share
        a22 += weight * point.share**2
        b1 += weight * point.seconds
        b2 += weight * point.seconds * point.share
    determinant = a11 * a22 - a12 * a12
    if determinant <= 0:  # one dominant time leaves the others to rounding
        return 0.0, b2 / a22
    return (b1 * a22 - b2 * a12) / determinant, (a11 * b2 - a12 * b1) / determinant


def _slope_for(points: list[Measurement], fixed: float) -> float:
    over = sum(p.count * p.share * (p.seconds - fixed) / p.seconds**2 for p in points)
    under = sum(p.count * (p.share / p.seconds) ** 2 for p in points)
    return over / under


def fit_parts(
    points: Iterable[Measurement],
    micro_batch_size: int,
    fixed_before: float,
    part_before: float,
    noise: float,
) -> tuple[float, float, float, bool]:
    """Fit t(n) = once + part p(n) + slope n, where a share of n samples has p(n) parts."""
    # As `fit_line` with a further unknown, so that the jump where a part begins bends no slope;
    # what the points leave open between `once` and `part` stays as it was. Returns the fixed part
    # of a share that is not cut (once + part), `part`, the slope, and whether two shares identify
    # them.
    chosen = list(points)
    chosen = [point for point in chosen if point.count > 1] or chosen
    share, seconds, count = np.array([(p.share, p.seconds, p.count) for p in chosen]).T
    weight = np.sqrt(count) / (max(noise, _MIN_NOISE) * seconds)
    least_slope = MIN_SLOPE_FRACTION * float((seconds / share).min())
    prior = 1.0 / (FIXED_PART_DEVIATION * float(seconds.mean()))
    parts = 1 + further_parts(share, micro_batch_size)
    features = np.stack([np.ones_like(share), parts, share], axis=1) * weight[:, None]
    features = np.concatenate([features, [[prior, 0.0, 0.0], [0.0, prior, 0.0]]])
    before = prior * np.array([fixed_before - part_before, part_before])
    wanted = np.concatenate([weight * (seconds - least_slope * share), before])
    once, part, slope = _not_negative(features, wanted)
    is_line_known = bool(share.max() >= MIN_SPREAD * share.min())
    return once + part, part, slope + least_slope, is_line_known


def _not_negative(features: FloatArray, wanted: FloatArray) -> list[float]:
    """Return the least squares of a few unknowns, each at least 0."""
    best, least = np.zeros(features.shape[1]), float(wanted @ wanted)
    for used in itertools.product((False, True), repeat=features.shape[1]):
        if not any(used):
            continue
        found = np.zeros(features.shape[1])
        found[list(used)] = np.linalg.lstsq(features[:, used], wanted, rcond=None)[0]
        error = float(np.square(features @ found - wanted).sum())
        if (found >= 0).all() and error < least:
            best, least = found, error
    return best.tolist()


# Assumed before the first measurement, as if this many differences had been seen.
PRIOR_NOISE = 0.03
PRIOR_DIFFERENCES = 4.0
MEMORY = 256.0
# E|x - y| of two standard normal numbers.
_MEAN_DIFFERENCE = 2 / math.sqrt(math.pi)


class NoiseLevel:
    """Relative standard deviation of one compute time, over all replicas."""

    # From differences of successive times with the same share, which needs no model; large ones are
    # clipped, because of outliers and changes of speed.

    def __init__(self) -> None:
        self.value = PRIOR_NOISE
        self._weight = PRIOR_DIFFERENCES

    def add(self, seconds: FloatArray, seconds_before: FloatArray) -> None:
        count = len(seconds)
        if not count:
            return
        differences = np.abs(seconds / seconds_before - 1.0) / _MEAN_DIFFERENCE
        mean = float(np.minimum(differences, 3.0 * self.value).sum()) / count
        self._weight = min(self._weight + count, MEMORY + count)
        self.value += (mean - self.value) * count / self._weight


_REFIT_EVERY = 16
_REFIT_EACH_UNTIL = 8
_STREAK_BEFORE_CHANGE = 3


class TimeModelFit:
    """One straight line per replica through (share, seconds) pairs, and detection of speed changes.

    Each replica has a window of its latest observations; lines are fitted to the medians for each
    share (`fit_line`), so single outliers do not move them. After a change of speed
    (`SpeedChanges`), only the observations since then count, and the known line is scaled to pass
    through them: a device that is clocked down or shared becomes slower in everything it does. New
    shares then correct the fixed part.

    Args:
        num_replicas: number of replicas.
        window: number of observations kept for each replica.
        micro_batch_sizes: most samples that each replica computes on at a time, int [n]; by default
            shares are not cut.

    Reference:
        Rescaling a known line to the latest time is the idea of LBB's rapid tuning, which keeps the
        fixed part.
    """

    def __init__(
        self,
        num_replicas: int,
        window: int = 64,
        micro_batch_sizes: ArrayLike | None = None,
    ) -> None:
        self._window = window
        self._most: IntArray | None = None
        if micro_batch_sizes is not None:
            self._most = np.broadcast_to(micro_batch_sizes, (num_replicas,)).astype(np.int64)
        self._part = np.zeros(num_replicas)
        self._shares = np.zeros((num_replicas, window), np.int64)
        self._seconds = np.zeros((num_replicas, window))
        self._position = np.zeros(num_replicas, np.int64)
        self._count = np.zeros(num_replicas, np.int64)
        self._since_fit = np.zeros(num_replicas, np.int64)
        self._streak = np.zeros(num_replicas, np.int64)
        self._last_share = np.zeros(num_replicas, np.int64)
        self._last_seconds = np.ones(num_replicas)
        self._speed_changes = SpeedChanges(num_replicas)
        self.known = np.zeros(num_replicas, np.bool_)
        """Whether each replica has a model, bool [n]."""
        self.identified = np.zeros(num_replicas, np.bool_)
        """Whether each replica has had two shares since its last speed change, bool [n]."""
        self._rescale = np.zeros(num_replicas, np.bool_)
        self.fixed_seconds = np.zeros(num_replicas)
        """Fixed parts, float64 [n]; 0 for replicas without a model."""
        self.seconds_per_sample = np.zeros(num_replicas)
        """Slopes, float64 [n]; 0 for replicas without a model."""
        self._noise = NoiseLevel()
        self.version = 0
        """Counter that grows whenever a model changes."""

    def seconds(self, shares: IntArray) -> FloatArray:
        """Return the times that the models say for shares, int64 [n], as float64 [n]."""
        line: FloatArray = self.fixed_seconds + self.seconds_per_sample * shares
        return line if self._most is None else line + self._part * further_parts(shares, self._most)

    @property
    def noise(self) -> float:
        """Relative standard deviation of one compute time."""
        return self._noise.value

    def models(self) -> tuple[LinearTimeModel | None, ...]:
        """Return the time model of each replica, None for replicas never measured."""
        fitted = (self.fixed_seconds, self.seconds_per_sample, self._part)
        numbers = zip(*(values.tolist() for values in fitted), strict=True)
        sizes = [MAX_TOTAL] * len(self.known) if self._most is None else self._most.tolist()
        return tuple(
            None
            if not known
            else LinearTimeModel(fixed, slope)
            if most >= MAX_TOTAL
            else MicroBatchTimeModel(fixed, slope, part, most)
            for (fixed, slope, part), most, known in zip(numbers, sizes, self.known, strict=True)
        )

    def observe(self, shares: ArrayLike, seconds: ArrayLike) -> IntArray:
        """Add the compute times of one step.

        Args:
            shares: samples that each replica computed, int [n]. A time with share 0 does not count.
            seconds: compute times, float64 [n]; NaN if unknown.

        Returns:
            For each replica, in how many of the latest steps it has had another speed, int64 [n];
            0 if no change of speed was detected in this step.
        """
        share = np.asarray(shares, np.int64)
        second = np.asarray(seconds, np.float64)
        valid = (share > 0) & (second > 0) & (second < np.inf)
        same = valid & (share == self._last_share)
        self._noise.add(second[same], self._last_seconds[same])
        np.copyto(self._streak, np.where(same, self._streak + 1, 1), where=valid)
        np.copyto(self._last_share, share, where=valid)
        np.copyto(self._last_seconds, second, where=valid)
        self._store(valid, share, second)
        steps = self._detect(valid, share, second)
        changed = steps > 0
        if changed.any():
            self._cut(changed, steps)
        due = (self._streak <= _REFIT_EACH_UNTIL) | (self._since_fit >= _REFIT_EVERY) | changed
        for replica in (due & valid).nonzero()[0].tolist():
            self._refit(replica)
        return steps

    def recall(self, replica: int, model: LinearTimeModel) -> None:
        """Take a model that was fitted before; it stays until there are observations."""
        self.fixed_seconds[replica] = model.fixed_seconds
        self.seconds_per_sample[replica] = model.seconds_per_sample
        known_part = getattr(model, "part_seconds", PART_FRACTION * model.fixed_seconds)
        self._part[replica] = known_part
        self.known[replica] = True
        self.forget(replica)

    def set_micro_batch_size(self, replica: int, samples: int) -> None:
        """Say that a replica computes larger shares in parts from now on."""
        if self._most is None:
            self._most = np.full(len(self.fixed_seconds), MAX_TOTAL)
        self._most[replica] = samples

    def forget(self, replica: int) -> None:
        """Drop a replica's observations; its model stays until there are new ones.

        Args:
            replica: index of the replica.
        """
        self._count[replica] = self._streak[replica] = 0
        self._speed_changes.forget(replica)
        self._rescale[replica] = self.known[replica]
        self.identified[replica] = False

    def counts(self, shares: ArrayLike) -> IntArray:
        """Count observations with given shares.

        Args:
            shares: one share for each replica, int [n].

        Returns:
            Number of observations in the window with exactly this share, int64 [n].
        """
        age = (self._position[:, None] - 1 - np.arange(self._window)) % self._window
        counted = (self._shares == np.asarray(shares)[:, None]) & (age < self._count[:, None])
        return counted.sum(axis=1)

    def latest(self) -> tuple[Measurement | None, ...]:
        """Return the measurements of each replica with its most recent share."""
        found: list[Measurement | None] = []
        for replica, share in enumerate(self._last_share.tolist()):
            points = [point for point in self._measurements(replica) if point.share == share]
            found.append(points[0] if points else None)
        return tuple(found)

    def _store(self, valid: BoolArray, share: IntArray, second: FloatArray) -> None:
        rows = valid.nonzero()[0]
        columns = self._position[rows]
        self._shares[rows, columns] = share[rows]
        self._seconds[rows, columns] = second[rows]
        self._position[rows] = (columns + 1) % self._window
        self._count[rows] = np.minimum(self._count[rows] + 1, self._window)
        self._since_fit[rows] += 1

    def _detect(self, valid: BoolArray, share: IntArray, second: FloatArray) -> IntArray:
        # If only one share has been seen, a deviation at a new share reveals the line, not a change
        # of speed.
        judged = valid & self.known & ~self._rescale
        judged &= self.identified | (self._streak >= _STREAK_BEFORE_CHANGE)
        ratio = np.ones_like(second)
        np.divide(second, self.seconds(share), out=ratio, where=judged)
        return self._speed_changes.observe(ratio, judged, self._streak > 1, self.noise)

    def _cut(self, changed: BoolArray, steps: IntArray) -> None:
        """Keep only the observations since the change."""
        self._count = np.where(changed, np.minimum(steps, self._count), self._count)
        self.identified &= ~changed
        self._rescale |= changed

    def _measurements(self, replica: int) -> list[Measurement]:
        start = int(self._position[replica]) - int(self._count[replica])
        columns = np.arange(start, int(self._position[replica])) % self._window
        return measurements(
            self._shares[replica, columns].tolist(), self._seconds[replica, columns].tolist()
        )

    def _refit(self, replica: int) -> None:
        points = self._measurements(replica)
        if self._rescale[replica]:
            latest = points[-1]
            expected = self.seconds(np.full(len(self.fixed_seconds), latest.share))[replica]
            changed = latest.seconds / float(expected)
            self.fixed_seconds[replica] *= changed
            self._part[replica] *= changed
            self._rescale[replica] = False
        fixed, slope, identified = self._fit_of(replica, points)
        self.fixed_seconds[replica], self.seconds_per_sample[replica] = fixed, slope
        self.known[replica] = True
        self.identified[replica] |= identified
        self._since_fit[replica] = 0
        self.version += 1

    def _fit_of(self, replica: int, points: list[Measurement]) -> tuple[float, float, bool]:
        """Fit a replica's line, and what its further parts cost, if it has any."""
        before = float(self.fixed_seconds[replica])
        most = MAX_TOTAL if self._most is None else int(self._most[replica])
        if all(point.share <= most for point in points):
            part = float(self._part[replica]) / before if before else PART_FRACTION
            fixed, slope, identified = fit_line(points, before, self.noise)
            self._part[replica] = part * fixed
            return fixed, slope, identified
        part_before = float(self._part[replica])
        fixed, part, slope, identified = fit_parts(points, most, before, part_before, self.noise)
        self._part[replica] = part
        return fixed, slope, identified
