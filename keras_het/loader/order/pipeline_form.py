"""Recognition of a user's pipeline, so that costly work is done only by the user of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.nested import Spec
from keras_het.loader.order.pass_counter import starts_once

Dataset = adapter.Dataset


@dataclasses.dataclass(frozen=True)
class PipelineForm:
    """A pipeline split into the part that every worker runs and the part for own rows only."""

    mode: str
    reason: str
    stream: Dataset
    options: tf.data.Options
    batch_size: int | None
    drop_remainder: bool = False
    element_maps: tuple[Dataset, ...] = ()
    row_functions: tuple[Callable[..., Any], ...] = ()
    gathers_indices: bool = False
    arrays: tuple[tf.Tensor, ...] = ()
    sample_spec: Spec | None = None
    autotuned_calls: int | None = None
    is_built: bool = False
    reads_ahead: bool = True

    @property
    def only_slices(self) -> bool:
        """Whether the only work left is to cut the global batches of `stream`."""
        return self.mode == "slice" and not self.row_functions and not self.gathers_indices


def recognise(dataset: Dataset) -> PipelineForm:
    """Split a pipeline of global batches into common and own work."""
    # Walks from the end: past prefetches, options and maps that are known to be row-wise, to
    # `batch`; from there through operations that commute with a one-to-one map down to the first
    # that does not. All maps on that path whose inputs have fixed dense shapes are left out of the
    # stream; if it ends at `from_tensor_slices`, the stream has row numbers in place of rows.
    options = tf.data.Options().merge(dataset.options())
    node, row_functions = _before_row_functions(dataset)
    if adapter.keras_array_indices(node):
        row_functions = (adapter.map_function(node), *row_functions)
        reason = "Keras arrays: each worker gathers only its own rows by their indices"
        indices = adapter.inputs_of(node)[0]
        return _slices(indices, reason, options, row_functions, gathers_indices=True)
    shows = any(map(adapter.draws_from_generator, adapter.upstream_of(dataset)))
    shows |= not starts_once(dataset)
    if not adapter.is_batch(node):
        reason = f"the global batch comes from {type(node).__name__}, not from a plain batch()"
        return _slices(dataset, reason, options, reads_ahead=not shows)
    size, drop_remainder = adapter.batch_arguments(node)
    stream, maps, arrays, sample_spec = _own_work(adapter.inputs_of(node)[0])
    threads = options.threading.private_threadpool_size
    reasons = ["rows of arrays are gathered"] if arrays else []
    reasons += [f"{len(maps)} map(s) of single samples run"] if maps else []
    if size is None or not reasons:
        reason = "no map of single samples with fixed dense input shapes right before batch()"
        reads_ahead = not shows or any(map(adapter.is_prefetch, _nodes_until(dataset, node)))
        return _slices(node, reason, options, row_functions, reads_ahead=reads_ahead)
    return PipelineForm(
        mode="element",
        reason=f"{' and '.join(reasons)} only where the sample is used",
        stream=stream,
        options=options,
        batch_size=size,
        drop_remainder=drop_remainder,
        element_maps=maps,
        row_functions=row_functions,
        arrays=arrays,
        sample_spec=sample_spec,
        # as many as the tuner that found them had; otherwise as many as CPUs, whatever the threads
        autotuned_calls=2 * threads if threads else None,
        reads_ahead=starts_once(stream),
    )


def _slices(
    stream: Dataset,
    reason: str,
    options: tf.data.Options,
    row_functions: tuple[Callable[..., Any], ...] = (),
    **flags: Any,
) -> PipelineForm:
    size = adapter.batch_arguments(stream)[0] if adapter.is_batch(stream) else None
    return PipelineForm(
        "slice", reason, stream, options, size, row_functions=row_functions, **flags
    )


def _nodes_until(node: Dataset, last: Dataset) -> Iterator[Dataset]:
    while node is not last:
        yield node
        node = adapter.inputs_of(node)[0]


def _before_row_functions(
    dataset: Dataset,
) -> tuple[Dataset, tuple[Callable[..., Any], ...]]:
    node, functions = dataset, []
    while (
        adapter.is_prefetch_or_options(node)
        or adapter.keras_class_weight(node)
        or iterator_adapter.is_adjustable(node)
    ):
        if adapter.is_map(node):
            functions.append(adapter.map_function(node))
        node = adapter.inputs_of(node)[0]
    return node, tuple(reversed(functions))


def _own_work(
    top: Dataset,
) -> tuple[Dataset, tuple[Dataset, ...], tuple[tf.Tensor, ...], Spec | None]:
    """Return the stream without its maps, these, and the arrays and the spec of their rows."""
    walked: list[Dataset] = []
    node = top
    lowest = 0
    while adapter.is_map(node) or adapter.commutes_with_map(node):
        walked.append(node)
        node = adapter.inputs_of(node)[0]
        if adapter.is_map(walked[-1]) and _batchable(node.element_spec):
            lowest = len(walked)
    arrays = adapter.sliced_arrays(node)
    if arrays is not None:
        # row numbers take the path of the rows: less to shuffle, and one gather per batch
        source, spec = tf.data.Dataset.range(int(arrays[0].shape[0])), node.element_spec
        return _without_maps(source, walked), _maps(walked), tuple(arrays), spec
    walked = walked[:lowest]
    source = adapter.inputs_of(walked[-1])[0] if walked else top
    return _without_maps(source, walked), _maps(walked), (), None


def _maps(walked: list[Dataset]) -> tuple[Dataset, ...]:
    return tuple(node for node in reversed(walked) if adapter.is_map(node))


def _without_maps(source: Dataset, walked: list[Dataset]) -> Dataset:
    for node in reversed(walked):
        if not adapter.is_map(node) and not adapter.is_options(node):  # set again at the end
            source = adapter.rebuild_on(node, source)
    return source


def _batchable(element_spec: Spec) -> bool:
    specs = [spec for spec in tf.nest.flatten(element_spec) if not adapter.is_none(spec)]
    dense = [spec for spec in specs if isinstance(spec, tf.TensorSpec)]
    return (
        bool(dense)
        and len(dense) == len(specs)
        and all(spec.shape.is_fully_defined() for spec in dense)
    )


_SECOND_SEED_OF_0 = 2**31 - 1


def with_repeatable_order(dataset: tf.data.Dataset, seed: int | None = None) -> tf.data.Dataset:
    """Return the samples of Keras's arrays, but shuffled by tf.data's `shuffle`."""
    # Keras draws the order of an epoch from TensorFlow's generator of random numbers, which cannot
    # be set to a later epoch; and nothing tells how many batches there are.
    found = adapter.keras_arrays(_without_prefetch(dataset))
    if found is None or found.arrays is None:
        return dataset
    samples = tf.data.Dataset.from_tensor_slices(found.arrays)
    if found.is_shuffled:
        samples = samples.shuffle(found.samples, seed=seed or 0)
    return samples.batch(found.batch_size)


def with_order_of_epoch(dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Reorder arrays that Keras shuffles in each epoch; a global seed gives all the same order."""
    node = _without_prefetch(dataset)
    found = adapter.keras_arrays(node)
    if found is None or not found.is_shuffled:
        return dataset
    if found.arrays is not None:
        return with_repeatable_order(dataset, seed)
    indices = tf.data.Dataset.range(found.samples).shuffle(found.samples, seed=seed)
    return adapter.with_keras_indices(node, indices.batch(found.batch_size))


def seeds_of_orders(dataset: tf.data.Dataset) -> list[list[int | None]]:
    """Return the two seeds of each shuffle, None if unknown, 0 if an order cannot be restored."""
    found: list[list[int | None]] = []
    for node in adapter.upstream_of(dataset):
        if adapter.is_shuffle(node):
            seeds = adapter.shuffle_seeds(node)
            found.append([None if seed is None else int(seed) for seed in seeds])
        elif (arrays := adapter.keras_arrays(node)) is not None and arrays.is_shuffled:
            seed = iterator_adapter.global_seed()
            # as TensorFlow keeps seed 0 apart from none
            found.append([0, 0] if seed is None else [seed, seed or _SECOND_SEED_OF_0])
    return found


def _without_prefetch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    while adapter.is_prefetch_or_options(dataset):
        (dataset,) = adapter.inputs_of(dataset)
    return dataset
