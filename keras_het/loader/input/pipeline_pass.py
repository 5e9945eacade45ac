"""A pass over the data: a running pipeline and the orders it follows."""

from __future__ import annotations

import atexit
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keras_het.loader.input.data_pass import Element, OrderedPass, Weights
from keras_het.loader.iterators.held_iterator import HeldIterator
from keras_het.loader.order.share_queue import ParallelCalls, ShareQueue

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(eq=False, kw_only=True)
class PipelinePass(OrderedPass):
    """A running pipeline that cuts each batch by the weights of its step."""

    pipeline: dataclasses.InitVar[tf.data.Dataset]
    keep_alive: dataclasses.InitVar[object]
    orders: ShareQueue
    weights: Weights
    lookahead: int
    batch_rows: int
    parallel_calls: ParallelCalls = dataclasses.field(default_factory=ParallelCalls)
    wants_fingerprint: bool = False
    give_back: Callable[[], None] | None = None
    epoch_steps: Callable[[], int | None] | None = None

    def __post_init__(self, pipeline: tf.data.Dataset, keep_alive: object) -> None:
        super().__post_init__()
        self._ordered = 0
        self.latest_weights: Sequence[float] = ()
        self._order_until(self.lookahead)
        self.held = HeldIterator(pipeline, keep_alive)
        _alive.add(self)

    def order(self, wanted: bool = True) -> None:
        first = self.wants_fingerprint and self._ordered == 0
        self._ordered += 1
        weights = None
        if wanted:
            weights = self.latest_weights = self.weights()
        self.orders.put(weights, self.batch_rows, first, self.parallel_calls.number)

    def read(self) -> Element:
        batches, sizes, fingerprint = self.held.read()
        sizes = sizes.numpy()
        self.batch_rows = self.batch_rows or int(sizes.sum())
        if self.delivered == 0 and self.wants_fingerprint:
            self.fingerprint = int(fingerprint)
        return list(batches), sizes

    def _order_next(self) -> None:
        self._order_until(self.delivered + 1 + self.lookahead)

    @property
    def _is_next_ordered(self) -> bool:
        return self.delivered < self._ordered

    def _free(self) -> None:
        _alive.discard(self)
        orders, give_back = self.orders, self.give_back

        def reuse() -> None:
            orders.clear()
            if give_back is not None:
                give_back()

        try:
            self.held.release(reuse)
        except RuntimeError:  # no new threads at interpreter shutdown
            orders.close()

    def abandon(self) -> None:
        """Wake up a waiting pipeline for good, at the end of the process."""
        self.orders.close()

    def _order_until(self, steps: int) -> None:
        """Order the steps of this run up to a given number, but not those of a later epoch."""
        length = self.epoch_steps() if self.epoch_steps is not None else None
        if length:
            at = self.first_step + self.delivered
            steps = min(steps, at - at % length + length - self.first_step)
        while self._ordered < steps:
            self.order()


_alive: weakref.WeakSet[PipelinePass] = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    for run in list(_alive):
        run.abandon()
