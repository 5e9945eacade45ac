"""Sources of global batches, one by one, that cut only the wanted ones."""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from keras_het.loader.input.data_pass import Element
from keras_het.loader.input.pipeline_pass import Weights
from keras_het.loader.iterators.held_iterator import HeldIterator
from keras_het.loader.order import rows
from keras_het.loader.order.share_queue import ShareQueue
from keras_het.planning.shares import apportion


class PipelineSource:
    """A pipeline that takes an order for each batch; unwanted batches get orders for no rows."""

    def __init__(
        self,
        pipeline: tf.data.Dataset,
        orders: ShareQueue,
        weights: Weights,
        batch_rows: int,
        keep_alive: object,
    ) -> None:
        self._orders, self._weights, self._rows = orders, weights, batch_rows
        self._wanted: collections.deque[bool] = collections.deque()
        self._iterator = HeldIterator(pipeline, keep_alive)

    def order(self, wanted: bool) -> None:
        """Announce whether the next unannounced batch will be wanted."""
        weights = tuple(self._weights())
        self._wanted.append(wanted)
        self._orders.put(weights if wanted else (0.0,) * len(weights), self._rows, False)

    def read(self) -> Element | None:
        """Return the next batch, None if it was not wanted."""
        batches, sizes, _ = self._iterator.read()
        return (list(batches), sizes.numpy()) if self._wanted.popleft() else None

    def close(self) -> None:
        """End the pass, and wake up the pipeline if it waits for an order."""
        self._orders.close()
        self._iterator.release(lambda: None)


class SlicedSource:
    """A pipeline of whole batches that its consumer cuts."""

    def __init__(
        self, pipeline: tf.data.Dataset, weights: Weights, local: range, keep_alive: object
    ) -> None:
        self._weights, self._local = weights, local
        self._ordered: collections.deque[tuple[float, ...] | None] = collections.deque()
        self._iterator = HeldIterator(pipeline, keep_alive)

    def order(self, wanted: bool) -> None:
        """Announce whether the next unannounced batch will be wanted."""
        self._ordered.append(tuple(self._weights()) if wanted else None)

    def read(self) -> Element | None:
        """Return the next batch, None if it was not wanted."""
        batch, weights = self._iterator.read(), self._ordered.popleft()
        if weights is None:
            return None
        sizes = np.asarray(apportion(rows.count_rows_eagerly(batch), weights), np.int64)
        parts = rows.cut_eagerly(batch, tf.constant(sizes))
        return parts[self._local.start : self._local.stop], sizes

    def close(self) -> None:
        """End the pass."""
        self._iterator.release(lambda: None)


def repeated(weights: Weights, times: int) -> Callable[[], tuple[float, ...]]:
    """Return the weights of all replicas in each of several parts of a batch."""
    return lambda: tuple(weights()) * times
