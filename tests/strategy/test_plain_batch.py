"""Batches that come without shares are cut within the step."""

import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES

from keras_het import HeterogeneousStrategy
from keras_het.strategy.batches.uneven_per_replica import share_out


@pytest.fixture
def strategy(logical_devices):
    return HeterogeneousStrategy(devices=DEVICES[:2], share_weights=[1, 2])


def test_all_kinds_of_parts_are_cut(strategy):
    rows = np.arange(6.0).reshape(6, 1)
    batch = {
        "array": rows,
        "tensor": tf.constant(rows),
        "ragged": tf.ragged.constant([[float(row)] for row in range(6)]),
        "sparse": tf.sparse.from_dense(rows),
        "scalar": tf.constant(3.0),
        "absent": None,
    }
    cut = share_out(strategy, batch)
    assert cut["absent"] is None
    for name in ("array", "tensor", "ragged", "sparse"):
        np.testing.assert_array_equal(cut[name].sizes, [2, 4])
        parts = strategy.experimental_local_results(cut[name])
        dense = [tf.sparse.to_dense(part) if name == "sparse" else part for part in parts]
        assert [np.ravel(part.numpy()).tolist() for part in dense] == [
            [0.0, 1.0],
            [2.0, 3.0, 4.0, 5.0],
        ], name
    assert [float(part) for part in strategy.experimental_local_results(cut["scalar"])] == [3, 3]
    assert share_out(strategy, cut) is cut


def test_what_has_no_rows_is_left_alone(strategy):
    batch = (None, tf.constant(1.0))
    assert share_out(strategy, batch) is batch


def test_parts_of_different_lengths_are_an_error(strategy):
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of rows"):
        share_out(strategy, (np.zeros((4, 1)), np.zeros((3, 1))))
