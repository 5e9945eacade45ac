"""Checks that a second read of a pipeline yields the same elements in the same order."""

from __future__ import annotations

import tensorflow as tf

from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.iterators.handover import why_not
from keras_het.loader.order.replay import fresh_copy

_SHUFFLE_OPERATIONS = frozenset(
    {"RandomShuffle", "ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3"}
)
_DRAWING_OPERATIONS = adapter.RANDOM_VALUE_OPERATIONS | _SHUFFLE_OPERATIONS


def why_not_replayed(stream: adapter.Dataset, can_be_built: bool = False) -> str | None:
    """Return why a pipeline cannot be reread while an iterator runs; None if it can."""
    reason = why_not(stream)
    if reason:
        return reason
    for node in adapter.upstream_of(stream):
        reason = _reason_of(node)
        if reason:
            return reason
    try:
        if not can_be_built:
            fresh_copy(stream)
    except ValueError as error:
        return str(error).splitlines()[0].split(". ")[0]
    return None


def _reason_of(node: adapter.Dataset) -> str | None:
    kind = type(node).__name__.removeprefix("_").removesuffix("Dataset")
    if adapter.is_nondeterministic(node) or _interleaves_in_any_order(node):
        return f"{kind} has deterministic=False: another order when it is read again"
    if adapter.is_shuffle(node) and not any(adapter.shuffle_seeds(node)):
        return "a shuffle has no seed: another order when it is read again"
    if kind in ("Random", "Snapshot", "Save"):
        return f"{kind} may give other elements when it is read again"
    operations = adapter.operations_in_functions(node)
    if operations & adapter.PYTHON_OPERATIONS:
        return f"a Python function in {kind} may give other elements when it is read again"
    if operations & _DRAWING_OPERATIONS:
        return f"{kind} draws random values: other elements when it is read again"
    return None


def shares_a_shuffle(one: adapter.Dataset, other: adapter.Dataset) -> bool:
    """Tell whether two pipelines read from the same reshuffling shuffle: they share its orders."""
    nodes = {id(node) for node in adapter.upstream_of(one)}
    shuffles = (node for node in adapter.upstream_of(other) if adapter.is_reshuffled(node))
    return any(id(node) in nodes for node in shuffles)


def draws_an_order(dataset: adapter.Dataset) -> bool:
    """Tell whether a new iterator starts in a state that another build may not have."""
    return any(
        adapter.is_shuffle(node)
        or "Random" in type(node).__name__
        or adapter.operations_in_functions(node) & _DRAWING_OPERATIONS
        for node in adapter.upstream_of(dataset)
    )


def takes_a_place(dataset: adapter.Dataset) -> bool:
    """Tell whether one more iterator would change the orders of later ones, given seeds."""
    for node in adapter.upstream_of(dataset):
        kind = type(node).__name__
        if adapter.is_shuffle(node):
            if adapter.is_reshuffled(node) and adapter.shuffle_seeds(node) != (0, 0):
                return True
        elif "Shuffle" in kind or "Random" in kind:
            return True
    return False


def _interleaves_in_any_order(node: adapter.Dataset) -> bool:
    if "ParallelInterleave" not in type(node).__name__:
        return False
    text = tf.raw_ops.DatasetToGraphV2(input_dataset=iterator_adapter.data_set_variant(node))
    graph = tf.compat.v1.GraphDef.FromString(text.numpy())
    return any(
        operation.op.startswith("ParallelInterleave")
        and operation.attr["deterministic"].s == b"false"
        for operation in graph.node
    )


def has_one_order_a_pass(stream: adapter.Dataset) -> bool:
    """Tell whether a pass left half-way, to go on elsewhere, does not affect later orders."""
    nodes = list(adapter.upstream_of(stream))
    shuffles = [node for node in nodes if adapter.is_reshuffled(node)]
    if not shuffles:
        return True
    # everything except `repeat` starts its source once
    return len(shuffles) == 1 and not any(
        adapter.is_repeat(node) and any(map(adapter.is_reshuffled, adapter.upstream_of(node)))
        for node in nodes
    )
