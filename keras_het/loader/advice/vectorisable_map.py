"""Detection of maps of single samples that could work on whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.advice import nodes
from keras_het.loader.advice.advice import VECTORISABLE_MAP, Advice
from keras_het.loader.advice.examination import Examination
from keras_het.loader.advice.rebuilding import rebuilt
from keras_het.loader.nested import Batch

Dataset = adapter.Dataset
Function = Callable[..., Any]
_CHECKED_BATCHES, _CHECKED_SAMPLES = 2, 8


def find(examination: Examination) -> list[Advice]:
    """Advise `batch` before `map` if both orders are shown to give the same result.

    The function itself is tried on batches first, then its `tf.vectorized_map`. The first that
    gives the same result as the map of samples on two small batches is built into the pipeline and
    measured.
    """
    found = []
    for node, _ in examination.all_nodes():
        if adapter.is_batch(node) and adapter.batch_arguments(node)[0]:
            found += _advice(examination, node)
    return found


def _advice(examination: Examination, batch: Dataset) -> list[Advice]:
    maps, between = _maps_before(batch)
    if not maps:
        return []
    source = adapter.inputs_of(maps[0])[0]
    small = min(adapter.batch_arguments(batch)[0] or 1, _CHECKED_SAMPLES)
    # the same samples for both: a shuffle before the maps yields different ones each time
    sample = source.take(_CHECKED_BATCHES * small).cache()
    expected = examination.quietly(lambda: _first_batches(_mapped(sample, maps).batch(small)))
    if not expected:
        return []
    for way, how in ((_applied, ""), (_vectorised, "tf.vectorized_map of ")):
        functions = [way(adapter.map_function(node)) for node in maps]
        given = examination.quietly(partial(_on_batches, sample, small, maps, functions))
        if given is None or not _equal(expected, given):
            continue
        batches = adapter.rebuild_on(batch, rebuilt(source, between))
        gain = examination.gain_of(batch, _mapped(batches, maps, functions))
        if gain is None:
            continue
        names = ", ".join(nodes.label(node) for node in maps)
        message = (
            f"Call batch() first and then map {how}the same function: it gave the same for "
            f"{_CHECKED_BATCHES * small} samples, and is called once a batch, not once a sample."
        )
        return [Advice(VECTORISABLE_MAP, names, message, gain.ratio, gain.is_measured)]
    return []


def _maps_before(batch: Dataset) -> tuple[list[Dataset], list[Dataset]]:
    """Return maps that may go after `batch`, first to last, and the operations among them."""
    maps: list[Dataset] = []
    between: list[Dataset] = []
    waiting: list[Dataset] = []
    node = adapter.inputs_of(batch)[0]
    while True:
        if adapter.is_map(node) and not nodes.may_change(node):
            maps.append(node)
            between += waiting
            waiting = []
        elif adapter.commutes_with_map(node):
            waiting.append(node)
        else:
            return maps[::-1], between[::-1]
        node = adapter.inputs_of(node)[0]


def _on_batches(
    source: Dataset, size: int, maps: Sequence[Dataset], functions: Sequence[Function]
) -> list[object]:
    return _first_batches(_mapped(source.batch(size), maps, functions))


def _mapped(
    source: Dataset, maps: Sequence[Dataset], functions: Sequence[Function] | None = None
) -> Dataset:
    """Apply the maps, or other functions with as many parallel calls, to a source."""
    for index, node in enumerate(maps):
        if functions is None:
            source = adapter.rebuild_on(node, source)
        else:
            calls = adapter.parallel_calls(node)
            source = source.map(functions[index], num_parallel_calls=calls)
    return source


def _applied(function: Function) -> Function:
    return function


def _vectorised(function: Function) -> Function:
    def on_batch(*arguments: Batch) -> Batch:
        if len(arguments) == 1:
            return tf.vectorized_map(function, arguments[0], fallback_to_while_loop=False)
        return tf.vectorized_map(
            lambda parts: function(*parts), arguments, fallback_to_while_loop=False
        )

    return on_batch


def _first_batches(dataset: Dataset) -> list[object]:
    flat = []
    for element in dataset.take(_CHECKED_BATCHES):
        flat += tf.nest.flatten(element, expand_composites=True)
    return [part.numpy() if isinstance(part, tf.Tensor) else part for part in flat]


def _equal(expected: list[object], given: list[object]) -> bool:
    return len(expected) == len(given) and all(
        map(_is_same, expected, given),
    )


def _is_same(expected: object, given: object) -> bool:
    if not isinstance(expected, np.ndarray) or not isinstance(given, np.ndarray):
        return type(expected) is type(given) and bool(expected == given)
    if expected.shape != given.shape or expected.dtype != given.dtype:
        return False
    if np.issubdtype(expected.dtype, np.floating):
        scale = float(np.nanmax(np.abs(expected), initial=0.0))
        return bool(np.allclose(expected, given, rtol=1e-5, atol=1e-5 * scale, equal_nan=True))
    return bool(np.array_equal(expected, given))
