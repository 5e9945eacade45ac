"""Forms and passes of the datasets that inputs were made from, which these inputs share."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.iterators.tunable import TunablePipeline
from keras_het.loader.order.pass_counter import PassCounter
from keras_het.loader.order.pipeline_form import PipelineForm, recognise

if TYPE_CHECKING:
    from keras_het.loader.input.global_order import GlobalOrderDataset


@dataclasses.dataclass
class Known:
    """Form of a dataset, and its passes; no form if that would keep the dataset alive."""

    form: PipelineForm | None
    passes: PassCounter
    inputs: weakref.WeakSet[GlobalOrderDataset] = dataclasses.field(default_factory=weakref.WeakSet)


# A second `fit` on the same dataset object continues its shuffle orders, as in stock Keras.
_known: weakref.WeakKeyDictionary[adapter.Dataset, dict[int | None, Known]] = (
    weakref.WeakKeyDictionary()
)
# Data sets that read from one shuffle share its orders: its `take` and `skip`, and those that
# Keras makes in each `fit` with class weights.
_passes: weakref.WeakKeyDictionary[adapter.Dataset, PassCounter] = weakref.WeakKeyDictionary()


def recall(
    dataset: adapter.Dataset, global_batch_size: int | None, reader: GlobalOrderDataset
) -> tuple[PipelineForm, PassCounter]:
    """Return the form and the passes of a dataset, remembered from earlier inputs."""
    of_sizes = _known.setdefault(dataset, {})
    if global_batch_size not in of_sizes:
        shuffle = adapter.first_reshuffled(dataset)
        passes = PassCounter()
        if shuffle is not None:
            passes = _passes.setdefault(shuffle, passes)
        of_sizes[global_batch_size] = Known(None, passes)
    known = of_sizes[global_batch_size]
    form = known.form
    if form is None:
        parts = dataset.current if isinstance(dataset, TunablePipeline) else dataset
        form = recognise(parts.batch(global_batch_size) if global_batch_size else parts)
        form = dataclasses.replace(form, is_built=parts is not dataset)
    if form.mode == "element":  # the stream of a slice form may be the dataset itself
        known.form = form
    known.inputs.add(reader)
    return form, known.passes


def remember(dataset: adapter.Dataset, global_batch_size: int | None, form: PipelineForm) -> None:
    """Make all inputs of a dataset read from a copy: they take their orders from one shuffle."""
    known = _known[dataset][global_batch_size]
    known.form = form
    for each in list(known.inputs):
        each.follow(form)
