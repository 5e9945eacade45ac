"""Formats of a partition's values: in full, at half precision, or only the largest ones."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from keras_het.exchange.message import Kind, Vector
from keras_het.planning.argument_checks import check_number, check_one_of

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


_NOTHING = np.zeros(0, np.float32)


class Wire(abc.ABC):
    """A format of messages; client and service use the same one.

    A push loses what the format cannot carry; `encode` returns this part as the residual, which the
    client adds to its next push (error feedback), so nothing is lost permanently. Answers of the
    service are dense, and by default in full.

    Attributes:
        name: name of the format, on which client and service must agree.
        is_exact: whether a message leaves no residual.
        push, answer: kinds of the messages.
    """

    name: str
    is_exact = False
    push = Kind.PUSH
    answer = Kind.VALUES

    @abc.abstractmethod
    def encode(self, values: Vector) -> tuple[tuple[Vector, ...], Vector]:
        """Encode float32 values of shape [size].

        Returns:
            The vectors to send; and the residual, float32 of shape [size] (empty if exact).
        """

    @abc.abstractmethod
    def decode(self, vectors: tuple[Vector, ...], size: int) -> Vector:
        """Return the float32 values of shape [size] that were sent; the rest is zero.

        Raises:
            ValueError: for vectors that do not have this size.
        """

    def encode_answer(self, values: Vector) -> Vector:
        """Return the vector to send for an answer of the service."""
        return values

    def decode_answer(self, sent: Vector) -> Vector:
        """Return the float32 values of an answer."""
        return sent


class FloatWire(Wire):
    """All values, as floats.

    Args:
        dtype: "float32", "float16" or "bfloat16". float16 holds values up to 65,504.

    Raises:
        ValueError: for another type.
    """

    def __init__(self, dtype: str = "float32") -> None:
        check_one_of("dtype", dtype, ("float32", "float16", "bfloat16"))
        self.name = dtype
        self.is_exact = dtype == "float32"
        self._dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        if not self.is_exact:
            self.push, self.answer = Kind.PUSH_16, Kind.VALUES_16

    def encode(self, values: Vector) -> tuple[tuple[Vector, ...], Vector]:
        """Round the values."""
        if self.is_exact:
            return (values,), _NOTHING
        sent = self.encode_answer(values)
        return (sent,), values - self.decode_answer(sent)

    def decode(self, vectors: tuple[Vector, ...], size: int) -> Vector:
        """Widen the values."""
        (sent,) = vectors
        check_size(sent, size)
        return self.decode_answer(sent)

    def encode_answer(self, values: Vector) -> Vector:
        """Round the values; what is too large for 16 bits becomes infinite."""
        if self.is_exact:
            return values
        with np.errstate(over="ignore"):
            return values.astype(self._dtype).view(np.uint16)

    def decode_answer(self, sent: Vector) -> Vector:
        """Widen the values."""
        return sent if self.is_exact else sent.view(self._dtype).astype(np.float32)


class TopKWire(Wire):
    """The values of largest magnitude, with their positions.

    Args:
        ratio: fraction of the values to send, above 0 and at most 1; at least one value is sent.

    Raises:
        ValueError: if the ratio is out of range.

    Reference:
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    push = Kind.PUSH_TOP

    def __init__(self, ratio: float) -> None:
        check_number("ratio", ratio, above=0, most=1)
        self.name, self._ratio = f"top-{ratio!r}", ratio

    def count(self, size: int) -> int:
        """Return how many values out of `size` are sent."""
        return max(1, min(size, round(self._ratio * size)))

    def encode(self, values: Vector) -> tuple[tuple[Vector, ...], Vector]:
        """Select the largest values."""
        smaller = len(values) - self.count(len(values))
        places = np.argpartition(np.abs(values), smaller)[smaller:].astype(np.int32)
        left = values.copy()
        left[places] = 0.0
        return (values[places], places), left

    def decode(self, vectors: tuple[Vector, ...], size: int) -> Vector:
        """Put the values in their positions."""
        sent, places = vectors
        check_size(sent, len(places))
        if len(places) and not (places.min() >= 0 and places.max() < size):
            raise ValueError(f"Positions must be from 0 to {size - 1}. Received: others.")
        values = np.zeros(size, np.float32)
        np.add.at(values, places, sent)
        return values


def check_size(vector: Vector, size: int) -> None:
    """Refuse a vector of another length."""
    if len(vector) != size:
        raise ValueError(f"Lengths differ. Received: {len(vector)} values; expected: {size}.")


def wire_named(name: str) -> Wire:
    """Return the format with a name, as in `Wire.name`."""
    kind, _, ratio = name.partition("-")
    if kind == "top" and ratio:
        return TopKWire(float(ratio))
    return FloatWire(name)
