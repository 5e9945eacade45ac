"""The optimizer's update where each process has the gradients of its own stages only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from keras_het.value_types import Summand


def square_norm(gradients: Sequence[Summand | None]) -> tf.Tensor:
    """Return the sum of the squares of all elements, float64 scalar; not finite if one is not.

    Rows of the same number in a sparse gradient count each by itself, as in Keras's clipping.

    Args:
        gradients: gradients; None counts nothing.
    """
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None
    ]
    squares = [tf.reduce_sum(tf.square(tf.cast(value, tf.float64))) for value in values]
    return tf.add_n(squares) if squares else tf.zeros([], tf.float64)


def apply_own_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tuple[Summand, keras.Variable]],
    square: tf.Tensor,
) -> None:
    """Update this process's variables as an optimizer that has all gradients does.

    Clipping by the norm of all gradients, and the check of `LossScaleOptimizer` that all are
    finite, need those of all processes.

    Args:
        optimizer: the model's optimizer.
        gradients: gradients of this process's variables, scaled as the loss was.
        square: `square_norm` of the gradients of all processes, each variable once.
    """
    if not gradients:
        # learning rate schedules go by it
        getattr(optimizer, "inner_optimizer", optimizer).iterations.assign_add(1)
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    clip = inner.global_clipnorm
    scale = tf.cast(optimizer.scale_loss(tf.ones([])), tf.float64)
    norm = tf.sqrt(square) / scale
    if clip is not None:
        # As Keras does: a norm that is not finite makes all gradients NaN, and sparse gradients
        # become dense ones, which adds up rows of the same number.
        factor = clip * tf.minimum(1.0 / norm, 1.0 / clip) + (norm - norm)
        gradients = [(g * tf.cast(factor, g.dtype), variable) for g, variable in gradients]
    elif optimizer is not inner:
        factor = tf.ones([], tf.float64) + (norm - norm)
        gradients = [(_scaled(gradient, factor), variable) for gradient, variable in gradients]
    with _without_global_clipping(inner):
        optimizer.apply_gradients(gradients)


def _scaled(gradient: Summand, factor: tf.Tensor) -> Summand:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


@contextlib.contextmanager
def _without_global_clipping(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    clip = optimizer.global_clipnorm
    optimizer.global_clipnorm = None
    try:
        yield
    finally:
        optimizer.global_clipnorm = clip
