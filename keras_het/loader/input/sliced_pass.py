"""A pass over global batches that only need to be cut."""

from __future__ import annotations

import collections

import numpy as np
import tensorflow as tf

from keras_het.loader.host.threads import LoaderThreads
from keras_het.loader.input.data_pass import DataPass, Element
from keras_het.loader.input.pipeline_pass import Weights
from keras_het.loader.iterators.handover import hand_over
from keras_het.loader.iterators.held_iterator import HeldIterator, release
from keras_het.loader.nested import Batch
from keras_het.loader.order import rows
from keras_het.loader.order.batch_bytes import count_bytes
from keras_het.planning.bounded_shares import IntArray
from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.planning.shares import apportion


class SlicedPass(DataPass):
    """A pass that runs the user's pipeline unchanged and cuts each batch on request.

    A cut shares the batch's memory, so it costs the same whatever the size of the rows.
    """

    def __init__(
        self,
        pipeline: tf.data.Dataset,
        layout: ReplicaLayout,
        weights: Weights,
        lookahead: int,
        *,
        number: int,
        first_step: int,
        num_steps: int,
        wants_fingerprint: bool,
        keep_alive: object,
    ) -> None:
        super().__init__(number, first_step, num_steps)
        self._layout = layout
        self._weights = weights
        self._wants_fingerprint = wants_fingerprint
        self._read = collections.deque(tuple(weights()) for _ in range(lookahead))
        self.batch_bytes = 0
        self._latest: tuple[tuple[tuple[float, ...], int], IntArray, tf.Tensor] | None = None
        self._first_batch: Batch = None
        self._iterator = HeldIterator(pipeline, keep_alive)

    @property
    def iterator(self) -> tf.data.Iterator:
        """The `tf.data.Iterator` that provides its steps."""
        return self._iterator.iterator

    @property
    def threads(self) -> LoaderThreads | None:
        """Threads of the pipeline's own pool, None if it has none."""
        return self._iterator.threads

    def move_to(
        self,
        pipeline: tf.data.Dataset,
        keep_alive: object,
        prepared: tf.data.Iterator | None = None,
    ) -> None:
        """Continue in another pipeline, keeping the buffered elements."""
        old = self._iterator.iterator
        new = hand_over(old, pipeline, prepared)
        self._iterator = HeldIterator(pipeline, keep_alive, new)
        release(old)

    def _produce(self) -> Element:
        self._read.append(tuple(self._weights()))
        weights = self._read.popleft()
        batch = self._iterator.read()
        if not self.batch_bytes:
            self.batch_bytes = count_bytes(batch)
        if self.delivered == 0 and self._wants_fingerprint:
            self.fingerprint = int(rows.hash_rows(batch))
        self._first_batch = batch if self.delivered == 0 else None
        return self._cut(batch, weights)

    def cut_first_again(self) -> bool:
        """Cut the first batch by the present weights, which count from there on."""
        weights = tuple(self._weights())
        self._read = collections.deque(weights for _ in self._read)
        if self._first is not None:
            self._first = self._cut(self._first_batch, weights)
        return True

    def _cut(self, batch: Batch, weights: tuple[float, ...]) -> Element:
        total = rows.count_rows_eagerly(batch)
        if self._latest is None or self._latest[0] != (weights, total):
            # most steps have the shares of the step before
            sizes = self._sizes(total, weights)
            self._latest = ((weights, total), sizes, tf.constant(sizes))
        _, sizes, cuts = self._latest
        if self._layout.num_replicas == 1:
            return [batch], sizes
        local = self._layout.local_replicas
        return rows.cut_eagerly(batch, cuts)[local.start : local.stop], sizes

    def _sizes(self, total: int, weights: tuple[float, ...]) -> IntArray:
        if len(weights) != self._layout.num_replicas:
            raise ValueError(
                f"Expected one weight for each of the {self._layout.num_replicas} replicas. "
                f"Received: {list(weights)}."
            )
        return np.asarray(apportion(total, weights), np.int64)

    def _free(self) -> None:
        self._iterator.release(lambda: None)
