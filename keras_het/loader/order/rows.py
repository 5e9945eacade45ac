"""Rows of a batch structure: count, cut, split and hash them, and how many bytes they take."""

from __future__ import annotations

from typing import Any, TypeVar

import tensorflow as tf

from keras_het.loader.nested import Batch, Leaf, Rows, Spec, StepInput

_Same = TypeVar("_Same", bound=Batch)


def is_sliceable(leaf: Leaf) -> bool:
    """Tell whether a leaf of a batch has rows (None and `Optional` leaves have none)."""
    return isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))


def has_rows(leaf: Any) -> bool:
    """Tell whether a leaf of a step's input has rows; a scalar has none."""
    return is_sliceable(leaf) and leaf.shape.rank != 0


def count_rows(batch: Batch) -> tf.Tensor:
    """Count the rows of a batch, int64 scalar; fail if the leaves disagree."""
    counts = [_rows_of(leaf) for leaf in tf.nest.flatten(batch) if is_sliceable(leaf)]
    checks = [
        tf.debugging.assert_equal(
            other, counts[0], "The parts of a global batch have different numbers of rows."
        )
        for other in counts[1:]
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(counts[0])


def slice_rows(batch: _Same, start: tf.Tensor | int, count: tf.Tensor | int) -> _Same:
    return tf.nest.map_structure(
        lambda leaf: _slice_leaf(leaf, start, count) if is_sliceable(leaf) else leaf, batch
    )


def split_rows(batch: _Same, sizes: tf.Tensor, parts: int) -> tuple[_Same, ...]:
    if parts == 1:
        return (batch,)
    starts = tf.cumsum(sizes, exclusive=True)
    return tuple(slice_rows(batch, starts[part], sizes[part]) for part in range(parts))


def count_rows_eagerly(batch: Batch) -> int:
    """Count the rows of a batch outside of any graph; dense tensors need no operation."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if is_sliceable(leaf)]
    counts = [
        leaf.shape[0] if isinstance(leaf, tf.Tensor) else int(_rows_of(leaf)) for leaf in leaves
    ]
    if any(count != counts[0] for count in counts):
        raise ValueError(
            "The parts of a global batch have different numbers of rows. "
            f"Received parts of {counts} rows. Give every part of a batch one row for each sample. "
            "If these are single samples, call .batch(global_batch_size) on the dataset."
        )
    return int(counts[0])


def cut_eagerly(batch: _Same, sizes: tf.Tensor) -> list[_Same]:
    """Cut a batch outside of any graph; a dense part shares the batch's memory where TF can."""
    parts = int(sizes.shape[0])
    leaves = tf.nest.flatten(batch)
    if any(is_sliceable(leaf) and not isinstance(leaf, tf.Tensor) for leaf in leaves):
        return list(split_rows(batch, sizes, parts))
    cuts = [_cut_leaf(leaf, sizes, parts) for leaf in leaves]
    return [tf.nest.pack_sequence_as(batch, [cut[part] for cut in cuts]) for part in range(parts)]


def _cut_leaf(leaf: Leaf, sizes: tf.Tensor, parts: int) -> list[Leaf]:
    if not is_sliceable(leaf):
        return [leaf] * parts
    with tf.device("CPU:0"):
        return tf.raw_ops.SplitV(value=leaf, size_splits=sizes, axis=0, num_split=parts)


def hash_rows(batch: Batch) -> tf.Tensor:
    """Hash all values of a batch, the same in every process, int64 scalar."""
    hashes = [
        tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(component), 2**62)
        for leaf in tf.nest.flatten(batch)
        if is_sliceable(leaf)
        for component in tf.nest.flatten(leaf, expand_composites=True)
    ]
    joined = tf.strings.reduce_join(tf.strings.as_string(tf.stack(hashes)), separator=",")
    return tf.strings.to_hash_bucket_fast(joined, 2**62)


def check_batched(element_spec: Spec) -> None:
    specs = [
        spec
        for spec in tf.nest.flatten(element_spec)
        if isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec))
    ]
    if not specs or any(spec.shape.rank == 0 for spec in specs) or _differ(specs):
        raise ValueError(
            "Elements of the dataset must be global batches: every tensor needs a leading batch "
            f"dimension, the same for all. Received elements of {element_spec}. If these are "
            "single samples, call .batch(global_batch_size) on the dataset."
        )


def _differ(specs: list[Any]) -> bool:
    """Whether specs have different numbers of rows; those that are unknown do not count."""
    shapes = [spec.shape for spec in specs if spec.shape.rank]
    return len({shape[0] for shape in shapes} - {None}) > 1


def relax_rows(element_spec: Spec) -> Spec:
    return tf.nest.map_structure(_relax, element_spec)


def _relax(spec: tf.TypeSpec) -> tf.TypeSpec:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.SparseTensorSpec) and spec.shape.rank is not None:
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec) and spec.shape.rank is not None:
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return spec


def _rows_of(leaf: Rows) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def _slice_leaf(leaf: Rows, start: tf.Tensor | int, count: tf.Tensor | int) -> Rows:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[start : start + count]
    if not isinstance(leaf, tf.SparseTensor):
        with tf.device("CPU:0"):  # kernels take bounds there; a GPU would copy them back
            begin, end = (tf.cast([each], tf.int64) for each in (start, start + count))
        return tf.strided_slice(leaf, begin, end, tf.constant([1], tf.int64))
    # static dimensions stay visible to the model that receives the batch
    static = leaf.shape[1:].as_list()
    rest = [leaf.dense_shape[i + 1] if n is None else n for i, n in enumerate(static)]
    size = tf.stack([tf.cast(n, tf.int64) for n in (count, *rest)])
    begin = tf.stack([tf.cast(n, tf.int64) for n in (start, *(0 for _ in rest))])
    cut = tf.sparse.slice(leaf, begin, size)
    return tf.SparseTensor(cut.indices, cut.values, size)


def concat_rows(batches: list[_Same]) -> _Same:
    filled = [batch for batch in batches if int(count_rows(batch))] or batches[:1]
    if len(filled) == 1:
        return filled[0]
    return tf.nest.map_structure(lambda *leaves: _concat_leaves(leaves), *filled)


def _concat_leaves(leaves: tuple[Leaf, ...]) -> Leaf:
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(leaves), expand_nonconcat_dims=True)
    return tf.concat(list(leaves), 0) if is_sliceable(leaves[0]) else leaves[0]


_BYTES_OF_A_STRING = 24
"""TensorFlow's overhead for each string, in addition to its characters."""


def count_bytes(batch: StepInput) -> int:
    """Size of a batch's tensors: dense, ragged and sparse ones, strings, and those in Optionals."""
    return sum(_bytes_of(leaf) for leaf in tf.nest.flatten(batch))


def _bytes_of(leaf: Leaf) -> int:
    if isinstance(leaf, tf.experimental.Optional):
        return count_bytes(leaf.get_value()) if leaf.has_value() else 0
    parts = tf.nest.flatten(leaf, expand_composites=True)
    return sum(_bytes_of_tensor(part) for part in parts if isinstance(part, tf.Tensor))


def _bytes_of_tensor(tensor: tf.Tensor) -> int:
    elements = int(tensor.shape.num_elements() or 0)
    if tensor.dtype == tf.string:
        characters = tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64))
        return elements * _BYTES_OF_A_STRING + int(characters)
    return 0 if tensor.dtype == tf.variant else elements * int(tensor.dtype.size)
