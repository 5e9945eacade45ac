r"""Losses and scalar statistics, as means over the replica's samples.

With reduction weights :math:`w_i = b_i / B`:

* mean over the batch: :math:`\frac{1}{b_i}\sum` needs no change;
* reduction "sum": :math:`\sum_i s_i = \sum_i w_i (s_i / w_i)`, factor :math:`1 / w_i`;
* the gradient of a vector with one value per sample is that of its sum: factor :math:`1 / w_i`,
  applied where the gradient is taken, since the same vector may also become a mean before;
* a mean whose divisor depends on the data (masks, sample weights, ragged lengths) with local
  divisor :math:`D_i`: factor :math:`(D_i / \sum_j D_j) / w_i`;
* values of samples given to `add_loss`, which Keras sums: factor :math:`1 / w_i`.

Keras divides by the number of replicas instead, which is correct for equal shares only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact.step import ExactStep, current_step
from keras_het.value_types import Leaf, Nest, TensorLike


def keep_local_mean(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook `scale_loss_for_distribution` and its inverse: the gradient gets the weight."""

    @functools.wraps(original)
    def scale_loss(value: tf.Tensor) -> tf.Tensor:
        return original(value) if current_step() is None else value

    return scale_loss


def sum_over_samples(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook `tf.GradientTape.gradient`: a vector's gradient is a sum over the replica's samples.

    Only for weights: gradients of samples with respect to themselves belong to each sample.
    """

    @functools.wraps(original)
    def gradient(
        self: tf.GradientTape,
        target: Nest,
        sources: Nest,
        output_gradients: Nest = None,
        *args: object,
        **kwargs: object,
    ) -> Nest:
        step = current_step()
        is_free = step is not None and output_gradients is None
        if step is None or not is_free or not any(map(_is_variable, tf.nest.flatten(sources))):
            return original(self, target, sources, output_gradients, *args, **kwargs)
        targets = tf.nest.flatten(target)
        factors = _factors(step, targets)
        found = original(self, target, sources, factors, *args, **kwargs)
        if factors is None or not all(_has_value_per_sample(step, value) for value in targets):
            return found
        return tf.nest.map_structure(
            lambda source, value: _without_factor(step, source, value), sources, found
        )

    return gradient


def average_exactly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook `tf.nn.compute_average_loss`: the weighted mean over replicas is the average.

    It divides by the global batch, or by the replica's own times the number of replicas, for
    replicas whose losses are summed.
    """

    @functools.wraps(original)
    def compute_average_loss(
        per_example_loss: TensorLike,
        sample_weight: TensorLike | None = None,
        global_batch_size: tf.Tensor | int | None = None,
    ) -> tf.Tensor:
        loss = original(per_example_loss, sample_weight, global_batch_size)
        step = current_step()
        if step is None:
            return loss
        factor = step.num_replicas if global_batch_size is None else step.inverse_weight
        return loss * tf.cast(factor, loss.dtype)

    return compute_average_loss


def _is_variable(source: object) -> bool:
    return isinstance(source, (tf.Variable, private_api.KerasTensorFlowVariable))


def _without_factor(step: ExactStep, source: Leaf, gradient: Leaf) -> Leaf:
    """Return the gradient of an input, which belongs to each sample."""
    if gradient is None or _is_variable(source):
        return gradient
    return gradient * tf.cast(step.weight, gradient.dtype)


def _factors(step: ExactStep, targets: list[tf.Tensor]) -> list[tf.Tensor] | None:
    """Return the factors of vectors, 1 for a mean; None if nothing is a vector."""
    if not any(_has_value_per_sample(step, target) for target in targets):
        return None
    factors = []
    for target in targets:
        factor = tf.ones_like(target)
        if _has_value_per_sample(step, target):
            factor *= tf.cast(step.inverse_weight, target.dtype)
        factors.append(factor)
    return factors


def _has_value_per_sample(step: ExactStep, target: tf.Tensor) -> bool:
    """Tell a vector of samples from a vector of means, such as the losses of several outputs.

    The number of samples is not known before the step runs, unless it runs eagerly. In Keras's own
    step every vector comes from a loss without a reduction.
    """
    shape = getattr(target, "shape", None)
    if shape is None or shape.rank in (None, 0):
        return False
    return (
        step.is_keras_step or None in tuple(shape) or shape[0] == tf.get_static_value(step.samples)
    )


def sum_added_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook the reduction of a tensor given to `add_loss`: Keras sums its values."""

    @functools.wraps(original)
    def aggregate_additional_loss(self: keras.Model, loss: tf.Tensor) -> tf.Tensor:
        total = original(self, loss)
        step = current_step()
        if step is None or not _is_of_samples(step, loss):
            return total
        return total * tf.cast(step.inverse_weight, total.dtype)

    return aggregate_additional_loss


def _is_of_samples(step: ExactStep, loss: tf.Tensor) -> bool:
    """Tell values of samples from values of weights, whose number is known in advance."""
    if not loss.shape.rank:
        return False
    return loss.shape[0] in (None, tf.get_static_value(step.samples))


def reduce_exactly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook `reduce_weighted_values`, which every `keras.losses.Loss` uses."""

    @functools.wraps(original)
    def reduce_weighted_values(
        values: tf.Tensor,
        sample_weight: TensorLike | None = None,
        mask: tf.Tensor | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: str | None = None,
    ) -> tf.Tensor:
        loss = original(values, sample_weight, mask, reduction, dtype)
        step = current_step()
        if step is None or len(values.shape) == 0:
            return loss
        if reduction in (None, "none"):
            return loss  # see `sum_over_samples`
        if reduction == "sum":
            return loss * tf.cast(step.inverse_weight, loss.dtype)
        divisor = _data_dependent_divisor(values, sample_weight, mask, reduction)
        if divisor is None:
            return loss
        return loss * tf.cast(_divisor_factor(step, divisor), loss.dtype)

    return reduce_weighted_values


def _data_dependent_divisor(
    values: tf.Tensor, sample_weight: TensorLike | None, mask: tf.Tensor | None, reduction: str
) -> tf.Tensor | None:
    """Return the local divisor of a mean unless it is simply proportional to the samples."""
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


def _divisor_factor(step: ExactStep, divisor: tf.Tensor) -> tf.Tensor:
    # A replica without samples computes on a row of zeros, which does not count.
    divisor = tf.stop_gradient(tf.where(step.samples > 0, divisor, tf.zeros_like(divisor)))
    fraction = tf.math.divide_no_nan(divisor, step.all_reduce_sum(divisor))
    return tf.cast(fraction, tf.float64) * step.inverse_weight


def weigh_scalar_updates(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook `Mean.update_state` and `Sum.update_state`.

    A scalar without a weight, such as the loss in a custom `train_step`, is a mean over the
    replica's samples: it counts as w_i of one update, so all replicas together count as one.
    """

    @functools.wraps(original)
    def update_state(
        self: keras.metrics.Metric, values: TensorLike, sample_weight: TensorLike | None = None
    ) -> Any:
        step = current_step()
        is_scalar = len(getattr(values, "shape", ())) == 0
        if step is not None and sample_weight is None and is_scalar:
            sample_weight = step.weight
        return original(self, values, sample_weight=sample_weight)

    return update_state
