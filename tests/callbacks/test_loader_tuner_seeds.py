"""A move of LoaderTuner takes nothing from the sequence of seeds that the program draws from."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from loader_training import BATCH, ROWS, done, moving, train, train_under_strategy

from keras_het.loader import Knobs, pipeline
from keras_het.loader import tf_data_adapter as adapter

FIRST = Knobs(2, 2, 2)


def rows(knobs):
    numbers = tf.data.Dataset.range(ROWS).shuffle(20)
    return numbers.map(
        lambda row: (tf.fill([3], tf.cast(row, tf.float32) / ROWS), tf.cast(row, tf.float32)),
        num_parallel_calls=knobs.num_parallel_calls,
    )


def samples(knobs):
    return rows(knobs).batch(BATCH).prefetch(knobs.prefetch)


def slices(knobs):
    return rows(knobs).padded_batch(BATCH, padded_shapes=([None], [])).prefetch(knobs.prefetch)


def drawn():
    later = tf.data.Dataset.range(50).shuffle(50)
    return [float(tf.random.uniform([])), *map(int, later)]


def test_what_is_drawn_after_a_training_does_not_depend_on_its_moves():
    results = []
    for tuner in (None, moving()):
        callbacks = [tuner] if tuner else []
        model = train(lambda: pipeline(samples, FIRST), callbacks)
        results.append((model.seen, drawn()))
    assert len(done(tuner)) >= 3
    assert results[0] == results[1]


@pytest.mark.quick("slices-True")
@pytest.mark.parametrize(("build", "is_built"), [(samples, True), (slices, True), (samples, False)])
def test_nor_does_it_under_the_strategy(build, is_built, logical_devices):
    results = []
    for tuner in (None, moving()):
        keras.utils.set_random_seed(5)
        data = pipeline(build, FIRST) if is_built else build(FIRST)
        trained = train_under_strategy(logical_devices, data, [tuner] if tuner else [], epochs=2)
        results.append((trained, drawn()))
    assert len(done(tuner)) >= 1
    assert results[0][1] == results[1][1]
    for expected, found in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_shuffle_without_a_seed_gets_that_of_the_first_build():
    def seeds_of(dataset):
        nodes = filter(adapter.is_shuffle, adapter.upstream_of(dataset))
        return [adapter.shuffle_seeds(node) for node in nodes]

    def build(knobs):
        return tf.data.Dataset.range(9).shuffle(9).batch(2).shuffle(4)

    tf.random.set_seed(5)
    first, second = pipeline(build, FIRST), pipeline(build, FIRST)
    assert seeds_of(first) != seeds_of(second)
    for each in (first, second):
        assert seeds_of(each.build_again(Knobs(4, 4, 4))) == seeds_of(each)
