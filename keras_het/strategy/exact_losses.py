r"""Losses and scalar statistics in the form of a mean over the replica's samples.

With reduction weights :math:`w_i = b_i / B`:

* mean over the batch: :math:`\frac{1}{b_i}\sum` needs no change;
* reduction "sum": :math:`\sum_i s_i = \sum_i w_i (s_i / w_i)`, factor :math:`1 / w_i`;
* a mean whose divisor depends on the data (masks, sample weights, ragged lengths) with local
  divisor :math:`D_i`: factor :math:`(D_i / \sum_j D_j) / w_i`.

Keras divides by the number of replicas instead, which holds for equal shares only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact_step import ExactStep, current_step


def keep_local_mean(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook for `scale_loss_for_distribution`: the weight is applied to the gradient instead."""

    @functools.wraps(original)
    def scale_loss(value: Any) -> Any:
        return original(value) if current_step() is None else value

    return scale_loss


def undo_vector_factor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook for `unscale_loss_for_distribution`: what the loss tracker sees.

    A loss with reduction None is a vector that carries the factor 1 / w_i for its gradient's sake;
    the tracker takes the mean of the vector itself.
    """

    @functools.wraps(original)
    def unscale_loss(value: Any) -> Any:
        step = current_step()
        if step is None:
            return original(value)
        return value if value.shape.rank == 0 else value * tf.cast(step.weight, value.dtype)

    return unscale_loss


def reduce_exactly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook for `reduce_weighted_values`, through which every `keras.losses.Loss` goes."""

    @functools.wraps(original)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = original(values, sample_weight, mask, reduction, dtype)
        step = current_step()
        if step is None or len(values.shape) == 0:
            return loss
        if reduction in (None, "none", "sum"):
            return loss * tf.cast(step.inverse_weight, loss.dtype)
        divisor = _data_dependent_divisor(values, sample_weight, mask, reduction)
        if divisor is None:
            return loss
        return loss * tf.cast(_divisor_factor(step, divisor), loss.dtype)

    return reduce_weighted_values


def _data_dependent_divisor(values: Any, sample_weight: Any, mask: Any, reduction: str) -> Any:
    """Returns the local divisor of a mean if it is not simply proportional to the samples."""
    dtype = tf.float64 if values.dtype == tf.float64 else tf.float32  # half precision cannot count
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        if sample_weight is not None:
            sample_weight = tf.convert_to_tensor(sample_weight)
        merged = private_api.keras_loss.apply_mask(
            sample_weight, mask, dtype=dtype.name, reduction=reduction
        )
        return tf.reduce_sum(tf.cast(merged, dtype))
    if mask is not None:
        return tf.reduce_sum(tf.cast(mask, dtype))
    if None in tuple(values.shape)[1:]:
        return tf.cast(tf.size(values), dtype)
    return None


def _divisor_factor(step: ExactStep, divisor: Any) -> Any:
    # A replica without samples computes on a row of zeros, which does not count.
    divisor = tf.stop_gradient(tf.where(step.samples > 0, divisor, tf.zeros_like(divisor)))
    fraction = tf.math.divide_no_nan(divisor, step.all_reduce_sum(divisor))
    return tf.cast(fraction, tf.float64) * step.inverse_weight


def weigh_scalar_updates(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook for `Mean.update_state` and `Sum.update_state`.

    A scalar without a weight, such as the loss in a `train_step` of one's own, is a mean over the
    replica's samples: it counts as w_i of one update, so that all replicas together count as one.
    """

    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        step = current_step()
        is_scalar = len(getattr(values, "shape", ())) == 0
        if step is not None and sample_weight is None and is_scalar:
            sample_weight = step.weight
        return original(self, values, sample_weight=sample_weight)

    return update_state
