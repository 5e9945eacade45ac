"""Sizes of gradient buckets that are tried, and the choice between them."""

import numpy as np
import pytest

from keras_het.planning.bucket_sizes import ONE_SUM, fastest, sizes_to_try, typical_seconds

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (0, []),
        (3 * MIB - 1, []),
        (3 * MIB, [1]),
        (8_800_000, [2, 1]),
        (41_000_000, [8, 2, 1]),
        (400_000_000, [64, 16, 4]),
        (48 * 2**30, [16384, 4096, 1024]),
    ],
)
def test_sizes_cut_a_model_into_a_few_buckets_up_to_some_dozens(num_bytes, sizes):
    assert sizes_to_try(num_bytes) == [ONE_SUM, *(MIB * size for size in sizes)]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([[1.0, 0.9, 0.8]] * 3, 4),
        ([[1.0, 0.985, 1.2]] * 3, 0),  # gains too little
        ([[1.0, 1.1, 1.2]] * 3, 0),
        # everything becomes faster from round to round
        ([[4.0, 3.6, 4.4], [2.0, 1.8, 2.2], [1.0, 0.9, 1.1]], 8),
        # one disturbed block decides nothing
        ([[1.0, 0.9, 1.1], [1.0, 9.0, 1.1], [1.0, 0.9, 1.1]], 8),
        ([[9.0, 0.9, 1.1], [1.0, 1.1, 1.2], [1.0, 1.1, 1.2]], 0),
    ],
)
def test_the_fastest_size_is_that_of_the_median_round(seconds, chosen):
    assert fastest([0, 8, 4], typical_seconds(np.array(seconds))) == chosen


def test_without_a_gain_the_size_of_today_stays():
    assert fastest([8, 0, 4], np.ones(3)) == 8


def test_the_seconds_that_are_told_are_those_that_decide():
    seconds = np.array([[4.0, 3.9], [2.0, 1.0], [1.0, 0.9]])
    np.testing.assert_allclose(typical_seconds(seconds), [2.0, 1.8])
