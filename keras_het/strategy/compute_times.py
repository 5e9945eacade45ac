"""The compute times of the latest steps, of all replicas, on every worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

CAPACITY = 256


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """What one step measured.

    Args:
        shares: samples of each replica, int64 of shape [num_replicas], as this worker cut them.
        mean_shares: the same, averaged over what all workers believed; differs if they disagree.
        seconds: compute time of each replica, float64 of shape [num_replicas].
        wanted_shares: what the chief wanted when the step began, int64 of shape [num_replicas]; all
            zero if nothing.
    """

    shares: np.ndarray[Any, np.dtype[np.int64]]
    mean_shares: np.ndarray[Any, np.dtype[np.float64]]
    seconds: np.ndarray[Any, np.dtype[np.float64]]
    wanted_shares: np.ndarray[Any, np.dtype[np.int64]]


class ComputeTimes:
    """Keeps the latest steps in a ring in host memory, which the train step writes.

    The chief's decision comes to all workers in the same way: with the step after it. Workers that
    decided for themselves could round differently, and cut a batch differently.

    Args:
        num_replicas: replicas over all workers.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._read = 0
        self.is_measuring = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._rows = tf.Variable(
                tf.zeros([CAPACITY, 4, num_replicas], tf.float64), trainable=False
            )
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._wanted = tf.Variable(tf.zeros([num_replicas]), trainable=False)

    def want(self, shares: Sequence[int]) -> None:
        """Tells all workers, with the next step, which shares they should use; for the chief.

        Args:
            shares: samples of each replica, each below 2**24.
        """
        self._wanted.assign(np.asarray(shares, np.float32))

    def contribution(self, replica_id: int, sizes: Any, seconds: Any) -> Any:
        """What a replica adds to the sum over all replicas, float32 of shape [3, num_replicas]."""
        believed = tf.cast(sizes, tf.float32) / self._num_replicas
        own = tf.one_hot(replica_id, self._num_replicas) * tf.cast(seconds, tf.float32)
        with tf.device("CPU:0"):
            wanted = self._wanted.read_value() if replica_id == 0 else tf.zeros_like(self._wanted)
        return tf.stack([believed, own, wanted])

    def record(self, sizes: Any, summed: Any) -> None:
        """Writes one step; called in the graph, by one local replica."""
        with tf.device("CPU:0"):
            row = tf.concat([tf.cast(sizes[None], tf.float64), tf.cast(summed, tf.float64)], axis=0)
            place = self._count % CAPACITY
            written = self._rows.scatter_nd_update([[place]], row[None])
            with tf.control_dependencies([written]):
                self._count.assign_add(1)

    def read_new(self) -> list[StepTimes]:
        """The steps since the last call, oldest first; at most the latest `CAPACITY`."""
        # operations instead of the variables' methods, which take longer than they
        count = int(tf.raw_ops.ReadVariableOp(resource=self._count.handle, dtype=tf.int64))
        first = max(self._read, count - CAPACITY)
        self._read = count
        if first == count:
            return []
        places = np.arange(first, count, dtype=np.int64) % CAPACITY
        rows = tf.raw_ops.ResourceGather(
            resource=self._rows.handle, indices=places, dtype=tf.float64
        )
        return [_step_times(row) for row in rows.numpy()]


def _step_times(row: Any) -> StepTimes:
    shares, mean_shares, seconds, wanted = row
    return StepTimes(shares.astype(np.int64), mean_shares, seconds, wanted.astype(np.int64))
