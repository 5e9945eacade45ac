"""One stage of a pipeline: its layers, weights, and forward pass as one traced function."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from keras_het import keras_graphs_adapter
from keras_het.planning.pipeline.plan import Stage as PlannedStage
from keras_het.strategy.pipeline.step.model_units import ModelUnits, Token
from keras_het.strategy.pipeline.step.segment import Segment, Values
from keras_het.value_types import Nest


class PassResult:
    """What a stage's forward pass on one micro-batch has made.

    Args:
        tensors: results that later stages or the loss need, by number.
        masks: their masks.
        state: the state of the layers afterwards, in the order of `Stage.state`.
        means: sum of the losses that are means over the samples, scalar.
        sums: sum of the losses that are sums over the samples, scalar.
    """

    def __init__(
        self,
        tensors: dict[Token, tf.Tensor],
        masks: dict[Token, tf.Tensor],
        state: list[tf.Tensor],
        means: tf.Tensor,
        sums: tf.Tensor,
    ) -> None:
        self.tensors, self.masks, self.state = tensors, masks, state
        self.means, self.sums = means, sums


class Stage:
    """Layers of a model that run on the same devices.

    Args:
        units: the model.
        planned: units, devices and routes of the stage.

    Attributes:
        planned: the same.
        taken: numbers of the tensors that it takes: model inputs, and results of earlier stages.
        sent: numbers of those it makes that later stages take or that the model returns.
        weights: trainable variables.
        state: the other variables; those of random generators are among them.
    """

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

    def is_mean(self, place: int) -> bool:
        """Tell whether the step's value of `state[place]` is the mean of its micro-batches'."""
        variable = self.state[place]
        is_float = tf.as_dtype(variable.dtype).is_floating
        return is_float and variable.aggregation not in ("sum", "only_first_replica")

    def check_may_be_shared(self) -> None:
        """Refuse state that processes with different micro-batches would not have in common.

        Raises:
            ValueError: once a pass has been traced, if layers assign such state.
        """
        apart = [
            self.state[i].path for i in self.assigned() if not (self.is_mean(i) or self._is_seed[i])
        ]
        if apart:
            raise ValueError(
                "A stage on several processes cannot have layers that count, or keep integers, "
                "sums or the first replica's state: each process would have its own. Received: "
                f"{', '.join(apart)}. Give plan=[...] cuts that leave these layers to a stage on "
                "one process, or train under keras_het.HeterogeneousStrategy."
            )

    def regularization(self, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the losses of the weights' regularizers.

        Args:
            weights: values of `weights`.
        """
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
        """Run the layers on one micro-batch; in the graph, one call of a function traced once.

        Args:
            weights: values of `weights`.
            state: values of `state` before the pass.
            tensors: values of `taken`.
            masks: masks of some of them.
            training: argument of the layers.
        """
        given = [tensors[token] for token in self.taken]
        given_masks = {str(token): masks[token] for token in self.taken if token in masks}
        found: Nest = self._functions[training](weights, state, given, given_masks)
        made, made_masks, after, means, sums = found
        return PassResult(
            dict(zip(self.sent, made, strict=True)),
            {int(token): mask for token, mask in made_masks.items()},
            after,
            means,
            sums,
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
        return (
            [values.tensors[token] for token in self.sent],
            {str(t): values.masks[t] for t in self.sent if t in values.masks},
            [values.state[id(variable)] for variable in self.state],
            _total(values.means),
            _total(values.sums),
        )

    def state_of_micro_batch(self, state: list[tf.Tensor], number: int) -> list[tf.Tensor]:
        """Return the state with which a micro-batch begins: its random numbers are its own.

        Args:
            state: values of `state` before the step.
            number: number of the micro-batch, from 0.
        """
        return [
            value + tf.constant([number, 0], value.dtype) if is_seed and number else value
            for value, is_seed in zip(state, self._is_seed, strict=True)
        ]

    def state_of_step(
        self,
        before: list[tf.Tensor],
        after: dict[int, list[tf.Tensor]],
        weight: Callable[[int], tf.Tensor],
    ) -> dict[int, tf.Tensor]:
        r"""Combine the state that the micro-batches left.

        Each began with the same state v. Of floating types, the result is
        :math:`\sum_m w_m v_m` with the micro-batch's part w of the samples, as of one batch for
        the moving averages of batch normalization; changes of integers add up unless they are
        equal; random generators advance as after one batch.

        Args:
            before: values of `state` before the step.
            after: values after each micro-batch, by number.
            weight: returns the part of the batch's samples in a micro-batch.

        Returns:
            The new values of what the layers assign, by place in `state`.
        """
        first = min(after)
        result = {}
        for i in self.assigned():
            value, ends = before[i], [state[i] for state in after.values()]
            if self._is_seed[i]:
                result[i] = ends[0] - tf.constant([first, 0], value.dtype)
            elif self.is_mean(i):
                parts = [
                    tf.cast(weight(m), value.dtype) * end
                    for m, end in zip(after, ends, strict=True)
                ]
                result[i] = tf.add_n(parts)
            elif self.state[i].aggregation == "only_first_replica" or value.dtype == tf.bool:
                result[i] = ends[0]
            else:
                result[i] = _with_changes(value, ends, [weight(m) > 0 for m in after])
        return result


def _with_changes(before: tf.Tensor, after: list[tf.Tensor], counts: list[tf.Tensor]) -> tf.Tensor:
    """Add up the changes of a value; a change that all have in common counts once."""
    changes = [value - before for value in after]
    are_equal = tf.reduce_all(tf.stack([tf.reduce_all(c == changes[0]) for c in changes]))
    counted = [c * tf.cast(is_real, c.dtype) for c, is_real in zip(changes, counts, strict=True)]
    return before + tf.where(are_equal, changes[0], sum(counted[1:], counted[0]))


def _distinct(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())


def _total(losses: list[tf.Tensor]) -> tf.Tensor:
    """Sum losses, in float32 if they have several types, as Keras does."""
    if not losses:
        return tf.zeros([], keras.config.floatx())
    dtypes = {loss.dtype for loss in losses}
    dtype = dtypes.pop() if len(dtypes) == 1 else keras.config.floatx()
    return tf.add_n([tf.cast(loss, dtype) for loss in losses])
