"""A model's variables as partitions of one vector, for a participant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.parameter_service.partitions import Partitions
from keras_het.exchange.message import Vector
from keras_het.packed_variables import PackedVariables

if TYPE_CHECKING:
    import keras

    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy


class PartitionedVector:
    """Variables, read and written as the partitions of one vector, a list of float32 vectors.

    Rounding errors of 16-bit variables are kept separately, so `read` returns the written values:
    otherwise workers would send the rounding as a change, and each would repeat it.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        strategy: HeterogeneousStrategy,
        partition_bytes: int,
    ) -> None:
        shapes = tuple(tuple(variable.shape) for variable in variables)
        self.partitions = Partitions(shapes, partition_bytes)
        self._variables = PackedVariables(variables, strategy)
        self._rounds = any(tf.as_dtype(variable.dtype).size < 4 for variable in variables)
        self._rest: Vector | None = None

    def read(self) -> list[Vector]:
        held = self._read()
        return self.partitions.cut(held if self._rest is None else held + self._rest)

    def write(self, parts: Sequence[Vector]) -> None:
        vector = np.concatenate(parts)
        self._variables.write(vector)
        if self._rounds:
            with np.errstate(invalid="ignore"):
                rest = vector - self._read()
            self._rest = np.where(np.isfinite(rest), rest, np.float32(0.0))

    def _read(self) -> Vector:
        # The memory of the tensor itself, which nothing changes.
        return np.frombuffer(memoryview(self._variables.read()), np.float32)
