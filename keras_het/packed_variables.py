"""One vector of many variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_het.value_types import TensorLike

if TYPE_CHECKING:
    import keras

    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


def pack(tensors: Sequence[TensorLike], dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Return the elements of tensors, one after another, as one vector; in the graph or eagerly."""
    return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], axis=0)


def unpack(vector: tf.Tensor, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    """Return the tensors in a vector; what follows them is padding."""
    sizes = [math.prod(shape) for shape in shapes]
    *parts, _ = tf.split(vector, [*sizes, int(vector.shape[0]) - sum(sizes)])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def shared_variables(
    model: keras.Model,
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Return the parts of a model that workers share: its weights, and its moving statistics."""
    weights = list(model.trainable_variables)
    if not model.built or not weights:
        raise ValueError(
            "Weights are shared before the first step, and there are none. Received: a model "
            "that is not built or has nothing to train. Give it an Input, or call it once."
        )
    return weights, [v for v in model.non_trainable_weights if tf.as_dtype(v.dtype).is_floating]


class PackedVariables:
    """Keras variables, read and written as one vector, for any number of local replicas."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        strategy: HeterogeneousStrategy,
        dtype: tf.DType = tf.float32,
    ) -> None:
        self._variables, self._strategy, self._dtype = list(variables), strategy, dtype
        self._shapes = tuple(tuple(variable.shape) for variable in variables)
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.size = sum(self._sizes)
        if variables:
            # Concrete: TensorFlow mistakes several functions with the same code for one being
            # retraced.
            self._read = tf.function(self._pack, autograph=False).get_concrete_function()
            with strategy.scope():
                write = tf.function(self._unpack, autograph=False)
                self._write = write.get_concrete_function(tf.TensorSpec([self.size], dtype))

    def read(self) -> tf.Tensor:
        return self._read() if self._variables else tf.zeros([0], self._dtype)

    def write(self, vector: tf.Tensor) -> None:
        if self._variables:
            with self._strategy.scope():
                self._write(vector)

    def differ(self, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        """Mark the variables in which two vectors differ: 1 or 0 for each, float32; in a graph."""
        if not self._variables:
            return tf.zeros([0])
        pairs = zip(tf.split(one, self._sizes), tf.split(other, self._sizes), strict=True)
        return tf.cast(tf.stack([tf.reduce_any(a != b) for a, b in pairs]), tf.float32)

    def choose(self, conditions: tf.Tensor, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        """Combine the variables of two vectors; in a graph."""
        if not self._variables:
            return one
        parts = zip(
            tf.unstack(conditions, len(self._sizes)),
            tf.split(one, self._sizes),
            tf.split(other, self._sizes),
            strict=True,
        )
        return tf.concat([tf.where(*variable) for variable in parts], axis=0)

    def _pack(self) -> tf.Tensor:
        with tf.device("CPU:0"):
            replicas = self._strategy.experimental_local_results
            return pack([tf.identity(replicas(v.value)[0]) for v in self._variables], self._dtype)

    def _unpack(self, vector: tf.Tensor) -> None:
        for variable, value in zip(self._variables, unpack(vector, self._shapes), strict=True):
            variable.assign(tf.cast(value, variable.dtype))
