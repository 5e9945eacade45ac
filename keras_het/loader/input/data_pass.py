"""Passes over the data: rewound after a look at the first element, cut, or claimed from others."""

from __future__ import annotations

import abc
import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from keras_het.loader.iterators.handover import HeldIterator, hand_over, release
from keras_het.loader.nested import Batch
from keras_het.loader.order import rows
from keras_het.loader.order.rows import count_bytes
from keras_het.loader.order.share_queue import ParallelCalls, ShareQueue
from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.planning.shares import IntArray, apportion

if TYPE_CHECKING:
    import tensorflow as tf

Element: TypeAlias = tuple[list[Batch], IntArray]
"""Batches of the local replicas, and int64 sizes of shape [num_replicas]."""

Weights = Callable[[], Sequence[float]]


class Placement(Protocol):
    """Copies batches to the devices that compute on them."""

    def __call__(self, batches: list[Batch]) -> list[Batch]:
        """Return each local replica's batch on its device."""

    def ahead(self, batches: list[Batch]) -> list[Batch]:
        """Return the same while the step before is computed, as far as there is memory for it."""


@dataclasses.dataclass(eq=False, kw_only=True)
class DataPass(abc.ABC):
    """A pass over the data."""

    number: int
    first_step: int = 0
    num_steps: int = -1

    def __post_init__(self) -> None:
        self.delivered = 0
        self.ended = False
        self.fingerprint: int | None = None
        self.on_end: Callable[[], None] | None = None
        self.was_executed = False
        self.placement: Placement | None = None
        self._first: Element | None = None
        self._rewound = False
        self._closed = False

    def next_element(self) -> Element:
        first, self._first = self._first, None
        if first is not None and self._rewound:
            return self._placed(first)
        if self.ended or self._closed:
            raise StopIteration
        try:
            element = self._produce()
        except StopIteration:
            self._end()
            raise
        self.delivered += 1
        if self.delivered == 1:
            self._first = element
        if self.first_step + self.delivered == self.num_steps:
            # Keras does not ask for the end of data whose size it knows
            self._end()
        return self._placed(element)

    def _placed(self, element: Element) -> Element:
        return element if self.placement is None else (self.placement(element[0]), element[1])

    def _end(self) -> None:
        self.ended = True
        if self.on_end is not None:
            self.on_end()
        self.close()

    def rewind(self) -> bool:
        """Return to the first element, once, if no other was delivered."""
        if self._rewound or self._first is None:
            return False
        self._rewound = True
        return True

    def leave_out(self, steps: int) -> None:
        """Continue as a pass that begins after some of its steps; before any is used."""
        with contextlib.suppress(StopIteration):
            for _ in range(steps):
                self.next_element()
        if steps:
            self.first_step, self.delivered = self.first_step + steps, 0
            self._first, self._rewound = None, False

    def cut_first_again(self) -> bool:
        """Cut the element that was looked at by the present weights; return whether possible."""
        return False

    @property
    def is_over(self) -> bool:
        return self.ended or self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._free()

    @abc.abstractmethod
    def _produce(self) -> Element:
        """Make the next element, or raise StopIteration."""

    @abc.abstractmethod
    def _free(self) -> None:
        """Release the resources of the pass; called once."""


class OrderedPass(DataPass):
    """A pass whose batches are ordered some steps before they are read."""

    held: HeldIterator

    def next_element(self) -> Element:
        """Return the next element, and begin to read the one after it if its shares are settled."""
        element = super().next_element()
        placement, is_training = self.placement, self.delivered > 1  # Keras looks at the first
        if placement and is_training and not self.is_over and self._is_next_ordered:
            self.held.read_ahead(functools.partial(self._read_and_place, placement))
        return element

    def _produce(self) -> Element:
        self._order_next()
        if self.held.ahead is None:
            return self.read()
        element = self.held.ahead.result()
        self.held.ahead = None
        return element

    def _read_and_place(self, placement: Placement) -> Element:
        batches, sizes = self.read()
        return placement.ahead(batches), sizes

    @abc.abstractmethod
    def _order_next(self) -> None:
        """Order as many batches as are to be ordered when the next one is read."""

    @property
    @abc.abstractmethod
    def _is_next_ordered(self) -> bool:
        """Whether the next batch can be read from what is held now, as things stand."""

    @abc.abstractmethod
    def order(self, wanted: bool = True) -> None:
        """Order the next batch, by the present weights, or for nobody."""

    @abc.abstractmethod
    def read(self) -> Element:
        """Return the next batch that was ordered, without any row if it was for nobody."""


@dataclasses.dataclass(eq=False, kw_only=True)
class SlicedPass(OrderedPass):
    """A pass of the user's unchanged pipeline; a cut shares the memory of its batch."""

    pipeline: dataclasses.InitVar[tf.data.Dataset]
    keep_alive: dataclasses.InitVar[object]
    layout: ReplicaLayout
    weights: Weights
    lookahead: int
    reads_ahead: bool = False
    wants_fingerprint: bool = False

    def __post_init__(self, pipeline: tf.data.Dataset, keep_alive: object) -> None:
        super().__post_init__()
        self._ordered = collections.deque(tuple(self.weights()) for _ in range(self.lookahead))
        self.batch_bytes = 0
        self._latest: tuple[tuple[tuple[float, ...], int], IntArray, tf.Tensor] | None = None
        self._first_batch: Batch = None
        self.held = HeldIterator(pipeline, keep_alive)

    def move_to(
        self,
        pipeline: tf.data.Dataset,
        keep_alive: object,
        prepared: tf.data.Iterator | None = None,
    ) -> None:
        before, old = self.held, self.held.iterator
        if before.ahead is not None:
            concurrent.futures.wait([before.ahead])
        new = hand_over(old, pipeline, prepared)
        self.held = HeldIterator(pipeline, keep_alive, new)
        self.held.ahead = before.ahead
        release(old)

    def order(self, wanted: bool = True) -> None:
        self._ordered.append(tuple(self.weights()) if wanted else ())

    def _order_next(self) -> None:
        self.order()

    @property
    def _is_next_ordered(self) -> bool:
        return self.reads_ahead and bool(self._ordered)

    def read(self) -> Element:
        weights = self._ordered.popleft()
        batch = self.held.read()
        if not weights:
            return [], np.zeros(0, np.int64)
        if not self.batch_bytes:
            self.batch_bytes = count_bytes(batch)
        if self.delivered == 0 and self.wants_fingerprint:
            self.fingerprint = int(rows.hash_rows(batch))
        self._first_batch = batch if self.delivered == 0 else None
        return self._cut(batch, weights)

    def cut_first_again(self) -> bool:
        weights = tuple(self.weights())
        self._ordered = collections.deque(weights for _ in self._ordered)
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
        if self.layout.num_replicas == 1:
            return [batch], sizes
        local = self.layout.local_replicas
        return rows.cut_eagerly(batch, cuts)[local.start : local.stop], sizes

    def _sizes(self, total: int, weights: tuple[float, ...]) -> IntArray:
        if len(weights) != self.layout.num_replicas:
            raise ValueError(
                f"Expected one weight for each of the {self.layout.num_replicas} replicas. "
                f"Received: {list(weights)}."
            )
        return np.asarray(apportion(total, weights), np.int64)

    def _free(self) -> None:
        self.held.release()


class Claims(Protocol):
    """Decisions, batch by batch in order, on which ones belong to this process."""

    @property
    def passes_before(self) -> tuple[bool, ...]:
        """Passes before this one, for each whether it was iterated; the same on all workers."""

    @property
    def num_parts(self) -> int:
        """Steps that one of the batches is cut into."""

    @property
    def left_over(self) -> collections.deque[Element]:
        """Steps of own batches to deliver first, left by an epoch that ended within a batch."""

    def is_known(self, batch: int) -> bool:
        """Tell whether the owner of this batch is known already."""

    def owns(self, batch: int) -> bool:
        """Tell whether a batch belongs to this process; may wait for the answer."""

    def is_over(self, batch: int) -> bool:
        """Tell whether this batch and all later ones belong to others."""


class ClaimedPass(DataPass):
    """A pass that skips the batches of others and delivers each of its own in one or more steps."""

    def __init__(self, source: OrderedPass, claims: Claims, lookahead: int, number: int) -> None:
        super().__init__(number=number)
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
            is_wanted = self._announced.popleft()
            element = self._source.read()
            if is_wanted:
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
                    f"Batch {self._next} was requested before its owner was known. Expected: "
                    "at most `steps_per_execution` steps between two calls of "
                    "`AsyncWorkers.on_train_batch_end`. Iterate the data by `fit` only."
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
        """Order the steps of this run up to a given number, but none of a later epoch."""
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
