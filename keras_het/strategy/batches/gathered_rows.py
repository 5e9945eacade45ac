"""Outputs of all replicas and micro-batches, joined in the order of the global batch."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.ignored_errors import ignore_errors
from keras_het.loader.order.rows import is_sliceable
from keras_het.strategy.batches.uneven_per_replica import with_rows
from keras_het.value_types import Leaf, Nest, Rows

_JOINS = "predict joins the rows of all replicas and micro-batches"
_RULE = (
    ": an output must have one row for each sample, and the size of the batch must not change that "
    "of a row. Received: "
)
_REMEDY = (
    "Return what belongs to single samples and compute the rest from that, or predict on one "
    "device with a model made outside of strategy.scope()."
)
_PADS = (
    "as of a model that pads to the longest sample of each. Pad to a fixed width before or in the "
    "model, or let it return a tf.RaggedTensor."
)
_Gather: TypeAlias = Callable[[tf.Tensor], tf.Tensor]
_checked_eagerly: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def check_predictions(function: Callable[[Nest], Nest], data: Nest, outputs: Nest) -> None:
    """Refuse outputs that cannot be joined, as far as shapes tell."""
    if tf.executing_eagerly():
        is_open = function not in _checked_eagerly
        _checked_eagerly.add(function)
    else:
        shapes = [_shape(leaf) for leaf in keras.tree.flatten(outputs)]
        is_open = any(not shape or shape[0] is not None or None in shape[1:] for shape in shapes)
    if is_open:
        refuse_other_rows(lambda rows: _traced(function, data, rows))


def refuse_other_rows(
    outputs_of: Callable[[int], Nest], joins: str = _JOINS, remedy: str = _REMEDY
) -> None:
    """Refuse outputs that are anything but one row for each sample, of a fixed size."""
    few, more = (keras.tree.flatten_with_path(outputs_of(rows)) for rows in (2, 3))
    for (path, at_two), (_, at_three) in zip(few, more, strict=False):
        first, second = _shape(at_two), _shape(at_three)
        if first is None or second is None:
            continue
        is_row = first[:1] in ([2], [None]) and second[:1] in ([3], [None])
        if not is_row or first[1:] != second[1:]:
            raise ValueError(
                f"{joins}{_RULE}{name_of(path)} of shape {first} for 2 samples and {second} for 3. "
                f"{remedy}"
            )


def refusal_in(error: BaseException) -> str | None:
    """Return the message of a check in the graph that has failed, without TensorFlow's pages."""
    found = re.search(rf"\[({re.escape(_JOINS)}.*)\]", str(error))
    return None if found is None else found.group(1).replace("] [", " ")


def name_of(path: tuple[object, ...]) -> str:
    """Return the name of an output for an error, from its path in what the model returns."""
    return "output" + "".join(f"[{key!r}]" for key in path)


def _shape(leaf: Leaf) -> list[int | None] | None:
    """Return a shape; of a ragged tensor with the mean length of its rows, if it is known."""
    shape = tf.TensorShape(getattr(leaf, "shape", ()))
    if isinstance(leaf, tf.RaggedTensor) and shape[0] and leaf.flat_values.shape[0] is not None:
        return [shape[0], leaf.flat_values.shape[0] // shape[0]]
    return None if leaf is None or shape.rank is None else shape.as_list()


def _traced(function: Callable[[Nest], Nest], data: Nest, rows: int) -> Nest:
    """Return symbolic outputs for a batch of so many rows, None if the step cannot be traced."""
    leaves, found = tf.nest.flatten(data), [None]
    places = [i for i, leaf in enumerate(leaves) if is_sliceable(leaf) and leaf.shape.rank != 0]

    def run(*parts: Rows) -> None:
        given = dict(enumerate(leaves)) | dict(zip(places, parts, strict=True))
        with keras.StatelessScope():
            found.append(function(tf.nest.pack_sequence_as(data, list(given.values()))))

    types = [with_rows(private_api.type_spec_from_value(leaves[i]), rows) for i in places]
    with ignore_errors("tracing"):  # it may need more samples, or run eagerly only
        tf.function(run, autograph=False).get_concrete_function(*types)
    return found[-1]


def gather_rows(local: Sequence[Rows], gather: _Gather, total: tf.Tensor, name: str) -> Rows:
    """Join the parts of this worker's replicas and of other workers, which `gather` has."""
    if isinstance(local[0], tf.RaggedTensor):
        rows = _gather_ragged_rows(tf.concat(local, axis=0), gather)
        count = rows.nrows(tf.int32)
    elif isinstance(local[0], tf.SparseTensor):
        dense = [tf.sparse.to_dense(part) for part in local]
        rows = tf.sparse.from_dense(_gather_dense_rows(dense, gather, name))
        count = tf.cast(rows.dense_shape[0], tf.int32)
    else:
        _check_rank(local[0], name)
        rows = _gather_dense_rows(local, gather, name)
        count = tf.shape(rows)[0]
    with tf.device("CPU:0"):  # 32 bits: see `is_positive`
        total = tf.cast(total, tf.int32)
    parts = [f"{_JOINS}{_RULE}{name} with", count, "rows for", total, f"samples. {_REMEDY}"]
    with _required(count == total, parts):
        return tf.nest.map_structure(tf.identity, rows, expand_composites=True)


class OutputsOfParts:
    """Outputs of a share's micro-batches, as tensors whose rows are put one after the other."""

    def __init__(self, first: Nest) -> None:
        self._first = first
        self.first_tensors = self._tensors(first)
        """The tensors of the first part."""
        self._shapes = [tf.shape(tensor) for tensor in self.first_tensors]

    def part_tensors(self, outputs: Nest) -> list[tf.Tensor]:
        """Return the tensors of another part, which must be as wide as the first part's."""
        return list(map(_as_wide, self._tensors(outputs), self._shapes, self._names))

    def joined(self, tensors: Iterable[tf.Tensor]) -> Nest:
        """Return the outputs of the whole share, given the joined tensors."""
        rest = iter(tensors)

        def output(leaf: Leaf) -> Leaf:
            if isinstance(leaf, tf.RaggedTensor):
                values, *lengths = [next(rest) for _ in range(1 + leaf.ragged_rank)]
                return tf.RaggedTensor.from_nested_row_lengths(values, lengths, validate=False)
            if isinstance(leaf, tf.SparseTensor):
                return tf.sparse.from_dense(next(rest))
            return None if leaf is None else next(rest)

        made = [output(leaf) for leaf in keras.tree.flatten(self._first)]
        return keras.tree.pack_sequence_as(self._first, made)

    def _tensors(self, outputs: Nest) -> list[tf.Tensor]:
        tensors, self._names = list[tf.Tensor](), list[str]()
        for path, leaf in keras.tree.flatten_with_path(outputs):
            if isinstance(leaf, tf.RaggedTensor):
                tensors += [leaf.flat_values, *leaf.nested_row_lengths()]
            elif isinstance(leaf, tf.SparseTensor):
                tensors.append(tf.sparse.to_dense(leaf))  # as `gather_rows` does
            elif leaf is not None:
                _check_rank(leaf, name_of(path))
                tensors.append(leaf)
            self._names += [name_of(path)] * (len(tensors) - len(self._names))
        return tensors


def _as_wide(tensor: tf.Tensor, wanted: tf.Tensor, name: str) -> tf.Tensor:
    if tensor.shape.rank and tensor.shape[1:].is_fully_defined():
        return tensor
    shape = tf.shape(tensor)
    shapes = tf.stack([wanted, shape])
    message = [f"{_JOINS}{_RULE}{name} with the shapes", shapes, f"in micro-batches, {_PADS}"]
    with _required(tf.reduce_all(shape[1:] == wanted[1:]), message):
        return tf.identity(tensor)


def _check_rank(output: tf.Tensor, name: str) -> None:
    if output.shape.rank == 0:
        raise ValueError(f"{_JOINS}{_RULE}{name} of shape []. {_REMEDY}")


def _required(condition: tf.Tensor, message: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Make the operations of a block wait for a condition, and fail with a message without it."""
    check = tf.raw_ops.Assert(condition=condition, data=message, summarize=-1)
    return tf.control_dependencies([check])


def _gather_ragged_rows(ragged: tf.RaggedTensor, gather: _Gather) -> tf.RaggedTensor:
    lengths, values = gather(ragged.row_lengths()), ragged.values
    is_nested = isinstance(values, tf.RaggedTensor)
    values = _gather_ragged_rows(values, gather) if is_nested else gather(values)
    return tf.RaggedTensor.from_row_lengths(values, lengths)


def _gather_dense_rows(parts: Sequence[tf.Tensor], gather: _Gather, name: str) -> tf.Tensor:
    shapes = [part.shape for part in parts]
    # eagerly every local shape is known, but not the other workers' shapes
    is_eager = tf.executing_eagerly() and shapes[0].rank > 1
    if is_eager or not all(shape.rank and shape[1:].is_fully_defined() for shape in shapes):
        parts = _with_equal_inner_shapes(parts, gather, name)
    return gather(tf.concat(parts, axis=0))


def _with_equal_inner_shapes(
    parts: Sequence[tf.Tensor], gather: _Gather, name: str
) -> list[tf.Tensor]:
    """Give parts without rows the inner shape of the others, which must be equal."""
    # A model that pads to its longest sample makes different shapes for different shares.
    shapes = tf.stack([tf.shape(part, out_type=tf.int64) for part in parts])
    shapes = gather(shapes)
    inner, has_rows = shapes[:, 1:], shapes[:, :1] > 0
    common = tf.reduce_max(tf.where(has_rows, inner, 0), axis=0)
    message = [
        f"{_JOINS}{_RULE}{name} with the shapes",
        shapes,
        f"on the replicas, {_PADS}",
    ]
    with _required(tf.reduce_all((inner == common) | ~has_rows), message):
        return [_reshaped_if_empty(part, common) for part in parts]


def _reshaped_if_empty(part: tf.Tensor, inner: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(part, out_type=tf.int64)
    wanted = tf.where(shape[0] > 0, shape, tf.concat([shape[:1], inner], axis=0))
    result = tf.reshape(part, wanted)
    if not tf.executing_eagerly() and part.shape.rank:
        result.set_shape([None, *part.shape[1:]])
    return result
