r"""Gradients are reduced before the optimizer sees them.

Keras clips, unscales and accumulates each replica's own gradient and sums afterwards. One device
clips the gradient of the whole batch. So the reduction comes first:

.. math:: g = \sum_i w_i g_i, \qquad \text{then clip, accumulate, decay and apply } g.

Every replica then holds the same gradient, and all optimizer state stays identical.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_het.strategy.exact_step import ExactStep, current_step


def weigh_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook for `Optimizer.scale_loss`: one multiplication of a scalar weighs all gradients."""

    @functools.wraps(original)
    def scale_loss(self: Any, loss: Any) -> Any:
        loss = original(self, loss)
        step = current_step()
        if step is None:
            return loss
        step.weighted_optimizers.add(id(self))
        return loss * tf.cast(step.weight, loss.dtype)

    return scale_loss


def make_apply_hook(
    before_reduction: Callable[[ExactStep, list[Any]], list[Any]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Builds the hook for `Optimizer.apply`.

    Args:
        before_reduction: called with the step and its local gradients just before they enter the
            collective; what it returns is reduced (the emulated device waits here).
    """

    def reduce_first(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            step = current_step()
            if step is None or step.gradients_are_reduced:
                return original(self, grads, trainable_variables)
            reduced = _reduce(step, list(grads), id(self), before_reduction)
            step.gradients_are_reduced = True
            try:
                return original(self, reduced, trainable_variables)
            finally:
                step.gradients_are_reduced = False

        return apply

    return reduce_first


def skip_second_reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook for the optimizer's own all-reduce, which comes after clipping."""

    @functools.wraps(original)
    def all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        step = current_step()
        if step is not None and step.gradients_are_reduced:
            return list(grads_and_vars)
        return original(self, grads_and_vars)

    return all_reduce_sum_gradients


def _reduce(
    step: ExactStep,
    grads: list[Any],
    optimizer_id: int,
    before_reduction: Callable[[ExactStep, list[Any]], list[Any]],
) -> list[Any]:
    present = [grad for grad in grads if grad is not None]
    if not present:
        return grads
    if optimizer_id in step.weighted_optimizers:
        present = _zero_without_samples(step, present)
    else:
        present = [step.weighted(grad) for grad in present]
    reduced = iter(step.all_reduce_sum(before_reduction(step, present)))
    return [None if grad is None else next(reduced) for grad in grads]


def _zero_without_samples(step: ExactStep, grads: list[Any]) -> list[Any]:
    """Replaces the gradients of an empty share, which may be NaN (0 / 0), by zeros.

    A condition instead of a multiplication: it costs nothing on replicas with samples.
    """
    dense = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
    guarded = tf.cond(
        step.samples > 0,
        lambda: [tf.identity(value) for value in dense],
        lambda: [tf.zeros_like(value) for value in dense],
    )
    return [
        tf.IndexedSlices(value, grad.indices, grad.dense_shape)
        if isinstance(grad, tf.IndexedSlices)
        else value
        for grad, value in zip(grads, guarded, strict=True)
    ]
