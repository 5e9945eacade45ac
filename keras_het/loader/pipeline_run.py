"""One pass over the data: a running pipeline and the orders it works by."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from keras_het.loader.held_iterator import HeldIterator
from keras_het.loader.run import Element, Run
from keras_het.loader.work_orders import WorkOrders

Weights = Callable[[], Sequence[float]]


class PipelineRun(Run):
    """A running pipeline that cuts each batch by the weights of its step.

    Args:
        pipeline: data set of ((batch of each local replica), sizes, fingerprint).
        orders: the orders that `pipeline` takes, none of them given yet.
        weights: current share weights, one for each replica; read once a step.
        lookahead: steps the pipeline may work ahead, and by which a new weight is late.
        batch_rows: rows of a full global batch, 0 if not known.
        number: number of passes over the data before this one.
        first_step: steps of this pass that are left out.
        num_steps: steps of a whole pass, negative if not known.
        wants_fingerprint: whether to hash the first batch.
        keep_alive: what holds the functions that `pipeline` calls.
        give_back: called when the iterator is gone and the pipeline can run again.
    """

    def __init__(
        self,
        pipeline: Any,
        orders: WorkOrders,
        weights: Weights,
        lookahead: int,
        batch_rows: int,
        *,
        number: int,
        first_step: int,
        num_steps: int,
        wants_fingerprint: bool,
        give_back: Callable[[], None],
        keep_alive: Any,
    ) -> None:
        super().__init__(number, first_step, num_steps)
        self._orders = orders
        self._weights = weights
        self._rows = batch_rows
        self._give_back = give_back
        self._wants_fingerprint = wants_fingerprint
        self._ordered = 0
        for _ in range(lookahead):
            self._order_step()
        self._iterator = HeldIterator(pipeline, keep_alive)
        _alive.add(self)

    def _produce(self) -> Element:
        self._order_step()
        batches, sizes, fingerprint = self._iterator.read()
        sizes = sizes.numpy()
        self._rows = self._rows or int(sizes.sum())
        if self.delivered == 0 and self._wants_fingerprint:
            self.fingerprint = int(fingerprint)
        return list(batches), sizes

    def _free(self) -> None:
        _alive.discard(self)
        orders, give_back = self._orders, self._give_back

        def reuse() -> None:
            orders.clear()
            give_back()

        try:
            self._iterator.release(reuse)
        except RuntimeError:  # no new thread while the interpreter ends
            orders.close()

    def abandon(self) -> None:
        """Wakes up a waiting pipeline for good, at the end of the process."""
        self._orders.close()

    def _order_step(self) -> None:
        first = self._wants_fingerprint and self._ordered == 0
        self._ordered += 1
        self._orders.put(self._weights(), self._rows, first)


_alive: weakref.WeakSet[PipelineRun] = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    for run in list(_alive):
        run.abandon()
