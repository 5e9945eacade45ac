"""Reconstruction of the rest of a pipeline on a changed beginning."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.advice import nodes

Dataset = adapter.Dataset


def path_to(root: Dataset, node: Dataset) -> list[Dataset] | None:
    """Return the operations after `node` up to the end `root`, first to last.

    Returns:
        None if an operation on the way has several inputs.
    """
    walked: list[Dataset] = []
    current = root
    while current is not node:
        sources = adapter.inputs_of(current)
        if len(sources) != 1:
            return None
        walked.append(current)
        current = sources[0]
    return walked[::-1]


def rebuilt(source: Dataset, path: Sequence[Dataset] | None) -> Dataset | None:
    """Apply the operations of `path` to another source; None if one of them cannot be rebuilt."""
    if path is None:
        return None
    for node in path:
        if nodes.is_own(node) or adapter.is_options(node):
            continue
        if adapter.is_map(node) or adapter.is_batch(node) or adapter.commutes_with_map(node):
            source = adapter.rebuild_on(node, source)
        elif nodes.kind(node) == "Filter":
            source = source.filter(nodes.python_function(node))
        elif nodes.kind(node) == "PaddedBatch":
            source = _padded_batch(node, source)
        elif nodes.kind(node).endswith("Interleave"):
            source = interleaved(node, source, getattr(node, "_num_parallel_calls", None))
        else:
            return None
    return source


def interleaved(node: Dataset, source: Dataset, parallel_calls: tf.Tensor | int | None) -> Dataset:
    """Return the same `interleave` on another source, or with different parallelism."""
    return source.interleave(
        nodes.python_function(node),
        cycle_length=adapter.constant(node._cycle_length),
        block_length=adapter.constant(node._block_length),
        num_parallel_calls=parallel_calls,
    )


def _padded_batch(node: Dataset, source: Dataset) -> Dataset:
    return source.padded_batch(
        node._batch_size,
        padded_shapes=node._padded_shapes,
        padding_values=node._padding_values,
        drop_remainder=node._drop_remainder,
    )
