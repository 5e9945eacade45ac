"""The size of a batch, whatever its tensors are."""

import tensorflow as tf

from keras_het.loader.iterators.live_iterator import LiveIterator
from keras_het.loader.order.rows import count_bytes


def ragged():
    return tf.RaggedTensor.from_row_lengths(tf.zeros([6], tf.float32), [1, 2, 3])


def test_the_tensors_of_a_batch_count():
    dense = ({"x": tf.zeros([4, 3]), "y": tf.zeros([4], tf.int64)}, tf.zeros([4], tf.bool))
    assert count_bytes(dense) == 48 + 32 + 4
    assert count_bytes(tf.constant(["a" * 1000, "b" * 500])) == 1500 + 2 * 24
    assert count_bytes(tf.zeros([0], tf.string)) == 0
    assert count_bytes(ragged()) == 6 * 4 + 4 * 8
    # two values, their places, and the shape
    sparse = tf.sparse.from_dense(tf.constant([[0.0, 1.0], [2.0, 0.0]]))
    assert count_bytes(sparse) == 2 * 4 + 2 * 2 * 8 + 2 * 8
    full = tf.experimental.Optional.from_value(tf.zeros([4]))
    empty = tf.experimental.Optional.empty(tf.TensorSpec([4], tf.float32))
    assert count_bytes((full, empty)) == 16
    numbers = tf.raw_ops.EmptyTensorList(
        element_shape=-1, max_num_elements=-1, element_dtype=tf.float32
    )
    assert count_bytes((None, 3, numbers)) == 0, "what is no tensor"


def test_the_first_batch_that_is_read_is_measured():
    live = LiveIterator(iter(tf.data.Dataset.from_tensors([b"word"]).repeat(2)))
    assert live.batch_bytes is None
    live.take(2)
    assert live.batch_bytes == 28
