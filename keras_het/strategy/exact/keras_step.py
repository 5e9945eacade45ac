"""One Keras step, run exactly: as one device would run it on the whole global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.batches.gathered_rows import check_predictions, gather_rows, name_of
from keras_het.strategy.batches.plain_batch import refuse_compiled_batch, share_out
from keras_het.strategy.batches.uneven_per_replica import find_sizes
from keras_het.strategy.exact import emulated_device
from keras_het.strategy.exact.created_in_scope import adopt_compiled, check_created_in_scope
from keras_het.strategy.exact.empty_share import at_least_one_row, drop_row_of_zeros
from keras_het.strategy.exact.keras_hooks import keras_hooks
from keras_het.strategy.exact.metrics import (
    cluster_logs,
    flatten_metrics,
    recorded_results,
    recorded_variable,
    unchanged_without_samples,
)
from keras_het.strategy.exact.own_state import changed_state, finish_prediction, state_before, tell
from keras_het.strategy.exact.replica_threads import as_replica
from keras_het.strategy.exact.step import ExactStep
from keras_het.strategy.measure.step_clock import StepClock
from keras_het.training_strategy import TrainingStrategy
from keras_het.value_types import Leaf, Nest

if TYPE_CHECKING:
    from keras_het.strategy.cluster.stop_request import StopRequest

Run = Callable[..., Any]


def run_train_or_test_step(
    strategy: TrainingStrategy, run: Run, function: MethodType, data: Nest
) -> Nest:
    """Run `model.train_step` or `model.test_step` on every replica."""
    model: keras.Model = function.__self__
    if model._distribute_strategy is strategy:
        adopt_compiled(strategy, model)
    metrics = list(model.metrics)
    remarks: list[str] = []
    caller = private_api.keras_state_of_thread()
    # a custom one may look at weights and steps as they are after the update
    may_defer_update = private_api.is_stock_train_step(function) and all(
        private_api.is_of_keras(metric) for metric in flatten_metrics(metrics)
    )
    if strategy.extended.reduces_within_worker:
        _check_is_not_measured(strategy)
    # A plain batch may lie between two steps of a `fit`, and only the times of `fit` are wanted.
    is_measuring = strategy.compute_times.needs_clock and find_sizes(data) is not None
    if strategy.num_replicas_in_sync > 1:
        refuse_compiled_batch(model, data)
    data = share_out(strategy, data)

    request, is_training = (
        _carried_request(strategy),
        private_api.keras_step_kind(function) == "train",
    )

    def replica_step(replica_data: Nest, sizes: tf.Tensor | None) -> Nest:
        step = _make_step(strategy, replica_data, sizes)
        step.state_before = state_before(step, model)
        step.remarks = remarks
        step.seed_stream += strategy._first_seed_stream
        step.values_of_model = {id(variable.value) for variable in model.variables}
        if may_defer_update:
            step.deferrable_optimizer = model.optimizer
        step.is_keras_step = private_api.runs_keras_train_step(function)
        step.is_measured = is_measuring
        step.wants_gradient_squares = strategy.compute_times.is_measuring_gradients
        replica_data = _start_clock(strategy, step, replica_data, is_measuring)
        if is_training and step.replica_id == strategy.layout.local_replicas.start:
            # Only where backups are written: the state that it stores is copied in every step.
            step.unfinished = request.unfinished if request and request.guard else None
        storing = step.unfinished.computing(model) if step.unfinished else contextlib.nullcontext()
        with as_replica(caller), step.active(), unchanged_without_samples(step, metrics), storing:
            step.rows = at_least_one_row(step, replica_data)
            logs = function(step.rows)
        with step.active():
            return _synchronise(strategy, step, model, logs)

    with keras_hooks(), recorded_results(metrics):
        logs = run(tf.autograph.experimental.do_not_convert(replica_step), (data, find_sizes(data)))
    tell(model, remarks)
    return tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], logs)


def run_predict_step(
    strategy: TrainingStrategy, run: Run, function: Callable[[Nest], Nest], data: Nest
) -> Nest:
    """Run Keras's predict step and return the outputs of all replicas in global order."""
    data = share_out(strategy, data)
    caller = private_api.keras_state_of_thread()
    model = private_api.model_of_prediction(function)
    remarks: list[str] = []

    def replica_step(replica_data: Nest, sizes: tf.Tensor | None) -> Nest:
        step = _make_step(strategy, replica_data, sizes)
        step.is_prediction = True
        step.seed_stream += strategy._first_seed_stream
        replica_data = _start_clock(strategy, step, replica_data)
        if model is not None:
            step.state_before, step.remarks = state_before(step, model), remarks
        step.rows = at_least_one_row(step, replica_data)
        with as_replica(caller), step.active():
            outputs = function(step.rows)
            if model is not None:
                finish_prediction(step, model)
        outputs = tf.nest.map_structure(_as_tensor, outputs)
        if step.replica_id == strategy.layout.local_replicas.start and step.num_replicas > 1:
            with as_replica(caller):
                check_predictions(function, step.rows, outputs)
        outputs = drop_row_of_zeros(step, outputs)
        flat = emulated_device.wait_until_computed(step, tf.nest.flatten(outputs))
        return tf.nest.pack_sequence_as(outputs, flat), step.total

    run_step = tf.autograph.experimental.do_not_convert(replica_step)
    with keras_hooks():
        outputs, total = run(run_step, (data, find_sizes(data)))
    if model is not None:
        tell(model, remarks)
    if (request := _carried_request(strategy)) is not None:
        # of a type that no summation machine sums
        wishes = request.contribution(True, tf.int64)
        request.record(strategy.extended.sum_over_workers(wishes))
    total = strategy.experimental_local_results(total)[0]
    rows = [
        gather_rows(strategy, leaf, total, name_of(path))
        for path, leaf in keras.tree.flatten_with_path(outputs)
    ]
    return keras.tree.pack_sequence_as(outputs, rows)


def _check_is_not_measured(strategy: TrainingStrategy) -> None:
    if strategy.compute_times.is_measuring:
        raise ValueError(
            "Compute times travel in the collective of each step, which local training does not "
            "have. Received: LocalTraining together with BatchBalancer, or after it under the same "
            'strategy (or after a fit with HybridAggregation(roles="auto") that failed). Leave '
            "BatchBalancer out, set shares by hand (strategy.set_shares), and use a strategy of "
            "its own."
        )


def _make_step(
    strategy: TrainingStrategy, replica_data: Nest, sizes: tf.Tensor | None
) -> ExactStep:
    context = tf.distribute.get_replica_context()
    replica_id = context.replica_id_in_sync_group
    if tf.is_tensor(replica_id):
        replica_id = int(tf.get_static_value(replica_id))
    is_local = strategy.extended.reduces_within_worker
    group = strategy.layout.local_replicas if is_local else range(strategy.layout.num_replicas)
    if sizes is not None:
        total = tf.reduce_sum(sizes[group.start : group.stop])
        step = ExactStep(replica_id, sizes[replica_id], total)
        step.sizes = sizes
    else:
        samples = _num_rows(replica_data)
        total = strategy.extended.all_reduce_in_replica(tf.distribute.ReduceOp.SUM, samples)
        step = ExactStep(replica_id, samples, total)
    step.num_replicas, step.position = len(group), replica_id - group.start
    step.num_local_replicas = len(strategy.layout.local_replicas)
    step.may_have_no_samples = is_local
    device = strategy.extended.worker_devices[replica_id - strategy.layout.local_replicas.start]
    step.is_on_gpu = "CPU" not in device
    return step


def _num_rows(data: Nest) -> tf.Tensor:
    """Number of samples of a batch that bypassed the strategy's data path."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int64)
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if len(getattr(leaf, "shape", ())) > 0:
            return tf.cast(tf.shape(leaf)[0], tf.int64)
    raise ValueError(
        "Cannot tell how many samples the batch has, so that its gradient cannot be weighted. "
        f"Received: {data}. Expected a structure with at least one tensor of shape [samples, ...]."
    )


def _start_clock(
    strategy: TrainingStrategy, step: ExactStep, data: Nest, is_measuring: bool = False
) -> Nest:
    """Start timing the replica if its time is measured or its device is emulated."""
    first = strategy.layout.local_replicas.start
    if strategy.emulated_devices is not None:
        step.emulated_device = strategy.emulated_devices[step.replica_id - first]
    if step.emulated_device is None and not is_measuring:
        return data
    step.clock = StepClock(data, step.is_on_gpu)
    return step.clock.inputs


def _synchronise(
    strategy: TrainingStrategy, step: ExactStep, model: keras.Model, logs: Nest
) -> Nest:
    """Combine logs, moving statistics and pending gradients of all replicas in one collective."""
    logs = tf.nest.map_structure(lambda leaf: _value_of(step, leaf), logs)
    metrics = flatten_metrics(model.metrics)
    if step.unfinished is not None:
        of_metrics = {id(variable) for metric in metrics for variable in metric.variables}
        step.unfinished.check(model, step.assigned_variables.keys() - of_metrics)
    changes = changed_state(step, model, metrics)
    check_created_in_scope(strategy, [change.variable for change in changes])
    summands = [summand for change in changes for summand in change.summands]
    # A test step has no gradients that could wait for the emulated device.
    computed = emulated_device.wait_until_computed(step, _tensors(logs))
    times = _compute_time(strategy, step)
    phases = _phases(strategy, step)
    wishes = _wishes(strategy, step, logs)
    with tf.control_dependencies(computed):
        values = [*summands, *times, *phases, *wishes]
        logs, summed, gradients = cluster_logs(step, logs, values)
    if step.pending_update is not None:
        step.pending_update.finish(step, gradients)
    before = {**step.state_before, **step.metric_state_before}
    sums = iter(summed[: len(summands)])
    times = summed[len(summands) : len(summands) + len(times)]
    for change in changes:
        value = change.finish([next(sums) for _ in change.summands])
        if step.may_have_no_samples:
            value = tf.where(step.total > 0, value, before[id(change.variable)])
        change.variable.assign(value)
    is_first = step.replica_id == strategy.layout.local_replicas.start
    if times and step.clock and is_first:
        waited = step.clock.seconds_since_stop(times)
        strategy.compute_times.record(step.sizes, times[0], waited, step.global_gradient_square)
    if phases and step.clock:
        place = len(summands) + len(times)
        position = step.replica_id - strategy.layout.local_replicas.start
        if is_first:
            strategy.compute_times.phases.record(summed[place])
        strategy.compute_times.phases.finish_step(
            position,
            step.samples,
            step.clock.seconds,
            step.clock.seconds_in_collectives(),
            step.clock.end_of_collectives,
        )
    request = _carried_request(strategy)
    if request and wishes and is_first:
        request.record(summed[-1])
    return logs


def _compute_time(strategy: TrainingStrategy, step: ExactStep) -> list[tf.Tensor]:
    """This replica's measurement, to be summed over all; empty unless it was requested."""
    times = strategy.compute_times
    if not times.is_measuring or not _is_timed(step) or step.clock is None:
        return []
    return [
        times.contribution(step.replica_id, step.sizes, step.clock.seconds, step.gradient_square)
    ]


def _phases(strategy: TrainingStrategy, step: ExactStep) -> list[tf.Tensor]:
    """Where this replica's time went, to be summed over all; empty unless it was requested."""
    phases = strategy.compute_times.phases
    if not phases.is_measuring or not _is_timed(step):
        return []
    position = step.replica_id - strategy.layout.local_replicas.start
    return [phases.contribution(step.replica_id, position)]


def _is_timed(step: ExactStep) -> bool:
    # without gradients it is not a step that trains
    return (
        step.is_measured
        and step.sizes is not None
        and step.clock is not None
        and step.clock.seconds is not None
    )


def _wishes(strategy: TrainingStrategy, step: ExactStep, logs: Nest) -> list[tf.Tensor]:
    """This worker's stop requests, to be summed over all; empty if no worker waits for others."""
    request = _carried_request(strategy)
    if request is None:
        return []
    is_first = step.replica_id == strategy.layout.local_replicas.start
    # of a type that travels anyway: another type would need a separate collective
    types = [leaf.dtype for leaf in _tensors(logs) if leaf.dtype.is_floating]
    dtype = types[0] if types else tf.float32
    return [request.contribution(is_first, dtype)]


def _carried_request(strategy: TrainingStrategy) -> StopRequest | None:
    return strategy._stop_request if strategy._steps_carry_wishes else None


def _as_tensor(leaf: Leaf) -> Leaf:
    is_tensor = leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
    return leaf if is_tensor else tf.convert_to_tensor(leaf)


def _tensors(structure: Nest) -> list[Leaf]:
    return [leaf for leaf in tf.nest.flatten(structure) if tf.is_tensor(leaf)]


def _value_of(step: ExactStep, leaf: Leaf) -> Leaf:
    # A variable that a metric returns as its result is known by its id.
    is_plain = isinstance(leaf, keras.Variable) and id(leaf) not in step.metric_results
    if is_plain and id(leaf) in step.metric_state_before:  # a metric's: a part of its value
        return recorded_variable(step, leaf)
    # an eager step may have made a number of a tensor
    is_number = tf.executing_eagerly() and isinstance(leaf, (float, int, np.ndarray, np.generic))
    leaf = np.asarray(leaf) if is_number else leaf
    return tf.convert_to_tensor(leaf) if is_plain or is_number else leaf
