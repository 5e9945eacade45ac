"""The size of a batch, whatever its tensors are."""

from __future__ import annotations

import tensorflow as tf

from keras_het.loader.order.rows import count_bytes
from keras_het.loader.tuning.session import TuningSession
from keras_het.planning.loader import FixedController


def ragged():
    return tf.RaggedTensor.from_row_lengths(tf.zeros([6], tf.float32), [1, 2, 3])


def test_dense():
    batch = ({"x": tf.zeros([4, 3]), "y": tf.zeros([4], tf.int64)}, tf.zeros([4], tf.bool))
    assert count_bytes(batch) == 48 + 32 + 4


def test_strings_count_with_their_characters():
    assert count_bytes(tf.constant(["a" * 1000, "b" * 500])) == 1500 + 2 * 24
    assert count_bytes(tf.zeros([0], tf.string)) == 0


def test_ragged_and_sparse():
    assert count_bytes(ragged()) == 6 * 4 + 4 * 8
    # two values, their places, and the shape
    assert (
        count_bytes(tf.sparse.from_dense(tf.constant([[0.0, 1.0], [2.0, 0.0]])))
        == 2 * 4 + 2 * 2 * 8 + 2 * 8
    )


def test_optionals():
    spec = tf.TensorSpec([4], tf.float32)
    full = tf.experimental.Optional.from_value(tf.zeros([4]))
    assert count_bytes((full, tf.experimental.Optional.empty(spec))) == 16


def test_what_is_no_tensor_counts_as_nothing():
    numbers = tf.raw_ops.EmptyTensorList(
        element_shape=-1, max_num_elements=-1, element_dtype=tf.float32
    )
    assert count_bytes((None, 3, numbers)) == 0


def test_the_session_looks_at_one_batch():
    session = TuningSession(lambda plan, cpus, most: FixedController(plan))
    session.note_batch((ragged(), tf.constant(["word"])))
    session.note_batch(tf.zeros([1000]))
    assert session._batch_bytes == count_bytes(ragged()) + 28
