"""A pass in which others take some of the global batches."""

from __future__ import annotations

import collections
from typing import Protocol

import numpy as np

from keras_het.loader.input.data_pass import DataPass, Element


class Claims(Protocol):
    """Decisions, batch by batch in order, on which ones belong to this process."""

    @property
    def passes_before(self) -> tuple[bool, ...]:
        """Passes over the data before this one, for each whether it was iterated.

        They determine the order of samples, and are the same on all workers that share the pass.
        """

    @property
    def num_parts(self) -> int:
        """Steps that one of the batches is cut into."""

    @property
    def left_over(self) -> collections.deque[Element]:
        """Steps of own batches that are still to be delivered.

        A pass begins with them, and leaves in it what it does not get to: Keras may end its epoch
        in the middle of a batch.
        """

    def is_known(self, batch: int) -> bool:
        """Tell whether the owner of this batch is known already."""

    def owns(self, batch: int) -> bool:
        """Tell whether a batch belongs to this process; may wait for the answer."""

    def is_over(self, batch: int) -> bool:
        """Tell whether this batch and all later ones belong to others."""


class BatchSource(Protocol):
    """Source of the global batches of a pass, one by one, cut if they are wanted."""

    def order(self, wanted: bool) -> None:
        """Announce whether the next unannounced batch will be wanted."""

    def read(self) -> Element | None:
        """Return the next batch, cut for the local replicas, None if it was not wanted."""

    def close(self) -> None:
        """End the pass."""


class ClaimedPass(DataPass):
    """A pass that delivers the batches of this process and skips the others.

    A batch may be delivered in several parts, each a separate step, for a worker with less memory
    or patience than the sync group.
    """

    def __init__(self, source: BatchSource, claims: Claims, lookahead: int, number: int) -> None:
        super().__init__(number, first_step=0, num_steps=-1)
        self._source = source
        self._claims = claims
        self._lookahead = lookahead
        self._announced: collections.deque[bool] = collections.deque()
        self._next = 0
        self._parts = claims.left_over

    def _produce(self) -> Element:
        while not self._parts:
            self._announce()
            if not self._announced:
                raise StopIteration
            self._announced.popleft()
            element = self._source.read()
            if element is not None:
                self._parts.extend(split_element(element, self._claims.num_parts))
        return self._parts.popleft()

    def _announce(self) -> None:
        """Announce the next batch, and those after it whose owner is known."""
        while len(self._announced) <= self._lookahead and not self._claims.is_over(self._next):
            if self._announced and not self._claims.is_known(self._next):
                return
            wanted = self._claims.owns(self._next)
            if not wanted and self._claims.is_over(self._next):
                return
            if not self._claims.is_known(self._next):  # skipping it would lose it
                raise RuntimeError(
                    f"Batch {self._next} was asked for before it was known whose it is. Expected: "
                    "at most `steps_per_execution` steps between two calls of "
                    "`HybridAggregation.on_train_batch_end`. Iterate the data by `fit` only."
                )
            self._announced.append(wanted)
            self._source.order(wanted)
            self._next += 1

    def _free(self) -> None:
        self._source.close()


def split_element(element: Element, num_parts: int) -> list[Element]:
    """Cut a batch for num_parts * n replicas into steps of n replicas; empty ones are left out."""
    batches, sizes = element
    each = len(sizes) // num_parts
    parts = [
        (batches[first : first + each], np.asarray(sizes[first : first + each]))
        for first in range(0, len(sizes), each)
    ]
    return [part for part in parts if part[1].sum()] if num_parts > 1 else [element]
