"""Advance of reshuffling datasets to the order of a later epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.order.pass_counter import Pass

Dataset = adapter.Dataset


def fresh_copy(dataset: Dataset) -> Dataset:
    """Return the same pipeline with every reshuffling `shuffle` back at its first iteration."""
    if not any(adapter.is_reshuffled(node) for node in adapter.upstream_of(dataset)):
        return dataset
    if not (
        adapter.is_map(dataset) or adapter.is_batch(dataset) or adapter.commutes_with_map(dataset)
    ):
        raise ValueError(
            "Cannot go back to an earlier order of this pipeline: a shuffle with "
            f"reshuffle_each_iteration is below {type(dataset).__name__}. Resume in a new process "
            "before the first iteration, or shuffle after that operation."
        )
    return adapter.rebuild_on(dataset, fresh_copy(adapter.inputs_of(dataset)[0]))


def advance(dataset: Dataset, passes: Iterable[Pass]) -> None:
    """Skip passes over the data, as cheaply as the pipeline allows.

    A shuffle's order depends on how often it was started before. If a pass starts each shuffle
    once, starting is enough; a shuffle that reads from another starts that with its first element;
    under anything else (`repeat` starts its source several times) the passes are run as far as they
    went. A pass that was not iterated is only started.
    """
    if adapter.first_reshuffled(dataset) is None:
        return
    options = tf.data.Options()
    options.autotune.enabled = False  # its threads would delay the end of the iterator
    quiet = dataset.with_options(options)
    for iterated in passes:
        iterator = iter(quiet)
        if not iterated:
            continue
        if not starts_once(dataset):
            # how far a pass over infinite data got that still runs is unknown
            is_known = iterated is not True or dataset.cardinality() != tf.data.INFINITE_CARDINALITY
            steps = None if iterated is True and is_known else int(iterated)
            for _ in itertools.islice(iterator, steps):
                pass
        elif nests_shuffles(dataset):
            next(iterator, None)


def starts_once(node: Dataset) -> bool:
    """Tell whether one pass over a pipeline starts every reshuffling shuffle exactly once."""
    while adapter.inputs_of(node) and adapter.first_reshuffled(node) is not None:
        if adapter.is_repeat(node) or not (
            adapter.is_map(node) or adapter.is_batch(node) or adapter.commutes_with_map(node)
        ):
            return False
        node = adapter.inputs_of(node)[0]
    return True


def nests_shuffles(node: Dataset) -> bool:
    return sum(map(adapter.is_shuffle, adapter.upstream_of(node))) > 1
