"""Logs of the cluster instead of each worker's own.

States of metrics are summed over replicas (or averaged, as each variable's `aggregation` says) in
one collective, and results recomputed from the sums. Another number in the logs is computed again
from results, sums and means of all samples, where the graph says how it is made of them; else it is
the mean over samples, and so are values of samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_het.strategy.exact.own_state import Assignments, Computed, OwnState
from keras_het.strategy.exact.sample_dependence import made_from
from keras_het.strategy.exact.step import ReplicaSum, StepSpec
from keras_het.value_types import Leaf, Nest


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
        return state[0]


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return a model's metrics and the metrics inside them, innermost first."""
    # Keras's steps also update the metrics of `compile` if a model defines its own `metrics`.
    every = [*model.metrics, *keras.Model.metrics.fget(model)]
    return list({id(metric): metric for metric in _flatten(every)}.values())


def _flatten(metrics: Sequence[keras.metrics.Metric]) -> Iterator[keras.metrics.Metric]:
    for metric in metrics:
        yield from _flatten(getattr(metric, "_metrics", []))
        yield metric


class Metrics:
    """States of metrics, and the logs that are computed from them."""

    def __init__(
        self,
        spec: StepSpec,
        replica_sum: ReplicaSum,
        assignments: Assignments,
        metrics: Sequence[keras.metrics.Metric],
    ) -> None:
        self._spec, self._sum, self._assignments = spec, replica_sum, assignments
        every = [variable for metric in metrics for variable in metric.variables]
        self._variables = list({id(variable): variable for variable in every}.values())
        # Tensor id to the tensor itself, which keeps its id unique, and whose result it is.
        self._records: dict[int, tuple[Leaf, _Recorded]] = {}
        self._is_computing = False
        self._computed: dict[int, Computed] = {}
        self.before = {id(v): tf.identity(tf.convert_to_tensor(v.value)) for v in self._variables}

    @contextlib.contextmanager
    def unchanged_without_samples(self) -> Iterator[None]:
        """Undo what a replica without samples writes into its metrics (0 / 0 is NaN)."""
        yield

        def restore() -> tf.Tensor:
            with self._assignments.by_keras():
                for variable, value in zip(self._variables, self.before.values(), strict=True):
                    variable.value.assign(value)  # not Keras's assign: this is no part of the step
            return tf.constant(0)

        if self._variables:
            tf.cond(self._spec.has_samples, lambda: tf.constant(0), restore)

    def record(self, metric: keras.metrics.Metric, original: Callable[[], Nest]) -> Nest:
        """Hook a metric's `result`: record which tensor is the result of which metric."""
        value = original()
        if self._is_computing:
            return value
        leaves = tf.nest.flatten(value)
        if any(id(leaf) not in self._records for leaf in leaves):
            state = tuple(tf.convert_to_tensor(v.value) for v in metric.variables)
            for path, leaf in enumerate(leaves):
                self._records.setdefault(id(leaf), (leaf, _Recorded(metric, state, path)))
        return value

    def values(self, logs: Nest) -> Nest:
        return tf.nest.map_structure(self._value, logs)

    def summands(self, logs: Nest) -> Nest:
        """What this replica adds to the states, and to the means, that logs are computed from."""
        leaves = tf.nest.flatten(logs)
        states = self._states(leaves)
        plain = [leaf for leaf in leaves if self._is_plain(leaf) and _has_mean(leaf)]
        return (
            [self._parts_of_state(record) for record in states.values()],
            [self._computed[id(leaf)][0] for leaf in leaves if id(leaf) in self._computed],
            [
                self._parts_of_mean(leaf, is_of_rows)
                for leaf, is_of_rows in zip(plain, self._are_of_rows(plain), strict=True)
            ],
        )

    def read(
        self, logs: Nest, metrics: Sequence[keras.metrics.Metric], own_state: OwnState
    ) -> list[str]:
        """Read off the graph how numbers in the logs are made; return remarks for the user."""
        # A metric continues from part to part of a share, so that what is made of it has no mean.
        if self._spec.is_whole:
            return []
        reader, made, unknown = own_state.reader(metrics), set[str](), list[str]()
        if not tf.executing_eagerly():
            handles = own_state.handles_in_graph(v for m in metrics for v in m.variables)
            made = made_from(tf.compat.v1.get_default_graph(), handles)
        for path, leaf in keras.tree.flatten_with_path(logs):
            if not tf.is_tensor(leaf) or id(leaf) in self._records:
                continue
            combination = reader.combination_of(leaf)
            if combination is not None and combination.aggregates:
                self._computed[id(leaf)] = own_state.computed(combination)
            elif self._records if tf.executing_eagerly() else leaf.name in made:
                unknown.append("/".join(map(repr, path)))
        if not unknown:
            return []
        names = ", ".join(unknown)
        self._sum.refuse_parts(
            f"a number in its logs is computed from a metric's result, {names}, and the graph "
            "does not show how",
            "Return the results themselves, or make it the result of a metric of your own.",
        )
        return [_REMARK.format(names)]

    @property
    def results(self) -> list[Leaf]:
        """All results so far."""
        return [leaf for leaf, _ in self._records.values()]

    def parts_of_result(self, leaf: tf.Tensor) -> list[tf.Tensor]:
        """What this replica adds to the state that a result is computed from."""
        return self._parts_of_state(self._records[id(leaf)][1])

    def global_result(self, leaf: tf.Tensor, state: Sequence[tf.Tensor]) -> tf.Tensor:
        record = self._records[id(leaf)][1]
        return self._results(record, state)[record.path]

    def _results(self, record: _Recorded, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        self._is_computing = True
        try:
            return tf.nest.flatten(record.metric.stateless_result(list(state)))
        finally:
            self._is_computing = False

    def _is_plain(self, leaf: Leaf) -> bool:
        return id(leaf) not in self._records and id(leaf) not in self._computed

    def global_logs(self, logs: Nest, sums: Nest) -> Nest:
        leaves = tf.nest.flatten(logs)
        records, (summed_states, summed, summed_parts) = self._states(leaves), sums
        results = {
            key: self._results(record, state)
            for (key, record), state in zip(records.items(), summed_states, strict=True)
        }
        of_computed = iter(summed)
        means = iter(
            parts[0] if len(parts) == 1 else tf.math.divide_no_nan(*parts) for parts in summed_parts
        )
        combined = []
        for leaf in leaves:
            if id(leaf) in self._records:
                record = self._records[id(leaf)][1]
                combined.append(results[id(record.state)][record.path])
            elif id(leaf) in self._computed:
                combined.append(self._computed[id(leaf)][1](next(of_computed)))
            else:
                combined.append(next(means) if _has_mean(leaf) else leaf)
        return tf.nest.pack_sequence_as(logs, combined)

    def _value(self, leaf: Leaf) -> Leaf:
        # A variable that a metric returns as its result is known by its id.
        is_plain = isinstance(leaf, keras.Variable) and id(leaf) not in self._records
        if is_plain and id(leaf) in self.before:  # a metric's: a part of its value
            value = tf.identity(tf.convert_to_tensor(leaf.value))
            self._records[id(value)] = value, _Recorded(_OneVariable((leaf,)), (value,), 0)
            return value
        # an eager step may have made a number of a tensor
        is_number = tf.executing_eagerly() and isinstance(
            leaf, float | int | np.ndarray | np.generic
        )
        leaf = np.asarray(leaf) if is_number else leaf
        return tf.convert_to_tensor(leaf) if is_plain or is_number else leaf

    def _states(self, leaves: Sequence[Leaf]) -> dict[int, _Recorded]:
        found = [self._records[id(leaf)][1] for leaf in leaves if id(leaf) in self._records]
        return {id(record.state): record for record in found}

    def _parts_of_state(self, record: _Recorded) -> list[tf.Tensor]:
        parts = []
        for variable, value in zip(record.metric.variables, record.state, strict=True):
            before = self.before.get(id(variable))
            if variable.aggregation == "sum":
                if before is not None:
                    value = tf.where(self._spec.has_samples, value, before)
                value = self._sum.joined_by(lambda _, latest: latest, value)
            elif variable.aggregation == "mean" and value.dtype.is_floating:
                value = self._spec.weighted(value)
            else:
                value = self._spec.on_first_replica(value)
            parts.append(value)
        return parts

    def _parts_of_mean(self, leaf: tf.Tensor, is_of_rows: bool) -> list[tf.Tensor]:
        """Return this replica's part of a mean over samples, or of a sum and its divisor."""
        if leaf.dtype.is_floating and not is_of_rows:
            return [self._spec.weighted(leaf)]
        dtype = leaf.dtype if leaf.dtype in (tf.float32, tf.float64) else tf.float64
        value = tf.cast(leaf, dtype)
        count = tf.cast(tf.shape(leaf)[0] if is_of_rows else self._spec.samples, dtype)
        total = tf.reduce_sum(value, axis=0) if is_of_rows else value * count
        return [self._spec.or_zero(part) for part in (total, count)]

    def _are_of_rows(self, leaves: Sequence[tf.Tensor]) -> list[bool]:
        """Tell values of samples from other vectors, alike on all replicas."""
        sizes = [leaf.shape[0] if leaf.shape.rank else 0 for leaf in leaves]
        if not tf.executing_eagerly() or not any(sizes):
            return [size is None for size in sizes]
        rows = max(1, int(self._spec.samples))
        agreeing = self._sum(tf.constant([float(size == rows) for size in sizes]))
        return [int(number) == self._spec.num_replicas for number in agreeing]


def _has_mean(leaf: Leaf) -> bool:
    return isinstance(leaf, tf.Tensor) and (
        leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool
    )


_REMARK = (
    "Numbers in the logs of a step are computed from a metric's result, and the graph does not "
    "show how: {}. Each becomes the mean over samples of what the replicas have, which is not "
    "what one device has. Compute it with keras.ops alone from what result() returns (no branch, "
    "function or loop of TensorFlow, no value for each sample), without run_eagerly=True, or make "
    "it the result of a custom metric."
)
