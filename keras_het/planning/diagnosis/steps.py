"""The steps of a recording that can be compared, and the recent ones that a diagnosis is about."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray

from keras_het.planning.diagnosis.recording import Floats, Integers, Recording
from keras_het.planning.shares import MAX_TOTAL

LONGEST_SECONDS = 1e6
"""A longer time of one step is taken for a mistake of the clock: 11 days."""
# A value counts as at most this many medians of its column.
_MOST_MEDIANS = 3.0
_SKEWED = 1.25
_MOST_ROWS_TO_FILL = 512


def medians(values: Floats, axis: int = 0) -> Floats:
    """Return lower medians: noise raises times more than it lowers them. NaN is unknown."""
    if not values.shape[axis]:
        return np.full(np.delete(values.shape, axis), np.nan)
    ordered = np.sort(values, axis=axis)  # NaN goes last
    count = np.sum(~np.isnan(ordered), axis=axis, keepdims=True)
    middle = np.take_along_axis(ordered, np.maximum((count - 1) // 2, 0), axis)
    return np.squeeze(middle, axis)


def means(values: Floats, most: float = np.inf) -> Floats:
    """Return the mean of each column's known values, of which none counts above `most` medians."""
    if most < np.inf:
        values = np.minimum(values, most * medians(values))
    known = ~np.isnan(values)
    total = np.where(known, values, 0.0).sum(axis=0)
    count = known.sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def levels(values: Floats) -> Floats:
    """Return the median of each column, or the mean if much is above it."""
    # A few outliers leave the median as it is, but a device that is slow in every third step is
    # slow.
    middle, mean = medians(values), means(values, _MOST_MEDIANS)
    # Few rows may have two outliers among them by accident.
    skewed = _SKEWED + 1.0 / np.sqrt(max(len(values), 1))
    return np.where(mean > skewed * middle, mean, middle)


def checked(values: Floats, most: float = LONGEST_SECONDS) -> Floats:
    """Return values with NaN in place of what cannot be, and 0 in place of what is below it."""
    values = np.asarray(values, np.float64)
    return np.where(np.abs(values) <= most, np.maximum(values, 0.0), np.nan)


def filled(values: Floats) -> Floats:
    """Return values with each column's median in place of NaN; 0 in columns without a value."""
    unknown = np.isnan(values)
    if not unknown.any():
        return values
    stride = -(-len(values) // _MOST_ROWS_TO_FILL)
    middle = medians(values[::stride])
    return np.where(unknown, np.nan_to_num(middle), values)


BoolArray = NDArray[np.bool_]

# The first steps of a run trace and compile.
_FIRST_ROWS = 8
_LONG_FIRST_ROW = 2.5
# An evaluation, a checkpoint or a new trace between steps.
_LONG_ROW = 4.0
_MOST_LONG_ROWS = 0.05
# What happened once proves nothing: a stall of the machine.
_SINGLE_ROW = 1.5
# The last batch of an epoch may be smaller than the batches around it.
_PARTIAL_BATCH = 0.98
MIN_STEPS = 20
"""Steps below which nothing is said."""
# A share that changes by this fraction of an even share is a change; less is rounding.
_CHANGED_SHARE = 0.2
# With more changes than this within the window, shares follow each step and say nothing about it.
_FREQUENT_CHANGES = 3
# More rows of history would cost time and tell the same.
_MOST_EARLIER_ROWS = 1000
# A change of the step time must be this certain and this large, and last for so many steps.
_DEVIATIONS = 4.5
_CHANGED_SECONDS = 1.08
_LASTING_STEPS = 16
_LEAST_NOISE = 0.005
_MOST_NOISE = 5.0
_NORMAL_QUARTILE = 0.6745
# Callbacks and Python up to this fraction of the rest of a step are taken for granted.
_USUAL_OTHER = 0.25


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps without gaps, of T rows and N replicas."""

    # own = other + input + compute; step = max own + transfer; transfer = min sync: the last
    # replica waits for nobody. Other time counts as if it came before the collective: what is after
    # it delays the next step alike.

    numbers: Integers
    weights: Floats
    compute: Floats
    input: Floats
    other: Floats
    transfer: Floats
    shares: Floats
    known: BoolArray

    @functools.cached_property
    def own(self) -> Floats:
        """Time of each replica before the collective in seconds, float64 of shape [T, N]."""
        return self.compute + self.input + self.other

    @functools.cached_property
    def seconds(self) -> Floats:
        """Time of each step, float64 of shape [T]."""
        return self.own.max(axis=1, initial=0.0) + self.transfer

    @functools.cached_property
    def least_other(self) -> float:
        """Other time in seconds that a replica must spend: the least of them, or a usual part."""
        # Callbacks that all replicas have make no difference between them.
        least = float(means(self.other).min()) if self.other.size else 0.0
        return min(least, _USUAL_OTHER * (self.mean(self.seconds) - least))

    def mean(self, values: Floats) -> float:
        """Return the mean over steps, of which a row may stand for several."""
        return float(values @ self.weights / self.weights.sum()) if len(values) else np.nan

    def rows(self, chosen: slice | Integers) -> Steps:
        names = {field.name for field in dataclasses.fields(self)} - {"known"}
        return dataclasses.replace(self, **{name: getattr(self, name)[chosen] for name in names})


@dataclasses.dataclass(frozen=True)
class Throughput:
    """How fast steps are by the wall clock, stalls included; NaN if unknown."""

    step_seconds: float
    median_seconds: float
    samples_per_second: float


def throughput(wall: Floats, samples: Floats, every: Integers | None = None) -> Throughput:
    """Return how fast steps are: of all views the only place that computes this."""
    wall = checked(wall)
    wall = wall[:, ~np.isnan(wall).all(axis=0)]
    rows = np.flatnonzero(~np.isnan(wall).any(axis=1) & bool(wall.size))
    weights = np.ones(len(rows)) if every is None else every[rows].astype(np.float64)
    seconds = wall[rows].mean(axis=1) if len(rows) else np.zeros(0)
    total = float(weights @ seconds)
    if not total > 0:
        return Throughput(np.nan, np.nan, np.nan)
    trained = float(weights @ np.nan_to_num(checked(samples[rows], MAX_TOTAL)))
    order = np.argsort(seconds)
    middle = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    return Throughput(total / weights.sum(), float(seconds[order[middle]]), trained / total)


def steps_of(recording: Recording, rows: Integers) -> Steps:
    """Return rows of a recording, with medians in place of single unknown values."""
    compute, waited, sync, other = (
        checked(values[rows])
        for values in (recording.compute, recording.input, recording.sync, recording.other)
    )
    known = np.asarray((~np.isnan(compute)).any(axis=0))
    shares = checked(recording.shares[rows], MAX_TOTAL)
    if np.isnan(shares).all():
        shares = np.ones_like(shares)
    lowest = np.where(np.isnan(sync), np.inf, sync).min(axis=1, initial=np.inf)
    transfer = np.where(np.isinf(lowest), np.nan, lowest)
    return Steps(
        recording.steps[rows],
        _weights(recording)[rows],
        filled(compute),
        filled(waited),
        filled(other),
        filled(transfer[:, None])[:, 0],
        filled(shares),
        known,
    )


def comparable_rows(recording: Recording) -> Integers:
    """Return the rows with their own times, samples and a whole global batch."""
    compute = np.asarray(recording.compute, np.float64)
    timed = np.isfinite(compute).any(axis=1)
    shares = np.asarray(recording.shares, np.float64)
    total = np.where(np.isfinite(shares), shares, 0.0).sum(axis=1)
    before, after = np.roll(total, 1), np.roll(total, -1)
    if len(total):
        before[0], after[-1] = total[0], total[-1]
    partial = total < _PARTIAL_BATCH * np.maximum(before, after)
    unknown = ~np.isfinite(shares).any(axis=1)
    # repeated rows would look like steps without noise
    own = timed if recording.measured is None else timed & recording.measured
    return np.flatnonzero(own & (unknown | ((total > 0) & ~partial)))


def without_long_rows(steps: Steps, begins: bool) -> Steps:
    """Leave out first steps that compile, a few that are far longer, and one that stands alone."""
    if len(steps.numbers) < 3:
        return steps
    middle = float(medians(steps.seconds))
    first = 0
    while begins and first < _FIRST_ROWS and steps.seconds[first] > _LONG_FIRST_ROW * middle:
        first += 1
        if first == len(steps.numbers):
            return steps
    kept = steps.rows(slice(first, None))
    is_long = kept.seconds > _LONG_ROW * middle
    second, longest = np.sort(kept.seconds)[-2:] if len(kept.seconds) > 1 else (0.0, 0.0)
    if longest > _SINGLE_ROW * second:
        is_long[kept.seconds.argmax()] = True
    if 0 < is_long.sum() <= max(2, _MOST_LONG_ROWS * len(is_long)) < len(is_long):
        kept = kept.rows(np.flatnonzero(~is_long))
    return kept


def _weights(recording: Recording) -> Floats:
    """How many steps rows stand for: those up to the next row, or since the last measured one."""
    if recording.measured is not None and not recording.measured.all():
        measured = np.flatnonzero(recording.measured)
        weights = np.ones(len(recording.steps))
        weights[measured] = np.diff(measured, prepend=-1)
        return weights
    numbers = np.asarray(recording.steps, np.float64)
    if len(numbers) < 2:
        return np.ones(len(numbers))
    return np.append(np.maximum(np.diff(numbers), 1.0), 1.0)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Recent and earlier steps; `wanted` are those since the last change of shares."""

    recent: Steps
    earlier: Steps
    wanted: int
    since_shares: int | None = None
    since_speed: int | None = None


def choose_windows(recording: Recording, window: int) -> Windows:
    """Choose the recent and the earlier steps of a diagnosis."""
    # Recent steps begin with the last change of shares, and with the last lasting change of the
    # step time: what has ended is not reported, what has begun is not averaged with what was
    # before.
    rows = comparable_rows(recording)
    tail = rows[-window:]
    steps = steps_of(recording, tail)
    begins = len(tail) == len(rows)
    changes = _share_changes(steps.shares)
    since_shares = None
    if 0 < len(changes) <= _FREQUENT_CHANGES:
        steps, begins = steps.rows(slice(int(changes[-1]), None)), False
        since_shares = int(steps.numbers[0])
    steps = without_long_rows(steps, begins)
    wanted = len(steps.numbers)
    first = _last_change(steps.seconds)
    since_speed = int(steps.numbers[first]) if first else None
    recent = steps.rows(slice(first, None))
    begin = recent.numbers[0] if len(recent.numbers) else 0
    before = rows[recording.steps[rows] < begin]
    stride = max(-(-len(before) // _MOST_EARLIER_ROWS), 1)
    earlier = steps_of(recording, before[::-stride][::-1])
    return Windows(recent, earlier, wanted, since_shares, since_speed)


def _last_change(seconds: Floats) -> int:
    """Return the index at which a series has last changed its level for good; 0 if it has not."""
    first = 0
    while len(seconds) - first >= 2 * _LASTING_STEPS:
        change = _change(np.log(np.maximum(seconds[first:], 1e-9)))
        if not change:
            break
        first += change
    return first


def _change(logs: Floats) -> int:
    """Return the place with the largest difference of means before and after, 0 if it is noise."""
    middle = float(medians(logs))
    n = len(logs)
    after = np.arange(n - _LASTING_STEPS // 2, _LASTING_STEPS - 1, -1)
    before = n - after

    def difference(most: float) -> Floats:
        sums = np.cumsum(np.clip(logs, middle - most, middle + most))
        return (sums[-1] - sums[before - 1]) / after - sums[before - 1] / before

    steps_between = np.abs(np.diff(logs))
    noise = max(float(medians(steps_between)) / (_NORMAL_QUARTILE * math.sqrt(2)), _LEAST_NOISE)
    # A stall counts as little more than noise, or two of them would be a lasting change.
    certain = np.abs(difference(_MOST_NOISE * noise))
    deviations = certain / (noise * np.sqrt(1.0 / after + 1.0 / before))
    best = int(deviations.argmax())
    large = abs(difference(1.0)[best]) > math.log(_CHANGED_SECONDS)
    return int(before[best]) if large and deviations[best] > _DEVIATIONS else 0


def _share_changes(shares: Floats) -> Integers:
    """Rows whose shares differ from those before, other than by the total."""
    total = np.maximum(shares.sum(axis=1, keepdims=True), 1e-9)
    fractions = shares / total * shares.shape[1]
    differs = np.abs(np.diff(fractions, axis=0)).max(axis=1, initial=0.0) > _CHANGED_SHARE
    return np.flatnonzero(differs) + 1
