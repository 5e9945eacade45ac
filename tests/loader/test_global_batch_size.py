"""The size of global batches changes between two passes; the order of samples does not."""

import numpy as np
import pytest
import tensorflow as tf

from keras_het.loader import GlobalOrderDataset
from keras_het.planning import ReplicaLayout

ROWS = 50


def rows_of(dataset):
    """Rows of every step, replica by replica."""
    return [np.concatenate([part.numpy() for part in local]) for local, _ in dataset]


def distributed(source):
    return GlobalOrderDataset(
        source, ReplicaLayout((3,), 0), lambda: (3, 2, 1), lambda local, sizes: (local, sizes)
    )


def shuffled():
    return tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=5)


PIPELINES = {
    "cut": (lambda size: shuffled().batch(size), "slice"),
    "mapped": (lambda size: shuffled().map(lambda v: v * 10).batch(size).prefetch(2), "element"),
    "whole batches": (
        lambda size: shuffled().map(lambda v: v + 1).batch(size, drop_remainder=True),
        "element",
    ),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_order_is_that_of_one_device_with_the_new_size(kind):
    build, mode = PIPELINES[kind]
    dataset = distributed(build(8))
    assert dataset.mode == mode
    expected_first = [batch.numpy() for batch in build(8)]
    second = build(20)
    list(second)
    expected_second = [batch.numpy() for batch in second]
    first = rows_of(dataset)
    dataset.set_global_batch_size(20)
    assert dataset.global_batch_size == 20
    assert len(dataset) == len(expected_second)
    for ours, theirs in ((first, expected_first), (rows_of(dataset), expected_second)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_running_pass_keeps_its_size():
    dataset = distributed(tf.data.Dataset.range(ROWS).map(lambda v: v * 2).batch(10))
    iterator = iter(dataset)
    next(iterator)
    dataset.set_global_batch_size(25)
    assert [int(sizes.sum()) for _, sizes in iterator] == [10] * 4
    assert [int(sizes.sum()) for _, sizes in dataset] == [25, 25]


def test_mistakes():
    dataset = distributed(tf.data.Dataset.range(ROWS).batch(5))
    with pytest.raises(ValueError, match="at least 1 sample"):
        dataset.set_global_batch_size(0)
    ragged = tf.data.Dataset.range(ROWS).ragged_batch(5).map(lambda r: tf.cast(r, tf.int64))
    with pytest.raises(ValueError, match=r"ends in batch\(\)"):
        distributed(ragged).set_global_batch_size(10)
