"""A pass over the data: a running pipeline and the orders it follows."""

from __future__ import annotations

import atexit
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keras_het.loader.input.data_pass import Element, OrderedPass, Weights
from keras_het.loader.iterators.held_iterator import HeldIterator
from keras_het.loader.order.share_queue import ShareQueue

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
    wants_fingerprint: bool = False
    give_back: Callable[[], None] | None = None
    epoch_steps: Callable[[], int | None] | None = None

    def __post_init__(self, pipeline: tf.data.Dataset, keep_alive: object) -> None:
        super().__post_init__()
        self._ordered = 0
        # of which `ordered` stays, because its orders then come from this pass
        self._successor: tuple[PipelinePass, Callable[[], None]] | None = None
        self.latest_weights: Sequence[float] = ()
        self._order_until(self.lookahead)
        self.held = HeldIterator(pipeline, keep_alive)
        _alive.add(self)

    @property
    def ordered(self) -> int:
        """Steps of the pass with settled shares, including those skipped."""
        return self.first_step + self._ordered

    def join(self, successor: PipelinePass, in_effect: Callable[[], None]) -> None:
        """Let another pipeline continue from the step up to which it has caught up.

        The steps before, which are ordered already, come from the running pipeline while the other
        one starts working: no step is made twice, and each has the shares it would have without it.
        """
        if successor.ordered < self.ordered or self._successor is not None or self.is_over:
            raise ValueError(
                "A pipeline can take over from the next step to be ordered on, one at a time. "
                f"Received: one at step {successor.ordered}; {self.ordered} steps are ordered."
            )
        self._successor = successor, in_effect

    def order(self, wanted: bool = True) -> None:
        first = self.wants_fingerprint and self._ordered == 0
        orders = self.orders
        if self._successor is not None and self.ordered >= self._successor[0].ordered:
            orders = self._successor[0].orders
        self._ordered += 1
        weights = None
        if wanted:
            weights = self.latest_weights = self.weights()
        orders.put(weights, self.batch_rows, first)

    def read(self) -> Element:
        batches, sizes, fingerprint = self.held.read()
        sizes = sizes.numpy()
        self.batch_rows = self.batch_rows or int(sizes.sum())
        if self.delivered == 0 and self.wants_fingerprint:
            self.fingerprint = int(fingerprint)
        return list(batches), sizes

    def _order_next(self) -> None:
        self._order_until(self.delivered + 1 + self.lookahead)
        if self._successor is not None:
            successor, in_effect = self._successor
            if self.first_step + self.delivered == successor.ordered:
                self._continue_in(successor, in_effect)

    @property
    def _is_next_ordered(self) -> bool:
        end = self.ordered
        if self._successor is not None:  # which has the orders from there on
            end = min(end, self._successor[0].ordered)
        return self.first_step + self.delivered < end

    def _continue_in(self, successor: PipelinePass, in_effect: Callable[[], None]) -> None:
        in_effect()  # first: what is released now must not be kept for later
        self._release()
        self.held, self.orders = successor.held, successor.orders
        self.give_back = None  # a pipeline that begins within a pass is of no further use
        self._successor = None

    def _free(self) -> None:
        _alive.discard(self)
        if self._successor is not None:
            self._successor[0].close()
            self._successor = None
        self._release()

    def _release(self) -> None:
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
