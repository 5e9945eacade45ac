"""Sources of global batches, one by one, that cut only the wanted ones."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import Protocol

import numpy as np
import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.input.data_pass import Element, Weights
from keras_het.loader.iterators.adjustable_pipeline import AdjustablePipeline
from keras_het.loader.iterators.held_iterator import HeldIterator
from keras_het.loader.order import rows
from keras_het.loader.order.pass_counter import PassCounter
from keras_het.loader.order.pipeline_form import PipelineForm, recognise
from keras_het.loader.order.share_queue import ShareQueue
from keras_het.planning.shares import apportion


class Follower(Protocol):
    """An input that is made from a data set."""

    def follow(self, form: PipelineForm) -> None:
        """Read from another form from the next pass on: all inputs share one order of passes."""


@dataclasses.dataclass
class Known:
    """Form of a data set, and its passes; no form if that would keep the data set alive."""

    form: PipelineForm | None
    passes: PassCounter
    inputs: weakref.WeakSet[Follower] = dataclasses.field(default_factory=weakref.WeakSet)


# A second `fit` on the same data set object continues its shuffle orders, as in stock Keras.
_known: weakref.WeakKeyDictionary[adapter.Dataset, dict[int | None, Known]] = (
    weakref.WeakKeyDictionary()
)
# Data sets that read from one shuffle share its orders: its `take` and `skip`, and those that
# Keras makes in each `fit` with class weights.
_passes: weakref.WeakKeyDictionary[adapter.Dataset, PassCounter] = weakref.WeakKeyDictionary()


def recall(
    dataset: adapter.Dataset, global_batch_size: int | None, reader: Follower
) -> tuple[PipelineForm, PassCounter]:
    """Return the form and the passes of a data set, remembered from earlier inputs."""
    known = _known.setdefault(dataset, {}).get(global_batch_size)
    form = known.form if known else None
    if form is None:
        parts = dataset.current if isinstance(dataset, AdjustablePipeline) else dataset
        form = recognise(parts.batch(global_batch_size) if global_batch_size else parts)
    if known is None:
        known = Known(None, _passes_of(dataset))
        _known[dataset][global_batch_size] = known
    if form.mode == "element":  # the stream of a slice form may be the data set itself
        known.form = form
    known.inputs.add(reader)
    known.passes.inputs.add(reader)
    return form, known.passes


def _passes_of(dataset: adapter.Dataset) -> PassCounter:
    shuffle = adapter.first_reshuffled(dataset)
    return PassCounter() if shuffle is None else _passes.setdefault(shuffle, PassCounter())


def remember(dataset: adapter.Dataset, global_batch_size: int | None, form: PipelineForm) -> None:
    """Make all inputs of the same data set read from `form`, whose stream is a copy.

    They count their passes together, so each order must be taken from the same shuffles.
    """
    known = _known.get(dataset, {}).get(global_batch_size)
    if known is not None:
        known.form = form
        for each in list(known.inputs):
            each.follow(form)


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
        self._iterator.release()


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
        self._iterator.release()
