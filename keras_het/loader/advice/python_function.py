"""Detection of Python functions that the pipeline calls for its elements."""

from __future__ import annotations

import dataclasses
from functools import partial

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.advice import nodes
from keras_het.loader.advice.advice import PYTHON_FUNCTION, Advice
from keras_het.loader.advice.examination import Examination
from keras_het.loader.nested import Batch

Dataset = adapter.Dataset
_STAND_INS = 100_000


def find(examination: Examination) -> list[Advice]:
    """Advise TensorFlow operations in place of Python functions that take time.

    Python functions run one at a time, in turns with the Python of the training loop. The gain is
    what it would be if they took no time.
    """
    found = []
    for node, scale in examination.all_nodes():
        if not _calls_python(node) or _is_cached_later(examination, node):
            continue
        gain = examination.most_gain(_own_seconds(examination, node) * scale)
        stand_in = examination.quietly(partial(_stand_in, node)) if gain is not None else None
        if stand_in is not None and examination.can_run(node, stand_in):
            free = examination.gain_of(node, stand_in)
            gain = None if free is None else dataclasses.replace(free, is_measured=False)
        if gain is not None:
            found.append(
                Advice(
                    PYTHON_FUNCTION, nodes.label(node), _message(node), gain.ratio, gain.is_measured
                )
            )
    return found


def _stand_in(node: Dataset) -> Dataset:
    """Return elements of the same form from TensorFlow operations that cost only their calls."""

    def zeros(spec: tf.TypeSpec) -> tf.Tensor:
        shape = spec.shape.as_list() if spec.shape.rank is not None else []
        return tf.zeros([size or 1 for size in shape], spec.dtype)

    def nothing(*_: Batch) -> Batch:
        return tf.nest.map_structure(zeros, node.element_spec)

    if adapter.is_map(node):
        # with an end: a filter that drops zeros would search for another element forever
        source = adapter.inputs_of(node)[0].take(_STAND_INS)
        return source.map(nothing, num_parallel_calls=adapter.parallel_calls(node))
    if adapter.draws_from_generator(node):
        return tf.data.Dataset.range(_STAND_INS).map(nothing)
    raise TypeError(f"No stand-in for {nodes.name(node)}.")


def _own_seconds(examination: Examination, node: Dataset) -> float:
    seconds = examination.cost(node).seconds
    if adapter.draws_from_generator(node):
        return seconds
    return seconds - sum(examination.cost(source).seconds for source in adapter.inputs_of(node))


def _calls_python(node: Dataset) -> bool:
    if adapter.draws_from_generator(node):
        return True
    return bool(adapter.operations_in_functions(node) & adapter.PYTHON_OPERATIONS)


def _is_cached_later(examination: Examination, node: Dataset) -> bool:
    return any(
        nodes.is_cache(other) and any(each is node for each in adapter.upstream_of(other))
        for other, _ in examination.all_nodes()
    )


def _message(node: Dataset) -> str:
    if adapter.draws_from_generator(node):
        return (
            "A Python generator gives one element at a time, however many cores there are. Give "
            "tf.data the data itself (from_tensor_slices, files), or let the generator give names "
            "and read them in a parallel map."
        )
    return (
        "This calls Python, one call at a time and in turns with the training loop. Write it in "
        "TensorFlow operations; if it always gives the same, cache() after it."
    )
