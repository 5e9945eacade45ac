"""Memory of a user's data set between two inputs made from it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Protocol

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.iterators.adjustable_pipeline import AdjustablePipeline
from keras_het.loader.order.pass_counter import PassCounter
from keras_het.loader.order.pipeline_form import PipelineForm, recognise


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
