"""A model's weights as vectors for the parameter service."""

from __future__ import annotations

import json
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_het.asynchronous.parameter_service import Partitions, model_fingerprint
from keras_het.asynchronous.rules import UpdateRule, serialize
from keras_het.training_strategy import TrainingStrategy


class VariableVectors:
    """Variables, read and written as partitions of one vector.

    Rounding errors of 16-bit variables are kept separately, so `read` returns the written
    values: otherwise workers would send the rounding as a change, and each would repeat it.
    """

    def __init__(
        self, variables: Sequence[keras.Variable], strategy: TrainingStrategy, partition_size: int
    ) -> None:
        self._variables = list(variables)
        self._strategy = strategy
        self.partitions = Partitions(tuple(tuple(v.shape) for v in variables), partition_size)
        self._read = tf.function(self._pack, autograph=False)
        self._write = tf.function(self._unpack, autograph=False)
        self._rounds = any(tf.as_dtype(variable.dtype).size < 4 for variable in variables)
        self._rest: list[tf.Tensor] | None = None

    def read(self) -> list[tf.Tensor]:
        """Return the values, a float32 vector for each partition."""
        held = list(self._read())
        if self._rest is None:
            return held
        return [own + rest for own, rest in zip(held, self._rest, strict=True)]

    def write(self, parts: Sequence[tf.Tensor]) -> None:
        """Set the values on every local replica."""
        with self._strategy.scope():
            self._write(list(parts))
        if self._rounds:
            self._rest = [
                tf.where(tf.math.is_finite(value - own), value - own, 0.0)
                for value, own in zip(parts, self._read(), strict=True)
            ]

    def _pack(self) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            values = [self._local_value(variable) for variable in self._variables]
            return self.partitions.pack(values)

    def _local_value(self, variable: keras.Variable) -> tf.Tensor:
        return tf.identity(self._strategy.experimental_local_results(variable.value)[0])

    def _unpack(self, parts: list[tf.Tensor]) -> None:
        tensors = self.partitions.unpack(parts)
        for variable, tensor in zip(self._variables, tensors, strict=True):
            variable.assign(tf.cast(tensor, variable.dtype))


class ModelVectors:
    """The parts of a model that are shared with the parameter service.

    The update rule combines trainable weights. Moving statistics (non-trainable float state) are
    averaged. Seeds and metrics stay local to each worker.
    """

    def __init__(self, model: keras.Model, strategy: TrainingStrategy, partition_size: int) -> None:
        if not model.built or not model.trainable_variables:
            raise ValueError(
                "Weights are shared before the first step, and there are none. Received: a model "
                "that is not built or has nothing to train. Give it an Input, or call it once."
            )
        state = [v for v in model.non_trainable_weights if tf.as_dtype(v.dtype).is_floating]
        self.weights = VariableVectors(model.trainable_variables, strategy, partition_size)
        self.state = VariableVectors(state, strategy, partition_size) if state else None
        self._described = [*model.trainable_variables, *state]

    def fingerprint(self, rule: UpdateRule) -> str:
        """Hash what all participants must agree on: variables, and rule with settings."""
        settings = json.dumps(serialize(rule), sort_keys=True, default=str)
        return model_fingerprint(
            [variable.path for variable in self._described],
            [tuple(variable.shape) for variable in self._described],
            [str(variable.dtype) for variable in self._described],
            f"{rule.name} {settings}",
        )
