"""The optimizer's update where each process has the gradients of its own stages only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_het import keras_graphs_adapter
from keras_het.value_types import Summand


def square_norm(
    optimizer: keras.optimizers.Optimizer | None,
    gradients: Sequence[tuple[Summand | None, keras.Variable]],
) -> tf.Tensor:
    """Return the sum of the squares of all elements, float64 scalar; not finite if one is not.

    The gradients are those that the optimizer would clip: without its scale, and with those that
    wait for their update. Rows of the same number in a sparse gradient count each by itself, as in
    Keras's clipping.
    """
    found = [(gradient, variable) for gradient, variable in gradients if gradient is not None]
    if optimizer is None or not found:
        return tf.zeros([], tf.float64)
    steps = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps or 1
    scale = tf.cast(optimizer.scale_loss(tf.ones([])), tf.float64)
    squares = []
    for gradient, variable in found:
        waiting = keras_graphs_adapter.accumulated_gradients(optimizer, variable)
        if waiting is not None:
            gradient = tf.convert_to_tensor(gradient)
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        unscaled = tf.cast(values, tf.float64) / scale
        if waiting is not None:
            unscaled = (unscaled + tf.cast(waiting.value, tf.float64)) / steps
        squares.append(tf.reduce_sum(tf.square(unscaled)))
    return tf.add_n(squares)


def apply_own_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tuple[Summand, keras.Variable]],
    square: tf.Tensor,
) -> None:
    """Update this process's variables as an optimizer that has all gradients does.

    Clipping by the norm of all gradients, and the check of `LossScaleOptimizer` that all are
    finite, need those of all processes.
    """
    norm = tf.sqrt(square)
    if not gradients:
        # learning rate schedules go by the number of steps, the loss by the scale
        keras_graphs_adapter.count_step(optimizer, tf.math.is_finite(norm))
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is not inner:
        factor = tf.ones([], tf.float64) + (norm - norm)
        gradients = [(_scaled(gradient, factor), variable) for gradient, variable in gradients]
    with contextlib.ExitStack() as stack:
        if inner.global_clipnorm and not inner.clipnorm:
            clip = functools.partial(_clipped, limit=inner.global_clipnorm, norm=norm)
            stack.enter_context(keras_graphs_adapter.clipping_by(inner, clip))
        optimizer.apply_gradients(gradients)


def _clipped(gradients: list[Summand], limit: float, norm: tf.Tensor) -> list[tf.Tensor]:
    """Clip as Keras does: a norm that is not finite makes all NaN, and sparse ones become dense."""
    factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    return [tf.convert_to_tensor(g) * tf.cast(factor, g.dtype) for g in gradients]


def _scaled(gradient: Summand, factor: tf.Tensor) -> Summand:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
