"""A pass over the data: a running pipeline and the orders it follows."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keras_het.loader.input.data_pass import DataPass, Element, Weights
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
        self.held = HeldIterator(pipeline, keep_alive)
        _alive.add(self)

    def skip(self, expected_rows: int) -> None:
        """Skip one global batch without using any of its rows."""
        self.orders.put(self._nobody, expected_rows, False)
        self.held.read()
        self.position += 1

    def come_into_effect(self) -> None:
        """Take effect; called by the run that continues in this pipeline."""
        _alive.discard(self)
        self._adopt()

    def abandon(self) -> None:
        """Let its threads end, at the end of the process."""
        self.orders.close()

    def drop(self) -> None:
        """End a pipeline that is no longer needed."""
        _alive.discard(self)
        self.orders.close()
        self.held.release()


class PipelinePass(DataPass):
    """A running pipeline that cuts each batch by the weights of its step."""

    def __init__(
        self,
        pipeline: tf.data.Dataset,
        orders: ShareQueue,
        weights: Weights,
        lookahead: int,
        batch_rows: int,
        *,
        number: int,
        first_step: int,
        num_steps: int,
        wants_fingerprint: bool,
        give_back: Callable[[], None],
        keep_alive: object,
        epoch_steps: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__(number, first_step, num_steps)
        self._lookahead = lookahead
        self._epoch_steps = epoch_steps
        self._orders = orders
        self._weights = weights
        self.batch_rows = batch_rows
        self._give_back = give_back
        self._wants_fingerprint = wants_fingerprint
        self._ordered = 0
        self._next_pipeline: NextPipeline | None = None
        self.latest_weights: Sequence[float] = ()
        self._order_until(lookahead)
        self.held = HeldIterator(pipeline, keep_alive)
        _alive.add(self)

    @property
    def ordered(self) -> int:
        """Steps of the pass with settled shares, including those skipped."""
        return self.first_step + self._ordered

    def join(self, next_pipeline: NextPipeline) -> None:
        """Let another pipeline continue from its position.

        The steps before, which are ordered already, come from the running pipeline while the other
        one starts working: no step is made twice, and each has the shares it would have without it.
        """
        if next_pipeline.position < self.ordered or self._next_pipeline is not None or self.is_over:
            raise ValueError(
                "A pipeline can take over from the next step to be ordered on, one at a time. "
                f"Received: one at step {next_pipeline.position}; {self.ordered} steps are ordered."
            )
        self._next_pipeline = next_pipeline

    def _produce(self) -> Element:
        self._order_until(self.delivered + 1 + self._lookahead)
        next_pipeline = self._next_pipeline
        if next_pipeline is not None and self.first_step + self.delivered == next_pipeline.position:
            self._continue_in(next_pipeline)
        batches, sizes, fingerprint = self.held.read()
        sizes = sizes.numpy()
        self.batch_rows = self.batch_rows or int(sizes.sum())
        if self.delivered == 0 and self._wants_fingerprint:
            self.fingerprint = int(fingerprint)
        return list(batches), sizes

    def _continue_in(self, next_pipeline: NextPipeline) -> None:
        next_pipeline.come_into_effect()  # first: what is released now must not be kept for later
        self._release()
        self.held, self._orders = next_pipeline.held, next_pipeline.orders
        self._give_back = lambda: None  # a pipeline that begins within a pass is of no further use
        self._next_pipeline = None

    def _free(self) -> None:
        _alive.discard(self)
        if self._next_pipeline is not None:
            self._next_pipeline.drop()
            self._next_pipeline = None
        self._release()

    def _release(self) -> None:
        orders, give_back = self._orders, self._give_back

        def reuse() -> None:
            orders.clear()
            give_back()

        try:
            self.held.release(reuse)
        except RuntimeError:  # no new threads at interpreter shutdown
            orders.close()

    def abandon(self) -> None:
        """Wake up a waiting pipeline for good, at the end of the process."""
        self._orders.close()

    def _order_until(self, steps: int) -> None:
        """Order the steps of this run up to a given number, but not those of a later epoch."""
        length = self._epoch_steps() if self._epoch_steps is not None else None
        if length:
            at = self.first_step + self.delivered
            steps = min(steps, at - at % length + length - self.first_step)
        while self._ordered < steps:
            self._order_step()

    def _order_step(self) -> None:
        first = self._wants_fingerprint and self._ordered == 0
        next_pipeline = self._next_pipeline
        is_of_next = next_pipeline is not None and self.ordered >= next_pipeline.position
        orders = next_pipeline.orders if next_pipeline is not None and is_of_next else self._orders
        self._ordered += 1
        self.latest_weights = self._weights()
        orders.put(self.latest_weights, self.batch_rows, first)


_alive: weakref.WeakSet[NextPipeline | PipelinePass] = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    for run in list(_alive):
        run.abandon()
