"""A pipeline that takes over where a running one of the same pass stops."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from keras_het.loader.iterators.held_iterator import HeldIterator
from keras_het.loader.order.share_queue import ShareQueue

if TYPE_CHECKING:
    import tensorflow as tf


class NextPipeline:
    """A pipeline that catches up with a running pass, without work for own rows only."""

    def __init__(
        self,
        pipeline: tf.data.Dataset,
        orders: ShareQueue,
        num_replicas: int,
        position: int,
        keep_alive: object,
        adopt: Callable[[], None],
    ) -> None:
        self.orders = orders
        self.position = position
        self._nobody = (0.0,) * num_replicas
        self._adopt = adopt
        self.iterator = HeldIterator(pipeline, keep_alive)
        _alive.add(self)

    def skip(self, expected_rows: int) -> None:
        """Skip one global batch without using any of its rows."""
        self.orders.put(self._nobody, expected_rows, False)
        self.iterator.read()
        self.position += 1

    def come_into_effect(self) -> None:
        """Take effect; called by the run that continues in this pipeline."""
        _alive.discard(self)
        self._adopt()

    def drop(self) -> None:
        """End a pipeline that is no longer needed."""
        _alive.discard(self)
        self.orders.close()
        self.iterator.release(lambda: None)


_alive: weakref.WeakSet[NextPipeline] = weakref.WeakSet()


@atexit.register
def _wake_up_all() -> None:
    for next_pipeline in list(_alive):
        next_pipeline.orders.close()
