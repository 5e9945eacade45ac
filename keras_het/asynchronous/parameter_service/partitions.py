"""The cuts of one vector of many variables into messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from keras_het.exchange.message import Vector
from keras_het.planning.argument_checks import check_number

PARTITION_BYTES = 4_000_000
"""Default size of a partition: with its header it is one piece of the wire, which is not copied
again; and it is updated while the next one travels."""


@dataclasses.dataclass(frozen=True)
class Partitions:
    """The cuts of the vector of some variables, as equal as possible.

    Variables lie in it one after another, rather than one message each: every message costs as much
    time as many bytes.

    Args:
        shapes: shape of each variable.
        partition_bytes: the largest number of bytes of a partition, whose elements are float32.

    Raises:
        ValueError: if there is nothing to cut, or nothing fits into a partition.
    """

    shapes: tuple[tuple[int, ...], ...]
    partition_bytes: int = PARTITION_BYTES

    def __post_init__(self) -> None:
        check_number("partition_bytes", self.partition_bytes, least=4)
        if self.size == 0:
            raise ValueError(f"There are no weights to keep. Received shapes: {self.shapes}.")

    @property
    def size(self) -> int:
        """Number of elements of all variables."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each partition."""
        count = -(-self.size // (self.partition_bytes // 4))
        smaller, rest = divmod(self.size, count)
        return (smaller + 1,) * rest + (smaller,) * (count - rest)

    def cut(self, vector: Vector) -> list[Vector]:
        """Return views of the partitions of a vector."""
        return np.split(vector, np.cumsum(self.sizes)[:-1])


def spread_partitions(sizes: Sequence[int], num_services: int) -> tuple[int, ...]:
    """Assign partitions to services, largest first, each to the least loaded; all tasks alike."""
    loads, places = [0] * num_services, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[index] = loads.index(min(loads))
        loads[places[index]] += sizes[index]
    return tuple(places)
