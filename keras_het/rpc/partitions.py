"""Cuts one long vector of all weights into messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

LARGEST_MESSAGE_BYTES = 4_096_000
"""Bytes of a partition's values. TensorFlow's RPC takes 4,194,304 bytes a message, all included."""
FEWEST_PARTITIONS = 12
"""That there are before any is larger than half the largest message. A message takes TensorFlow a
while however short it is, so large ones are quicker; but the first and the last one of an exchange
travel alone, and each that is under way takes six times its bytes in the service's memory."""


@dataclasses.dataclass(frozen=True)
class Partitions:
    """Where each variable lies in the vector, and where the vector is cut.

    Variables are packed one after the other in their order, not one message each: a message costs
    as much time as many bytes. All partitions are of one size, so that they share the functions of
    a service: fewer elements than there are partitions are added, which are zero and stay so.

    Args:
        shapes: shape of each variable.
        partition_size: float32 elements of a partition at most.
        fewest: partitions that there are before any is larger than half the largest message.

    Raises:
        ValueError: if there is nothing to cut, or a partition would not fit into a message.
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
        """Elements of all variables."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each partition, all equal."""
        halves = -(-self.size // (LARGEST_MESSAGE_BYTES // 8))
        count = max(-(-self.size // self.partition_size), min(self.fewest, halves))
        return (-(-self.size // count),) * count

    def pack(self, tensors: Sequence[Any]) -> list[Any]:
        """One float32 vector for each partition; in the graph or eagerly.

        Args:
            tensors: one for each variable.
        """
        parts = [tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors]
        vector = tf.concat([*parts, tf.zeros([self._added])], axis=0)
        return [vector] if len(self.sizes) == 1 else list(tf.split(vector, len(self.sizes)))

    def unpack(self, partitions: Sequence[Any]) -> list[Any]:
        """One float32 tensor for each variable.

        Args:
            partitions: one vector for each partition.
        """
        vector = partitions[0] if len(partitions) == 1 else tf.concat(list(partitions), axis=0)
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        *parts, _ = tf.split(vector, [*sizes, self._added])
        return [tf.reshape(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    @property
    def _added(self) -> int:
        """Elements that belong to no variable."""
        return sum(self.sizes) - self.size


def spread_partitions(sizes: Sequence[int], num_services: int) -> tuple[int, ...]:
    """Which service holds each partition: the largest first, each where least is.

    Every task finds the same places by itself.

    Args:
        sizes: elements of each partition.
        num_services: services that share them.

    Returns:
        Number of the service of each partition.
    """
    loads, places = [0] * num_services, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[index] = loads.index(min(loads))
        loads[places[index]] += sizes[index]
    return tuple(places)
