"""Consecutive layer calls as a pure function of tensors: weights and state in, state out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_het import keras_graphs_adapter
from keras_het.strategy.pipeline.step.model_units import Token, Unit


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
