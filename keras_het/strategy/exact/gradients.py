r"""Reduction of gradients before the optimizer sees them.

Keras clips, unscales and accumulates each replica's own gradient and sums afterwards. One device
clips the gradient of the whole batch. So the reduction comes first:

.. math:: g = \sum_i w_i g_i, \qquad \text{then clip, accumulate, decay and apply } g.

Every replica then holds the same gradient, and all optimizer state stays identical.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact.created_in_scope import check_created_in_scope
from keras_het.strategy.exact.power_sgd import Approximation, approximated
from keras_het.strategy.exact.step import (
    Original,
    ReplicaSum,
    StepSpec,
    is_positive,
    running_step,
    travels_alone,
)
from keras_het.strategy.exact.xla import compiled_update, is_wanted
from keras_het.value_types import EitherVariable, Leaf, Nest, Summand

if TYPE_CHECKING:
    from keras_het.strategy.exact.own_state import OwnState
    from keras_het.strategy.measure.step_clock import Measurement

_Given: TypeAlias = "Summand | EitherVariable | None"
"""A gradient that is given to an optimizer, which may keep it in a variable; or none."""
_Reduced: TypeAlias = "list[Summand | None]"


class Update:
    """What the optimizer does with reduced gradients."""

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self.is_running = False

    def run(self, update: Callable[[_Reduced], Any], reduced: _Reduced) -> Any:
        """Apply gradients, if any replica of the group has samples."""

        def run() -> tf.Tensor:
            update(reduced)
            return tf.constant(0)

        self.is_running = True
        try:
            if not self._spec.may_have_no_samples:
                return update(reduced)
            tf.cond(is_positive(self._spec.total), run, lambda: tf.constant(0))
            return None
        finally:
            self.is_running = False


@dataclasses.dataclass(frozen=True)
class _PendingUpdate:
    """An optimizer update whose gradients are not reduced yet."""

    apply: Callable[[_Reduced], Any]
    optimizer: keras.optimizers.Optimizer
    variables: Sequence[EitherVariable]
    gradients: _Reduced
    is_weighted: bool
    have_unique_indices: list[bool]


# The outermost update reduces: what a custom optimizer does around its parent's `apply`, or that of
# a nested one, sees the gradient of the whole batch and the updated weights.
class Gradients:
    """Gradients of a step, from the scaled loss to the update."""

    def __init__(
        self,
        spec: StepSpec,
        replica_sum: ReplicaSum,
        update: Update,
        measurement: Measurement | None,
        model: keras.Model | None,
    ) -> None:
        self._spec, self._sum, self._update = spec, replica_sum, update
        self._measurement = measurement
        self._model = model
        # equal on all replicas after each step
        self._values_of_model = {id(v.value) for v in model.variables} if model else set[int]()
        self._weighted_optimizers = set[int]()
        self._is_scaling = False
        self._pending: list[_PendingUpdate] = []
        self._num_operations = 0  # of the graph when the first update began to wait

    @property
    def are_weighted(self) -> bool:
        """Whether the gradients on the tape carry the weight."""
        return bool(self._weighted_optimizers)

    def scale_loss(
        self, original: Original, optimizer: keras.optimizers.Optimizer, loss: tf.Tensor
    ) -> tf.Tensor:
        """Hook `Optimizer.scale_loss`: multiplying one scalar weights all gradients."""
        # an optimizer may call its parent class or a nested one, which would weight it again
        if self._is_scaling:
            return original(optimizer, loss)
        self._is_scaling = True
        try:
            loss = original(optimizer, loss)
        finally:
            self._is_scaling = False
        self._weighted_optimizers.add(id(optimizer))
        return loss * tf.cast(self._spec.weight, loss.dtype)

    def apply(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[_Given],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._update.is_running:
            return original(optimizer, grads, *args, **kwargs)
        variables = args[0] if args else kwargs.get("trainable_variables")
        variables = variables or optimizer._trainable_variables
        grads = self._checked(grads, variables)

        def apply(reduced: _Reduced) -> Any:
            return original(optimizer, reduced, *args, **kwargs)

        return self._reduce_and_apply(optimizer, variables, grads, apply)

    def apply_gradients(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        grads_and_vars: Iterable[tuple[_Given, EitherVariable]],
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Hook `Optimizer.apply_gradients`; Keras's own only calls `apply` and needs no hook."""
        if self._update.is_running:
            return original(optimizer, grads_and_vars, *args, **kwargs)
        given, variables = zip(*grads_and_vars, strict=True)

        def apply(reduced: _Reduced) -> Any:
            pairs = list(zip(reduced, variables, strict=True))
            return original(optimizer, pairs, *args, **kwargs)

        grads = self._checked(given, variables)
        return self._reduce_and_apply(optimizer, variables, grads, apply)

    def keep_reduced(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        grads_and_vars: Iterable[tuple[Summand | None, EitherVariable]],
    ) -> list[tuple[Summand | None, EitherVariable]]:
        """Hook the optimizer's own all-reduce, which comes after clipping."""
        if self._update.is_running:
            return list(grads_and_vars)
        return list(original(optimizer, grads_and_vars))

    def sum_with(self, others: Nest) -> tuple[list[_Reduced], Nest]:
        """Sum the gradients that wait for it, and other values, over all replicas."""
        if not self._pending:
            return [], self._sum(others)
        return self._summed(self._pending, others)

    def update(self, reduced: list[_Reduced]) -> None:
        """Run the updates that have waited for the sum, if there are any."""
        for pending, gradients in zip(self._pending, reduced, strict=True):
            self._finish(pending, gradients)

    @property
    def part_gradients(self) -> list[_Reduced]:
        """The gradients of one micro-batch, for each update."""
        return [update.gradients for update in self._pending]

    def take(self, first: Gradients, gradients: list[_Reduced]) -> None:
        """Take over the updates of the first micro-batch, with the gradients of the whole share."""
        for update, share_gradients in zip(first._pending, gradients, strict=True):
            measured = self._measured(share_gradients, is_weighted=True)
            self._pending.append(dataclasses.replace(update, gradients=measured))

    def refuse_reads_after_update(self, own_state: OwnState, model: keras.Model) -> None:
        """Refuse to cut a step that reads, after its update, what the update changes."""
        if not self._pending or self._spec.deferrable_optimizer is not None:
            return
        operations = tf.compat.v1.get_default_graph().get_operations()[self._num_operations :]
        of_optimizers = [
            variable
            for optimizer in [update.optimizer for update in self._pending]
            for variable in optimizer.variables
            if variable is not getattr(optimizer, "_learning_rate", None)
        ]
        names = own_state.handles_in_graph([*model.trainable_variables, *of_optimizers])
        read = {names[i.name] for op in operations for i in op.inputs if i.name in names}
        if read:
            self._sum.refuse_parts(
                f"it reads {', '.join(sorted(read))} after the update of the optimizer",
                "Read weights and the state of the optimizer before it, or in a callback.",
            )

    def _reduce_and_apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[EitherVariable],
        gradients: _Reduced,
        apply: Callable[[_Reduced], Any],
    ) -> Any:
        is_weighted = id(optimizer) in self._weighted_optimizers
        is_cut = self._spec.parts is not None
        if is_cut and not is_weighted:
            gradients = [each if each is None else self._spec.weighted(each) for each in gradients]
        elif not is_cut:
            gradients = self._measured(gradients, is_weighted)
        have_unique_indices = [_has_unique_indices(each) for each in gradients]
        about = (apply, optimizer, variables, gradients)
        update = _PendingUpdate(*about, is_weighted or is_cut, have_unique_indices)
        may_wait = optimizer is self._spec.deferrable_optimizer and not self._pending
        if is_cut or (may_wait and is_weighted):
            if not self._pending and is_cut:
                graph = tf.compat.v1.get_default_graph()
                self._num_operations = len(graph.get_operations())
            self._pending.append(update)
            return None
        (reduced,), _ = self._summed([update], [])
        return self._finish(update, reduced)

    def _measured(self, gradients: _Reduced, is_weighted: bool) -> _Reduced:
        """Stop the clock of the share, whose gradients are computed."""
        if self._measurement is None:
            return gradients
        gradients = self._measurement.gradients_are_computed(gradients)
        if self._measurement.measures_squares:
            self._measurement.own_squares.append(self._own_square(gradients, is_weighted))
        return gradients

    def _summed(self, updates: list[_PendingUpdate], others: Nest) -> tuple[list[_Reduced], Nest]:
        leading, gradients = dict[tf.DType, int](), [list(each.gradients) for each in updates]
        is_weighted = updates[0].is_weighted  # several wait only where all are
        found, approximation = self._approximate(updates, gradients)
        early = self._sum_buckets(gradients, is_weighted)
        for of_one in gradients:
            for place, each in enumerate(of_one):
                if each is None:
                    continue
                if isinstance(each, tf.IndexedSlices) or travels_alone(each):
                    of_one[place] = _prepared(self._spec, each, is_weighted)
                else:
                    leading[each.dtype] = leading.get(each.dtype, 0) + each.shape.num_elements()

        def prepare(buffer: tf.Tensor) -> tf.Tensor:
            left, size = leading.get(buffer.dtype, 0), buffer.shape.num_elements()
            count = left if size is None else min(left, size)
            leading[buffer.dtype] = left - count
            return _prepared(self._spec, buffer, is_weighted, count) if count else buffer

        reduced, summed = self._sum((gradients, others), prepare)
        for (number, place), each in early.items():
            reduced[number][place] = each
        if approximation is not None:
            approximation.keep([each for of_one in reduced for each in of_one if each is not None])
        for (number, place), each in found.items():
            reduced[number][place] = each
        for update, of_one in zip(updates, reduced, strict=True):
            for place, is_unique in enumerate(update.have_unique_indices):
                if is_unique:
                    of_one[place] = _merge_equal_indices(of_one[place])
        return reduced, summed

    def _approximate(
        self, updates: Sequence[_PendingUpdate], gradients: list[_Reduced]
    ) -> tuple[dict[tuple[int, int], tf.Tensor], Approximation | None]:
        """Take gradients out that travel as matrices of low rank, and sum them."""
        power_sgd = tf.distribute.get_strategy().extended.power_sgd
        if power_sgd is None or self._model is None:
            return {}, None
        places, own, kept, scales = [], [], [], []
        for number, (update, of_one) in enumerate(zip(updates, gradients, strict=True)):
            scale = getattr(update.optimizer, "dynamic_scale", None)  # of a LossScaleOptimizer
            for place, each in enumerate(of_one):
                if each is None or not power_sgd.pays(each):
                    continue
                places.append((number, place))
                own.append(_prepared(self._spec, each, update.is_weighted))
                kept.append(power_sgd.kept(self._model, update.variables[place], each))
                scales.append(None if scale is None else tf.cast(scale.value, each.dtype))
                of_one[place] = None
        if not places:
            return {}, None
        approximation = approximated(own, kept, scales, self._spec, self._sum)
        return dict(zip(places, approximation.sums, strict=True)), approximation

    def _sum_buckets(
        self, gradients: list[_Reduced], is_weighted: bool
    ) -> dict[tuple[int, int], tf.Tensor]:
        """Take full buckets of dense gradients out, and sum each as soon as its members exist."""
        # The last variables come first, whose gradients a backward pass makes first. What is left
        # travels with all else, unless gradients travel as another type.
        extended = tf.distribute.get_strategy().extended
        sent_as, most = extended.communication_dtype, extended.bytes_per_bucket
        found = dict[tuple[int, int], tf.Tensor]()
        if self._spec.parts is not None:  # their gradients exist all at once
            most = 0
        if not (most or sent_as):
            return found
        places = [(i, j) for i, of_one in enumerate(gradients) for j in range(len(of_one))]
        buckets = dict[tf.DType, list[tuple[int, int]]]()
        sizes = dict[tf.DType, int]()

        def sum_bucket(dtype: tf.DType) -> None:
            bucket = buckets.pop(dtype)
            members = [gradients[i][j] for i, j in bucket]
            prepare = functools.partial(_prepared, self._spec, is_weighted=is_weighted)
            sums = self._sum.sum_bucket(members, prepare, is_measured=not most)
            found.update(zip(bucket, sums, strict=True))
            for i, j in bucket:
                gradients[i][j] = None

        for update, place in reversed(places):
            each = gradients[update][place]
            if not isinstance(each, tf.Tensor):
                continue
            bucket = buckets.setdefault(each.dtype, [])
            bucket.append((update, place))
            size = sizes.get(each.dtype, 0) + each.shape.num_elements() * each.dtype.size
            sizes[each.dtype] = size
            if most and size >= most:
                sum_bucket(each.dtype)
                del sizes[each.dtype]
        for dtype in list(buckets) if sent_as else ():
            sum_bucket(dtype)
        return found

    def _finish(self, update: _PendingUpdate, reduced: _Reduced) -> Any:
        if self._measurement is not None and self._measurement.measures_squares:
            self._measurement.global_squares.append(_squared_norm(reduced))
        apply = update.apply
        is_sparse = any(isinstance(each, tf.IndexedSlices) for each in reduced)
        if is_wanted(self._model) and private_api.is_of_keras(update.optimizer) and not is_sparse:
            apply = compiled_update(apply)
        return self._update.run(apply, reduced)

    def _own_square(self, gradients: _Reduced, is_weighted: bool) -> tf.Tensor:
        """Squared norm of this replica's mean gradient, float32 scalar; 0 without samples."""
        square = _squared_norm(gradients)
        weight = tf.cast(self._spec.weight, square.dtype)
        if is_weighted:
            square = tf.math.divide_no_nan(square, weight * weight)
        return tf.where(weight > 0, square, tf.zeros_like(square))

    def _checked(
        self, given: Sequence[_Given], variables: Sequence[EitherVariable]
    ) -> list[Summand | None]:
        """Return the gradients themselves, with static shapes, if they can be reduced."""
        grads = [self._value(each) for each in given]
        check_created_in_scope(tf.distribute.get_strategy(), variables)
        self._sum.refuse_condition()
        for grad, variable in zip(grads, variables, strict=True):
            # their next value, which replicas cannot sum
            if getattr(variable, "overwrite_with_gradient", False) and not self._spec.is_whole:
                raise ValueError(
                    "Variables that are overwritten with their gradient cannot be trained on "
                    "several replicas, whose gradients are summed. Received: "
                    f"{variable.path!r} on {self._spec.num_replicas} replicas, probably of a layer "
                    "quantized to float8. Train before model.quantize('float8'), or on one device."
                )
            # packing needs them, and an embedding's dense gradient has none
            if grad is not None and not isinstance(grad, tf.IndexedSlices):
                grad.set_shape(variable.shape)
        return grads

    def _value(self, given: _Given) -> Summand | None:
        value = given.value if isinstance(given, private_api.KerasTensorFlowVariable) else given
        if not isinstance(value, tf.Variable):
            return value
        if id(value) not in self._values_of_model and not self._spec.is_whole:
            raise ValueError(
                "Gradients that a step keeps must be in variables that Keras knows: a tf.Variable "
                "is each replica's own, and would be summed with wrong weights."
                f" Received: {value.name!r} on {self._spec.num_replicas} replicas. Make it with "
                "self.add_weight(shape=..., initializer='zeros', trainable=False), or let the "
                "optimizer accumulate: keras.optimizers.Adam(gradient_accumulation_steps=2)."
            )
        return tf.convert_to_tensor(value)


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
    step.sum.refuse_condition()
    step.sum.refuse_parts(
        "keras_het.reduce_over_replicas combines values in the middle of it",
        "Let the optimizer do what needs the gradient of the global batch.",
    )

    def own(value: Leaf) -> Summand | None:
        if value is None:
            return None
        is_sparse = isinstance(value, tf.IndexedSlices)
        value = value if is_sparse else tf.convert_to_tensor(value)
        return _prepared(step.spec, value, is_weighted=aggregation == "sum")

    return step.sum(tf.nest.map_structure(own, values))


def _prepared(
    spec: StepSpec, value: Summand, is_weighted: bool, num_leading: int | None = None
) -> Summand:
    """Weight what a replica adds to a sum, or make it zero without samples if it is weighted."""
    # It may be NaN then (0 / 0). A condition, not a multiplication, costs nothing with samples.
    if not is_weighted:
        return spec.weighted(value)
    if isinstance(value, tf.IndexedSlices):
        values = _prepared(spec, value.values, is_weighted)
        return tf.IndexedSlices(values, value.indices, value.dense_shape)

    def zeros() -> tf.Tensor:
        if num_leading is None:
            return tf.zeros_like(value)
        leading = tf.zeros_like(value[:num_leading])
        return tf.reshape(tf.concat([leading, value[num_leading:]], axis=0), tf.shape(value))

    return tf.cond(spec.has_samples, lambda: tf.identity(value), zeros)


def _squared_norm(gradients: _Reduced) -> tf.Tensor:
    """Sum of the squares of all elements; slices of the same row are added first."""
    dense = [
        _merge_equal_indices(g).values if isinstance(g, tf.IndexedSlices) else g
        for g in gradients
        if g is not None
    ]
    return tf.add_n([tf.reduce_sum(tf.square(tf.cast(g, tf.float32))) for g in dense])


def _has_unique_indices(gradient: Summand | None) -> bool:
    """Tell whether a gradient names each row once, as `embedding_lookup_sparse` makes it."""
    # Optimizers square slices one by one: one device has one slice per row there, so slices of
    # several replicas are added. An `Embedding` has one per use of a row, here too.
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    operation = getattr(gradient.indices, "op", None)
    while operation is not None and operation.type in ("Identity", "Reshape", "Cast"):
        operation = operation.inputs[0].op
    return operation is not None and operation.type in ("Unique", "UniqueV2")


def _merge_equal_indices(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)
