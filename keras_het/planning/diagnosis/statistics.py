"""Statistics of measured times, which have gaps and outliers; NaN is unknown."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.diagnosis.recording import Floats, Integers
from keras_het.planning.shares import MAX_TOTAL

LONGEST_SECONDS = 1e6
"""A longer time of one step is taken for a mistake of the clock: 11 days."""
# A value counts as at most this many medians of its column.
_MOST_MEDIANS = 3.0
_SKEWED = 1.25
_MOST_ROWS_TO_FILL = 512
_LEAST_BLOCK = 16
_BLOCKS = 50


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


def blocks(values: Floats) -> Floats:
    """Cut rows into blocks of 2 % of them and at least 16, the latest rows first of all."""
    # Medians over more would hide what was good only in the beginning; of fewer the smallest is
    # chance.
    size = max(_LEAST_BLOCK, len(values) // _BLOCKS)
    number = len(values) // size
    # The first steps, which compile, are in no block if there is a choice.
    latest = values[len(values) - number * size :]
    return latest.reshape(number, size, *values.shape[1:])


def best_block(values: Floats) -> Floats:
    """Return the smallest median of a block in each column; NaN with too few rows."""
    consecutive = blocks(values)
    unknown = np.isnan(consecutive).sum(axis=1) > consecutive.shape[1] // 2
    of_blocks = np.where(unknown, np.inf, medians(consecutive, axis=1))
    best = of_blocks.min(axis=0, initial=np.inf)
    return np.where(np.isinf(best), np.nan, best)


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
