"""One Keras step, run exactly: as one device would run it on the whole global batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.loader.order.rows import count_rows, has_rows
from keras_het.strategy.batches.gathered_rows import (
    OutputsOfParts,
    check_predictions,
    gather_rows,
    name_of,
)
from keras_het.strategy.batches.uneven_per_replica import (
    find_sizes,
    share_out,
)
from keras_het.strategy.exact.created_in_scope import adopt_compiled, check_created_in_scope
from keras_het.strategy.exact.gradients import Gradients, Update
from keras_het.strategy.exact.keras_hooks import as_replica, keras_hooks, recorded_results
from keras_het.strategy.exact.means import Means
from keras_het.strategy.exact.metrics import Metrics, metrics_of
from keras_het.strategy.exact.micro_batches import Appended, MicroBatches
from keras_het.strategy.exact.own_state import Assignments, OwnState, StateChange, tell
from keras_het.strategy.exact.step import ReplicaSum, StepSpec, active, is_positive
from keras_het.strategy.exact.xla import compiled
from keras_het.strategy.measure.emulated_device import works_ahead
from keras_het.strategy.measure.step_clock import Measurement
from keras_het.value_types import Leaf, Nest

if TYPE_CHECKING:
    from keras_het.strategy.cluster.stop_request import StopRequest
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

Run = Callable[..., Any]
_About: TypeAlias = "tuple[keras.Model | None, list[keras.metrics.Metric], list[str]]"
"""Model, metrics, and remarks for the user."""


def run_train_or_test_step(
    strategy: HeterogeneousStrategy, run: Run, kind: str, function: MethodType, data: Nest
) -> Nest:
    """Run `model.train_step` or `model.test_step` on every replica."""
    model: keras.Model = function.__self__
    if model._distribute_strategy is strategy:
        adopt_compiled(strategy, model)
    metrics = metrics_of(model)
    caller = private_api.keras_state_of_thread()
    # A plain batch may lie between two steps of a `fit`, and only the times of `fit` are wanted.
    has_sizes = find_sizes(data) is not None
    if not has_sizes:
        data = share_out(strategy, data)
    request = _carried_request(strategy)
    # a custom step may look at weights and steps as they are after the update
    may_defer = private_api.is_stock_train_step(function) and all(
        private_api.is_of_keras(metric) for metric in metrics
    )
    facts = {
        "kind": kind,
        "is_keras_step": private_api.runs_keras_train_step(function),
        "deferrable_optimizer": model.optimizer if may_defer else None,
        "is_timed": _is_measured(strategy) and has_sizes,
    }
    remarks: list[str] = []

    def replica_step(rows: Nest, sizes: tf.Tensor | None) -> Nest:
        step, rows = _step(strategy, rows, sizes, (model, metrics, remarks), **facts)
        return _trace(strategy, step, model, function, rows, caller, request)

    with keras_hooks(), recorded_results(metrics):
        logs = run(tf.autograph.experimental.do_not_convert(replica_step), (data, find_sizes(data)))
    tell(model, remarks)
    return tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], logs)


def run_predict_step(
    strategy: HeterogeneousStrategy, run: Run, function: Callable[[Nest], Nest], data: Nest
) -> Nest:
    """Run Keras's predict step and return the outputs of all replicas in global order."""
    data = share_out(strategy, data)
    caller = private_api.keras_state_of_thread()
    model = private_api.model_of_prediction(function)
    remarks: list[str] = []

    def replica_step(rows: Nest, sizes: tf.Tensor | None) -> Nest:
        step, rows = _step(strategy, rows, sizes, (model, [], remarks), kind="predict")
        compute = functools.partial(_predict, model=model, function=function, caller=caller)
        if step.spec.parts is None:
            outputs, changes = compute(step, rows)
            first, summands = step, [change.summands for change in changes]
        else:
            first, outputs, changes, summands = _predict_parts(step, step.spec.parts, compute)
        with as_replica(caller), active(step):
            first.own_state.finish_prediction(changes, summands)
        outputs, spec = _unless_empty(step.spec, outputs, _no_rows), step.spec
        if step.measurement is not None:
            held = step.measurement.held(tf.nest.flatten(outputs))
            outputs = tf.nest.pack_sequence_as(outputs, held)
        return outputs, spec.total

    run_step = tf.autograph.experimental.do_not_convert(replica_step)
    with keras_hooks():
        outputs, total = run(run_step, (data, find_sizes(data)))
    if model is not None:
        tell(model, remarks)
    if (request := _carried_request(strategy)) is not None:
        # of a type that no summation machine sums
        flags = request.contribution(True, tf.int64)
        request.record(strategy.extended.sum_over_workers(flags))
    total = strategy.experimental_local_results(total)[0]
    is_whole = strategy.layout.num_replicas == 1 and strategy.extended.micro_batch_sizes is None

    def joined(path: tuple[object, ...], leaf: Leaf) -> Leaf:
        local = strategy.experimental_local_results(leaf)
        if is_whole or local[0] is None:
            return local[0]
        gather = strategy.extended.gather_rows_over_workers
        return gather_rows(local, gather, total, name_of(path))

    rows = [joined(*each) for each in keras.tree.flatten_with_path(outputs)]
    return keras.tree.pack_sequence_as(outputs, rows)


def _predict(
    step: ExactStep,
    rows: Nest,
    *,
    model: keras.Model | None,
    function: Callable[[Nest], Nest],
    caller: dict[str, Any],
) -> tuple[Nest, list[StateChange]]:
    """Predict for a share, or for one micro-batch; return also the changes of state."""
    spec, rows = step.spec, at_least_one_row(step.spec, rows)
    step.own_state.read_from(rows)
    with as_replica(caller), active(step):
        with compiled(model, spec.device):
            outputs = function(rows)
        changes = [] if model is None else step.own_state.changes(model, [])
    outputs = tf.nest.map_structure(_as_tensor, outputs)
    if spec.local_position == 0 and spec.is_first_part and not spec.is_whole:
        with as_replica(caller):
            check_predictions(function, rows, outputs)
    return outputs, changes


def _predict_parts(
    step: ExactStep, parts: MicroBatches, compute: Callable[..., Any]
) -> tuple[ExactStep, Nest, list[StateChange], Nest]:
    """Predict for all micro-batches of a share, and put their outputs one after the other."""
    first = _first_part(step, parts)
    first_outputs, changes = compute(first, parts.rows(None))
    outputs = OutputsOfParts(first_outputs)

    def own(part: ExactStep, rows: Nest) -> Nest:
        outputs_of_part, changes_of_part = compute(part, rows)
        summands = [change.summands for change in changes_of_part]
        return _appended(outputs.part_tensors(outputs_of_part)), summands

    summands = _appended(outputs.first_tensors), [change.summands for change in changes]
    rows, summands = _add_up(step, parts, first, summands, own)
    return first, outputs.joined(rows), changes, summands


def _appended(tensors: Sequence[tf.Tensor]) -> list[Appended]:
    return [Appended(tensor) for tensor in tensors]


def _trace(
    strategy: HeterogeneousStrategy,
    step: ExactStep,
    model: keras.Model,
    function: Callable[[Nest], Nest],
    rows: Nest,
    caller: dict[str, Any],
    request: StopRequest | None,
) -> Nest:
    """Run one replica's train or test step: its own part, one collective for all, the update."""
    spec, measurement, is_first = step.spec, step.measurement, step.spec.local_position == 0
    compute = functools.partial(_compute, model=model, function=function, caller=caller)
    if spec.parts is None:
        part, logs, changes = compute(step, rows)
        own = None
    else:
        part, logs, changes, own = _compute_parts(step, spec.parts, model, compute)
    with active(step):
        check_created_in_scope(strategy, [change.variable for change in changes])
        # A test step has no gradients that could wait for the emulated device.
        results = _tensors(logs if own is None else own)
        computed = results if measurement is None else measurement.held(results)
        times = [] if measurement is None else measurement.summands()
        flags = [] if request is None else [_stop_flags(request, is_first, logs)]
        with tf.control_dependencies(computed):
            if own is None:
                own = _summands(part, logs, changes)
            reduced, (own, times, flags) = step.gradients.sum_with((own, times, flags))
            of_logs, of_state = own
            logs = part.metrics.global_logs(logs, of_logs)
        step.gradients.update(reduced)
        before = {**part.own_state.before, **part.metrics.before}
        for change, sums in zip(changes, of_state, strict=True):
            value = change.finish(sums)
            if spec.may_have_no_samples:
                value = tf.where(spec.total > 0, value, before[id(change.variable)])
            change.variable.assign(value)
        if measurement is not None:
            measurement.record(times)
        if request is not None and is_first:
            request.record(flags[0])
    return logs


def _compute(
    step: ExactStep,
    rows: Nest,
    *,
    model: keras.Model,
    function: Callable[[Nest], Nest],
    caller: dict[str, Any],
) -> tuple[ExactStep, Nest, list[StateChange]]:
    """Run the step on a share, or on one micro-batch; return its logs, and its changes of state."""
    with as_replica(caller), active(step), step.metrics.unchanged_without_samples():
        rows = at_least_one_row(step.spec, rows)
        if step.spec.parts is not None and step.spec.is_first_part:
            step.spec.parts.first_rows = rows
        step.own_state.read_from(rows)
        with compiled(model, step.spec.device):
            # the hooks call the stages; gradients most often wait for the sum
            logs = function(rows)
    with active(step):
        logs = step.metrics.values(logs)
        metrics = metrics_of(model)
        changes = step.own_state.changes(model, metrics)
        step.remarks += step.metrics.read(logs, metrics, step.own_state)
        return step, logs, changes


def _compute_parts(
    step: ExactStep, parts: MicroBatches, model: keras.Model, compute: Callable[..., Any]
) -> tuple[ExactStep, Nest, list[StateChange], Nest]:
    """Run the step on all micro-batches of a share; return also what they add to the sums."""
    first, logs, changes = compute(_first_part(step, parts), parts.rows(None))
    with active(first):
        first_summands = first.gradients.part_gradients, _summands(first, logs, changes)

    def own(part: ExactStep, rows: Nest) -> Nest:
        part.means.divisors = first.means.divisors
        _, part_logs, part_changes = compute(part, rows)
        with active(part):
            part.gradients.refuse_reads_after_update(part.own_state, model)
            return part.gradients.part_gradients, _summands(part, part_logs, part_changes)

    gradients, summands = _add_up(step, parts, first, first_summands, own)
    with active(step):
        step.gradients.take(first.gradients, gradients)
    return first, logs, changes, summands


def _first_part(step: ExactStep, parts: MicroBatches) -> ExactStep:
    if tf.executing_eagerly():
        parts.refuse("it runs eagerly", "Compile the model without run_eagerly=True.")
    return step.part(parts, None)


def _add_up(
    step: ExactStep,
    parts: MicroBatches,
    first: ExactStep,
    of_first: Nest,
    compute: Callable[[ExactStep, Nest], Nest],
) -> Nest:
    """Join what the first micro-batch has computed and what `compute` returns for each other."""
    with active(first):
        values = first.own_state.part_values(first.metrics.before)

    def own(number: tf.Tensor) -> Nest:
        with active(first):
            first.own_state.put_back(values)
        return compute(step.part(parts, number), parts.rows(number))

    return parts.add_up(of_first, first.sum.join_of, own)


def _summands(step: ExactStep, logs: Nest, changes: Sequence[StateChange]) -> Nest:
    return step.metrics.summands(logs), [change.summands for change in changes]


def _step(
    strategy: HeterogeneousStrategy,
    rows: Nest,
    sizes: tf.Tensor | None,
    about: _About,
    **facts: Any,
) -> tuple[ExactStep, Nest]:
    """Return a replica's step, and its rows once its clock has started."""
    spec = _spec(strategy, rows, sizes, **facts)
    sizes_of_parts = strategy.extended.micro_batch_sizes
    most = None if sizes_of_parts is None else sizes_of_parts[spec.replica_id]
    if most is not None and spec.emulated_device is not None:
        emulated = spec.emulated_device.in_parts(most)
        spec = dataclasses.replace(spec, emulated_device=emulated)
    is_measured = spec.is_timed or spec.emulated_device is not None
    # Absent where nobody measures: nothing of it is in the graph then.
    measurement = Measurement(spec, strategy.extended.compute_times, rows) if is_measured else None
    rows = rows if measurement is None else measurement.rows
    if most is not None:
        times = strategy.extended.compute_times
        at_a_time = times.fitting(spec.replica_id, most) if times.cuts else most
        spec = dataclasses.replace(spec, parts=MicroBatches(spec.samples, at_a_time, rows))
    return ExactStep(spec, measurement, *about), rows


def _spec(
    strategy: HeterogeneousStrategy, data: Nest, sizes: tf.Tensor | None, **facts: Any
) -> StepSpec:
    replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
    if tf.is_tensor(replica_id):
        replica_id = int(tf.get_static_value(replica_id))
    is_local, local = strategy.extended.reduces_within_worker, strategy.layout.local_replicas
    group = local if is_local else range(strategy.layout.num_replicas)
    if sizes is not None:
        with tf.device("CPU:0"):
            samples, total = sizes[replica_id], tf.reduce_sum(sizes[group.start : group.stop])
    else:
        samples = _num_rows(data)
        total = strategy.extended.all_reduce_in_replica(tf.distribute.ReduceOp.SUM, samples)
    part, whole = tf.cast(samples, tf.float64), tf.cast(total, tf.float64)
    position = replica_id - local.start
    extended = strategy.extended
    emulated = extended.emulated_devices[position] if extended.emulated_devices else None
    return StepSpec(
        replica_id=replica_id,
        group=group,
        local_replicas=local,
        samples=samples,
        total=total,
        has_samples=is_positive(samples),
        weight=tf.math.divide_no_nan(part, whole),
        inverse_weight=tf.math.divide_no_nan(whole, part),
        sizes=sizes,
        seed_stream=replica_id + extended.first_seed_stream,
        device=extended.worker_devices[position],
        is_on_gpu=works_ahead(extended.worker_devices[position], emulated),
        may_have_no_samples=is_local,
        emulated_device=emulated,
        **facts,
    )


class ExactStep:
    """A step and its stages; the hooks into Keras call verbs of the stages."""

    def __init__(
        self,
        spec: StepSpec,
        measurement: Measurement | None,
        model: keras.Model | None,
        metrics: Sequence[keras.metrics.Metric],
        remarks: list[str],
    ) -> None:
        self.spec, self.measurement = spec, measurement
        self.update = Update(spec)
        self.assignments = Assignments(self.update)
        self.sum = ReplicaSum(spec, self.assignments, measurement)
        self.gradients = Gradients(spec, self.sum, self.update, measurement, model)
        self.means = Means(spec, self.sum, self.gradients, remarks)
        self.metrics = Metrics(spec, self.sum, self.assignments, metrics)
        self.own_state = OwnState(spec, self.sum, self.assignments, self.metrics, model, remarks)
        self.remarks = remarks
        self._about = (model, metrics, remarks)

    def part(self, parts: MicroBatches, number: tf.Tensor | None) -> ExactStep:
        """Return the step on one micro-batch, in the graph being built."""
        spec = parts.spec(self.spec, number)
        return ExactStep(spec, self.measurement if number is None else None, *self._about)


def _is_measured(strategy: HeterogeneousStrategy) -> bool:
    if strategy.extended.compute_times.is_measuring and strategy.extended.reduces_within_worker:
        raise ValueError(
            "Compute times travel in the collective of each step, which local training does not "
            "have. Received: LocalTraining together with BatchBalancer, or after it under the same "
            'strategy (or after a fit with AsyncWorkers(roles="auto") that failed). Leave '
            "BatchBalancer out, set shares by hand (strategy.set_share_weights), and use a "
            "strategy of its own."
        )
    return strategy.extended.steps_are_timed


def _stop_flags(request: StopRequest, is_first: bool, logs: Nest) -> tf.Tensor:
    """This worker's stop requests, to be summed over all."""
    # of a type that travels anyway: another type would need a separate collective
    types = [leaf.dtype for leaf in _tensors(logs) if leaf.dtype.is_floating]
    return request.contribution(is_first, types[0] if types else tf.float32)


def _carried_request(strategy: HeterogeneousStrategy) -> StopRequest | None:
    return strategy.extended.stop_request if strategy.extended.steps_carry_flags else None


def _num_rows(data: Nest) -> tf.Tensor:
    """Number of samples of a batch that bypassed the strategy's data path."""
    for leaf in filter(has_rows, tf.nest.flatten(data)):
        return count_rows(leaf)
    raise ValueError(
        "Cannot tell how many samples the batch has, so that its gradient cannot be weighted. "
        f"Received: {data}. Expected a structure with at least one tensor of shape [samples, ...]."
    )


def _as_tensor(leaf: Leaf) -> Leaf:
    is_tensor = leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
    return leaf if is_tensor else tf.convert_to_tensor(leaf)


def _tensors(structure: Nest) -> list[Leaf]:
    return [leaf for leaf in tf.nest.flatten(structure) if tf.is_tensor(leaf)]


def at_least_one_row(spec: StepSpec, data: Nest) -> Nest:
    """Return the replica's batch, or one row of zeros (ones on a GPU) if it has none."""
    # Layers are not made for empty batches: cuDNN refuses some, TensorFlow's convolutions give the
    # wrong shape on CPUs. Nothing of the row counts. On a GPU it is ones: a row that is masked as a
    # whole is refused by cuDNN, and an index out of range, an error on CPUs, reads zeros.
    return _unless_empty(spec, data, lambda leaf: _one_row(leaf, spec.is_on_gpu))


def _unless_empty(spec: StepSpec, data: Nest, otherwise: Callable[[Leaf], Leaf]) -> Nest:
    def chosen(leaf: Leaf) -> Leaf:
        # an eager step may receive arrays, whose shape is a tuple
        if not hasattr(leaf, "shape") or tf.TensorShape(leaf.shape).rank == 0:
            return leaf
        result = tf.cond(spec.has_samples, lambda: leaf, lambda: otherwise(leaf))
        if isinstance(result, tf.Tensor) and tf.TensorShape(leaf.shape).rank:
            result.set_shape([None, *leaf.shape[1:]])
        return result

    return tf.nest.map_structure(chosen, data)


def _one_row(leaf: Leaf, is_on_gpu: bool) -> Leaf:
    if isinstance(leaf, tf.RaggedTensor):
        splits = [splits[:1] for splits in leaf.nested_row_splits]
        splits[0] = tf.zeros([2], splits[0].dtype)
        return tf.RaggedTensor.from_nested_row_splits(leaf.flat_values[:0], splits)
    if isinstance(leaf, tf.SparseTensor):
        shape = tf.concat([[tf.constant(1, tf.int64)], leaf.dense_shape[1:]], axis=0)
        return tf.SparseTensor(leaf.indices[:0], leaf.values[:0], shape)
    make = tf.ones if is_on_gpu and leaf.dtype != tf.string else tf.zeros
    return make(tf.concat([[1], tf.shape(leaf)[1:]], axis=0), leaf.dtype)


def _no_rows(leaf: Leaf) -> Leaf:
    if isinstance(leaf, tf.SparseTensor):
        shape = tf.concat([[tf.constant(0, tf.int64)], leaf.dense_shape[1:]], axis=0)
        return tf.SparseTensor(leaf.indices[:0], leaf.values[:0], shape)
    return leaf[:0]
