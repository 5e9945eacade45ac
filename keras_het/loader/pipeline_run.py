"""One pass over the data: a running pipeline and the orders it works by."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

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
        epoch: number of passes over the data before this one.
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
        epoch: int,
        first_step: int,
        num_steps: int,
        wants_fingerprint: bool,
        give_back: Callable[[], None],
        keep_alive: Any,
    ) -> None:
        super().__init__(epoch, first_step, num_steps)
        self._orders = orders
        self._weights = weights
        self._rows = batch_rows
        self._give_back = give_back
        self._wants_fingerprint = wants_fingerprint
        self._ordered = 0
        for _ in range(lookahead):
            self._order_step()
        self._iterator = iter(pipeline)
        _hold_functions_of(self._iterator, (pipeline, keep_alive))
        _alive.add(self)

    def _produce(self) -> Element:
        self._order_step()
        batches, sizes, fingerprint = next(self._iterator)
        sizes = sizes.numpy()
        self._rows = self._rows or int(sizes.sum())
        if self.delivered == 0 and self._wants_fingerprint:
            self.fingerprint = int(fingerprint)
        return list(batches), sizes

    def _free(self) -> None:
        _alive.discard(self)
        # Destroying an iterator may block until tf.data's autotuner wakes up (seconds): not here.
        # A run that is garbage never comes here: handing its parts to another thread while the
        # collector works on them crashes, so that they go where they are, and the pipeline too.
        held = [self.__dict__.pop("_iterator", None)]
        try:
            threading.Thread(
                target=_release, args=(held, self._orders, self._give_back), daemon=True
            ).start()
        except RuntimeError:  # no new thread while the interpreter ends
            self._orders.close()

    def abandon(self) -> None:
        """Wakes up a waiting pipeline for good, at the end of the process."""
        self._orders.close()

    def _order_step(self) -> None:
        first = self._wants_fingerprint and self._ordered == 0
        self._ordered += 1
        self._orders.put(self._weights(), self._rows, first)


def _release(held: list[Any], orders: WorkOrders, give_back: Callable[[], None]) -> None:
    held.clear()
    with contextlib.suppress(Exception):
        orders.clear()
        give_back()


def _hold_functions_of(iterator: Any, holder: Any) -> None:
    """Keeps the functions of a pipeline until after its iterator is gone.

    TensorFlow crashes if the garbage collector takes the functions of a pipeline before the
    iterator whose threads are calling them, which it may do where both are in one cycle (an
    exception's traceback is enough).
    """
    while _condemned:
        _held.pop(_condemned.pop(), None)
    key = next(_keys)
    _held[key] = holder
    weakref.finalize(iterator, _condemned.append, key).atexit = False


_held: dict[int, Any] = {}
_condemned: list[int] = []
_keys = itertools.count()
_alive: weakref.WeakSet[PipelineRun] = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    for run in list(_alive):
        run.abandon()
