"""Series cut into columns: medians, highest values, old steps, gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keras_het.tensorboard.columns import columns, edges_between, windows


def test_windows_ignore_what_is_unknown() -> None:
    rows = np.array([3.0, np.nan, 1.0, np.nan, np.nan, np.nan, 5.0])
    low, middle, high = windows(rows, 3).T
    np.testing.assert_array_equal(low, [1, np.nan, 5])
    np.testing.assert_array_equal(middle, [2, np.nan, 5])
    np.testing.assert_array_equal(high, [3, np.nan, 5])


def test_windows_agree_with_numpy() -> None:
    rows = np.random.default_rng(0).random((24, 3, 2))
    rows[rows < 0.2] = np.nan
    low, middle, high = np.moveaxis(windows(rows, 8), 1, 0)
    parts = rows.reshape(3, 8, 3, 2)
    np.testing.assert_array_equal(low, np.nanmin(parts, axis=1))
    np.testing.assert_allclose(middle, np.nanmedian(parts, axis=1))
    np.testing.assert_array_equal(high, np.nanmax(parts, axis=1))


@pytest.mark.parametrize(
    ("first", "last", "most", "edges"),
    [
        (0, 3, 600, [0, 1, 2, 3]),
        (5, 6, 600, [5, 6]),
        (0, 0, 600, [0, 1]),
        (10, 20, 4, [10, 12, 15, 18, 20]),
    ],
)
def test_edges_are_whole_steps(first: int, last: int, most: int, edges: list[int]) -> None:
    assert edges_between(first, last, most).tolist() == edges


def cut(steps: Any, every: Any, values: Any, edges: Any, how: str = "median") -> list[float]:
    arrays = (np.array(steps), np.array(every), np.array(values, float)[:, None], np.array(edges))
    return columns(*arrays, how)[:, 0].tolist()


def test_columns_have_the_value_of_their_steps() -> None:
    assert cut(range(6), [1] * 6, [1, 2, 9, 4, 5, 6], [0, 3, 6]) == [2, 5]
    assert cut(range(6), [1] * 6, [1, 2, 9, 4, 5, 6], [0, 3, 6], "highest") == [9, 6]
    assert cut(range(5), [1] * 5, [1, 2, 9, 4, 6], [0, 3, 5]) == [2, 5]


def test_a_row_of_old_steps_goes_on_in_the_columns_that_it_covers() -> None:
    assert cut([0, 8, 16, 17], [8, 8, 1, 1], [1, 2, 3, 4], [0, 4, 8, 12, 16, 17, 18]) == [
        *(1, 1, 2, 2, 3, 4)
    ]


def test_a_gap_stays_unknown() -> None:
    values = cut([0, 1, 10], [1, 1, 1], [1, 2, 3], [0, 1, 2, 6, 10, 11])
    np.testing.assert_array_equal(values, [1, 2, np.nan, np.nan, 3])
    assert np.isnan(cut(np.zeros(0, int), np.zeros(0, int), np.zeros((0,)), [0, 1])).all()
