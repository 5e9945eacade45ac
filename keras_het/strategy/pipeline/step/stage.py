"""One stage of a pipeline: its layers, weights, and forward pass as one traced function."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from keras_het import keras_graphs_adapter
from keras_het.planning.pipeline.plan import Stage as PlannedStage
from keras_het.strategy.exact.own_state import StateChange
from keras_het.strategy.pipeline.step.micro_batch_state import (
    MicroBatchResults,
    Rule,
    known_change,
    rules_of,
)
from keras_het.strategy.pipeline.step.model_units import ModelUnits, Token
from keras_het.strategy.pipeline.step.segment import Segment, Values
from keras_het.value_types import Nest


class PassResult:
    """What a stage's forward pass on one micro-batch has made."""

    def __init__(
        self,
        tensors: dict[Token, tf.Tensor],
        masks: dict[Token, tf.Tensor],
        state: list[tf.Tensor],
        means: tf.Tensor,
        sums: tf.Tensor,
        aggregates: dict[int, list[tf.Tensor]],
    ) -> None:
        self.tensors, self.masks, self.state = tensors, masks, state
        self.means, self.sums, self.aggregates = means, sums, aggregates


class Stage:
    """Layers of a model that run on the same devices."""

    def __init__(self, units: ModelUnits, planned: PlannedStage) -> None:
        self.planned = planned
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
        seeds = {
            id(variable)
            for layer in self.layers
            for variable in keras_graphs_adapter.seeds_of(layer)
        }
        self._is_seed = [id(variable) in seeds for variable in self.state]
        self._rules: dict[bool, dict[int, Rule]] = {}
        self.remarks: list[str] = []

    @functools.cached_property
    def _functions(self) -> dict[bool, Callable[..., Nest]]:
        return {
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
                "first replica's state or integers of unknown meaning: each process would have "
                f"its own. Received: {', '.join(apart)}. Give plan=[...] cuts that leave these "
                "layers to a stage on one process, or train under keras_het.HeterogeneousStrategy."
            )

    def regularization(self, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the losses of the weights' regularizers."""
        return [
            variable.regularizer(value)
            for variable, value in zip(self.weights, weights, strict=True)
            if variable.regularizer is not None
        ]

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
            {id(variable): value for variable, value in zip(self.state, state, strict=True)},
        )
        by_id = {id(variable): value for variable, value in zip(self.weights, weights, strict=True)}
        for is_recomputed, segment in self._segments:
            run = segment.run_twice if is_recomputed and training else segment.run
            run(by_id, values, training)
        after = [values.state[id(variable)] for variable in self.state]
        places = [i for i in self.assigned() if not self._is_seed[i]]
        rules, self.remarks = rules_of(
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
        micro_batches = MicroBatchResults([weight(m) for m in after])
        changes = []
        for i in self.assigned():
            variable, ends = self.state[i], [result.state[i] for result in results]
            if self._is_seed[i]:
                end = ends[0] - tf.constant([min(after), 0], ends[0].dtype)
                changes.append(known_change(variable, end))
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
