"""Gradients that are summed in buckets: more sums in a step, and the same bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

from keras_het import HeterogeneousStrategy


def dense(optimizer):
    inner = [keras.layers.Dense(16, "relu") for _ in range(3)]
    normalization = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((6,)), *inner, normalization, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    return model, np.random.default_rng(0).normal(size=(28, 6)).astype("float32")


def words(optimizer):
    layers = [keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(8)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    return model, np.random.default_rng(0).integers(0, 9, (28, 3))


def half(optimizer):
    layers = [keras.layers.Dense(8, dtype=each) for each in ("float64", "float32", "float64")]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    return model, np.random.default_rng(0).normal(size=(28, 6)).astype("float32")


def trained(build, optimizer, bytes_per_pack, shares=(5, 0, 2), **options):
    """Weights and losses after an epoch, and the number of sums that a train step has."""
    packs = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    strategy = HeterogeneousStrategy(
        DEVICES[: len(shares)],
        share_weights=shares,
        communication_options=packs,
        **options,
    )
    sums, original = [], strategy.extended.all_reduce_in_replica

    def all_reduce_in_replica(reduce_op, value):
        sums.append(len(value))
        return original(reduce_op, value)

    strategy.extended.all_reduce_in_replica = all_reduce_in_replica
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, x = build(optimizer())
    y = x.sum(axis=1, keepdims=True).astype("float32")
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    state = [*model.get_weights(), *model.optimizer.variables]
    return [*map(np.array, state), np.array(history.history["loss"])], len(sums)


@pytest.mark.quick("types")
@pytest.mark.parametrize(
    ("build", "optimizer"),
    [
        (dense, lambda: keras.optimizers.Adam(0.01)),
        (dense, lambda: keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=0.1)),
        (dense, lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
        (words, lambda: keras.optimizers.Adam(0.01)),
        (half, lambda: keras.optimizers.SGD(0.01)),
    ],
    ids=["dense", "clipped", "accumulated", "sparse", "types"],
)
def test_buckets_change_no_bit(build, optimizer):
    shares = (5, 2) if build is half else (5, 0, 2)
    expected, once = trained(build, optimizer, 0, shares)
    counts = []
    for size in (1, 300, 10**9):
        found, number = trained(build, optimizer, size, shares)
        counts.append(number)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert counts[0] > counts[1] > counts[2] == once  # of one type each, or all of all types


@pytest.mark.full
def test_parts_of_a_share_are_summed_at_once():
    expected, once = trained(dense, keras.optimizers.Adam, 0, micro_batch_size=2)
    found, number = trained(dense, keras.optimizers.Adam, 1, micro_batch_size=2)
    assert number == once
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
def test_one_process_sends_nothing_and_rounds_nothing():
    options = {"build": words, "optimizer": keras.optimizers.Adam, "shares": (5, 2)}
    expected, once = trained(**options, bytes_per_pack=0)
    found, number = trained(**options, bytes_per_pack=0, communication_dtype="bfloat16")
    assert number == once
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_types_that_cannot_be_sent():
    with pytest.raises(ValueError, match='communication_dtype must be "bfloat16" or "float16"'):
        HeterogeneousStrategy(DEVICES[:1], communication_dtype="int8")
    with pytest.raises(ValueError, match=r"communication_dtype='bfloat16' with gradient_reduction"):
        HeterogeneousStrategy(
            DEVICES[:1], gradient_reduction="summation", communication_dtype="bfloat16"
        )
