"""Orders by which the consumer tells its pipeline the shares of each step to come."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_het.planning.shares import FloatArray, IntArray, apportion


@dataclasses.dataclass
class ParallelCalls:
    """Calls of each map of own samples in the steps to be ordered, 0 for the user's own."""

    number: int = 0


class ShareQueue:
    """A queue of orders, one for each global batch, from the consumer to its pipeline."""

    # The consumer puts the order of step t + lookahead when it asks for step t. The pipeline waits
    # for an order before it cuts a batch: it is never more than `lookahead` steps ahead, whatever
    # buffers tf.data adds. All workers read the same weights at the same step.

    def __init__(self, num_replicas: int, lookahead: int, admits: bool = False) -> None:
        self._num_replicas = num_replicas
        self._latest: tuple[tuple[object, ...], list[tf.Tensor]] | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(
                lookahead + 2,
                dtypes=[tf.float64, tf.int64, tf.int64],
                shapes=[[num_replicas], [num_replicas], [3]],
            )
            # the number of the input to read from, which is 0, for each order in the queue
            self._admissions = tf.queue.FIFOQueue(lookahead + 2, tf.int64, [[]]) if admits else None

    def put(
        self,
        weights: Sequence[float] | None,
        expected_rows: int,
        fingerprint: bool,
        parallel_calls: int = 0,
    ) -> None:
        """Order the next global batch, of which nobody gets a row if the weights are None."""
        weights = (0.0,) * self._num_replicas if weights is None else weights
        header = (expected_rows, fingerprint, parallel_calls)
        key = (tuple(weights), *header)
        if self._latest is None or self._latest[0] != key:
            # Most steps repeat the previous order; making one costs more than a small step.
            self._latest = (key, self._order(weights, header))
        # the queue's own method takes longer than the operation
        tf.raw_ops.QueueEnqueueV2(
            handle=self._queue.queue_ref, components=self._latest[1], timeout_ms=-1
        )
        if self._admissions is not None:
            self._admissions.enqueue(tf.zeros([], tf.int64))

    def _order(self, weights: Sequence[float], header: tuple[int, bool, int]) -> list[tf.Tensor]:
        values = np.asarray(weights, np.float64)
        if values.shape != (self._num_replicas,):
            raise ValueError(
                f"Expected one weight for each of the {self._num_replicas} replicas. "
                f"Received: {list(weights)}."
            )
        shares = _sizes(header[0], values)
        with tf.device("CPU:0"):
            parts = (values, shares, np.array(header, np.int64))
            return [tf.constant(part) for part in parts]

    def take(self) -> list[tf.Tensor]:
        """Wait for the next order, inside a pipeline, and return it for `sizes`."""
        return self._queue.dequeue()

    def admit(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Read a batch only after it was ordered, even while the iterator is destroyed."""
        # not by a zip of orders and batches: tf.data reads the other input after a cancelled wait
        if self._admissions is None:
            return batches
        admissions = tf.data.Dataset.range(tf.int64.max).map(lambda _: self._admissions.dequeue())
        return tf.data.Dataset.choose_from_datasets([batches], admissions)

    def sizes(
        self, order: list[tf.Tensor], rows: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return sizes, whether rows are hashed, and the calls of their maps (0: the user's)."""
        weights, shares, header = order
        sizes = tf.cond(
            tf.equal(rows, header[0]),
            lambda: shares,
            lambda: _sizes_in_graph(rows, weights),
        )
        return tf.ensure_shape(sizes, [self._num_replicas]), tf.equal(header[1], 1), header[2]

    def clear(self) -> None:
        """Drop all remaining orders. No pipeline may be waiting for one."""
        for queue in self._queues():
            left = int(queue.size())
            if left:
                queue.dequeue_many(left)

    def close(self) -> None:
        for queue in self._queues():
            with contextlib.suppress(tf.errors.OpError):
                queue.close(cancel_pending_enqueues=True)

    def _queues(self) -> list[tf.queue.FIFOQueue]:
        return [self._queue] if self._admissions is None else [self._queue, self._admissions]


def _sizes(rows: int | np.int64, weights: FloatArray) -> IntArray:
    if not weights.any():
        return np.zeros(len(weights), np.int64)
    return np.asarray(apportion(int(rows), weights.tolist()), np.int64)


# Traced once: TensorFlow keeps the Python function of each trace until the process ends.
@tf.function(
    input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([None], tf.float64)],
    autograph=False,
)
def _sizes_in_graph(rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.numpy_function(_sizes, [rows, weights], tf.int64)
