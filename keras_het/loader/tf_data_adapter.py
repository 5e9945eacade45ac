"""The private symbols of tf.data that the loader needs, all in one place.

Checked on TensorFlow 2.16.2 and 2.21.0 and on Keras 3.15.1 by
`tests/loader/test_tf_data_adapter.py`, which names each symbol. Everything else in this package
uses the public interface.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import cardinality as cardinality_ops
from tensorflow.python.data.ops import (
    batch_op,
    dataset_ops,
    flat_map_op,
    from_tensor_slices_op,
    from_tensors_op,
    map_op,
    prefetch_op,
    random_op,
    repeat_op,
    shard_op,
    shuffle_op,
    skip_op,
    take_op,
    zip_op,
)
from tensorflow.python.distribute import input_lib
from tensorflow.python.framework import tensor_util
from tensorflow.python.ops import gen_dataset_ops

from keras_het.loader.nested import Batch, Spec

Dataset: TypeAlias = tf.data.Dataset
"""A `tf.data.Dataset`: an operation node with its inputs."""

DistributedDataset = input_lib.DistributedDataset
"""Base class by which Keras's `fit` recognises distributed input."""

GENERATOR_OPERATIONS = frozenset({"GeneratorDataset", "GeneratorDatasetV2"})
"""Kinds of operation with which a pipeline draws from a Python generator."""

RANDOM_VALUE_OPERATIONS = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomCrop",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "RngReadAndSkip",
        "RngSkip",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "StatefulRandomBinomial",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
        "TruncatedNormal",
    }
)
"""Kinds of operation that draw random values (a `RandomShuffle` only reorders)."""

# Knobs, and seeds: pipelines that differ only in these may continue each other.
_FREE_ATTRIBUTES = frozenset(
    {"_num_parallel_calls", "_parallel_calls", "_seed", "_seed2", "_variant_tensor_attr"}
)
_MOST_COMPARED = 1000
_MAPS = (map_op._MapDataset, map_op._ParallelMapDataset)
_BATCHES = (batch_op._BatchDataset, batch_op._ParallelBatchDataset)
# Rows pass through these unchanged, and which rows do does not depend on their content.
_REBUILT_BY: dict[type, Callable[[Dataset, Dataset], Dataset]] = {
    repeat_op._RepeatDataset: lambda node, source: source.repeat(node._count),
    take_op._TakeDataset: lambda node, source: source.take(node._count),
    skip_op._SkipDataset: lambda node, source: source.skip(node._count),
    shard_op._ShardDataset: lambda node, source: source.shard(node._num_shards, node._index),
    prefetch_op._PrefetchDataset: lambda node, source: source.prefetch(constant(node._buffer_size)),
    cardinality_ops._AssertCardinalityDataset: lambda node, source: source.apply(
        tf.data.experimental.assert_cardinality(node._expected_cardinality)
    ),
    dataset_ops._OptionsDataset: lambda node, source: source.with_options(
        tf.data.Options().merge(node.options())
    ),
    shuffle_op._ShuffleDataset: lambda node, source: _same_shuffle(node, source),
}


def constant(tensor: tf.Tensor) -> Any:
    value = tensor_util.constant_value(tensor)
    return None if value is None else value.item()


def constants_of(node: Dataset) -> dict[str, Any]:
    """Return the numbers and strings that a node was given, except those that may differ."""
    # Sizes, counts, bounds, names of files and small arrays; not the numbers of parallel calls, the
    # buffers of `prefetch` and of file readers, and seeds, which belong to an iterator's state.
    skipped = _FREE_ATTRIBUTES if is_shuffle(node) else {*_FREE_ATTRIBUTES, "_buffer_size"}
    found: dict[str, Any] = {}
    for attribute, value in vars(node).items():
        if attribute in skipped or attribute.startswith("_self_"):
            continue
        leaves = [_small_constant(leaf) for leaf in tf.nest.flatten(value)]
        if any(leaf is not None for leaf in leaves):
            found[attribute.removeprefix("_")] = leaves[0] if len(leaves) == 1 else leaves
    return found


def _small_constant(leaf: object) -> Any:
    if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.resource, tf.variant):
        return None
    if (leaf.shape.num_elements() or _MOST_COMPARED + 1) > _MOST_COMPARED:
        return None
    value = tensor_util.constant_value(leaf)
    return None if value is None else np.asarray(value).tolist()


def inputs_of(node: Dataset) -> list[Dataset]:
    return list(node._inputs())


def upstream_of(node: Dataset) -> Iterator[Dataset]:
    yield node
    for source in inputs_of(node):
        yield from upstream_of(source)


def is_none(spec: tf.TypeSpec) -> bool:
    return type(spec).__name__ == "NoneTensorSpec"


def is_map(node: Dataset) -> bool:
    return isinstance(node, (*_MAPS, AppliedMap))


def is_batch(node: Dataset) -> bool:
    return isinstance(node, _BATCHES)


def is_prefetch(node: Dataset) -> bool:
    return isinstance(node, prefetch_op._PrefetchDataset)


def is_prefetch_or_options(node: Dataset) -> bool:
    """Tell whether `node` changes neither the elements nor which of them pass."""
    return isinstance(node, (prefetch_op._PrefetchDataset, dataset_ops._OptionsDataset))


def is_options(node: Dataset) -> bool:
    return isinstance(node, dataset_ops._OptionsDataset)


def commutes_with_map(node: Dataset) -> bool:
    """Tell whether a one-to-one `map` may swap places with `node` without changing the result."""
    return type(node) in _REBUILT_BY


def is_reshuffled(node: Dataset) -> bool:
    """Tell whether `node` is a `shuffle` whose order differs between iterations."""
    return isinstance(node, shuffle_op._ShuffleDataset) and bool(node._reshuffle_each_iteration)


def counts_iterators(node: Dataset) -> bool:
    """Tell whether `node` yields other elements, or another order of them, for each iterator."""
    is_random = isinstance(node, random_op._RandomDataset) and bool(node._rerandomize)
    return is_random or is_reshuffled(node)


def first_reshuffled(dataset: Dataset) -> Dataset | None:
    """Return the last operation of a pipeline that counts its iterators; a pass depends on it."""
    return next(filter(counts_iterators, upstream_of(dataset)), None)


def is_shuffle(node: Dataset) -> bool:
    return isinstance(node, shuffle_op._ShuffleDataset)


def shuffle_seeds(node: Dataset) -> tuple[int | None, int | None]:
    """Return the two seeds of a `shuffle`; both 0 if it has none and draws one per iterator."""
    return constant(node._seed), constant(node._seed2)


def is_file_cache(node: Dataset) -> bool:
    """Tell whether `node` is a `cache` in files, or its function makes one."""
    name = getattr(node, "_filename", None) if "Cache" in type(node).__name__ else None
    if name is not None and tensor_util.constant_value(name) not in (None, b"", ""):
        return True
    return any(
        operation.type.startswith("CacheDataset") and _may_name_files(operation.inputs[1])
        for function in node._functions()
        for operation in function.function.graph.get_operations()
    )


def writes_files(node: Dataset) -> bool:
    """Tell whether reading from `node` writes files, or may."""
    writers = ("_SnapshotDataset", "_LegacySnapshotDataset", "_SaveDataset")
    return is_file_cache(node) or type(node).__name__ in writers


def _may_name_files(name: tf.Tensor) -> bool:
    value = tensor_util.constant_value(name)
    return value is None or np.asarray(value).item() not in (b"", "")


def is_repeat(node: Dataset) -> bool:
    return isinstance(node, repeat_op._RepeatDataset)


def is_nondeterministic(node: Dataset) -> bool:
    """Tell whether `node` was explicitly given `deterministic=False`."""
    return getattr(node, "_deterministic", None) == "false"


def batch_arguments(node: Dataset) -> tuple[int | None, bool]:
    return constant(node._batch_size), bool(constant(node._drop_remainder))


def map_function(node: Dataset) -> Callable[..., Any]:
    return node._map_func._func


def operations_in_functions(node: Dataset) -> set[str]:
    """Return the kinds of operation in the functions of `node`, called functions included."""
    kinds: set[str] = set()
    for function in node._functions():
        graph = function.function.graph.as_graph_def()
        kinds.update(operation.op for operation in graph.node)
        for called in graph.library.function:
            kinds.update(operation.op for operation in called.node_def)
    return kinds


def rebuild_on(node: Dataset, source: Dataset) -> Dataset:
    """Repeat one operation on another source."""
    if is_map(node):
        return AppliedMap(node, source)
    if is_batch(node):
        size, drop_remainder = batch_arguments(node)
        return source.batch(size, drop_remainder=drop_remainder)
    if not commutes_with_map(node):
        raise TypeError(f"Cannot rebuild a dataset node of type {type(node).__name__}.")
    return _REBUILT_BY[type(node)](node, source)


class AppliedMap(dataset_ops.UnaryDataset):
    """The traced function of a `map`, applied in order to another source without a new trace."""

    def __init__(
        self,
        node: Dataset,
        source: Dataset,
        autotuned_calls: int | None = None,
        ordered_calls: tf.Tensor | None = None,
    ) -> None:
        self._input_dataset = source
        self._map_func = node._map_func
        self._name = None
        # attributes that is_map() nodes must have, so that an applied map can be applied again
        self._parallel_calls = parallel_calls(node, autotuned_calls)
        arguments = {
            "f": self._map_func.function,
            "use_inter_op_parallelism": True,
            "preserve_cardinality": True,
            **self._common_args,
        }
        captured = self._map_func.function.captured_inputs
        if self._parallel_calls is None:
            variant = gen_dataset_ops.map_dataset(source._variant_tensor, captured, **arguments)
        else:
            calls = tf.constant(self._parallel_calls, tf.int64)
            if ordered_calls is not None:
                calls = tf.where(ordered_calls > 0, ordered_calls, calls)
            variant = gen_dataset_ops.parallel_map_dataset_v2(
                source._variant_tensor,
                captured,
                num_parallel_calls=calls,
                deterministic="true",
                **arguments,
            )
        super().__init__(source, variant)

    def _functions(self) -> list[Any]:
        return [self._map_func]

    @property
    def element_spec(self) -> Spec:
        return self._map_func.output_structure


def has_autotuned_calls(node: Dataset) -> bool:
    if not isinstance(node, map_op._ParallelMapDataset):
        return False
    return constant(node._num_parallel_calls) in (None, tf.data.AUTOTUNE)


def parallel_calls(node: Dataset, autotuned: int | None = None) -> int | None:
    """Return the number of parallel calls of a `map`, None if it is sequential."""
    # nothing tunes a pipeline that runs inside a function: AUTOTUNE needs a number
    if isinstance(node, AppliedMap):
        return node._parallel_calls
    if not isinstance(node, map_op._ParallelMapDataset):
        return None
    calls = constant(node._num_parallel_calls)
    if calls is None or calls == tf.data.AUTOTUNE:
        if autotuned is not None:
            return autotuned
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return int(calls)


def keras_array_indices(node: Dataset) -> bool:
    """Tell whether `node` is the `map` in which Keras gathers array rows at batches of indices."""
    if not is_map(node) or not _is_keras_function(
        node, "trainers.data_adapters.array_data_adapter", "grab_batch"
    ):
        return False
    sources = inputs_of(inputs_of(node)[0])
    return (
        isinstance(inputs_of(node)[0], zip_op._ZipDataset)
        and len(sources) == 2
        and isinstance(sources[1], repeat_op._RepeatDataset)
        and isinstance(inputs_of(sources[1])[0], from_tensors_op._TensorDataset)
    )


class KerasArrays(NamedTuple):
    """Arrays that Keras was given."""

    arrays: Batch
    samples: int
    batch_size: int
    is_shuffled: bool


def keras_arrays(node: Dataset) -> KerasArrays | None:
    """Return the arrays behind a `map` of `keras_array_indices`, None if Keras's use is unknown."""
    if not keras_array_indices(node):
        return None
    indices, repeated = inputs_of(inputs_of(node)[0])
    (source,) = inputs_of(repeated)
    place = "trainers.data_adapters.array_data_adapter"
    maps = [each for each in upstream_of(indices) if hasattr(each, "_map_func")]
    cuts = [each for each in maps if _is_keras_function(each, place, "slice_batch_indices")]
    orders = [each for each in maps if _is_keras_function(each, place, "permutation")]
    if len(cuts) != 1 or len(orders) != 1:
        return None
    batch_size = _closed_over(map_function(cuts[0]), "batch_size")
    samples = _closed_over(map_function(orders[0]), "num_samples")
    # not the operation that shuffles, which differs between versions of Keras
    shuffle = _closed_over(map_function(orders[0]), "shuffle")
    sizes_are_known = all(isinstance(size, (int, np.integer)) for size in (batch_size, samples))
    if not sizes_are_known or shuffle not in (False, True, "batch"):
        return None
    is_dense = all(type(spec) is tf.TensorSpec for spec in tf.nest.flatten(source.element_spec))
    arrays = tf.nest.pack_sequence_as(source.element_spec, list(source._tensors))
    return KerasArrays(arrays if is_dense else None, samples, int(batch_size), shuffle is True)


def with_keras_indices(node: Dataset, indices: Dataset) -> Dataset:
    """Return the rows that a `map` of `keras_array_indices` gathers at other indices."""
    _, arrays = inputs_of(inputs_of(node)[0])
    return AppliedMap(node, tf.data.Dataset.zip((indices, arrays)))


def keras_class_weight(node: Dataset) -> bool:
    """Tell whether `node` is Keras's row-wise `map` from classes to sample weights."""
    return is_map(node) and _is_keras_function(
        node, "trainers.data_adapters.tf_dataset_adapter", "class_weights_map_fn"
    )


def sliced_arrays(node: Dataset) -> list[tf.Tensor] | None:
    """Return the dense arrays of a `from_tensor_slices`, flattened like its elements, else None."""
    if type(node) is not from_tensor_slices_op._TensorSliceDataset:
        return None
    dense = all(type(spec) is tf.TensorSpec for spec in tf.nest.flatten(node.element_spec))
    return list(node._tensors) if dense else None


def tensors_of(node: Dataset) -> list[tf.Tensor]:
    """Return the tensors of a `from_tensor_slices` or `from_tensors`; none for any other node."""
    is_source = isinstance(
        node, (from_tensor_slices_op._TensorSliceDataset, from_tensors_op._TensorDataset)
    )
    return list(node._tensors) if is_source else []


def element_reader(iterator: tf.data.Iterator) -> Callable[[], Any]:
    """Return a function that yields an eager iterator's next element, or raises StopIteration."""
    # the Python of `next(iterator)`, most of which it avoids, takes longer than a small step
    spec = iterator.element_spec
    leaves = tf.nest.flatten(spec)
    if not all(type(leaf) is tf.TensorSpec for leaf in leaves) or not _is_plain(spec):
        return iterator.__next__
    handle = iterator._iterator_resource
    types = [leaf.dtype for leaf in leaves]
    shapes = [leaf.shape for leaf in leaves]

    def read() -> Batch:
        try:
            flat = tf.raw_ops.IteratorGetNext(
                iterator=handle, output_types=types, output_shapes=shapes
            )
        except tf.errors.OutOfRangeError:
            raise StopIteration from None
        return _packed(spec, iter(flat))

    return read


def _is_plain(spec: Spec) -> bool:
    if type(spec) is tuple:
        return all(map(_is_plain, spec))
    if type(spec) is dict:
        return all(map(_is_plain, spec.values()))
    return type(spec) is tf.TensorSpec


def _packed(spec: Spec, flat: Iterator[tf.Tensor]) -> Batch:
    if type(spec) is tuple:
        return tuple([_packed(part, flat) for part in spec])
    if type(spec) is dict:
        parts = {key: _packed(spec[key], flat) for key in sorted(spec)}  # tf.nest's order
        return {key: parts[key] for key in spec}
    return next(flat)


def draws_from_generator(node: Dataset) -> bool:
    """Tell whether `node` is `Dataset.from_generator`."""
    return isinstance(node, flat_map_op._FlatMapDataset) and bool(
        operations_in_functions(node) & GENERATOR_OPERATIONS
    )


def is_keras_generator(node: Dataset) -> bool:
    """Tell whether `node` draws from a generator given to `fit` itself, possible only once."""
    return _drawn_function(node).startswith("GeneratorDataAdapter.")


def is_keras_py_dataset(node: Dataset) -> bool:
    """Tell whether `node` draws from a `PyDataset`, whose iterators share one queue of batches."""
    return _drawn_function(node).startswith("PyDatasetAdapter.")


def _drawn_function(node: Dataset) -> str:
    """Qualified name of the source of `node`, if it is a `Dataset.from_generator`, else ""."""
    if not draws_from_generator(node):
        return ""
    function: object = map_function(node)
    for name in ("get_iterator_id_fn", "generator_state"):
        function = _closed_over(function, name)
    return str(getattr(getattr(function, "_generator", None), "__qualname__", ""))


def _closed_over(function: object, name: str) -> Any:
    """Return the value of a variable in a function's closure, None if it has none."""
    # what a user gives to flat_map may be any callable, with empty cells
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    cell = dict(zip(names, cells, strict=True)).get(name)
    return None if cell is None else cell.cell_contents


def _is_keras_function(node: Dataset, module: str, name: str) -> bool:
    function = map_function(node)
    return getattr(function, "__module__", None) == f"keras.src.{module}" and str(
        getattr(function, "__qualname__", "")
    ).endswith(f"<locals>.{name}")


def _same_shuffle(node: Dataset, source: Dataset) -> Dataset:
    """Return a `shuffle` with exactly the two seeds of `node`, whatever the global seed is now."""
    shuffled = copy.copy(node)
    shuffled._input_dataset = source
    variant = gen_dataset_ops.shuffle_dataset_v3(
        source._variant_tensor,
        buffer_size=node._buffer_size,
        seed=node._seed,
        seed2=node._seed2,
        seed_generator=gen_dataset_ops.dummy_seed_generator(),
        reshuffle_each_iteration=node._reshuffle_each_iteration,
        **shuffled._common_args,
    )
    dataset_ops.UnaryUnchangedStructureDataset.__init__(shuffled, source, variant)
    return shuffled
