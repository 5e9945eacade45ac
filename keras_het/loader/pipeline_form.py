"""Recognises what a user's pipeline does, so that costly work is done where it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter

Dataset = adapter.Dataset


@dataclasses.dataclass(frozen=True)
class PipelineForm:
    """A pipeline split into what every worker runs and what only the user of a row runs.

    Args:
        mode: "element" if `stream` yields single samples before their maps, else "slice" and
            `stream` yields global batches.
        reason: why this mode, in words for the log.
        stream: what every worker runs.
        element_maps: `map` nodes for single samples, first to last; for own rows only.
        batch_size: samples of a full global batch, or None if not known.
        drop_remainder: whether a last partial batch is left out (element mode).
        row_functions: row-wise functions of a batch, first to last; for own rows only.
        gathers_indices: whether an element of `stream` is a pair (indices, arrays) of which only
            the indices are cut, as in Keras's input from arrays.
        options: the user's options.
    """

    mode: str
    reason: str
    stream: Dataset
    element_maps: tuple[Dataset, ...]
    batch_size: int | None
    drop_remainder: bool
    row_functions: tuple[Callable[..., Any], ...]
    gathers_indices: bool
    options: tf.data.Options

    def reading_from(self, stream: Dataset) -> PipelineForm:
        """The same form of another stream with equal elements."""
        return dataclasses.replace(self, stream=stream)


def recognise(dataset: Dataset) -> PipelineForm:
    """Splits a pipeline of global batches into common and own work.

    Walks from the end of the pipeline: past prefetches, options and maps that are known to be
    row-wise, to `batch`; from there through operations that commute with a one-to-one map
    (shuffle, repeat, take, skip, shard, prefetch, options) down to the first one that does not.
    All maps on that way whose input elements have fixed dense shapes are left out of the stream.

    Args:
        dataset: pipeline whose elements are global batches.

    Returns:
        The form; "slice" mode, which is always right, where the pipeline is not recognised.
    """
    options = tf.data.Options().merge(dataset.options())
    node, row_functions = _before_row_functions(dataset)
    if adapter.keras_array_indices(node):
        row_functions = (adapter.map_function(node), *row_functions)
        reason = "Keras arrays: each worker gathers only its own rows by their indices"
        return _slices(adapter.inputs_of(node)[0], reason, row_functions, options, True)
    if not adapter.is_batch(node):
        reason = f"the global batch comes from {type(node).__name__}, not from a plain batch()"
        return _slices(dataset, reason, (), options)
    size, drop_remainder = adapter.batch_arguments(node)
    maps, kept = _pulled_maps(adapter.inputs_of(node)[0])
    if size is None or not maps:
        reason = "no map of single samples with fixed dense input shapes right before batch()"
        return _slices(node, reason, row_functions, options)
    return PipelineForm(
        mode="element",
        reason=f"{len(maps)} map(s) of single samples run only where the sample is used",
        stream=_rebuilt(*kept),
        element_maps=tuple(reversed(maps)),
        batch_size=size,
        drop_remainder=drop_remainder,
        row_functions=row_functions,
        gathers_indices=False,
        options=options,
    )


def _slices(
    stream: Dataset,
    reason: str,
    row_functions: tuple[Callable[..., Any], ...],
    options: tf.data.Options,
    gathers_indices: bool = False,
) -> PipelineForm:
    size = adapter.batch_arguments(stream)[0] if adapter.is_batch(stream) else None
    return PipelineForm(
        "slice", reason, stream, (), size, False, row_functions, gathers_indices, options
    )


def _before_row_functions(
    dataset: Dataset,
) -> tuple[Dataset, tuple[Callable[..., Any], ...]]:
    node, functions = dataset, []
    while adapter.is_prefetch_or_options(node) or adapter.keras_class_weight(node):
        if adapter.is_map(node):
            functions.append(adapter.map_function(node))
        node = adapter.inputs_of(node)[0]
    return node, tuple(reversed(functions))


def _pulled_maps(top: Dataset) -> tuple[list[Dataset], tuple[Dataset, list[Dataset]]]:
    """Maps to leave out, last first, and (source, nodes to repeat on it, last first)."""
    walked: list[Dataset] = []
    node = top
    lowest = 0
    while adapter.is_map(node) or adapter.commutes_with_map(node):
        walked.append(node)
        node = adapter.inputs_of(node)[0]
        if adapter.is_map(walked[-1]) and _batchable(node.element_spec):
            lowest = len(walked)
    walked = walked[:lowest]
    maps = [node for node in walked if adapter.is_map(node)]
    source = adapter.inputs_of(walked[-1])[0] if walked else top
    # options are set again at the end of the pipeline
    left_out = (adapter.is_map, adapter.is_options)
    return maps, (source, [node for node in walked if not any(is_(node) for is_ in left_out)])


def _rebuilt(source: Dataset, nodes: list[Dataset]) -> Dataset:
    for node in reversed(nodes):
        source = adapter.rebuild_on(node, source)
    return source


def _batchable(element_spec: Any) -> bool:
    specs = [spec for spec in tf.nest.flatten(element_spec) if not adapter.is_none(spec)]
    dense = [spec for spec in specs if isinstance(spec, tf.TensorSpec)]
    return (
        bool(dense)
        and len(dense) == len(specs)
        and all(spec.shape.is_fully_defined() for spec in dense)
    )
