"""Compute times of the latest steps, of all replicas, on every worker."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.strategy.measure.phase_times import PhaseTimes

CAPACITY = 256
_ROWS = 7


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Measurements of one step."""

    shares: np.ndarray[Any, np.dtype[np.int64]]
    mean_shares: np.ndarray[Any, np.dtype[np.float64]]
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    wanted_shares: np.ndarray[Any, np.dtype[np.int64]]
    gradient_squares: np.ndarray[Any, np.dtype[np.float64]]
    global_gradient_square: float
    collective_seconds: float = 0.0


class ComputeTimes:
    """Ring of the latest steps in host memory, written by the train step.

    With the sums of a step travel the shares that the chief wants. Workers that decided for
    themselves could round differently, and cut a batch differently.
    """

    def __init__(self, layout: ReplicaLayout) -> None:
        self._num_replicas = num_replicas = layout.num_replicas
        self.phases = PhaseTimes(layout)
        self._read = 0
        self.is_measuring = False
        self.is_measuring_gradients = False
        self.is_sampled_out = False
        """Whether the step that runs now is one of those that are not measured."""
        # Models whose train function was made during measurement; whether with gradients.
        self._measured_models: weakref.WeakKeyDictionary[keras.Model, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._keeps_measuring = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._rows = tf.Variable(
                tf.zeros([CAPACITY, _ROWS, num_replicas], tf.float64), trainable=False
            )
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._wanted_shares = tf.Variable(tf.zeros([num_replicas]), trainable=False)

    def begin(self, model: keras.Model | None, gradients: bool, stops: bool) -> None:
        """Make training steps measure, see `HeterogeneousStrategy.measure_compute_times`."""
        gradients = gradients and self._num_replicas > 1
        self.is_measuring = True
        self.is_measuring_gradients |= gradients
        self._keeps_measuring |= not stops
        if model is None or self._measured_models.get(model, -1) >= gradients:
            return
        self._measured_models[model] = self.is_measuring_gradients
        if model.train_function is not None:
            model.make_train_function(force=True)

    def end(self, model: keras.Model) -> None:
        """End a measurement that stops, see `HeterogeneousStrategy.stop_measuring`."""
        if self._keeps_measuring and not self.is_measuring_gradients:
            return
        self.is_measuring, self.is_measuring_gradients = self._keeps_measuring, False
        self._measured_models.pop(model, None)
        if self._keeps_measuring:
            self._measured_models[model] = False
        if model.train_function is not None:
            model.make_train_function(force=True)

    def send_shares(self, shares: Sequence[int]) -> None:
        """Tell all workers which shares they should use, zeros for no wish; for the chief."""
        self._wanted_shares.assign(np.asarray(shares, np.float32))

    def contribution(
        self,
        replica_id: int,
        sizes: tf.Tensor,
        seconds: tf.Tensor,
        gradient_square: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Return what a replica adds to the sum over all replicas, in the graph."""
        believed = tf.cast(sizes, tf.float32) / self._num_replicas
        place = tf.one_hot(replica_id, self._num_replicas)
        with tf.device("CPU:0"):
            wanted = self._wanted_shares
            wanted = wanted.read_value() if replica_id == 0 else tf.zeros_like(wanted)
        rows = [believed, place * tf.cast(seconds, tf.float32), wanted]
        if gradient_square is not None:
            rows.append(place * gradient_square)
        return tf.stack(rows)

    def record(
        self,
        sizes: tf.Tensor,
        summed: tf.Tensor,
        collective_seconds: tf.Tensor,
        global_gradient_square: tf.Tensor | None = None,
    ) -> None:
        """Write one step; called in the graph, by one local replica."""
        with tf.device("CPU:0"):
            rows = [tf.cast(sizes[None], tf.float64), tf.cast(summed, tf.float64)]
            if global_gradient_square is not None:
                square = tf.cast(global_gradient_square, tf.float64)
                rows.append(tf.fill([1, self._num_replicas], square))
            row = tf.concat(rows, axis=0)
            row = tf.pad(row, [[0, _ROWS - 1 - row.shape[0]], [0, 0]])
            collective = tf.cast(collective_seconds, tf.float64)
            row = tf.concat([row, tf.fill([1, self._num_replicas], collective)], axis=0)
            place = self._count % CAPACITY
            written = self._rows.scatter_nd_update([[place]], row[None])
            with tf.control_dependencies([written]):
                self._count.assign_add(1)

    def read_new(self) -> list[StepTimes]:
        """The steps since the last call, oldest first; at most the latest `CAPACITY`."""
        # operations, because the variables' methods take longer
        count = int(tf.raw_ops.ReadVariableOp(resource=self._count.handle, dtype=tf.int64))
        first, self._read = max(self._read, count - CAPACITY), count
        return self._steps(first, count)

    def latest(self, number: int) -> list[StepTimes]:
        """The latest steps, oldest first; `read_new` still returns them."""
        count = int(tf.raw_ops.ReadVariableOp(resource=self._count.handle, dtype=tf.int64))
        return self._steps(max(0, count - min(number, CAPACITY)), count)

    def _steps(self, first: int, count: int) -> list[StepTimes]:
        if first == count:
            return []
        places = np.arange(first, count, dtype=np.int64) % CAPACITY
        rows = tf.raw_ops.ResourceGather(
            resource=self._rows.handle, indices=places, dtype=tf.float64
        )
        return [_step_times(row) for row in rows.numpy()]


def _step_times(row: np.ndarray) -> StepTimes:
    shares, mean_shares, seconds, wanted, squares, square, collective = row
    return StepTimes(
        shares.astype(np.int64),
        mean_shares,
        seconds,
        wanted.astype(np.int64),
        squares,
        float(square[0]),
        float(collective[0]),
    )
