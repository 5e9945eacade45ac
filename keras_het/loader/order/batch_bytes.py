"""Memory size of a batch."""

from __future__ import annotations

import tensorflow as tf

from keras_het.loader.nested import Leaf, StepInput

_BYTES_OF_A_STRING = 24
"""TensorFlow's overhead for each string, in addition to its characters."""


def count_bytes(batch: StepInput) -> int:
    """Size of a batch's tensors: dense, ragged and sparse ones, strings, and those in Optionals."""
    return sum(_bytes_of(leaf) for leaf in tf.nest.flatten(batch))


def _bytes_of(leaf: Leaf) -> int:
    if isinstance(leaf, tf.experimental.Optional):
        return count_bytes(leaf.get_value()) if leaf.has_value() else 0
    parts = tf.nest.flatten(leaf, expand_composites=True)
    return sum(_bytes_of_tensor(part) for part in parts if isinstance(part, tf.Tensor))


def _bytes_of_tensor(tensor: tf.Tensor) -> int:
    elements = int(tensor.shape.num_elements() or 0)
    if tensor.dtype == tf.string:
        characters = tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64))
        return elements * _BYTES_OF_A_STRING + int(characters)
    return 0 if tensor.dtype == tf.variant else elements * int(tensor.dtype.size)
