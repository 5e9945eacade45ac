"""State that layers assign in each micro-batch of a step, with the value of the whole batch.

The rules are those of `own_state`: a micro-batch stands for a replica's share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.exact.own_state import (
    StateChange,
    carried,
    is_float,
    remark_on_unknown,
)
from keras_het.strategy.exact.sample_dependence import Combination, Kind, SampleDependence

_DECLARED = {"sum": "sum", "mean": "mean", "only_first_replica": "first"}
_BECOMES = {
    "mean": "the mean over samples",
    "first": "what the first micro-batch has",
    "changes": "the sum of the micro-batches' changes, or one of them if all are equal",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the values of one variable after each micro-batch become one."""

    name: str
    combination: Combination | None = None

    @property
    def tensors(self) -> list[tf.Tensor]:
        """What each micro-batch has to return."""
        return [] if self.combination is None else [t for _, t in self.combination.aggregates]

    @property
    def adds_up(self) -> bool:
        """Whether sums over several processes make the value."""
        if self.combination is None:
            return self.name in ("sum", "mean")
        return not {kind for kind, _ in self.combination.aggregates} & {Kind.MAX, Kind.MIN}


def rules_of(
    assigned: Sequence[tuple[keras.Variable, tf.Tensor]],
    layers: Sequence[keras.layers.Layer],
    rows: Sequence[tf.Tensor],
    equal: Sequence[tf.Tensor],
) -> tuple[list[Rule], list[str]]:
    """Return the rule of each variable that layers assign, and what the user should know."""
    own = {
        id(variable)
        for layer in layers
        for part in private_api.layers_with_state(layer)
        if not private_api.is_of_keras(part)
        for variable in private_api.own_state(part)
    }
    parts = tf.nest.flatten(list(rows), expand_composites=True)
    rows = [value for value in parts if value.shape.rank != 0]
    dependence = SampleDependence(rows, equal, [], {}, keeps_equal=True)
    rules, unknown = [], dict[str, list[str]]()
    for variable, value in assigned:
        name = _DECLARED.get(variable.aggregation)
        is_undeclared = name is None and id(variable) in own
        combination = dependence.combination(value) if is_undeclared else None
        if name is None or (name == "mean" and not is_float(variable)):
            is_bool = variable.dtype == "bool"
            name = "mean" if is_float(variable) else "first" if is_bool else "changes"
        if is_undeclared and combination is None:
            unknown.setdefault(_BECOMES[name], []).append(variable.path)
        rules.append(Rule(name, combination))
    return rules, [remark_on_unknown(unknown)] if unknown else []


def known_change(variable: keras.Variable, value: tf.Tensor) -> StateChange:
    """Return a change that every process knows by itself."""
    return StateChange(variable, [], lambda _: value)


class MicroBatchResults:
    """Combines what the micro-batches of this process have left."""

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
            return known_change(variable, ends[0])
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
