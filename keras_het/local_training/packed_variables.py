"""Several variables packed into one vector in host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_het.training_strategy import TrainingStrategy


class PackedVariables:
    """Keras variables, read and written as one vector, for any number of local replicas."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        strategy: TrainingStrategy,
        dtype: tf.DType = tf.float32,
    ) -> None:
        self._dtype = dtype
        self._variables = list(variables)
        self._strategy = strategy
        self._sizes = [math.prod(variable.shape) for variable in variables]
        self.size = sum(self._sizes)
        if variables:
            vector = tf.TensorSpec([self.size], dtype)
            # Concrete: TensorFlow mistakes several functions with the same code for one being
            # retraced.
            self._read = tf.function(self._pack, autograph=False).get_concrete_function()
            with strategy.scope():
                write = tf.function(self._unpack, autograph=False)
                self._write = write.get_concrete_function(vector)

    def read(self) -> tf.Tensor:
        """Return the values, of shape [size]."""
        return self._read() if self._variables else tf.zeros([0], self._dtype)

    def write(self, vector: tf.Tensor) -> None:
        """Set the values on every local replica."""
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
            values = [self._local_value(variable) for variable in self._variables]
            return tf.concat([tf.reshape(tf.cast(v, self._dtype), [-1]) for v in values], axis=0)

    def _local_value(self, variable: keras.Variable) -> tf.Tensor:
        return tf.identity(self._strategy.experimental_local_results(variable.value)[0])

    def _unpack(self, vector: tf.Tensor) -> None:
        parts = tf.split(vector, self._sizes)
        for variable, part in zip(self._variables, parts, strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))
