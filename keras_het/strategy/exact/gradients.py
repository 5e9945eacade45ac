r"""Reduction of gradients before the optimizer sees them.

Keras clips, unscales and accumulates each replica's own gradient and sums afterwards. One device
clips the gradient of the whole batch. So the reduction comes first:

.. math:: g = \sum_i w_i g_i, \qquad \text{then clip, accumulate, decay and apply } g.

Every replica then holds the same gradient, and all optimizer state stays identical.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact.created_in_scope import check_created_in_scope
from keras_het.strategy.exact.step import ExactStep, current_step, running_step
from keras_het.value_types import EitherVariable, Nest, Summand

_Given: TypeAlias = "Summand | EitherVariable | None"
"""A gradient that is given to an optimizer, which may keep it in a variable; or none."""


def weigh_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook `Optimizer.scale_loss`: multiplying one scalar weights all gradients."""

    @functools.wraps(original)
    def scale_loss(self: keras.optimizers.Optimizer, loss: tf.Tensor) -> tf.Tensor:
        step = current_step()
        if step is None or step.is_scaling_loss:
            return original(self, loss)
        # an optimizer may call its parent class or a nested one, which would weight it again
        step.is_scaling_loss = True
        try:
            loss = original(self, loss)
        finally:
            step.is_scaling_loss = False
        step.weighted_optimizers.add(id(self))
        return loss * tf.cast(step.weight, loss.dtype)

    return scale_loss


class UpdateHooks:
    """Hooks for `Optimizer.apply` and `Optimizer.apply_gradients`.

    The outermost call of an update reduces the gradients: whatever a custom optimizer does before
    and after its parent's `apply`, or that of a nested one, sees the gradient of the whole batch
    and the updated weights.
    """

    def __init__(
        self, before_reduction: Callable[[ExactStep, list[Summand]], list[Summand]]
    ) -> None:
        self._before_reduction = before_reduction

    def apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hook `apply`."""

        @functools.wraps(original)
        def apply(
            optimizer: keras.optimizers.Optimizer,
            grads: Sequence[_Given],
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            step = current_step()
            if step is None or step.gradients_are_reduced:
                return original(optimizer, grads, *args, **kwargs)
            variables = args[0] if args else kwargs.get("trainable_variables")
            grads = _values_of(step, grads)
            _check(step, grads, variables or optimizer._trainable_variables)
            return self._update(
                step,
                optimizer,
                grads,
                lambda reduced: original(optimizer, reduced, *args, **kwargs),
            )

        return apply

    def apply_gradients(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hook `apply_gradients`; Keras's own only calls `apply` and needs no hook."""

        @functools.wraps(original)
        def apply_gradients(
            optimizer: keras.optimizers.Optimizer,
            grads_and_vars: Iterable[tuple[_Given, EitherVariable]],
            *args: object,
            **kwargs: object,
        ) -> Any:
            step = current_step()
            if step is None or step.gradients_are_reduced:
                return original(optimizer, grads_and_vars, *args, **kwargs)
            given, variables = zip(*grads_and_vars, strict=True)
            grads = _values_of(step, given)
            _check(step, grads, variables)

            def apply(reduced: list[Summand | None]) -> Any:
                pairs = list(zip(reduced, variables, strict=True))
                return original(optimizer, pairs, *args, **kwargs)

            return self._update(step, optimizer, grads, apply)

        return apply_gradients

    def _update(
        self,
        step: ExactStep,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Summand | None],
        apply: Callable[[list[Summand | None]], Any],
    ) -> Any:
        is_weighted = id(optimizer) in step.weighted_optimizers
        update = PendingUpdate(apply, list(gradients), is_weighted)
        update.delay(functools.partial(self._before_reduction, step))
        if step.wants_gradient_squares:
            step.gradient_square = _plus(step.gradient_square, update.own_square(step))
        may_defer = optimizer is step.deferrable_optimizer and step.pending_update is None
        if may_defer and is_weighted:
            step.pending_update = update
            return None
        reduced, _ = sum_with_gradients(step, update, [])
        return update.finish(step, reduced)


def reduce_over_replicas(values: Nest, aggregation: str = "mean") -> Nest:
    r"""Combine what the replicas of a step compute from their samples, as one device would.

    For a `train_step` or `test_step` of your own that changes weights outside of the optimizer, or
    needs the gradient of the whole batch for something else. All replicas must call it, outside of
    `tf.cond` and the like. The gradient that goes to `optimizer.apply` needs none of this.

    Args:
        values: nested structure of tensors and `tf.IndexedSlices`, of any shape. None stays None.
        aggregation: "mean" for the mean over samples :math:`\sum_i w_i v_i`, as for the gradient of
            a mean loss that `optimizer.scale_loss` has not scaled; "sum" for the sum of all
            replicas' values, as for a number of samples.

    Returns:
        The combined values, the same on every replica; without a strategy, `values`.

    Raises:
        ValueError: for another aggregation, and in a function given to `strategy.run`.
    """
    if aggregation not in ("mean", "sum"):
        raise ValueError(f'aggregation must be "mean" or "sum". Received: {aggregation!r}.')
    step = running_step()
    if step is None:
        is_replica = not tf.distribute.in_cross_replica_context()
        if is_replica and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ValueError(
                "reduce_over_replicas knows the shares of Keras's steps only. Received: a call in "
                "a function given to strategy.run. Use the all_reduce of tf.distribute."
                "get_replica_context() there, of values divided by the size of the global batch."
            )
        return values
    _refuse_condition(step)
    prepare = _weigh if aggregation == "mean" else _zero_without_samples
    flat = tf.nest.flatten(values)
    own = [
        _map_values(functools.partial(prepare, step, num_leading=None), value)
        if isinstance(value, tf.IndexedSlices)
        else prepare(step, tf.convert_to_tensor(value), num_leading=None)
        for value in flat
        if value is not None
    ]
    reduced = iter(step.all_reduce_sum(own))
    return tf.nest.pack_sequence_as(values, [None if v is None else next(reduced) for v in flat])


def skip_second_reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook the optimizer's own all-reduce, which comes after clipping."""

    @functools.wraps(original)
    def all_reduce_sum_gradients(
        self: keras.optimizers.Optimizer,
        grads_and_vars: Iterable[tuple[Summand | None, EitherVariable]],
    ) -> list[tuple[Summand | None, EitherVariable]]:
        step = current_step()
        if step is not None and step.gradients_are_reduced:
            return list(grads_and_vars)
        return original(self, grads_and_vars)

    return all_reduce_sum_gradients


def _check(
    step: ExactStep, grads: Sequence[Summand | None], variables: Sequence[EitherVariable]
) -> None:
    check_created_in_scope(tf.distribute.get_strategy(), variables)
    _refuse_condition(step)
    _refuse_overwriting(step, variables)
    _give_static_shapes(grads, variables)


def _values_of(step: ExactStep, grads: Sequence[_Given]) -> list[Summand | None]:
    """Return the gradients themselves if an optimizer keeps them in variables."""
    of_keras = private_api.KerasTensorFlowVariable
    values = [grad.value if isinstance(grad, of_keras) else grad for grad in grads]
    for value in values:
        if not isinstance(value, tf.Variable) or id(value) in step.values_of_model:
            continue
        if step.num_replicas > 1:
            raise ValueError(
                "Gradients that a step keeps must be in variables that Keras knows: a tf.Variable "
                "is each replica's own, and is not added up as the shares were when it was "
                f"written. Received: {value.name!r} on {step.num_replicas} replicas. Make it with "
                "self.add_weight(shape=..., initializer='zeros', trainable=False), or let the "
                "optimizer accumulate: keras.optimizers.Adam(gradient_accumulation_steps=2)."
            )
    return [tf.convert_to_tensor(v) if isinstance(v, tf.Variable) else v for v in values]


def _refuse_condition(step: ExactStep) -> None:
    """Refuse an update in a branch, from which replicas of one process cannot be reached."""
    if step.graph is tf.compat.v1.get_default_graph() or step.num_local_replicas == 1:
        return
    raise ValueError(
        "An update within tf.cond, tf.while_loop or a tf.function of one's own cannot add up the "
        f"gradients of the {step.num_local_replicas} replicas of a process. Received: "
        "optimizer.apply, apply_gradients or reduce_over_replicas there, in a train_step. Take it "
        "out of the condition, let the optimizer accumulate (keras.optimizers.Adam("
        "gradient_accumulation_steps=2)), or start one process for each device."
    )


def _refuse_overwriting(step: ExactStep, variables: Sequence[EitherVariable]) -> None:
    """Refuse variables whose gradient is their next value, which replicas cannot sum."""
    for variable in variables:
        if step.num_replicas > 1 and getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                "Variables that are overwritten with their gradient cannot be trained on several "
                f"replicas, whose gradients are summed. Received: {variable.path!r} on "
                f"{step.num_replicas} replicas, probably of a layer quantized to float8. Train "
                "before model.quantize('float8'), or on one device."
            )


def _give_static_shapes(
    grads: Sequence[Summand | None], variables: Sequence[EitherVariable]
) -> None:
    """Set static shapes, which packing needs; an embedding's dense gradient has none."""
    for grad, variable in zip(grads, variables, strict=True):
        if grad is not None and not isinstance(grad, tf.IndexedSlices):
            grad.set_shape(variable.shape)


@dataclasses.dataclass
class PendingUpdate:
    """An optimizer update whose gradients are not reduced yet."""

    apply: Callable[[list[Summand | None]], Any]
    gradients: list[Summand | None]
    is_weighted: bool

    @property
    def present(self) -> list[Summand]:
        """The gradients that exist."""
        return [gradient for gradient in self.gradients if gradient is not None]

    def delay(self, wait: Callable[[list[Summand]], list[Summand]]) -> None:
        """Insert `wait` between the computation of the gradients and the collective."""
        self.gradients = self._with_none(wait(self.present))

    def own_square(self, step: ExactStep) -> tf.Tensor:
        """Squared norm of this replica's mean gradient, float32 scalar; 0 without samples."""
        square = _squared_norm(self.present)
        weight = tf.cast(step.weight, square.dtype)
        if self.is_weighted:
            square = tf.math.divide_no_nan(square, weight * weight)
        return tf.where(weight > 0, square, tf.zeros_like(square))

    def finish(self, step: ExactStep, reduced: Sequence[Summand]) -> Any:
        """Apply the reduced gradients, without a second reduction."""
        if step.wants_gradient_squares:
            square = _squared_norm(reduced)
            step.global_gradient_square = _plus(step.global_gradient_square, square)
        step.gradients_are_reduced = True
        unfinished = step.unfinished
        begin = unfinished.updating(reduced) if unfinished else contextlib.nullcontext()
        try:
            with begin:
                if step.may_have_no_samples:
                    return self._apply_if_there_are_samples(step, reduced)
                return self.apply(self._with_none(reduced))
        finally:
            step.gradients_are_reduced = False

    def _apply_if_there_are_samples(self, step: ExactStep, reduced: Sequence[Summand]) -> None:
        def apply() -> tf.Tensor:
            self.apply(self._with_none(reduced))
            return tf.constant(0)

        tf.cond(step.total > 0, apply, lambda: tf.constant(0))

    def _with_none(self, present: Sequence[Summand]) -> list[Summand | None]:
        values = iter(present)
        return [None if gradient is None else next(values) for gradient in self.gradients]


def _plus(sum_so_far: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor:
    return value if sum_so_far is None else sum_so_far + value


def _squared_norm(gradients: Sequence[Summand]) -> tf.Tensor:
    """Sum of the squares of all elements; slices of the same row are added first."""
    merged = [_merge_equal_indices(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    dense = [g.values if isinstance(g, tf.IndexedSlices) else g for g in merged]
    return tf.add_n([tf.reduce_sum(tf.square(tf.cast(g, tf.float32))) for g in dense])


def sum_with_gradients(
    step: ExactStep, update: PendingUpdate | None, others: Nest
) -> tuple[list[Summand], Nest]:
    """Sum gradients and other values over all replicas, in one collective per element type."""
    if update is None or not update.present:
        return [], step.all_reduce_sum(others)
    prepare = _zero_without_samples if update.is_weighted else _weigh
    gradients = [
        _map_values(functools.partial(prepare, step, num_leading=None), gradient)
        if isinstance(gradient, tf.IndexedSlices)
        else gradient
        for gradient in update.present
    ]
    num_leading = _num_elements_by_type(gradients)

    def prepare_buffer(buffer: tf.Tensor) -> tf.Tensor:
        leading = num_leading.get(buffer.dtype, 0)
        return prepare(step, buffer, num_leading=leading) if leading else buffer

    reduced, summed = step.all_reduce_sum((gradients, others), prepare_buffer)
    merged = [
        _merge_equal_indices(after) if _has_unique_indices(before) else after
        for before, after in zip(update.present, reduced, strict=True)
    ]
    return merged, summed


def _has_unique_indices(gradient: Summand) -> bool:
    """Tell whether a gradient names each row once, as `embedding_lookup_sparse` makes it.

    Optimizers square slices one by one. One device would have added those of the whole batch to one
    slice per row, so slices of several replicas must be added too. An `Embedding` yields one slice
    per use of a row, on one device and here.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    operation = getattr(gradient.indices, "op", None)
    while operation is not None and operation.type in ("Identity", "Reshape", "Cast"):
        operation = operation.inputs[0].op
    return operation is not None and operation.type in ("Unique", "UniqueV2")


def _merge_equal_indices(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add the slices of equal rows."""
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _num_elements_by_type(gradients: Sequence[Summand]) -> dict[tf.DType, int]:
    counts: dict[tf.DType, int] = {}
    for gradient in gradients:
        if not isinstance(gradient, tf.IndexedSlices):
            counts[gradient.dtype] = counts.get(gradient.dtype, 0) + gradient.shape.num_elements()
    return counts


def _weigh(step: ExactStep, buffer: tf.Tensor, num_leading: int | None) -> tf.Tensor:
    """Weight the gradients of a `train_step` that did not call `optimizer.scale_loss`."""
    del num_leading  # Such gradients travel alone.
    return step.weighted(buffer)


def _map_values(
    function: Callable[[tf.Tensor], tf.Tensor], slices: tf.IndexedSlices
) -> tf.IndexedSlices:
    return tf.IndexedSlices(function(slices.values), slices.indices, slices.dense_shape)


def _zero_without_samples(step: ExactStep, buffer: tf.Tensor, num_leading: int | None) -> tf.Tensor:
    """Replace the gradients of an empty share, which may be NaN (0 / 0), with zeros.

    Uses a condition, not a multiplication: it costs nothing on replicas with samples.
    """

    def zeros() -> tf.Tensor:
        if num_leading is None:
            return tf.zeros_like(buffer)
        leading = tf.zeros_like(buffer[:num_leading])
        return tf.reshape(tf.concat([leading, buffer[num_leading:]], axis=0), tf.shape(buffer))

    return tf.cond(step.samples > 0, lambda: tf.identity(buffer), zeros)
