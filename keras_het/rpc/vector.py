"""One vector of many variables, and its cuts into messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_het.value_types import TensorLike

if TYPE_CHECKING:
    import keras

    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

LARGEST_MESSAGE_BYTES = 4_096_000
"""Bytes of a partition's values. TensorFlow's RPC takes 4,194,304 bytes per message in total."""
FEWEST_PARTITIONS = 12
"""Smallest number before any is larger than half the largest message. TensorFlow needs a
while even for a short message, so large ones are faster; but the first and last of an exchange
travel alone, and each one in flight takes six times its bytes in the service's memory."""


@dataclasses.dataclass(frozen=True)
class Partitions:
    """The position of each variable in the vector, and the cuts of the vector.

    Variables are packed one after another in their order, rather than one message each: every
    message costs as much time as many bytes. All partitions have the same size and can therefore
    share the functions of a service: fewer padding elements than there are partitions are added;
    they are zero and stay zero.

    Args:
        shapes: shape of each variable.
        partition_size: the largest number of float32 elements in a partition.
        fewest: the smallest number of partitions before any is larger than half the largest
            message.

    Raises:
        ValueError: if there is nothing to cut, or a partition does not fit into a message.
    """

    shapes: tuple[tuple[int, ...], ...]
    partition_size: int = LARGEST_MESSAGE_BYTES // 4
    fewest: int = FEWEST_PARTITIONS

    def __post_init__(self) -> None:
        if not 0 < self.partition_size * 4 <= LARGEST_MESSAGE_BYTES:
            raise ValueError(
                f"A partition must have 1 to {LARGEST_MESSAGE_BYTES // 4} float32 elements. "
                f"Received: partition_size={self.partition_size}."
            )
        if self.size == 0:
            raise ValueError(f"There are no weights to keep. Received shapes: {self.shapes}.")

    @property
    def size(self) -> int:
        """Number of elements of all variables."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each partition, all equal."""
        halves = -(-self.size // (LARGEST_MESSAGE_BYTES // 8))
        count = max(-(-self.size // self.partition_size), min(self.fewest, halves))
        return (-(-self.size // count),) * count

    def pack(self, tensors: Sequence[Any]) -> list[Any]:
        """Return one float32 vector for each partition; in the graph or eagerly.

        Args:
            tensors: one tensor for each variable.
        """
        vector = pack([*tensors, tf.zeros([sum(self.sizes) - self.size])])
        return [vector] if len(self.sizes) == 1 else list(tf.split(vector, len(self.sizes)))

    def unpack(self, partitions: Sequence[Any]) -> list[Any]:
        """Return one float32 tensor for each variable.

        Args:
            partitions: one vector for each partition.
        """
        vector = partitions[0] if len(partitions) == 1 else tf.concat(list(partitions), axis=0)
        return unpack(vector, self.shapes)


def pack(tensors: Sequence[TensorLike], dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Return the elements of tensors, one after another, as one vector; in the graph or eagerly."""
    return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], axis=0)


def unpack(vector: tf.Tensor, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    """Return the tensors in a vector; what follows them is padding."""
    sizes = [math.prod(shape) for shape in shapes]
    *parts, _ = tf.split(vector, [*sizes, int(vector.shape[0]) - sum(sizes)])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def spread_partitions(sizes: Sequence[int], num_services: int) -> tuple[int, ...]:
    """Assign partitions to services: largest first, each to the least loaded service.

    Every task computes the same assignment independently.
    """
    loads, places = [0] * num_services, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[index] = loads.index(min(loads))
        loads[places[index]] += sizes[index]
    return tuple(places)


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


class Vector:
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
            specs = tf.nest.map_structure(
                lambda part: tf.TensorSpec(part.shape, part.dtype), self._read.structured_outputs
            )
            with strategy.scope():
                write = tf.function(self._unpack, autograph=False)
                self._write = write.get_concrete_function(specs)

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
            return self._cut([tf.identity(replicas(v.value)[0]) for v in self._variables])

    def _unpack(self, vector: tf.Tensor) -> None:
        for variable, value in zip(self._variables, self._joined(vector), strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def _cut(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        return pack(values, self._dtype)

    def _joined(self, vector: tf.Tensor) -> list[tf.Tensor]:
        return unpack(vector, self._shapes)


class PartitionedVector(Vector):
    """Variables, read and written as the partitions of one vector, a list of float32 vectors.

    Rounding errors of 16-bit variables are kept separately, so `read` returns the written
    values: otherwise workers would send the rounding as a change, and each would repeat it.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        strategy: HeterogeneousStrategy,
        partition_size: int,
    ) -> None:
        shapes = tuple(tuple(variable.shape) for variable in variables)
        self.partitions = Partitions(shapes, partition_size)
        self._rounds = any(tf.as_dtype(variable.dtype).size < 4 for variable in variables)
        self._rest: list[tf.Tensor] | None = None
        super().__init__(variables, strategy)

    def read(self) -> list[tf.Tensor]:
        held = list(super().read())
        if self._rest is None:
            return held
        return [own + rest for own, rest in zip(held, self._rest, strict=True)]

    def write(self, parts: Sequence[tf.Tensor]) -> None:
        super().write(list(parts))
        if self._rounds:
            self._rest = [
                tf.where(tf.math.is_finite(value - own), value - own, 0.0)
                for value, own in zip(parts, super().read(), strict=True)
            ]

    def _cut(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self.partitions.pack(values)

    def _joined(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self.partitions.unpack(parts)
