r"""State that is not a trainable weight: moving statistics, synchronised statistics, seeds.

* State of Keras's own layers with a float type, such as moving statistics, becomes
  :math:`\sum_i w_i v_i`, the mean over samples, on every replica.
* State of custom layers: see `own_state`.
* `BatchNormalization(synchronized=True)` sums its statistics over all replicas, with or without a
  mask; the gradient that flows back through these sums carries the other replicas' weights.
* Seeds: replica 0 draws what one device would draw; the others draw independent streams, so two
  replicas never drop the same units merely because they share a seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_het.strategy.exact.step import ExactStep, running_step
from keras_het.value_types import Leaf, Nest, TensorLike

# A large prime keeps seeds of neighbouring replicas apart; it wraps around int32 on purpose.
_SEED_STRIDE = 1_000_003


def record_assignment(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook `keras.Variable` assignments: record what the step assigns to which variable."""

    @functools.wraps(original)
    def direct_assign(self: keras.Variable, value: TensorLike) -> Any:
        step = running_step()
        if step is None:
            return original(self, value)
        if not step.gradients_are_reduced:
            if tf.is_symbolic_tensor(value):
                value = tf.identity(value)  # an operation as recent as the assignment
            step.assigned_variables.setdefault(id(self), (self, []))[1].append(value)
        with step.assigning():
            return original(self, value)

    return direct_assign


def record_plain_assignment(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook all assignments to TensorFlow's variables: record those that are not Keras's."""

    @functools.wraps(original)
    def assign(self: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None or step.is_assigning or step.gradients_are_reduced:
            return original(self, *args, **kwargs)
        container = tf.distribute.get_strategy().extended.value_container(self)
        values = [tf.identity(value) for value in _tensors(args, kwargs)]
        if not values and not tf.executing_eagerly():
            values = [tf.constant(0)]  # tells in which graph
        recorded = step.assigned_variables.setdefault(id(container), (container, []))
        recorded[1].extend(values)
        with step.assigning():  # TensorFlow calls one method from another
            return original(self, *args, **kwargs)

    return assign


def _tensors(*arguments: Nest) -> Iterator[tf.Tensor]:
    for leaf in tf.nest.flatten(arguments):
        if isinstance(leaf, tf.IndexedSlices):
            yield from (leaf.indices, leaf.values)
        elif tf.is_tensor(leaf) or isinstance(leaf, keras.Variable):
            yield tf.convert_to_tensor(leaf)


def sum_statistics_exactly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook synchronised moments: one collective instead of three, and a weighted gradient."""

    @functools.wraps(original)
    def compute_moments_sync(
        x: tf.Tensor, axes: Sequence[int], keepdims: bool
    ) -> tuple[tf.Tensor, tf.Tensor]:
        step = running_step()
        if step is None:
            mean, variance = original(x, axes, keepdims)
            return mean, variance
        total, total_of_squares, count = _sum_over_replicas(step, *_statistics(step, x, axes))
        mean = tf.math.divide_no_nan(total, count)
        mean_of_squares = tf.math.divide_no_nan(total_of_squares, count)
        variance = tf.maximum(mean_of_squares - tf.square(mean), 0.0)
        if keepdims:
            return mean, variance
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    return compute_moments_sync


def sum_masked_statistics_exactly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook `BatchNormalization._moments`, which does not synchronise when there is a mask."""

    @functools.wraps(original)
    def moments(
        self: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        step = running_step()
        if step is None or mask is None or not self.synchronized:
            mean, variance = original(self, inputs, mask)
            return mean, variance
        rank = len(inputs.shape)
        axes = [axis for axis in range(rank) if axis != self.axis % rank]
        is_used = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        kept = tf.where(is_used, inputs, tf.zeros_like(inputs))
        sums = _sums(step, [kept, tf.cast(is_used, inputs.dtype)], axes)
        total, count = _sum_over_replicas(step, *sums)
        divisor = count + keras.config.epsilon()  # as Keras divides
        mean = total / divisor
        # a second collective, as Keras takes distances from the mean: a single pass is less exact
        distance = tf.where(is_used, inputs - mean, tf.zeros_like(inputs))
        (squares,) = _sum_over_replicas(step, *_sums(step, [tf.square(distance)], axes))
        return tf.squeeze(mean, axes), tf.squeeze(squares / divisor, axes)

    return moments


def _statistics(step: ExactStep, x: tf.Tensor, axes: Sequence[int]) -> list[tf.Tensor]:
    """Return this replica's sum, sum of squares and count."""
    return _sums(step, [x, tf.square(x), tf.ones_like(x)], axes)


def _sums(step: ExactStep, values: Sequence[tf.Tensor], axes: Sequence[int]) -> list[tf.Tensor]:
    def sums() -> list[tf.Tensor]:
        return [tf.reduce_sum(value, axes, keepdims=True) for value in values]

    # A replica without samples computes on a row of zeros, which does not count.
    def zeros() -> list[tf.Tensor]:
        return [tf.zeros_like(value) for value in sums()]

    return list(tf.cond(step.samples > 0, sums, zeros))


def _sum_over_replicas(step: ExactStep, *values: tf.Tensor) -> list[tf.Tensor]:
    @tf.custom_gradient
    def summed(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if step.loss_is_weighted:
                has_samples = tf.cast(step.samples > 0, tf.float32)
                guarded = [
                    tf.math.multiply_no_nan(dy, tf.cast(has_samples, dy.dtype)) for dy in upstream
                ]
                return list(step.all_reduce_sum(guarded))
            # The weight w_i is applied to the gradient of this replica later on.
            sums = step.all_reduce_sum([step.weighted(dy) for dy in upstream])
            return [dy * tf.cast(step.inverse_weight, dy.dtype) for dy in sums]

        return list(step.all_reduce_sum(list(xs))), gradient

    return list(summed(*values))


def draw_own_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook `SeedGenerator.next`: an independent stream per replica."""

    @functools.wraps(original)
    def next_seed(self: keras.random.SeedGenerator, *args: object, **kwargs: object) -> tf.Tensor:
        seed = original(self, *args, **kwargs)
        step = running_step()
        if step is None:
            return seed
        step.assigned_variables.pop(id(self.state), None)  # has one value on all replicas
        if step.seed_stream != 0:
            offset = (step.seed_stream * _SEED_STRIDE) % (2**31)
            seed = seed + tf.cast(tf.constant([offset, 0], tf.int64), seed.dtype)
        step.own_seeds.append(seed)
        return seed

    return next_seed


def update_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook TensorFlow's handling of assignments to `aggregation` variables; not Keras's own.

    Those of optimizers (`iterations`) have one value on all replicas; a broadcast could not run
    inside the `tf.cond` of a `LossScaleOptimizer`. Those of layers are combined when the step ends:
    TensorFlow would sum or average what Keras assigns, which are whole values, not changes. It does
    so with what a step assigns to variables of its own: by samples here, as of one device.
    """

    @functools.wraps(original)
    def apply_aggregation(
        value: Leaf, aggregation: tf.VariableAggregation, destinations: tf.Variable
    ) -> Leaf:
        step = running_step()
        if step is not None and (step.is_assigning or _is_of_first(step, aggregation)):
            return value
        if step is None or not tf.is_tensor(value) or aggregation not in _SUMS:
            return original(value, aggregation, destinations)
        if aggregation == tf.VariableAggregation.MEAN:
            return step.all_reduce_sum(step.weighted(value))
        return step.all_reduce_sum(tf.where(step.samples > 0, value, tf.zeros_like(value)))

    return apply_aggregation


_SUMS = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)


def _is_of_first(step: ExactStep, aggregation: tf.VariableAggregation) -> bool:
    return not step.is_prediction and aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
