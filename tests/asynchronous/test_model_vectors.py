"""Variables as vectors that travel: what 16-bit ones cannot hold is not lost."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_het
from keras_het.asynchronous.rules import Delta, PushMeta
from keras_het.rpc.vector import PartitionedVector

SIZE, PART = 64, 32


def vectors_of(dtype, devices):
    strategy = keras_het.HeterogeneousStrategy(devices)
    with strategy.scope():
        variable = keras.Variable(np.zeros(SIZE), dtype=dtype)
    return variable, PartitionedVector([variable], strategy, PART), strategy


def values():
    return np.random.default_rng(2).normal(size=SIZE).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_is_written_is_read(logical_devices, dtype, num_devices):
    variable, vectors, strategy = vectors_of(dtype, logical_devices[:num_devices])
    vectors.write([values()[:PART], values()[PART:]])
    np.testing.assert_array_equal(np.concatenate(vectors.read()), values())
    with strategy.scope():
        variable.assign(variable.value + 1.0)  # a step
    moved = np.concatenate(vectors.read()) - values()
    np.testing.assert_allclose(moved, 1.0, atol=2.0**-6 if dtype != "float32" else 1e-6)


def test_what_variables_cannot_hold_is_not_a_number_left_over(logical_devices):
    _, vectors, _ = vectors_of("float16", logical_devices[:1])
    vectors.write([np.full(PART, 1e6, np.float32), np.zeros(SIZE - PART, np.float32)])
    assert np.isinf(vectors.read()[0]).all()
    vectors.write([np.zeros(PART, np.float32), np.zeros(SIZE - PART, np.float32)])
    np.testing.assert_array_equal(np.concatenate(vectors.read()), 0)


def test_workers_do_not_send_their_rounding(logical_devices):
    rule, center = Delta(), tf.Variable(values())
    workers = [vectors_of("bfloat16", logical_devices[:1])[1] for _ in range(3)]
    seen = [values()] * 3
    for own in workers:
        own.write([values()[:PART], values()[PART:]])
    for _ in range(10):
        for number, own in enumerate(workers):
            weights = tf.concat(own.read(), axis=0)
            message = rule.message(weights, seen[number])
            meta = PushMeta(number, 1.0, 0.0)
            seen[number] = rule.update(center, {}, message, meta)
            goes_on = rule.receive(weights, weights, seen[number])
            own.write([goes_on[:PART], goes_on[PART:]])
    np.testing.assert_allclose(center, values(), atol=1e-6)
