"""What is remembered of a user's data set between two inputs that are made of it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from keras_het.loader.adjustable_pipeline import AdjustablePipeline
from keras_het.loader.pass_counter import PassCounter
from keras_het.loader.pipeline_form import PipelineForm, recognise


@dataclasses.dataclass
class Known:
    """The form that a data set had, and its passes; no form if that would keep the data set."""

    form: PipelineForm | None
    passes: PassCounter


# A second `fit` on the same data set object goes on with its shuffle orders, as stock Keras does.
_known: weakref.WeakKeyDictionary[Any, dict[int | None, Known]] = weakref.WeakKeyDictionary()


def recall(dataset: Any, global_batch_size: int | None) -> tuple[PipelineForm, PassCounter]:
    """The form and the passes of a data set, remembered from earlier inputs.

    Args:
        dataset: pipeline of global batches, or of samples with `global_batch_size`.
        global_batch_size: samples in a global batch, None if elements are global batches.

    Returns:
        The form, and what counts its passes.
    """
    known = _known.setdefault(dataset, {}).get(global_batch_size)
    form = known.form if known else None
    if form is None:
        parts = dataset.current if isinstance(dataset, AdjustablePipeline) else dataset
        form = recognise(parts.batch(global_batch_size) if global_batch_size else parts)
    if known is None:
        known = Known(None, PassCounter())
        _known[dataset][global_batch_size] = known
    if form.mode == "element":  # the stream of a slice form may be the data set itself
        known.form = form
    return form, known.passes


def remember(dataset: Any, global_batch_size: int | None, form: PipelineForm) -> None:
    """Makes the next input of the same data set read from `form`, whose stream is a copy."""
    if dataset in _known and global_batch_size in _known[dataset]:
        _known[dataset][global_batch_size].form = form
