r"""State that a step assigns outside of its update, with the value of one device.

* State of Keras's own layers with a float type, such as moving statistics, becomes
  :math:`\sum_i w_i v_i`, the mean over samples, on every replica.
* Seeds: replica 0 draws what one device would draw; the others draw independent streams, so two
  replicas never drop the same units merely because they share a seed.
* What a custom layer assigns is read off the graph (`sample_dependence`): counters of steps stay,
  counters of samples and sums are summed, means weighted, maxima compared, and whatever is computed
  from these is recomputed. If the graph says nothing (an eager step, a branch, a neighbourhood of
  samples), a warning says so, and the user may choose with the variable's `aggregation`: "sum" if
  changes add up, "mean" for a mean over samples :math:`\sum_i w_i v_i`, "only_first_replica" for
  the value of the first replica with samples. By default, float types are combined as a mean;
  changes of integers add up unless they are equal.

The rules are the same for the replicas of a step and for the micro-batches of a pipeline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact.created_in_scope import is_shared
from keras_het.strategy.exact.sample_dependence import Combination, Kind, SampleDependence
from keras_het.strategy.exact.step import Original, ReplicaSum, StepSpec
from keras_het.value_types import EitherVariable, Leaf, Nest, TensorLike

if TYPE_CHECKING:
    from keras_het.strategy.exact.gradients import Update
    from keras_het.strategy.exact.metrics import Metrics

_logger = logging.getLogger(__name__)
_told: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()
_left_apart: weakref.WeakKeyDictionary[keras.Model, set[int]] = weakref.WeakKeyDictionary()
# A large prime keeps seeds of neighbouring replicas apart; it wraps around int32 on purpose.
_SEED_STRIDE = 1_000_003
_DECLARED = {"sum": "sum", "mean": "mean", "only_first_replica": "first"}
_SUMS = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)


Computed: TypeAlias = tuple[list[Nest], Callable[[Sequence[Nest]], tf.Tensor]]
"""What a replica adds to sums over all, and the value that is made of them."""


@dataclasses.dataclass(frozen=True)
class StateChange:
    """A variable that the step has assigned, and how replicas agree on one value for it."""

    variable: keras.Variable
    summands: list[Nest]
    finish: Callable[[Sequence[Nest]], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the values of one variable after each part of a batch become one."""

    name: str
    combination: Combination | None = None

    @property
    def tensors(self) -> list[tf.Tensor]:
        """What each part of the batch has to give."""
        return [] if self.combination is None else [t for _, t in self.combination.aggregates]

    @property
    def adds_up(self) -> bool:
        """Whether sums over several processes make the value."""
        if self.combination is None:
            return self.name in ("sum", "mean")
        return not {kind for kind, _ in self.combination.aggregates} & {Kind.MAX, Kind.MIN}


class Rules:
    """Rules of the variables that layers assign, and of which of them nothing is known."""

    def __init__(self, layers: Iterable[keras.layers.Layer], part: str) -> None:
        self._part = part
        self._of_layers_of_ones_own = {
            id(variable)
            for layer in layers
            if not private_api.is_of_keras(layer)
            for variable in private_api.own_state(layer)
        }
        self._unknown: dict[str, list[str]] = {}

    def are_for(self, variable: keras.Variable) -> bool:
        """Tell whether a layer of the user's own keeps a variable."""
        return id(variable) in self._of_layers_of_ones_own

    def rule(
        self, variable: keras.Variable, value: Any, read: Callable[[Any], Combination | None]
    ) -> Rule:
        """Return what is declared, else what the graph says, else what is likely."""
        is_mean, declared = is_float(variable), _DECLARED.get(variable.aggregation)
        if declared is not None:
            return Rule("first" if declared == "mean" and not is_mean else declared)
        combination = read(value) if self.are_for(variable) else None
        if combination is not None:
            return Rule("computed", combination)
        name = "mean" if is_mean else "first" if variable.dtype == "bool" else "changes"
        if self.are_for(variable):
            self._unknown.setdefault(name, []).append(variable.path)
        return Rule(name)

    def remarks(self) -> list[str]:
        if not self._unknown:
            return []
        becomes = {
            "mean": "the mean over samples",
            "first": f"what the first {self._part} has",
            "changes": f"the sum of each {self._part}'s change, or one of them if all are equal",
        }
        done = "; ".join(
            f"{', '.join(map(repr, paths))}: {becomes[name]}"
            for name, paths in self._unknown.items()
        )
        return [_REMARK_ON_UNKNOWN.format(done)]


def tell(model: keras.Model, remarks: Sequence[str]) -> None:
    """Tell the user what steps have found, each remark once per model."""
    told = _told.setdefault(model, set())
    for remark in dict.fromkeys(remarks):
        if remark not in told:
            told.add(remark)
            _logger.warning("%s", remark)


def variables_left_apart(model: keras.Model) -> set[int]:
    """Return the ids of variables of which the user was told that each replica keeps its own."""
    return _left_apart.get(model, set())


def carried(value: tf.Tensor) -> tf.Tensor:
    """Return the value in a type that every collective sums; integers up to 2^53 are exact."""
    return value if value.dtype.is_floating else tf.cast(value, tf.float64)


def is_float(variable: keras.Variable) -> bool:
    """Tell whether a variable has a mean."""
    return bool(tf.as_dtype(variable.value.dtype).is_floating)


class Assignments:
    """What the step assigns to which variable, apart from its update."""

    def __init__(self, update: Update) -> None:
        self._update = update
        self.is_by_keras = False
        """Whether Keras or keras_het assigns now, not the user."""
        self.recorded: dict[int, tuple[EitherVariable, list[Leaf]]] = {}
        """By id: the variable, and the values that were assigned to it, in order."""

    @contextlib.contextmanager
    def by_keras(self) -> Iterator[None]:
        before, self.is_by_keras = self.is_by_keras, True
        try:
            yield
        finally:
            self.is_by_keras = before

    def assign(self, original: Original, variable: keras.Variable, value: TensorLike) -> Any:
        """Hook the assignment of a `keras.Variable`."""
        if not self._update.is_running:
            if tf.is_symbolic_tensor(value):
                value = tf.identity(value)  # an operation as recent as the assignment
            self.recorded.setdefault(id(variable), (variable, []))[1].append(value)
        with self.by_keras():
            return original(variable, value)

    def assign_plain(
        self, original: Original, variable: tf.Variable, *args: Any, **kwargs: Any
    ) -> Any:
        """Hook all assignments to TensorFlow's variables: record those that are not Keras's."""
        if self.is_by_keras or self._update.is_running:
            return original(variable, *args, **kwargs)
        container = tf.distribute.get_strategy().extended.value_container(variable)
        values = [tf.identity(value) for value in _tensors(args, kwargs)]
        if not values and not tf.executing_eagerly():
            values = [tf.constant(0)]  # tells in which graph
        self.recorded.setdefault(id(container), (container, []))[1].extend(values)
        with self.by_keras():  # TensorFlow calls one method from another
            return original(variable, *args, **kwargs)


def _tensors(*arguments: Nest) -> Iterator[tf.Tensor]:
    for leaf in tf.nest.flatten(arguments):
        if isinstance(leaf, tf.IndexedSlices):
            yield from (leaf.indices, leaf.values)
        elif tf.is_tensor(leaf) or isinstance(leaf, keras.Variable):
            yield tf.convert_to_tensor(leaf)


class OwnState:
    """State that a step's layers and metrics keep, and the seeds that it draws."""

    def __init__(
        self,
        spec: StepSpec,
        replica_sum: ReplicaSum,
        assignments: Assignments,
        of_metrics: Metrics,
        model: keras.Model | None,
        remarks: list[str],
    ) -> None:
        self._spec, self._sum, self._assignments = spec, replica_sum, assignments
        self._of_metrics = of_metrics
        self._remarks = remarks  # what the user should know about the step
        # wherever they may be needed
        self.before = {
            id(variable): tf.identity(tf.convert_to_tensor(variable.value))
            for variable in (model.non_trainable_variables if model is not None else ())
            if spec.may_have_no_samples
            or spec.parts is not None
            or not is_float(variable)
            or variable.aggregation == "sum"
        }
        # The batch, and tensors that differ although no sample affects them.
        self._rows: Nest = ()
        self._seeds: list[tf.Tensor] = []
        self._drawn: dict[int, tuple[keras.Variable, tf.Tensor]] = {}

    def read_from(self, rows: Nest) -> None:
        """Take note of the batch, whose rows all that depends on samples is computed from."""
        self._rows = rows

    def draw_seed(
        self,
        original: Original,
        generator: keras.random.SeedGenerator,
        *args: object,
        **kwargs: object,
    ) -> tf.Tensor:
        """Hook `SeedGenerator.next`: an independent stream per replica."""
        seed = original(generator, *args, **kwargs)
        # has one value on all replicas
        self._assignments.recorded.pop(id(generator.state), None)
        self._drawn.setdefault(id(generator.state), (generator.state, seed))
        stream = self._spec.seed_stream
        if tf.is_tensor(stream) or stream != 0:
            offset = (stream * _SEED_STRIDE) % (2**31)
            seed = seed + tf.cast(tf.convert_to_tensor([offset, 0], tf.int64), seed.dtype)
        self._seeds.append(seed)
        return seed

    def aggregate(
        self,
        original: Original,
        value: Leaf,
        aggregation: tf.VariableAggregation,
        destinations: tf.Variable,
    ) -> Leaf:
        """Hook TensorFlow's sums of what is assigned to `aggregation` variables: by samples."""
        # Keras's own: TensorFlow would sum or average whole values, not changes. Those of
        # optimizers (`iterations`) have one value on all replicas, and a broadcast could not run
        # inside the `tf.cond` of a `LossScaleOptimizer`; changes to layers are combined later.
        is_of_first = aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        if self._assignments.is_by_keras or (is_of_first and self._spec.kind != "predict"):
            return value
        if not tf.is_tensor(value) or aggregation not in _SUMS:
            return original(value, aggregation, destinations)
        is_mean = aggregation == tf.VariableAggregation.MEAN
        self._sum.refuse_parts(
            f"a layer assigns the tf.Variable {destinations.name!r} with an aggregation",
            "Make it with self.add_weight(..., trainable=False).",
        )
        return self._sum(self._spec.weighted(value) if is_mean else self._spec.or_zero(value))

    def finish_prediction(
        self, changes: Sequence[StateChange], summands: Sequence[list[tf.Tensor]]
    ) -> None:
        """Combine the state that a prediction has changed, in a collective if there is any."""
        for change, sums in zip(changes, self._sum(summands), strict=True):
            change.variable.value.assign(change.finish(sums))

    def changes(
        self, model: keras.Model, metrics: Sequence[keras.metrics.Metric]
    ) -> list[StateChange]:
        """Return the state that this step has changed and replicas must agree on."""
        spec, assigned = self._spec, self._assignments.recorded
        if spec.is_whole and not spec.may_have_no_samples:
            return []
        rules = Rules(private_api.layers_with_state(model), "replica")
        reader = self.reader(metrics)
        changes = []
        for variable in model.non_trainable_variables:
            if id(variable) not in assigned:
                continue
            if rules.are_for(variable):
                rule = rules.rule(variable, variable, reader.combination)
                changes.append(self._change(variable, rule))
            elif is_float(variable) and (spec.kind != "predict" or spec.parts is not None):
                # predictions without parts combine what custom layers keep only
                changes.append(self._change(variable, Rule("mean")))
        self._remarks += rules.remarks()
        self._remark_on_sums(metrics, reader)
        of_metrics = {id(v): v for metric in metrics for v in metric.variables}.values()
        for variable in of_metrics:
            if variable.aggregation != "sum" and id(variable) in assigned:
                has_mean = variable.aggregation == "mean" and is_float(variable)
                changes.append(self._change(variable, Rule("mean" if has_mean else "first")))
        if spec.num_replicas > 1:
            combined = {id(variable) for variable in (*model.non_trainable_variables, *of_metrics)}
            self._remark_on_others(model, combined, reader)
        return changes

    def reader(self, metrics: Sequence[keras.metrics.Metric]) -> Reader:
        return Reader(
            self._assignments, self._rows, self._sum, self._seeds, self._of_metrics, metrics
        )

    def part_values(
        self, of_metrics: dict[int, tf.Tensor]
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return what the first micro-batch has changed, with the values that others start from."""
        # Sums of metrics continue in each part.
        before = {**of_metrics, **self.before}
        found = [(v, before.get(key, seed)) for key, (v, seed) in self._drawn.items()]
        for key, (variable, _) in self._assignments.recorded.items():
            if key not in before:
                self._sum.refuse_parts(
                    f"it assigns {variable.name!r} outside of the optimizer's update",
                    "Make state with self.add_weight(..., trainable=False) of a layer or the "
                    "model, keep a metric in an attribute of the model, and leave out layers "
                    "that assign weights, as SpectralNormalization.",
                )
            if key not in of_metrics or variable.aggregation != "sum":
                found.append((variable, before[key]))
        return found

    def put_back(self, values: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
        """Start another micro-batch from the state before the step."""
        with self._assignments.by_keras():
            for variable, value in values:
                variable.value.assign(value)  # not Keras's assign: this is no part of the step

    def handles_in_graph(self, variables: Iterable[EitherVariable]) -> dict[str, str]:
        """Return the names of variables by the names of their handles in the graph being built."""
        handles = ((_handle_in_graph(variable), variable) for variable in variables)
        return {handle: variable.path for handle, variable in handles if handle is not None}

    def _change(self, variable: keras.Variable, rule: Rule) -> StateChange:
        if rule.combination is not None:
            if rule.combination.aggregates:
                return StateChange(variable, *self.computed(rule.combination))
            value = tf.convert_to_tensor(variable.value)  # equal already
            return StateChange(variable, [], lambda sums: value)
        if rule.name in ("sum", "changes"):
            return self._sum_of_changes(variable, unless_equal=rule.name == "changes")
        value = tf.convert_to_tensor(variable.value)
        if rule.name == "mean":
            return StateChange(variable, [self._spec.weighted(value)], lambda sums: sums[0])
        first = self._spec.on_first_replica(carried(value))
        return StateChange(variable, [first], lambda sums: tf.cast(sums[0], value.dtype))

    def computed(self, combination: Combination) -> Computed:
        """Return what this replica adds to the aggregates, and what is computed from their sums."""
        aggregates = combination.aggregates

        def finish(sums: Sequence[Nest]) -> tf.Tensor:
            pairs = zip(aggregates, sums, strict=True)
            return combination.compute([self._of_all(*each, summed) for each, summed in pairs])

        return [self._summand(*each) for each in aggregates], finish

    def _summand(self, kind: Kind, tensor: tf.Tensor) -> Nest:
        if kind is Kind.RESULT:
            return self._of_metrics.parts_of_result(tensor)
        if kind is Kind.MEAN:
            return self._spec.weighted(tensor)
        value = carried(tensor)
        if kind in (Kind.MAX, Kind.MIN):
            nothing = value.dtype.min if kind is Kind.MAX else value.dtype.max
            largest = tf.maximum if kind is Kind.MAX else tf.minimum
            row = self._in_own_row(self._unless_empty(value, nothing))
            return self._sum.joined_by(largest, row)
        return self._unless_empty(value, 0)

    def _of_all(self, kind: Kind, tensor: tf.Tensor, summed: Nest) -> tf.Tensor:
        if kind is Kind.RESULT:
            return self._of_metrics.global_result(tensor, summed)
        if kind in (Kind.MAX, Kind.MIN):
            choose = tf.reduce_max if kind is Kind.MAX else tf.reduce_min
            summed = choose(summed, axis=0)
        result = tf.cast(summed, tensor.dtype)
        result.set_shape(tensor.shape)
        return result

    def _sum_of_changes(self, variable: keras.Variable, unless_equal: bool) -> StateChange:
        """The old value plus the changes of all replicas, or plus one of them if all are equal."""
        # Those of micro-batches are added up on their replica, beside the least and the largest.
        value = tf.convert_to_tensor(variable.value)
        before = self.before.get(id(variable))
        if before is None:  # made in this step
            before = tf.zeros_like(value)
        change = carried(value) - carried(before)
        # 0 / 0 marks replicas without samples, which computed on a row of zeros
        rows = self._in_own_row(self._unless_empty(change, float("nan")))

        def finish(sums: Sequence[tf.Tensor]) -> tf.Tensor:
            counts = ~tf.math.is_nan(sums[0])
            total = tf.reduce_sum(tf.where(counts, sums[0], tf.zeros_like(sums[0])), axis=0)
            if unless_equal:
                low, high = sums[1:] or (sums[0], sums[0])
                least = tf.reduce_min(tf.where(counts, low, low.dtype.max), axis=0)
                most = tf.reduce_max(tf.where(counts, high, high.dtype.min), axis=0)
                total = tf.where(tf.reduce_all(least == most), most, total)
            return before + tf.cast(total, value.dtype)

        bounds = (tf.minimum, tf.maximum) if unless_equal and self._spec.parts is not None else ()
        limits = [self._sum.joined_by(limit, rows) for limit in bounds]
        return StateChange(variable, [rows, *limits], finish)

    def _unless_empty(self, value: tf.Tensor, nothing: float) -> tf.Tensor:
        return tf.where(self._spec.has_samples, value, tf.cast(nothing, value.dtype))

    def _in_own_row(self, value: tf.Tensor) -> tf.Tensor:
        """Return one row per replica, zero except its own: the sum has all of them."""
        rows = [tf.zeros_like(value)] * self._spec.num_replicas
        rows[self._spec.position] = value
        return tf.stack(rows)

    def _remark_on_sums(self, metrics: Sequence[keras.metrics.Metric], reader: Reader) -> None:
        for metric in metrics:
            if type(metric).__module__.split(".")[0] == "keras":
                continue
            sums = [variable for variable in metric.variables if variable.aggregation == "sum"]
            for variable in sums:
                is_assigned = id(variable) in self._assignments.recorded
                if is_assigned and not reader.adds_samples(variable, sums):
                    self._remarks.append(_remark_on_metric(metric, variable))

    def _remark_on_others(self, model: keras.Model, combined: set[int], reader: Reader) -> None:
        """Name variables that nothing combines, to which replicas assign different values."""
        strategy = tf.distribute.get_strategy()
        apart = [
            variable
            for key, (variable, _) in self._assignments.recorded.items()
            if key not in combined and (reader.differs(key) or is_shared(strategy, variable))
        ]
        if apart:
            _left_apart.setdefault(model, set()).update(map(id, apart))
            names = ", ".join(_name(model, variable) for variable in apart)
            self._remarks.append(_REMARK_ON_OTHERS.format(names))


class Reader:
    """Reader of the step's assignments to variables from the graph; starts on first use."""

    def __init__(
        self,
        assignments: Assignments,
        rows: Nest,
        replica_sum: ReplicaSum,
        seeds: Sequence[tf.Tensor],
        of_metrics: Metrics,
        metrics: Sequence[keras.metrics.Metric],
    ) -> None:
        self._assigned = assignments.recorded
        self._rows, self._sum, self._seeds = rows, replica_sum, seeds
        self._of_metrics = of_metrics
        # Replicas hold their own parts of these, before a step too.
        self._parts = [v for each in metrics for v in each.variables if v.aggregation == "sum"]
        self._dependence: SampleDependence | None = None
        self._handles: dict[int, str] = {}

    def combination_of(self, value: tf.Tensor) -> Combination | None:
        """Return a value as a function of aggregates, None if unknown."""
        dependence = self._of_graph
        return None if dependence is None else dependence.combination(value)

    def combination(self, variable: keras.Variable) -> Combination | None:
        """The same for a variable."""
        dependence = self._of_graph
        if dependence is None or not self._is_known(id(variable)):
            return None
        return dependence.combination(self._assigned[id(variable)][1][-1])

    def adds_samples(self, variable: keras.Variable, sums: Sequence[keras.Variable]) -> bool:
        """Tell whether a step adds a function of samples to one of `sums`; True if unknown."""
        dependence = self._of_graph
        if dependence is None or not self._is_known(id(variable)):
            return True
        handle = self._handles[id(variable)]
        partial = [self._handles[id(each)] for each in sums if id(each) in self._handles]
        values = self._assigned[id(variable)][1]
        return all(dependence.adds_samples(value, handle, partial) for value in values)

    def differs(self, key: int) -> bool:
        """Tell whether replicas may have assigned different values to a variable, by its id."""
        dependence = self._of_graph
        return any(
            dependence is None or not _is_here(v) or dependence.kind(v) is not Kind.EQUAL
            for v in self._assigned[key][1]
        )

    @property
    def _of_graph(self) -> SampleDependence | None:
        """None without a graph."""
        if tf.executing_eagerly():
            return None
        if self._dependence is None:
            assigned: dict[str, list[tf.Tensor] | None] = {}
            for key, (variable, values) in self._assigned.items():
                handle = _handle_in_graph(variable)
                if handle is not None and not isinstance(variable, tf.Variable):
                    self._handles[key] = handle
                    assigned[handle] = values if self._is_known(key) else None
            assigned |= dict.fromkeys(filter(None, map(_handle_in_graph, self._parts)))
            self._dependence = SampleDependence(
                rows=filter(tf.is_symbolic_tensor, _dense_leaves(self._rows)),
                equal=filter(tf.is_symbolic_tensor, self._sum.results),
                unequal=filter(tf.is_symbolic_tensor, self._seeds),
                assigned=assigned,
                results=filter(_is_here, self._of_metrics.results),
                means=filter(_is_here, self._sum.means),
            )
            for key, (variable, _) in self._assigned.items():
                handle = _handle_in_graph(variable)
                if handle is not None and isinstance(variable, tf.Variable) and self.differs(key):
                    assigned[handle] = None
        return self._dependence

    def _is_known(self, key: int) -> bool:
        return key in self._handles and all(map(_is_here, self._assigned[key][1]))


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


def _name(model: keras.Model, variable: EitherVariable) -> str:
    """A variable's name, and the attribute that holds it: TensorFlow's names are often equal."""
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


_REMARK_ON_UNKNOWN = (
    "How state that a layer assigns depends on the samples cannot be read off this step "
    "(run_eagerly=True, a branch, or an operation that is not known). It becomes, which may "
    'differ from one device: {}. Say what it is: self.add_weight(..., aggregation="'
    'sum") if changes of replicas add up, as sums and counts of samples do, "mean" for a mean '
    'over samples, "only_first_replica" for what is the same on every replica.'
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
