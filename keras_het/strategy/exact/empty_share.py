"""Placeholder input of a replica without samples.

Layers are not made for empty batches: cuDNN refuses some, and TensorFlow's convolutions give them
the wrong shape on the CPU (seen on 2.16 and 2.21). A replica whose share is zero therefore computes
on one row of zeros, and nothing of it counts: its gradient, its losses, its metrics and its
statistics have the weight zero, and its predictions are dropped.

On a GPU it is a row of ones. Layers that mask zeros would mask a whole row of them, which cuDNN's
recurrent layers refuse too; and an index out of range, an error on the CPU, reads zeros there.
"""

from __future__ import annotations

import tensorflow as tf

from keras_het.strategy.exact.step import ExactStep
from keras_het.value_types import Leaf, Nest


def at_least_one_row(step: ExactStep, data: Nest) -> Nest:
    """Return the replica's batch, or one row of zeros (ones on a GPU) if it has none."""
    return tf.nest.map_structure(lambda leaf: _one_row_if_empty(step, leaf), data)


def drop_row_of_zeros(step: ExactStep, outputs: Nest) -> Nest:
    """Return the outputs, or no rows if the replica has no samples."""

    def drop(leaf: Leaf) -> Leaf:
        if not _has_rows(leaf):
            return leaf
        kept = tf.cond(step.samples > 0, lambda: leaf, lambda: _no_rows(leaf))
        return _with_static_shape(kept, leaf)

    return tf.nest.map_structure(drop, outputs)


def _one_row_if_empty(step: ExactStep, leaf: Leaf) -> Leaf:
    if not _has_rows(leaf):
        return leaf
    row = tf.cond(step.samples > 0, lambda: leaf, lambda: _one_row(leaf, step.is_on_gpu))
    return _with_static_shape(row, leaf)


def _has_rows(leaf: Leaf) -> bool:
    # an eager step may receive arrays, whose shape is a tuple
    return hasattr(leaf, "shape") and tf.TensorShape(leaf.shape).rank != 0


def _one_row(leaf: Leaf, is_on_gpu: bool) -> Leaf:
    if isinstance(leaf, tf.RaggedTensor):
        splits = [splits[:1] for splits in leaf.nested_row_splits]
        splits[0] = tf.zeros([2], splits[0].dtype)
        return tf.RaggedTensor.from_nested_row_splits(leaf.flat_values[:0], splits)
    if isinstance(leaf, tf.SparseTensor):
        shape = tf.concat([[tf.constant(1, tf.int64)], leaf.dense_shape[1:]], axis=0)
        return tf.SparseTensor(leaf.indices[:0], leaf.values[:0], shape)
    make = tf.ones if is_on_gpu and leaf.dtype != tf.string else tf.zeros
    return make(tf.concat([[1], tf.shape(leaf)[1:]], axis=0), leaf.dtype)


def _no_rows(leaf: Leaf) -> Leaf:
    if isinstance(leaf, tf.SparseTensor):
        shape = tf.concat([[tf.constant(0, tf.int64)], leaf.dense_shape[1:]], axis=0)
        return tf.SparseTensor(leaf.indices[:0], leaf.values[:0], shape)
    return leaf[:0]


def _with_static_shape(result: Leaf, like: Leaf) -> Leaf:
    if isinstance(result, tf.Tensor) and tf.TensorShape(like.shape).rank:
        result.set_shape([None, *like.shape[1:]])
    return result
