r"""Losses, scalar statistics and synchronised moments, as means over the replica's samples.

With reduction weights :math:`w_i = b_i / B`:

* mean over the batch: :math:`\frac{1}{b_i}\sum` needs no change;
* reduction "sum": :math:`\sum_i s_i = \sum_i w_i (s_i / w_i)`, factor :math:`1 / w_i`;
* the gradient of a vector with one value per sample is that of its sum: factor :math:`1 / w_i`,
  applied where the gradient is taken, since the same vector may also become a mean before;
* a mean whose divisor depends on the data (masks, sample weights, ragged lengths) with local
  divisor :math:`D_i`: factor :math:`(D_i / \sum_j D_j) / w_i`;
* values of samples given to `add_loss`, which Keras sums: factor :math:`1 / w_i`;
* `BatchNormalization(synchronized=True)` sums its statistics over all replicas, with or without a
  mask; the gradient that flows back through these sums carries the other replicas' weights.

Keras divides by the number of replicas instead, which is correct for equal shares only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact.gradients import Gradients
from keras_het.strategy.exact.sample_dependence import Kind, SampleDependence
from keras_het.strategy.exact.step import Original, ReplicaSum, StepSpec
from keras_het.value_types import Leaf, Nest, TensorLike


class Means:
    """Means over samples, which get their weights where a step takes them."""

    def __init__(
        self, spec: StepSpec, replica_sum: ReplicaSum, gradients: Gradients, remarks: list[str]
    ) -> None:
        self._spec, self._sum, self._gradients = spec, replica_sum, gradients
        self._remarks = remarks
        self._called: tuple[keras.losses.Loss, Nest] | None = None
        self.divisors: list[tf.Tensor] = []
        """Divisors of all replicas that depend on the data, in order; the first part sums them."""
        self._num_used = 0

    def keep_local(self, original: Original, value: tf.Tensor) -> tf.Tensor:
        """Hook `scale_loss_for_distribution` and its inverse: the gradient gets the weight."""
        del original
        return value

    def gradient(
        self,
        original: Original,
        tape: tf.GradientTape,
        target: Nest,
        sources: Nest,
        output_gradients: Nest = None,
        *args: object,
        **kwargs: object,
    ) -> Nest:
        """Hook `tf.GradientTape.gradient`: a vector's is a sum over the replica's samples."""
        # Gradients of samples with respect to themselves belong to each sample.
        targets = tf.nest.flatten(target)
        are_of_samples = [self._has_value_per_sample(each) for each in targets]
        has_weights = any(map(_is_variable, tf.nest.flatten(sources)))
        if output_gradients is not None or not has_weights or not any(are_of_samples):
            return original(tape, target, sources, output_gradients, *args, **kwargs)
        factors = [
            tf.ones_like(each) * tf.cast(self._spec.inverse_weight, each.dtype)
            if is_of_samples
            else tf.ones_like(each)
            for each, is_of_samples in zip(targets, are_of_samples, strict=True)
        ]
        found = original(tape, target, sources, factors, *args, **kwargs)
        if not all(are_of_samples):
            return found
        return tf.nest.map_structure(self._without_factor, sources, found)

    def _without_factor(self, source: Leaf, gradient: Leaf) -> Leaf:
        """Return the gradient of an input, which belongs to each sample."""
        if gradient is None or _is_variable(source):
            return gradient
        return gradient * tf.cast(self._spec.weight, gradient.dtype)

    def _has_value_per_sample(self, target: tf.Tensor) -> bool:
        """Tell a vector of samples from a vector of means, as the losses of several outputs."""
        # The number of samples is unknown before the step runs, unless eagerly. In Keras's own step
        # every vector comes from a loss without a reduction.
        shape = getattr(target, "shape", None)
        if shape is None or shape.rank in (None, 0):
            return False
        is_known = shape[0] == tf.get_static_value(self._spec.samples)
        return self._spec.is_keras_step or None in tuple(shape) or is_known

    def average(
        self,
        original: Original,
        per_example_loss: TensorLike,
        sample_weight: TensorLike | None = None,
        global_batch_size: tf.Tensor | int | None = None,
    ) -> tf.Tensor:
        """Do `tf.nn.compute_average_loss`: the weighted mean over replicas is the average."""
        # It divides by the global batch, or by the replica's own times the number of replicas.
        loss = original(per_example_loss, sample_weight, global_batch_size)
        spec = self._spec
        factor = spec.num_replicas if global_batch_size is None else spec.inverse_weight
        return self._scaled(loss, factor)

    def _scaled(self, loss: tf.Tensor, factor: tf.Tensor | float) -> tf.Tensor:
        self._sum.means.append(loss * tf.cast(factor, loss.dtype))
        return self._sum.means[-1]

    def sum_added(self, original: Original, model: keras.Model, loss: tf.Tensor) -> tf.Tensor:
        """Hook the reduction of a tensor given to `add_loss`: Keras sums its values."""
        total = original(model, loss)
        # values of samples, unlike values of weights, have no number that is known in advance
        of_samples = (None, tf.get_static_value(self._spec.samples))
        if not loss.shape.rank or loss.shape[0] not in of_samples:
            return total
        return self._scaled(total, self._spec.inverse_weight)

    def call_loss(
        self, original: Original, loss: keras.losses.Loss, y_true: Nest, y_pred: Nest, *args: Any
    ) -> Any:
        """Hook `Loss.__call__`: keep what its values are computed from."""
        before, self._called = self._called, (loss, (y_true, y_pred))
        try:
            return original(loss, y_true, y_pred, *args)
        finally:
            self._called = before

    def _check_has_mean(self, values: tf.Tensor) -> None:
        """Name a loss that combines samples, as the quotient of two sums and a mean's root do."""
        # Values of samples (their number is not known when the step is traced) have a mean.
        if self._called is None or self._spec.is_whole or tf.executing_eagerly():
            return
        loss, batch = self._called
        is_of_batch = getattr(loss, "fn", None) is keras.losses.circle
        if not values.shape.rank or values.shape[0] is not None:
            tensors = filter(tf.is_symbolic_tensor, tf.nest.flatten(batch, expand_composites=True))
            dependence = SampleDependence([t for t in tensors if t.shape.rank != 0], [], [], {})
            made = dependence.combination(values)
            has_mean = made is None or not made.aggregates
            is_of_batch = not has_mean and dependence.kind(values) is not Kind.MEAN
        if is_of_batch:
            name = f"the loss {loss.name!r} combines the samples of its batch"
            instead = (
                "Expected a value for each sample, as keras.losses.Dice(axis=(1, 2, 3)) has for "
                "images, or their mean."
            )
            self._sum.refuse_parts(name, instead)
            self._remarks.append(_REMARK.format(name, instead))

    def reduce(
        self,
        original: Original,
        values: tf.Tensor,
        sample_weight: TensorLike | None = None,
        mask: tf.Tensor | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: str | None = None,
    ) -> tf.Tensor:
        """Hook `reduce_weighted_values`, which every `keras.losses.Loss` uses."""
        self._check_has_mean(values)
        loss = original(values, sample_weight, mask, reduction, dtype)
        if len(values.shape) == 0 or reduction in (None, "none"):  # see `gradient`
            return loss
        if reduction == "sum":
            return self._scaled(loss, self._spec.inverse_weight)
        divisor = _data_dependent_divisor(values, sample_weight, mask, reduction)
        if divisor is None:
            return self._scaled(loss, 1.0)
        is_weighted = mask is not None or reduction == "mean_with_sample_weight"
        return self._scaled(loss, self._divisor_factor(divisor, is_weighted))

    def _divisor_factor(self, divisor: tf.Tensor, is_weighted: bool) -> tf.Tensor:
        spec = self._spec
        if spec.is_first_part:
            whole = divisor
            if spec.parts is not None and is_weighted:
                whole = spec.parts.for_whole_share(divisor, "a mask, or a weight of samples,")
            elif spec.parts is not None:
                whole = spec.parts.size_of_share(divisor, spec.samples)
            # A replica without samples computes on a row of zeros, which does not count.
            self.divisors.append(self._sum(tf.stop_gradient(spec.or_zero(whole))))
        total = self.divisors[self._num_used]
        self._num_used += 1
        divisor = tf.stop_gradient(spec.or_zero(divisor))
        fraction = tf.math.divide_no_nan(divisor, total)
        return tf.cast(fraction, tf.float64) * spec.inverse_weight

    def update_scalar(
        self,
        original: Original,
        metric: keras.metrics.Metric,
        values: TensorLike,
        sample_weight: TensorLike | None = None,
    ) -> Any:
        """Hook `Mean.update_state` and `Sum.update_state`."""
        # One without a weight, as the loss in a custom `train_step`, is a mean over the replica's
        # samples: w_i of one update.
        if sample_weight is None and len(getattr(values, "shape", ())) == 0:
            sample_weight = self._spec.weight
        return original(metric, values, sample_weight=sample_weight)

    def moments(
        self, original: Original, x: tf.Tensor, axes: Sequence[int], keepdims: bool
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Hook synchronised moments: one collective instead of three, and a weighted gradient."""
        del original
        sums = self._own_sums([x, tf.square(x), tf.ones_like(x)], axes)
        total, total_of_squares, count = self._over_replicas(*sums)
        mean = tf.math.divide_no_nan(total, count)
        mean_of_squares = tf.math.divide_no_nan(total_of_squares, count)
        variance = tf.maximum(mean_of_squares - tf.square(mean), 0.0)
        if keepdims:
            return mean, variance
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    def masked_moments(
        self,
        original: Original,
        layer: keras.layers.BatchNormalization,
        inputs: tf.Tensor,
        mask: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Hook `BatchNormalization._moments`, which does not synchronise when there is a mask."""
        if mask is None or not layer.synchronized:
            mean, variance = original(layer, inputs, mask)
            return mean, variance
        rank = len(inputs.shape)
        axes = [axis for axis in range(rank) if axis != layer.axis % rank]
        is_used = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        kept = tf.where(is_used, inputs, tf.zeros_like(inputs))
        sums = self._own_sums([kept, tf.cast(is_used, inputs.dtype)], axes)
        total, count = self._over_replicas(*sums)
        divisor = count + keras.config.epsilon()  # as Keras divides
        mean = total / divisor
        # a second collective, as Keras takes distances from the mean: a single pass is less exact
        distance = tf.where(is_used, inputs - mean, tf.zeros_like(inputs))
        (squares,) = self._over_replicas(*self._own_sums([tf.square(distance)], axes))
        return tf.squeeze(mean, axes), tf.squeeze(squares / divisor, axes)

    def _own_sums(self, values: Sequence[tf.Tensor], axes: Sequence[int]) -> list[tf.Tensor]:
        def sums() -> list[tf.Tensor]:
            return [tf.reduce_sum(value, axes, keepdims=True) for value in values]

        # A replica without samples computes on a row of zeros, which does not count.
        def zeros() -> list[tf.Tensor]:
            return [tf.zeros_like(value) for value in sums()]

        return list(tf.cond(self._spec.has_samples, sums, zeros))

    def _over_replicas(self, *values: tf.Tensor) -> list[tf.Tensor]:
        self._sum.refuse_parts(
            "BatchNormalization(synchronized=True) normalises with statistics of the global batch",
            "Leave synchronized out, so that each part is normalised by itself, or use "
            "LayerNormalization or GroupNormalization.",
        )

        @tf.custom_gradient
        def summed(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            return list(self._sum(list(xs))), self._gradients_of_sums

        return list(summed(*values))

    def _gradients_of_sums(self, *upstream: tf.Tensor) -> list[tf.Tensor]:
        if self._gradients.are_weighted:
            has_samples = tf.cast(self._spec.has_samples, tf.float32)
            return list(
                self._sum(
                    [tf.math.multiply_no_nan(dy, tf.cast(has_samples, dy.dtype)) for dy in upstream]
                )
            )
        # The weight w_i is applied to the gradient of this replica later on.
        sums = self._sum([self._spec.weighted(dy) for dy in upstream])
        return [dy * tf.cast(self._spec.inverse_weight, dy.dtype) for dy in sums]


def _is_variable(source: object) -> bool:
    return isinstance(source, (tf.Variable, private_api.KerasTensorFlowVariable))


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


_REMARK = (
    "A step takes the mean over samples of what its replicas have for a loss, and {}. That is not "
    "the loss of one device, nor its gradient. {}"
)
