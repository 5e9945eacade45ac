"""Medians and means of values of which some are unknown."""

from __future__ import annotations

import numpy as np

from keras_het.planning.diagnosis.recording import Floats

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
    """Return the typical value of each column: the median, or the mean if much is above it.

    A few outliers leave the median as it is, but a device that is slow in every third step is slow.
    """
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
