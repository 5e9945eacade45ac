"""Long series cut into few columns, as a plot has room for."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_het.planning.diagnosis.recording import Floats, Integers


def windows(rows: Any, every: int) -> Any:
    """Return the lowest, the median and the highest value of windows of rows, ignoring NaN."""
    num = -(-len(rows) // every)
    padded = np.full((num * every, *rows.shape[1:]), np.nan, rows.dtype)
    padded[: len(rows)] = rows
    ordered = np.sort(padded.reshape(num, every, *rows.shape[1:]), axis=1)  # NaN comes last
    known = np.maximum(np.sum(~np.isnan(ordered), axis=1, keepdims=True), 1)

    def at(place: Any) -> Any:
        return np.take_along_axis(ordered, place, axis=1)[:, 0]

    middle = 0.5 * (at((known - 1) // 2) + at(known // 2))
    return np.stack([ordered[:, 0], middle, at(known - 1)], axis=1)


def edges_between(first: int, last: int, most: int) -> Integers:
    """Return the steps at which columns begin, and the end of the last one."""
    num = max(min(most, last - first), 1)
    return np.unique(np.round(np.linspace(first, max(last, first + 1), num + 1)).astype(np.int64))


def columns(steps: Integers, every: Integers, values: Floats, edges: Integers, how: str) -> Floats:
    """Return one value for each column and series, NaN where nothing is known."""
    num = len(edges) - 1
    result = np.full((num, values.shape[1]), np.nan)
    if not len(steps):
        return result
    bounds = np.searchsorted(steps, edges)
    begin, end = bounds[:-1], bounds[1:]
    place = 2 if how == "highest" else 1
    widest = int(np.max(end - begin))
    if np.all(end - begin == widest) and widest:  # all alike, but perhaps the last: at once
        result[:] = windows(values[begin[0] : end[-1]], widest)[:, place]
        return result
    for column in range(num):
        if end[column] > begin[column]:
            rows = values[begin[column] : end[column]]
            result[column] = rows[0] if len(rows) == 1 else windows(rows, len(rows))[0, place]
        elif begin[column] and _goes_on(steps, every, begin[column] - 1, edges[column]):
            result[column] = values[begin[column] - 1]
    return result


def _goes_on(steps: Integers, every: Integers, row: int, step: int) -> bool:
    return bool(steps[row] + every[row] > step)
