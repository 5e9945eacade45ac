"""One long vector of all weights, cut into partitions of one size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_het.asynchronous.parameter_service import Partitions


def test_partitions_are_as_few_as_fit():
    assert Partitions(((3, 4), (5,), ()), partition_size=7).sizes == (6, 6, 6)
    assert Partitions(((1000, 1024), (1,)), 1_024_000, fewest=1).sizes == (512_001, 512_001)


@pytest.mark.parametrize(
    ("elements", "count"),
    [
        (512_000, 1),  # half the largest message
        (512_001, 2),
        (10_000_000, 12),  # between half of it and all
        (12 * 1_024_000, 12),
        (12 * 1_024_000 + 1, 13),
        (100_000_000, 98),
    ],
)
def test_middle_sized_weights_are_spread_over_some_messages(elements, count):
    sizes = Partitions(((elements,),)).sizes
    assert len(sizes) == count and elements <= sum(sizes) < elements + count
    assert max(sizes) * 4 <= 4_096_000


def test_partitions_that_are_small_already_are_not_cut_further():
    assert Partitions(((400_000,),), 100_000).sizes == (100_000,) * 4


@given(st.integers(1, 300), st.integers(1, 400))
def test_partitions_are_equal_and_hold_all_weights(size, partition_size):
    partitions = Partitions(((size,), ()), partition_size)
    count = -(-(size + 1) // partition_size)
    assert len(partitions.sizes) == count and len(set(partitions.sizes)) == 1
    assert size < sum(partitions.sizes) < size + 1 + count
    assert partitions.sizes[0] <= partition_size
    vector, scalar = np.arange(1.0, size + 1, dtype=np.float32), np.float32(-1)
    packed = partitions.pack([vector, scalar])
    np.testing.assert_array_equal(np.concatenate(packed)[size + 1 :], 0)
    for got, want in zip(partitions.unpack(packed), (vector, scalar), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("shapes", "size", "match"), [((), 5, "no weights"), (((3,),), 1_100_000, "float32 elements")]
)
def test_wrong_partitions(shapes, size, match):
    with pytest.raises(ValueError, match=match):
        Partitions(shapes, size)
