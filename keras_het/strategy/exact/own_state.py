r"""State that custom layers and metrics assign in a step, with the value of one device.

What a layer assigns is read off the graph (`sample_dependence`): counters of steps stay, counters
of samples and sums are summed, means weighted, maxima compared, and whatever is computed from these
is recomputed. If the graph says nothing (an eager step, a branch, a neighbourhood of samples), the
user is told, and may choose with the variable's `aggregation`:

* "sum": the replicas' changes add up;
* "mean": the value is a mean over samples, :math:`\sum_i w_i v_i`;
* "only_first_replica": that of the first replica with samples.

By default, float types are combined as a mean; changes of integers add up unless they are equal.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact.created_in_scope import is_shared
from keras_het.strategy.exact.sample_dependence import Combination, Kind, SampleDependence
from keras_het.strategy.exact.step import ExactStep
from keras_het.value_types import EitherVariable, Leaf, Nest

_logger = logging.getLogger(__name__)
_told: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class StateChange:
    """A variable that the step has assigned, and how replicas agree on one value for it."""

    variable: keras.Variable
    summands: list[tf.Tensor]
    finish: Callable[[Sequence[tf.Tensor]], tf.Tensor]


def state_before(step: ExactStep, model: keras.Model) -> dict[int, tf.Tensor]:
    """Return the values of state before the step, by variable id, wherever they may be needed."""
    return {
        id(variable): tf.identity(tf.convert_to_tensor(variable.value))
        for variable in model.non_trainable_variables
        if step.may_have_no_samples or not is_float(variable) or variable.aggregation == "sum"
    }


def finish_prediction(step: ExactStep, model: keras.Model) -> None:
    """Combine the state that a prediction has changed, in a collective if there is any."""
    changes = changed_state(step, model, [])
    summands = [change.summands for change in changes]
    sums = step.all_reduce_sum(summands) if tf.nest.flatten(summands) else summands
    for change, own in zip(changes, sums, strict=True):
        change.variable.value.assign(change.finish(own))


def changed_state(
    step: ExactStep, model: keras.Model, metrics: Sequence[keras.metrics.Metric]
) -> list[StateChange]:
    """Return the state that this step has changed and replicas must agree on.

    In a prediction only custom layers have such state.
    """
    if step.num_replicas == 1 and not step.may_have_no_samples:
        return []
    own = {
        id(variable)
        for layer in private_api.layers_with_state(model)
        if not private_api.is_of_keras(layer)
        for variable in private_api.own_state(layer)
    }
    dependence = _Reader(step)
    changes, unknown = [], dict[str, list[str]]()
    for variable in model.non_trainable_variables:
        if id(variable) not in step.assigned_variables:
            continue
        if id(variable) in own:
            changes.append(_own_change(step, variable, dependence, unknown))
        elif is_float(variable) and not step.is_prediction:
            changes.append(mean_of(step, variable))
    if unknown:
        step.remarks.append(remark_on_unknown(unknown))
    _remark_on_sums(step, metrics, dependence)
    of_metrics = {id(v): v for metric in metrics for v in metric.variables}.values()
    changes += [
        mean_of(step, variable) if variable.aggregation == "mean" else _first(step, variable)
        for variable in of_metrics
        if variable.aggregation != "sum" and id(variable) in step.assigned_variables
    ]
    if step.num_replicas > 1:
        combined = {id(variable) for variable in (*model.non_trainable_variables, *of_metrics)}
        _remark_on_others(step, model, combined, dependence)
    return changes


def tell(model: keras.Model, remarks: Sequence[str]) -> None:
    """Tell the user what steps have found, each remark once per model."""
    told = _told.setdefault(model, set())
    for remark in dict.fromkeys(remarks):
        if remark not in told:
            told.add(remark)
            _logger.warning("%s", remark)


def mean_of(step: ExactStep, variable: keras.Variable) -> StateChange:
    """The mean over samples; the first replica's value if the type has no means."""
    if not is_float(variable):
        return _first(step, variable)
    value = tf.convert_to_tensor(variable.value)
    return StateChange(variable, [step.weighted(value)], lambda sums: sums[0])


def _first(step: ExactStep, variable: keras.Variable) -> StateChange:
    value = tf.convert_to_tensor(variable.value)
    first = step.of_first_replica(carried(value))
    return StateChange(variable, [first], lambda sums: tf.cast(sums[0], value.dtype))


def _own_change(
    step: ExactStep, variable: keras.Variable, dependence: _Reader, unknown: dict[str, list[str]]
) -> StateChange:
    if variable.aggregation == "sum":
        return _sum_of_changes(step, variable, unless_equal=False)
    if variable.aggregation == "mean":
        return mean_of(step, variable)
    if variable.aggregation == "only_first_replica":
        return _first(step, variable)
    combination = dependence.combination(variable)
    if combination is not None:
        return _combined(step, variable, combination)
    if is_float(variable):
        unknown.setdefault("the mean over samples", []).append(variable.path)
        return mean_of(step, variable)
    if variable.dtype == "bool":
        unknown.setdefault("what the first replica has", []).append(variable.path)
        return _first(step, variable)
    added = "the sum of the replicas' changes, or one of them if all are equal"
    unknown.setdefault(added, []).append(variable.path)
    return _sum_of_changes(step, variable, unless_equal=True)


def _combined(step: ExactStep, variable: keras.Variable, combination: Combination) -> StateChange:
    if not combination.aggregates:  # equal already
        value = tf.convert_to_tensor(variable.value)
        return StateChange(variable, [], lambda sums: value)
    aggregates = combination.aggregates

    def finish(sums: Sequence[tf.Tensor]) -> tf.Tensor:
        return combination.compute(
            [
                _of_all(kind, tensor, summed)
                for (kind, tensor), summed in zip(aggregates, sums, strict=True)
            ]
        )

    return StateChange(variable, [_summand(step, *each) for each in aggregates], finish)


def _summand(step: ExactStep, kind: Kind, tensor: tf.Tensor) -> tf.Tensor:
    if kind is Kind.MEAN:
        return step.weighted(tensor)
    value = carried(tensor)
    if kind in (Kind.MAX, Kind.MIN):
        nothing = value.dtype.min if kind is Kind.MAX else value.dtype.max
        return _in_own_row(step, _unless_empty(step, value, nothing))
    return _unless_empty(step, value, 0)


def _of_all(kind: Kind, tensor: tf.Tensor, summed: tf.Tensor) -> tf.Tensor:
    if kind in (Kind.MAX, Kind.MIN):
        choose = tf.reduce_max if kind is Kind.MAX else tf.reduce_min
        summed = choose(summed, axis=0)
    result = tf.cast(summed, tensor.dtype)
    result.set_shape(tensor.shape)
    return result


def _sum_of_changes(step: ExactStep, variable: keras.Variable, unless_equal: bool) -> StateChange:
    """The old value plus the changes of all replicas, or plus one of them if all are equal."""
    value = tf.convert_to_tensor(variable.value)
    before = step.state_before.get(id(variable))
    if before is None:  # made in this step
        before = tf.zeros_like(value)
    change = carried(value) - carried(before)
    # 0 / 0 marks replicas without samples, which computed on a row of zeros
    own = _unless_empty(step, change, float("nan"))
    rows = _in_own_row(step, own)

    def finish(sums: Sequence[tf.Tensor]) -> tf.Tensor:
        counts = ~tf.math.is_nan(sums[0])
        total = tf.reduce_sum(tf.where(counts, sums[0], tf.zeros_like(sums[0])), axis=0)
        if unless_equal:
            least = tf.reduce_min(tf.where(counts, sums[0], sums[0].dtype.max), axis=0)
            most = tf.reduce_max(tf.where(counts, sums[0], sums[0].dtype.min), axis=0)
            total = tf.where(tf.reduce_all(least == most), most, total)
        return before + tf.cast(total, value.dtype)

    return StateChange(variable, [rows], finish)


def carried(value: tf.Tensor) -> tf.Tensor:
    """Return the value in a type that every collective sums; integers up to 2^53 are exact."""
    return value if value.dtype.is_floating else tf.cast(value, tf.float64)


def _unless_empty(step: ExactStep, value: tf.Tensor, nothing: float) -> tf.Tensor:
    return tf.where(step.samples > 0, value, tf.cast(nothing, value.dtype))


def _in_own_row(step: ExactStep, value: tf.Tensor) -> tf.Tensor:
    """Return one row per replica, zero except its own: the sum over replicas has all of them."""
    rows = [tf.zeros_like(value)] * step.num_replicas
    rows[step.position] = value
    return tf.stack(rows)


class _Reader:
    """Reader of the step's assignments to variables from the graph; starts on first use."""

    def __init__(self, step: ExactStep) -> None:
        self._step = step
        self._dependence: SampleDependence | None = None
        self._handles: dict[int, str] = {}

    def combination(self, variable: keras.Variable) -> Combination | None:
        """Return a variable's value as a function of aggregates, None if unknown."""
        dependence = self.dependence
        value = self._step.assigned_variables[id(variable)][1][-1]
        if dependence is None or not self._is_known(id(variable)):
            return None
        return dependence.combination(value)

    def adds_samples(self, variable: keras.Variable, sums: Sequence[keras.Variable]) -> bool:
        """Tell whether a step adds a function of samples to one of `sums`; True if unknown."""
        dependence = self.dependence
        if dependence is None or not self._is_known(id(variable)):
            return True
        handle = self._handles[id(variable)]
        partial = [self._handles[id(each)] for each in sums if id(each) in self._handles]
        values = self._step.assigned_variables[id(variable)][1]
        return all(dependence.adds_samples(value, handle, partial) for value in values)

    def differs(self, key: int) -> bool:
        """Tell whether replicas may have assigned different values to a variable, by its id."""
        dependence = self.dependence
        values = self._step.assigned_variables[key][1]
        return any(
            dependence is None or not _is_here(v) or dependence.kind(v) is not Kind.EQUAL
            for v in values
        )

    @property
    def dependence(self) -> SampleDependence | None:
        """The reader of the graph, None without a graph."""
        if tf.executing_eagerly():
            return None
        if self._dependence is None:
            step = self._step
            assigned: dict[str, list[tf.Tensor] | None] = {}
            for key, (variable, values) in step.assigned_variables.items():
                handle = _handle_in_graph(variable)
                if handle is not None and not isinstance(variable, tf.Variable):
                    self._handles[key] = handle
                    assigned[handle] = values if self._is_known(key) else None
            self._dependence = SampleDependence(
                rows=filter(tf.is_symbolic_tensor, _dense_leaves(step.rows)),
                equal=filter(tf.is_symbolic_tensor, step.reduced),
                unequal=filter(tf.is_symbolic_tensor, step.own_seeds),
                assigned=assigned,
            )
            for key, (variable, _) in step.assigned_variables.items():
                handle = _handle_in_graph(variable)
                if handle is not None and isinstance(variable, tf.Variable) and self.differs(key):
                    assigned[handle] = None
        return self._dependence

    def _is_known(self, key: int) -> bool:
        return key in self._handles and all(map(_is_here, self._step.assigned_variables[key][1]))


def _is_here(value: Leaf) -> bool:
    return tf.is_symbolic_tensor(value) and value.graph is tf.compat.v1.get_default_graph()


def _dense_leaves(batch: Nest) -> list[tf.Tensor]:
    leaves = [getattr(leaf, "flat_values", leaf) for leaf in tf.nest.flatten(batch)]
    return [leaf for leaf in leaves if tf.is_tensor(leaf) and leaf.shape.rank != 0]


def _handle_in_graph(variable: EitherVariable) -> str | None:
    """The name of a variable's resource handle in the graph that is being built."""
    of_keras = isinstance(variable, private_api.KerasTensorFlowVariable)
    tensor = tf.convert_to_tensor(variable.value if of_keras else variable)
    while tensor.op.type in ("Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return str(tensor.op.inputs[0].name) if tensor.op.type == "ReadVariableOp" else None


def _remark_on_sums(
    step: ExactStep, metrics: Sequence[keras.metrics.Metric], dependence: _Reader
) -> None:
    for metric in metrics:
        if type(metric).__module__.split(".")[0] == "keras":
            continue
        sums = [variable for variable in metric.variables if variable.aggregation == "sum"]
        for variable in sums:
            is_assigned = id(variable) in step.assigned_variables
            if is_assigned and not dependence.adds_samples(variable, sums):
                step.remarks.append(_remark_on_metric(metric, variable))


def _remark_on_others(
    step: ExactStep, model: keras.Model, combined: set[int], dependence: _Reader
) -> None:
    """Name the variables that nothing combines and to which replicas assign different values."""
    strategy = tf.distribute.get_strategy()
    apart = [
        variable
        for key, (variable, _) in step.assigned_variables.items()
        if key not in combined and (dependence.differs(key) or is_shared(strategy, variable))
    ]
    if apart:
        step.remarks.append(_REMARK_ON_OTHERS.format(", ".join(_name(model, v) for v in apart)))


def _name(model: keras.Model, variable: EitherVariable) -> str:
    """A variable's name, and the attribute that holds it: those of TensorFlow are often equal."""
    holders = [
        f" ({type(layer).__name__}.{name})"
        for layer in private_api.layers_with_state(model)
        for name, value in vars(layer).items()
        if value is variable
    ]
    return f"{getattr(variable, 'path', None) or variable.name!r}" + "".join(holders[:1])


_REMARK_ON_OTHERS = (
    "A step assigns values that depend on its replica's samples to variables that are not combined "
    "over replicas: each keeps its own value, which is not that of one device. Received: {}. Make "
    "state with self.add_weight(...) of a layer or the model, in strategy.scope(). Before a step "
    "assigns to weights, variables of an optimizer or a tf.Variable, as SAM does, it must take "
    "keras_het.reduce_over_replicas(...) of what it computes from samples."
)


def _remark_on_metric(metric: keras.metrics.Metric, variable: keras.Variable) -> str:
    return (
        f"The metric {metric.name!r} ({type(metric).__name__}) assigns its state {variable.name!r} "
        "a value that is not what it held plus what samples alone say: a maximum, a count of "
        "steps, or a mean that is updated from what was held, as Welford's. "
        'Its aggregation is "sum", so that the values of all replicas are added '
        "up, which is not what one device has. Make it with self.add_variable(..., "
        'aggregation="mean") if replicas\' values are to be averaged by their samples, with '
        '"only_first_replica" if all hold the same, or add up sums and counts and compute the rest '
        "in result(). Keras has no aggregation for maxima: keep them in the state of a layer."
    )


def remark_on_unknown(unknown: dict[str, list[str]]) -> str:
    """Return what to tell the user of state about which nothing is known."""
    done = "; ".join(f"{', '.join(map(repr, paths))}: {what}" for what, paths in unknown.items())
    return (
        "How state that a layer assigns depends on the samples cannot be read off this step "
        "(run_eagerly=True, a branch, or an operation that is not known). It becomes, which may "
        f"differ from one device: {done}. Say what it is: self.add_weight(..., aggregation="
        '"sum") if changes of replicas add up, as sums and counts of samples do, "mean" for a mean '
        'over samples, "only_first_replica" for what is the same on every replica.'
    )


def is_float(variable: keras.Variable) -> bool:
    """Tell whether a variable has a mean."""
    return bool(tf.as_dtype(variable.value.dtype).is_floating)
