"""Detection of samples that are processed and then thrown away."""

from __future__ import annotations

from functools import partial

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.advice import nodes
from keras_het.loader.advice.advice import LATE_FILTER, Advice
from keras_het.loader.advice.examination import Examination
from keras_het.loader.nested import Batch

Dataset = adapter.Dataset
_MOST_KEPT = 0.9
_MOST_SAMPLES = 512
_PARTS = 1000
_FREE = frozenset({"Identity", "Placeholder", "NoOp", "Const"})
_HEAVY = (
    "BatchMatMul",
    "Conv",
    "Crop",
    "Decode",
    "DepthwiseConv",
    "EagerPyFunc",
    "FFT",
    "Image",
    "MatMul",
    "PartitionedCall",
    "PyFunc",
    "ReadFile",
    "Resize",
    "StatefulPartitionedCall",
    "StatelessWhile",
    "While",
)


def find(examination: Examination) -> list[Advice]:
    """Advise `filter` before `map` if the filter does not need what the map computes.

    The graphs of both functions tell what the predicate reads, and which operations of the map that
    needs. The gain is that of a pipeline in which the map receives only as many samples as are
    kept.
    """
    found = []
    for node, _ in examination.all_nodes():
        if nodes.kind(node) == "Filter":
            advice = examination.quietly(partial(_advice, examination, node))
            found += [advice] if advice else []
    return found


def _advice(examination: Examination, node: Dataset) -> Advice | None:
    mapped = adapter.inputs_of(node)[0]
    while adapter.commutes_with_map(mapped):
        (mapped,) = adapter.inputs_of(mapped)
    if not adapter.is_map(mapped):
        return None
    passed_on, unneeded = _what_the_filter_needs(mapped, node)
    if not unneeded:
        return None
    kept = _kept_part(examination, node)
    if kept is None or kept > _MOST_KEPT:
        return None
    (source,) = adapter.inputs_of(mapped)
    gain = examination.gain_of(node, adapter.rebuild_on(mapped, _some(source, kept)))
    if gain is None:
        return None
    label = nodes.label(mapped)
    how = (
        "The filter reads only what that map passes on: call filter() before map()."
        if passed_on
        else f"The filter does not need {', '.join(sorted(unneeded))}: split the map, compute "
        "what the filter reads, then filter(), then map() the rest."
    )
    message = f"{nodes.name(node)} drops {1 - kept:.0%} of the samples after the work. {how}"
    return Advice(LATE_FILTER, label, message, gain.ratio, gain.is_measured)


def _some(source: Dataset, part: float) -> Dataset:
    """Return a part of the elements, spread evenly."""
    limit = max(round(part * _PARTS), 1)

    def is_one(number: tf.Tensor, _: Batch) -> tf.Tensor:
        return (number + 1) * limit // _PARTS > number * limit // _PARTS

    return source.enumerate().filter(is_one).map(lambda _, element: element)


def _what_the_filter_needs(mapped: Dataset, node: Dataset) -> tuple[bool, set[str]]:
    """Tell whether the filter reads only inputs of the map, and what else the map does."""
    read = _read_inputs(node._predicate.function.graph)
    graph = mapped._map_func.function.graph
    # captures of the filter, such as a table, come after the values it gets from the map
    needed = _ancestors([graph.outputs[place] for place in read if place < len(graph.outputs)])
    everything = _ancestors(list(graph.outputs))
    unneeded = {operation.type for operation in everything - needed} - _FREE
    kinds = {operation.type for operation in needed} - _FREE
    if not kinds:
        return True, unneeded
    # costs within a function are not measured: only work that is known to be heavy
    heavy = {kind for kind in unneeded if kind.startswith(_HEAVY)}
    return False, set() if any(kind.startswith(_HEAVY) for kind in kinds) else heavy


def _read_inputs(graph: tf.Graph) -> list[int]:
    """Positions of the inputs of a function on which its outputs depend."""
    needed = _ancestors(list(graph.outputs))
    return [place for place, tensor in enumerate(graph.inputs) if tensor.op in needed]


def _ancestors(tensors: list[tf.Tensor]) -> set[tf.Operation]:
    waiting = [tensor.op for tensor in tensors]
    found: set[tf.Operation] = set()
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
    return found


def _kept_part(examination: Examination, node: Dataset) -> float | None:
    predicate = nodes.python_function(node)
    (source,) = adapter.inputs_of(node)

    def decide(*arguments: Batch) -> tf.Tensor:
        return tf.cast(predicate(*arguments), tf.int64)  # type: ignore[misc]

    within = examination.seconds / max(examination.cost(source).seconds, 1e-9)
    taken = [
        int(kept)
        for kept in source.take(int(min(max(within, 16), _MOST_SAMPLES)))
        .map(decide)
        .as_numpy_iterator()
    ]
    return sum(taken) / len(taken) if taken else None
