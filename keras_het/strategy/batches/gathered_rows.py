"""Outputs of all replicas, joined in the order of the global batch."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_het.training_strategy import TrainingStrategy
from keras_het.value_types import Rows


def gather_rows(strategy: TrainingStrategy, value: tf.distribute.DistributedValues | Rows) -> Rows:
    """Concatenate the rows of all replicas, replica by replica; dense or ragged tensors."""
    local = strategy.experimental_local_results(value)
    if isinstance(local[0], tf.RaggedTensor):
        return _gather_ragged_rows(strategy, tf.concat(local, axis=0))
    if isinstance(local[0], tf.SparseTensor):
        dense = [tf.sparse.to_dense(part) for part in local]
        return tf.sparse.from_dense(_gather_dense_rows(strategy, dense))
    if local[0].shape.rank == 0:
        return _gather_over_workers(strategy, tf.stack(local))
    return _gather_dense_rows(strategy, local)


def _gather_ragged_rows(strategy: TrainingStrategy, ragged: tf.RaggedTensor) -> tf.RaggedTensor:
    lengths = _gather_over_workers(strategy, ragged.row_lengths())
    values = ragged.values
    if isinstance(values, tf.RaggedTensor):
        values = _gather_ragged_rows(strategy, values)
    else:
        values = _gather_over_workers(strategy, values)
    return tf.RaggedTensor.from_row_lengths(values, lengths)


def _gather_dense_rows(strategy: TrainingStrategy, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    shapes = [part.shape for part in parts]
    # eagerly every local shape is known, but not those of the other workers
    is_eager = tf.executing_eagerly() and shapes[0].rank > 1
    if is_eager or any(
        shape.rank is not None and not shape[1:].is_fully_defined() for shape in shapes
    ):
        parts = _with_equal_inner_shapes(strategy, parts)
    return _gather_over_workers(strategy, tf.concat(parts, axis=0))


def _with_equal_inner_shapes(
    strategy: TrainingStrategy, parts: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Give parts without rows the inner shape of the others, which must be equal.

    A model that pads to its longest sample produces different shapes for different shares. What one
    device would have written into the missing places is not known here.
    """
    shapes = tf.stack([tf.shape(part, out_type=tf.int64) for part in parts])
    shapes = _gather_over_workers(strategy, shapes)
    inner, has_rows = shapes[:, 1:], shapes[:, :1] > 0
    common = tf.reduce_max(tf.where(has_rows, inner, 0), axis=0)
    check = tf.debugging.Assert(
        tf.reduce_all((inner == common) | ~has_rows),
        [
            "The replicas' predictions have different shapes and cannot be joined: the model pads "
            "to the longest sample of each replica's own share. Received the shapes (one row for "
            "each replica)",
            shapes,
            "which may differ in the first dimension only. Pad to a fixed width before or in the "
            "model, or let it return a tf.RaggedTensor.",
        ],
        summarize=-1,
    )
    with tf.control_dependencies([] if check is None else [check]):
        return [_reshaped_if_empty(part, common) for part in parts]


def _reshaped_if_empty(part: tf.Tensor, inner: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(part, out_type=tf.int64)
    wanted = tf.where(shape[0] > 0, shape, tf.concat([shape[:1], inner], axis=0))
    result = tf.reshape(part, wanted)
    if not tf.executing_eagerly():
        result.set_shape([None, *part.shape[1:]])
    return result


def _gather_over_workers(strategy: TrainingStrategy, value: tf.Tensor) -> tf.Tensor:
    if strategy.num_workers == 1:
        return value
    return strategy.extended.gather_rows_over_workers(value)
