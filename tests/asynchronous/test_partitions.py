"""Variables as one vector, cut into partitions that are spread over services."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_het
from keras_het.asynchronous.exchange.participant import PartitionedVector
from keras_het.asynchronous.parameter_service import Partitions
from keras_het.asynchronous.parameter_service.wire import PARTITION_BYTES, spread_partitions
from keras_het.exchange.message import HEADER_BYTES, PIECE_BYTES


def test_partitions_are_as_few_as_fit():
    assert Partitions(((3, 4), (5,), ()), partition_bytes=28).sizes == (6, 6, 6)
    assert Partitions(((3, 4), (5,)), partition_bytes=28).sizes == (6, 6, 5)
    assert Partitions(((1_000_000,),)).sizes == (1_000_000,)
    assert PARTITION_BYTES + HEADER_BYTES <= PIECE_BYTES  # one piece, which is not copied again


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 5))
def test_partitions_are_equal_and_hold_all_weights(size, largest, num_services):
    partitions = Partitions(((size,), ()), 4 * largest + 3)
    sizes = partitions.sizes
    assert sum(sizes) == partitions.size == size + 1
    assert len(sizes) == -(-(size + 1) // largest) and max(sizes) <= largest
    assert min(sizes) >= max(sizes) - 1
    vector = np.arange(size + 1, dtype=np.float32)
    cut = partitions.cut(vector)
    assert tuple(map(len, cut)) == sizes and all(part.base is not None for part in cut)
    np.testing.assert_array_equal(np.concatenate(cut), vector)
    places = spread_partitions(sizes, num_services)
    loads = [places.count(place) for place in range(num_services)]
    assert sum(loads) == len(sizes) and max(loads) - min(loads) <= 1


def test_the_largest_partitions_are_spread_first():
    assert spread_partitions([1, 5, 2, 3], 2) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("shapes", "size", "match"), [((), 28, "no weights"), (((3,),), 3, "of at least 4")]
)
def test_wrong_partitions(shapes, size, match):
    with pytest.raises(ValueError, match=match):
        Partitions(shapes, size)


SIZE, PART = 64, 32


def vectors_of(dtype, devices):
    strategy = keras_het.HeterogeneousStrategy(devices)
    with strategy.scope():
        variables = [keras.Variable(np.zeros(shape), dtype=dtype) for shape in ((7, 9), ())]
    return variables, PartitionedVector(variables, strategy, 4 * PART), strategy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_is_written_is_read(logical_devices, dtype, num_devices):
    variables, vectors, strategy = vectors_of(dtype, logical_devices[:num_devices])
    values = np.random.default_rng(2).normal(size=SIZE).astype(np.float32)
    vectors.write(vectors.partitions.cut(values))
    read = vectors.read()
    np.testing.assert_array_equal(np.concatenate(read), values)
    np.testing.assert_allclose(variables[1], values[-1], rtol=2.0**-7)
    with strategy.scope():
        for variable in variables:
            variable.assign(variable.value + 1.0)  # a step
    moved = np.concatenate(vectors.read()) - values
    np.testing.assert_allclose(moved, 1.0, atol=2.0**-6 if dtype != "float32" else 1e-6)
    np.testing.assert_array_equal(np.concatenate(read), values)  # of before the step


def test_what_variables_cannot_hold_is_not_a_number_left_over(logical_devices):
    _, vectors, _ = vectors_of("float16", logical_devices[:1])
    zeros = np.zeros(PART, np.float32)
    vectors.write([zeros + 1e6, zeros])
    assert np.isinf(vectors.read()[0]).all()
    vectors.write([zeros, zeros])
    np.testing.assert_array_equal(np.concatenate(vectors.read()), 0)
