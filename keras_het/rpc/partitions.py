"""Cut one long vector of all weights into messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

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
        return sum(int(np.prod(shape)) for shape in self.shapes)

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
        parts = [tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors]
        vector = tf.concat([*parts, tf.zeros([self._added])], axis=0)
        return [vector] if len(self.sizes) == 1 else list(tf.split(vector, len(self.sizes)))

    def unpack(self, partitions: Sequence[Any]) -> list[Any]:
        """Return one float32 tensor for each variable.

        Args:
            partitions: one vector for each partition.
        """
        vector = partitions[0] if len(partitions) == 1 else tf.concat(list(partitions), axis=0)
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        *parts, _ = tf.split(vector, [*sizes, self._added])
        return [tf.reshape(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    @property
    def _added(self) -> int:
        """Number of padding elements, which belong to no variable."""
        return sum(self.sizes) - self.size


def spread_partitions(sizes: Sequence[int], num_services: int) -> tuple[int, ...]:
    """Assign partitions to services: largest first, each to the least loaded service.

    Every task computes the same assignment independently.
    """
    loads, places = [0] * num_services, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[index] = loads.index(min(loads))
        loads[places[index]] += sizes[index]
    return tuple(places)
