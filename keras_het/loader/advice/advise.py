"""Measurement of a pipeline, with advice to its author."""

from __future__ import annotations

from typing import IO

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.advice import (
    cacheable_prefix,
    late_filter,
    nodes,
    python_function,
    sequential_interleave,
    unshuffled_shards,
    vectorisable_map,
)
from keras_het.loader.advice.advice import Advice, AdviceReport
from keras_het.loader.advice.examination import Examination
from keras_het.loader.iterators.adjustable_pipeline import AdjustablePipeline

_RULES = (
    cacheable_prefix.find,
    vectorisable_map.find,
    sequential_interleave.find,
    late_filter.find,
    python_function.find,
)


def advise(
    dataset: tf.data.Dataset,
    seconds: float = 0.5,
    step_seconds: float = 0.0,
    file: IO[str] | None = None,
) -> AdviceReport:
    """Print what the author of a pipeline could change, and what that would gain.

    Finds work that could be cached, maps of single samples that could work on batches, files that
    are read one after the other, samples that are decoded and then filtered out, files in the same
    order in each epoch, and Python functions in the hot path. Gains are measured: the changed
    pipeline is built and run. Gains below 20 % or 0.5 ms per batch are not reported.

    The pipeline and parts of it are iterated for `seconds` each, ten to thirty times: this uses up
    some of a shuffle's orders and some of a generator's elements. A pipeline that writes files
    (`cache(filename)`, `snapshot`) is only inspected. A cache in memory is filled first, for at
    most 10 seconds or 20 times `seconds`.

    Args:
        dataset: a `tf.data.Dataset`, as `fit` would get it.
        seconds: how long to run each part.
        step_seconds: time of the device for a batch, in seconds. A pipeline faster than that gains
            nothing. 0 asks for the fastest pipeline.
        file: where to print, the terminal by default.

    Returns:
        The findings, largest gain first.

    Raises:
        TypeError: if `dataset` is not a `tf.data.Dataset`.
        ValueError: if a time is not valid.
        tf.errors.OpError: if the pipeline itself fails.
    """
    _check(dataset, seconds, step_seconds)
    if isinstance(dataset, AdjustablePipeline):
        dataset = dataset.current
    examination = Examination(dataset, seconds, step_seconds)
    found: list[Advice] = unshuffled_shards.find(examination)
    notes = []
    if examination.why_not is None:
        for rule in _RULES:
            found += rule(examination)
    else:
        notes.append(examination.why_not)
    if any(nodes.kind(node) == "DataService" for node in adapter.upstream_of(dataset)):
        notes.append("What the tf.data service does was not looked at: advise on what it is given.")
    found.sort(key=lambda advice: -(advice.estimated_gain or 0.0))
    whole = examination.seconds_per_batch if examination.why_not is None else None
    report = AdviceReport(tuple(found), whole, tuple(notes))
    report.show(file)
    return report


def _check(dataset: tf.data.Dataset, seconds: float, step_seconds: float) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"advise needs a tf.data.Dataset. Received: {dataset!r} of type {type(dataset)}. Give "
            "it what you give to fit, before strategy.distribute and before iter()."
        )
    if not (0 < seconds < float("inf") and 0 <= step_seconds < float("inf")):
        raise ValueError(
            "seconds must be positive and step_seconds at least 0, both finite. Received: "
            f"seconds={seconds}, step_seconds={step_seconds}."
        )
