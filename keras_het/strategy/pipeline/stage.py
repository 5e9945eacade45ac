"""One stage of a pipeline: its layers as pure functions, and its pass as one traced function."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_het import keras_graphs_adapter, private_api
from keras_het.planning.pipeline.plan import Stage as PlannedStage
from keras_het.strategy.exact.own_state import Rule, Rules, StateChange, carried
from keras_het.strategy.exact.sample_dependence import Combination, Kind, SampleDependence
from keras_het.strategy.pipeline.model_units import ModelUnits, Token, Unit
from keras_het.value_types import Nest


@dataclasses.dataclass
class Values:
    """What layer calls read and make."""

    tensors: dict[Token, tf.Tensor] = dataclasses.field(default_factory=dict)
    masks: dict[Token, tf.Tensor] = dataclasses.field(default_factory=dict)
    state: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    means: list[tf.Tensor] = dataclasses.field(default_factory=list)
    sums: list[tf.Tensor] = dataclasses.field(default_factory=list)


# A layer, because Keras forgets what a layer gave to `add_loss` when it is called again, unless
# both calls lie within that of an outer layer.
class Segment(keras.layers.Layer):
    """Consecutive layer calls."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(autocast=False)
        self._units = list(units)
        layers = {id(unit.layer): unit.layer for unit in units if unit.layer is not None}
        self.parts = list(layers.values())
        self.made = [token for unit in units for token in unit.outputs]
        inside = set(self.made)
        taken = (token for unit in units for token in unit.inputs.values())
        self.taken = list(dict.fromkeys(token for token in taken if token not in inside))
        self.assigned: set[int] = set()
        self.supports_masking = True
        self.built = True

    @property
    def state(self) -> list[keras.Variable]:
        return list(self.non_trainable_variables)

    def call(
        self,
        tensors: list[tf.Tensor],
        masks: list[tf.Tensor | None],
        training: bool | None = None,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
        values = {}
        for token, tensor, mask in zip(self.taken, tensors, masks, strict=True):
            values[token] = tensor
            if mask is not None:
                values[token] = tf.identity(tensor)
                values[token]._keras_mask = mask
        for unit in self._units:
            arguments = {key: values[token] for key, token in unit.inputs.items()}
            results = keras_graphs_adapter.call_node(unit.node, unit.operation, arguments, training)
            values.update(zip(unit.outputs, results, strict=True))
        made = [values[token] for token in self.made]
        masks_made = [getattr(value, "_keras_mask", None) for value in made]
        return [tf.identity(value) for value in made], masks_made

    def run(self, weights: dict[int, tf.Tensor], values: Values, training: bool) -> None:
        """Run the layer calls on given weights and state, and add the results to `values`."""
        given = [
            *((v, weights[id(v)]) for v in self.trainable_variables),
            *((v, values.state[id(v)]) for v in self.state),
        ]
        with keras.StatelessScope(given, collect_losses=True) as scope:
            made, masks = self(
                [values.tensors[token] for token in self.taken],
                [values.masks.get(token) for token in self.taken],
                training=training,
            )
        values.tensors.update(zip(self.made, made, strict=True))
        values.masks.update(
            (token, mask) for token, mask in zip(self.made, masks, strict=True) if mask is not None
        )
        for variable in self.trainable_variables:
            if scope.get_current_value(variable) is not weights[id(variable)]:
                raise ValueError(
                    "In a pipeline only the optimizer changes weights. Received: a layer that "
                    f"assigns to {variable.path!r}, as SpectralNormalization does. Train it under "
                    "keras_het.HeterogeneousStrategy."
                )
        for variable in self.state:
            value = scope.get_current_value(variable)
            if value is not values.state[id(variable)]:
                self.assigned.add(id(variable))
            values.state[id(variable)] = tf.convert_to_tensor(value)
        for loss in scope.losses:
            (values.sums if loss.shape.rank else values.means).append(tf.reduce_sum(loss))

    def run_twice(self, weights: dict[int, tf.Tensor], values: Values, training: bool) -> None:
        """Do what `run` does, but keep only what the calls take: the gradient repeats them."""
        # The calls are pure functions, so dropout and batch normalization see the same again.
        variables = self.trainable_variables
        floats = [token for token in self.taken if values.tensors[token].dtype.is_floating]
        given = Values(dict(values.tensors), dict(values.masks), dict(values.state))
        shape: list[Values] = []

        def forward(*arguments: tf.Tensor) -> list[tf.Tensor]:
            result = Values(dict(given.tensors), dict(given.masks), dict(given.state))
            result.tensors.update(zip(floats, arguments, strict=False))
            own = dict(zip(map(id, variables), arguments[len(floats) :], strict=True))
            self.run(own, result, training)
            shape[:] = [result]
            return [
                *(result.tensors[token] for token in self.made),
                *(result.masks[token] for token in self.made if token in result.masks),
                *(result.state[id(variable)] for variable in self.state),
                *result.means,
                *result.sums,
            ]

        @tf.custom_gradient
        def remembers_inputs(*arguments: tf.Tensor) -> object:
            results = forward(*arguments)

            def backward(*gradients: tf.Tensor) -> list[tf.Tensor | None]:
                targets = [g for g in gradients if g is not None]
                with tf.control_dependencies(targets):
                    again = [tf.identity(argument) for argument in arguments]
                    with tf.GradientTape(watch_accessed_variables=False) as tape:
                        tape.watch(again)
                        repeated = forward(*again)
                chosen = [i for i, value in enumerate(repeated) if value.dtype.is_floating]
                return list(
                    tape.gradient(
                        [repeated[i] for i in chosen],
                        again,
                        output_gradients=[gradients[i] for i in chosen],
                        unconnected_gradients="zero",
                    )
                )

            return results, backward

        results = iter(
            remembers_inputs(
                *(values.tensors[token] for token in floats), *(weights[id(v)] for v in variables)
            )
        )
        (result,) = shape
        values.tensors.update((token, next(results)) for token in self.made)
        values.masks.update((t, next(results)) for t in self.made if t in result.masks)
        values.state.update((id(variable), next(results)) for variable in self.state)
        values.means.extend(next(results) for _ in result.means)
        values.sums.extend(next(results) for _ in result.sums)


class PassResult(NamedTuple):
    """What a stage's forward pass on one micro-batch has made."""

    tensors: dict[Token, tf.Tensor]
    masks: dict[Token, tf.Tensor]
    state: list[tf.Tensor]
    means: tf.Tensor
    sums: tf.Tensor
    aggregates: dict[int, list[tf.Tensor]]


class Stage:
    """Layers of a model that run on the same devices."""

    def __init__(self, units: ModelUnits, planned: PlannedStage) -> None:
        own = range(planned.first, planned.end)
        recomputed = set(planned.recomputed)
        self._segments = [
            (is_recomputed, Segment([units.units[i] for i in group]))
            for is_recomputed, group in itertools.groupby(own, key=recomputed.__contains__)
        ]
        made = {token for _, segment in self._segments for token in segment.made}
        taken = (token for _, segment in self._segments for token in segment.taken)
        self.taken: list[Token] = list(dict.fromkeys(t for t in taken if t not in made))
        self.sent: list[Token] = [t for t in made if units.last_use.get(t, -1) >= planned.end]
        self.weights = _distinct(v for _, s in self._segments for v in s.trainable_variables)
        self.state = _distinct(v for _, s in self._segments for v in s.state)
        self.layers = list({id(p): p for _, s in self._segments for p in s.parts}.values())
        seeds = {id(v) for layer in self.layers for v in keras_graphs_adapter.seeds_of(layer)}
        self._is_seed = [id(variable) in seeds for variable in self.state]
        self._rules: dict[bool, dict[int, Rule]] = {}
        self.remarks: list[str] = []
        self._functions = {
            training: tf.function(
                functools.partial(self._run, training=training),
                autograph=False,
                experimental_attributes={"_noinline": True},
            )
            for training in (True, False)
        }

    def assigned(self) -> list[int]:
        """Return which of `state` the layers assign; once a pass has been traced."""
        found = set().union(*(segment.assigned for _, segment in self._segments))
        return [i for i, variable in enumerate(self.state) if id(variable) in found]

    def check_may_be_shared(self, training: bool) -> None:
        """Refuse state that processes with different micro-batches would not have in common."""
        rules = self._rules[training].items()
        apart = [self.state[i].path for i, rule in rules if not rule.adds_up]
        if apart:
            raise ValueError(
                "A stage on several processes cannot have layers that keep maxima, minima, the "
                "first replica's state or integers of unknown meaning: each process would have its "
                f"own. Received: {', '.join(apart)}. Give split_after=[...] cuts that leave these "
                "layers to a stage on one process, or train under keras_het.HeterogeneousStrategy."
            )

    def forward(
        self,
        weights: list[tf.Tensor],
        state: list[tf.Tensor],
        tensors: dict[Token, tf.Tensor],
        masks: dict[Token, tf.Tensor],
        training: bool,
    ) -> PassResult:
        """Run the layers on one micro-batch; in the graph, one call of a function traced once."""
        given = [tensors[token] for token in self.taken]
        given_masks = {str(token): masks[token] for token in self.taken if token in masks}
        found: Nest = self._functions[training](weights, state, given, given_masks)
        made, made_masks, after, means, sums, aggregates = found
        return PassResult(
            dict(zip(self.sent, made, strict=True)),
            {int(token): mask for token, mask in made_masks.items()},
            after,
            means,
            sums,
            {int(place): parts for place, parts in aggregates.items()},
        )

    def _run(
        self,
        weights: list[tf.Tensor],
        state: list[tf.Tensor],
        tensors: list[tf.Tensor],
        masks: dict[str, tf.Tensor],
        training: bool,
    ) -> Nest:
        values = Values(
            dict(zip(self.taken, tensors, strict=True)),
            {int(token): mask for token, mask in masks.items()},
            dict(zip(map(id, self.state), state, strict=True)),
        )
        by_id = dict(zip(map(id, self.weights), weights, strict=True))
        for is_recomputed, segment in self._segments:
            run = segment.run_twice if is_recomputed and training else segment.run
            run(by_id, values, training)
        after = [values.state[id(variable)] for variable in self.state]
        places = [i for i in self.assigned() if not self._is_seed[i]]
        rules, self.remarks = _rules_of(
            [(self.state[i], after[i]) for i in places],
            self.layers,
            rows=[*tensors, *masks.values()],
            equal=[*weights, *(v for i, v in enumerate(state) if not self._is_seed[i])],
        )
        self._rules[training] = dict(zip(places, rules, strict=True))
        return (
            [values.tensors[token] for token in self.sent],
            {str(t): values.masks[t] for t in self.sent if t in values.masks},
            after,
            _total(values.means),
            _total(values.sums),
            {str(i): rule.tensors for i, rule in self._rules[training].items()},
        )

    def state_of_micro_batch(self, state: list[tf.Tensor], number: int) -> list[tf.Tensor]:
        """Return the state with which a micro-batch begins: its random numbers are its own."""
        return [
            value + tf.constant([number, 0], value.dtype) if is_seed and number else value
            for value, is_seed in zip(state, self._is_seed, strict=True)
        ]

    def changes(
        self,
        before: list[tf.Tensor],
        after: dict[int, PassResult],
        weight: Callable[[int], tf.Tensor],
        training: bool,
    ) -> list[StateChange]:
        """Combine the state that the micro-batches left, each of which began with the same."""
        results = list(after.values())
        micro_batches = _MicroBatchResults([weight(m) for m in after])
        changes = []
        for i in self.assigned():
            variable, ends = self.state[i], [result.state[i] for result in results]
            if self._is_seed[i]:
                end = ends[0] - tf.constant([min(after), 0], ends[0].dtype)
                changes.append(_known_change(variable, end))
            elif (rule := self._rules[training].get(i)) is not None:
                parts = [result.aggregates.get(i, []) for result in results]
                changes.append(micro_batches.change(variable, rule, before[i], ends, parts))
        return changes


def _distinct(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())


def _total(losses: list[tf.Tensor]) -> tf.Tensor:
    """Sum losses, in float32 if they have several types, as Keras does."""
    if not losses:
        return tf.zeros([], keras.config.floatx())
    dtypes = {loss.dtype for loss in losses}
    dtype = dtypes.pop() if len(dtypes) == 1 else keras.config.floatx()
    return tf.add_n([tf.cast(loss, dtype) for loss in losses])


def _rules_of(
    assigned: Sequence[tuple[keras.Variable, tf.Tensor]],
    layers: Sequence[keras.layers.Layer],
    rows: Sequence[tf.Tensor],
    equal: Sequence[tf.Tensor],
) -> tuple[list[Rule], list[str]]:
    parts = tf.nest.flatten(list(rows), expand_composites=True)
    rows = [value for value in parts if value.shape.rank != 0]
    dependence = SampleDependence(rows, equal, [], {}, keeps_equal=True)
    nested = (part for layer in layers for part in private_api.layers_with_state(layer))
    rules = Rules(nested, "micro-batch")
    found = [rules.rule(variable, value, dependence.combination) for variable, value in assigned]
    return found, rules.remarks()


def _known_change(variable: keras.Variable, value: tf.Tensor) -> StateChange:
    return StateChange(variable, [], lambda _: value)


class _MicroBatchResults:
    """Combines what the micro-batches of this process have left, each as a replica's share."""

    def __init__(self, weights: Sequence[tf.Tensor]) -> None:
        self._weights = weights

    def change(
        self,
        variable: keras.Variable,
        rule: Rule,
        before: tf.Tensor,
        ends: Sequence[tf.Tensor],
        parts: Sequence[Sequence[tf.Tensor]],
    ) -> StateChange:
        """Return a variable's change; its summands are to be added up over processes."""
        if rule.combination is not None:
            return self._computed(variable, rule.combination, list(zip(*parts, strict=True)))
        if rule.name == "mean":
            return StateChange(variable, [self._mean(ends)], lambda sums: sums[0])
        if rule.name == "first":
            return _known_change(variable, ends[0])
        changes = [carried(end) - carried(before) for end in ends]
        total = self._sum(changes)
        if rule.name == "changes":
            are_equal = tf.reduce_all(tf.stack([tf.reduce_all(c == changes[0]) for c in changes]))
            total = tf.where(are_equal, changes[0], total)
        return StateChange(variable, [total], lambda sums: before + tf.cast(sums[0], before.dtype))

    def _computed(
        self,
        variable: keras.Variable,
        combination: Combination,
        columns: Sequence[Sequence[tf.Tensor]],
    ) -> StateChange:
        kinds = [kind for kind, _ in combination.aggregates]
        added = {
            i: self._mean(column) if kind is Kind.MEAN else self._sum([*map(carried, column)])
            for i, (kind, column) in enumerate(zip(kinds, columns, strict=True))
            if kind in (Kind.COUNT, Kind.SUM, Kind.MEAN)
        }

        def finish(sums: Sequence[tf.Tensor]) -> tf.Tensor:
            found = dict(zip(added, sums, strict=True))
            pairs = enumerate(zip(kinds, columns, strict=True))
            return combination.compute(
                [
                    tf.cast(found[i], column[0].dtype) if i in found else self._chosen(kind, column)
                    for i, (kind, column) in pairs
                ]
            )

        return StateChange(variable, list(added.values()), finish)

    def _mean(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        pairs = zip(self._weights, values, strict=True)
        return tf.add_n([tf.cast(weight, value.dtype) * value for weight, value in pairs])

    def _sum(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.add_n(self._unless_empty(values, 0))

    def _chosen(self, kind: Kind, values: Sequence[tf.Tensor]) -> tf.Tensor:
        if kind is Kind.EQUAL:
            return values[0]
        is_max, dtype = kind is Kind.MAX, values[0].dtype
        choose = tf.reduce_max if is_max else tf.reduce_min
        nothing = dtype.min if is_max else dtype.max
        return choose(tf.stack(self._unless_empty(values, nothing)), axis=0)

    def _unless_empty(self, values: Sequence[tf.Tensor], nothing: float) -> list[tf.Tensor]:
        pairs = zip(self._weights, values, strict=True)
        return [tf.where(w > 0, value, tf.cast(nothing, value.dtype)) for w, value in pairs]
