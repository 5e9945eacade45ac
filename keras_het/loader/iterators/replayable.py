"""What the iterators of a pipeline take from its shuffles, and from random generators."""

from __future__ import annotations

from keras_het.loader import tf_data_adapter as adapter

_SHUFFLE_OPERATIONS = frozenset(
    {"RandomShuffle", "ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3"}
)
_DRAWING_OPERATIONS = adapter.RANDOM_VALUE_OPERATIONS | _SHUFFLE_OPERATIONS


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


def has_one_order_a_pass(stream: adapter.Dataset) -> bool:
    """Tell whether a pass left half-way, to continue elsewhere, does not affect later orders."""
    nodes = list(adapter.upstream_of(stream))
    shuffles = [node for node in nodes if adapter.is_reshuffled(node)]
    if not shuffles:
        return True
    # everything except `repeat` starts its source once
    return len(shuffles) == 1 and not any(
        adapter.is_repeat(node) and any(map(adapter.is_reshuffled, adapter.upstream_of(node)))
        for node in nodes
    )
