"""Logs of the cluster instead of each worker's own.

A metric's `result()` is computed inside the step from the state that the replica has gathered. The
states of all replicas are summed (or averaged, as each variable's `aggregation` says) in one
collective, and the results are recomputed from the sums, so the progress bar on every worker shows
what one device would show. A number in the logs that is not a metric's result is combined as the
mean over samples, and so are values of samples, along their first dimension.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from keras_het.strategy.exact.gradients import sum_with_gradients
from keras_het.strategy.exact.step import ExactStep, current_step
from keras_het.value_types import Leaf, Nest, Summand


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """Origin of a tensor in the logs: a metric, its state at the time, and the key of a dict."""

    metric: keras.metrics.Metric | _OneVariable
    state: tuple[tf.Tensor, ...]
    path: int


@dataclasses.dataclass(frozen=True)
class _OneVariable:
    """A metric's variable, treated as a metric whose result it is."""

    variables: tuple[keras.Variable, ...]

    def stateless_result(self, state: list[tf.Tensor]) -> tf.Tensor:
        """The variable's combined value."""
        return state[0]


def flatten_metrics(metrics: Sequence[keras.metrics.Metric]) -> list[keras.metrics.Metric]:
    """Return the metrics and the metrics inside them, innermost first."""
    flat: list[keras.metrics.Metric] = []
    for metric in metrics:
        flat.extend(flatten_metrics(getattr(metric, "_metrics", [])))
        flat.append(metric)
    return flat


@contextlib.contextmanager
def recorded_results(metrics: Sequence[keras.metrics.Metric]) -> Iterator[None]:
    """Make the metrics record, in the running step, which tensor is the result of which metric."""
    flat = list({id(metric): metric for metric in flatten_metrics(metrics)}.values())
    for metric in flat:
        object.__setattr__(metric, "result", _recording(metric, metric.result))
    try:
        yield
    finally:
        for metric in flat:
            object.__delattr__(metric, "result")


def _recording(metric: keras.metrics.Metric, result: Callable[[], Nest]) -> Callable[[], Nest]:
    @functools.wraps(result)
    def recording_result() -> Nest:
        value = result()
        step = current_step()
        if step is None or step.is_computing_results:
            return value
        records = step.metric_results
        leaves = tf.nest.flatten(value)
        new_leaves = [leaf for leaf in leaves if id(leaf) not in records]
        if new_leaves:
            state = tuple(tf.convert_to_tensor(v.value) for v in metric.variables)
            for path, leaf in enumerate(leaves):
                # Keeping the tensor alive keeps its id unique.
                records.setdefault(id(leaf), (leaf, _Recorded(metric, state, path)))
        return value

    return recording_result


def recorded_variable(step: ExactStep, variable: keras.Variable) -> tf.Tensor:
    """Return this replica's part of a metric's variable, to be combined like the metric's state."""
    value = tf.identity(tf.convert_to_tensor(variable.value))
    record = _Recorded(_OneVariable((variable,)), (value,), 0)
    step.metric_results[id(value)] = (value, record)
    return value


@contextlib.contextmanager
def unchanged_without_samples(
    step: ExactStep, metrics: Sequence[keras.metrics.Metric]
) -> Iterator[None]:
    """Undo what a replica without samples wrote into its metrics (0 / 0 is NaN)."""
    variables = [v for metric in metrics for v in metric.variables]
    before = [tf.identity(tf.convert_to_tensor(v.value)) for v in variables]
    step.metric_state_before = {
        id(variable): value for variable, value in zip(variables, before, strict=True)
    }
    yield

    def restore() -> tf.Tensor:
        with step.assigning():
            for variable, value in zip(variables, before, strict=True):
                variable.value.assign(value)  # not Keras's assign: this is no part of the step
        return tf.constant(0)

    if variables:
        tf.cond(step.samples > 0, lambda: tf.constant(0), restore)


def cluster_logs(
    step: ExactStep, logs: Nest, sums: Sequence[tf.Tensor]
) -> tuple[Nest, list[tf.Tensor], list[Summand]]:
    """Combine the logs of all replicas, and the gradients of a pending update."""
    records = step.metric_results
    leaves = tf.nest.flatten(logs)
    recorded = [records[id(leaf)][1] if id(leaf) in records else None for leaf in leaves]
    states = {id(r.metric): r for r in recorded if r is not None}
    plain = [
        leaf
        for leaf, record in zip(leaves, recorded, strict=True)
        if record is None and _has_mean(leaf)
    ]
    gradients, (reduced_states, reduced_plain, summed) = sum_with_gradients(
        step,
        step.pending_update,
        (
            [_contributions(step, record) for record in states.values()],
            [
                _parts_of_mean(step, *each)
                for each in zip(plain, _are_of_rows(step, plain), strict=True)
            ],
            list(sums),
        ),
    )
    results = _results(step, list(states.values()), reduced_states)
    next_plain = iter(
        sums[0] if len(sums) == 1 else tf.math.divide_no_nan(*sums) for sums in reduced_plain
    )
    combined = []
    for leaf, record in zip(leaves, recorded, strict=True):
        if record is not None:
            combined.append(results[id(record.metric)][record.path])
        else:
            combined.append(next(next_plain) if _has_mean(leaf) else leaf)
    cluster = tf.nest.pack_sequence_as(logs, combined)
    return cluster, list(summed), gradients


def _contributions(step: ExactStep, record: _Recorded) -> list[tf.Tensor]:
    """Return what this replica adds to the sum of the metric's state."""
    contributions = []
    for variable, value in zip(record.metric.variables, record.state, strict=True):
        before = step.metric_state_before.get(id(variable))
        if variable.aggregation == "sum":
            if before is not None:
                value = tf.where(step.samples > 0, value, before)
        elif variable.aggregation == "mean" and value.dtype.is_floating:
            value = step.weighted(value)
        else:
            value = step.of_first_replica(value)
        contributions.append(value)
    return contributions


def _results(
    step: ExactStep, records: Sequence[_Recorded], states: Sequence[Sequence[tf.Tensor]]
) -> dict[int, list[Leaf]]:
    step.is_computing_results = True
    try:
        return {
            id(record.metric): tf.nest.flatten(record.metric.stateless_result(list(state)))
            for record, state in zip(records, states, strict=True)
        }
    finally:
        step.is_computing_results = False


def _has_mean(leaf: Leaf) -> bool:
    return isinstance(leaf, tf.Tensor) and (
        leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool
    )


def _are_of_rows(step: ExactStep, leaves: Sequence[tf.Tensor]) -> list[bool]:
    """Tell values of samples from other vectors, alike on all replicas."""
    sizes = [leaf.shape[0] if leaf.shape.rank else 0 for leaf in leaves]
    if not tf.executing_eagerly() or not any(sizes):
        return [size is None for size in sizes]
    rows = max(1, int(step.samples))
    agreeing = step.all_reduce_sum(tf.constant([float(size == rows) for size in sizes]))
    return [int(number) == step.num_replicas for number in agreeing]


def _parts_of_mean(step: ExactStep, leaf: tf.Tensor, is_of_rows: bool) -> list[tf.Tensor]:
    """Return what this replica adds to a mean over samples: a part, or a sum and its divisor."""
    if leaf.dtype.is_floating and not is_of_rows:
        return [step.weighted(leaf)]
    dtype = leaf.dtype if leaf.dtype in (tf.float32, tf.float64) else tf.float64
    value = tf.cast(leaf, dtype)
    count = tf.cast(tf.shape(leaf)[0] if is_of_rows else step.samples, dtype)
    total = tf.reduce_sum(value, axis=0) if is_of_rows else value * count
    return [tf.where(step.samples > 0, part, tf.zeros_like(part)) for part in (total, count)]
