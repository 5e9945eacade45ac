r"""Micro-batches: a share that a device's memory does not hold, in parts, one after the other.

A share of :math:`b_i` samples with the bound m becomes :math:`n_i = \max(1, \lceil b_i / m \rceil)`
parts of nearly equal sizes :math:`m_{ij}`. A part counts as a replica does, with the weight
:math:`m_{ij} / B`, and starts from the state before the step; what the parts add to the sums over
all replicas is added up before the step's one exchange.

The first part is traced as a whole share would be, so that a share within its bound runs as without
one. The others are the body of a loop: memory is that of one part, and a step is not traced again
when the number of parts changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import tensorflow as tf

from keras_het import private_api
from keras_het.loader.order.rows import has_rows, slice_rows
from keras_het.strategy.exact.step import Join, StepSpec, is_positive
from keras_het.value_types import Nest

_OfPart: TypeAlias = "tf.Tensor | tf.IndexedSlices | Appended | None"
# Parts draw other random numbers than replicas and each other, also on async workers.
_SEED_STREAMS = 100_003


@dataclasses.dataclass(frozen=True)
class Appended:
    """Rows of a part, which come after the rows of earlier parts."""

    rows: tf.Tensor


class MicroBatches:
    """The parts of one replica's share."""

    def __init__(self, samples: tf.Tensor, most: int | tf.Tensor, rows: Nest) -> None:
        self._rows, self._samples = rows, samples
        self.first_rows: Nest = ()
        """The rows that the first part is computed on."""
        with tf.device("CPU:0"):
            parts = tf.maximum(-(-samples // tf.cast(most, samples.dtype)), 1)
            self._count = tf.cast(parts, tf.int32)  # see `is_positive`

    @staticmethod
    def refuse(what: str, instead: str) -> NoReturn:
        """Say what of a step needs the whole share."""
        raise ValueError(
            f"A step cannot be computed in micro-batches where {what}. Received: a strategy with "
            f"micro_batch_size. {instead} Or leave micro_batch_size out and bound the shares: "
            "BatchBalancer(max_share=...)."
        )

    def spec(self, share: StepSpec, number: tf.Tensor | None) -> StepSpec:
        """Return the facts of one part, of the first one without a number."""
        start, stop = self._range(number)
        with tf.device("CPU:0"):  # see `is_positive`
            samples, stream = stop - start, share.seed_stream
        part, whole = tf.cast(samples, tf.float64), tf.cast(share.total, tf.float64)
        if number is not None:
            stream = stream + tf.cast(number, tf.int64) * _SEED_STREAMS
        return dataclasses.replace(
            share,
            samples=samples,
            has_samples=is_positive(samples),
            weight=tf.math.divide_no_nan(part, whole),
            inverse_weight=tf.math.divide_no_nan(whole, part),
            seed_stream=stream,
            is_first_part=number is None,
        )

    def rows(self, number: tf.Tensor | None) -> Nest:
        start, stop = self._range(number)
        with tf.device("CPU:0"):
            count = stop - start
        return tf.nest.map_structure(
            lambda leaf: slice_rows(leaf, start, count) if has_rows(leaf) else leaf,
            self._rows,
        )

    def for_whole_share(self, tensor: tf.Tensor, what: str) -> tf.Tensor:
        """Compute for the whole share what the first part has computed from its rows alone."""
        flat = [tf.nest.flatten(r, expand_composites=True) for r in (self.first_rows, self._rows)]
        known = {part.ref(): whole for part, whole in zip(*flat, strict=True)}
        found, obstacle = self._operations(tensor, known)
        if obstacle is not None:
            self.refuse(
                f"{what} depends on more than the batch: on the operation {obstacle.name!r} "
                f"({obstacle.type})",
                "Compute masks and weights of samples in the dataset.",
            )
        for operation in sorted(found.values(), key=private_api.order_of_operation):
            inputs = [known.get(each.ref(), each) for each in operation.inputs]
            if any(new is not old for new, old in zip(inputs, operation.inputs, strict=True)):
                repeated = private_api.repeat_operation(operation, inputs).op.outputs
                known |= {
                    old.ref(): new for old, new in zip(operation.outputs, repeated, strict=True)
                }
        return known.get(tensor.ref(), tensor)

    def _operations(
        self, tensor: tf.Tensor, known: dict[Any, tf.Tensor]
    ) -> tuple[dict[str, tf.Operation], tf.Operation | None]:
        """Return what to repeat for the whole share, and what cannot be, if there is any."""
        waiting, found = [tensor], dict[str, tf.Operation]()
        while waiting:
            latest = waiting.pop()
            operation = latest.op
            if latest.ref() in known or operation.name in found:
                continue
            if (
                latest.graph is not tf.compat.v1.get_default_graph()
                or private_api.is_stateful(operation)
                or private_api.calls_functions(operation)
            ):
                return found, operation
            if operation.type == "Shape" and not self._have_own_lengths:
                of = operation.inputs[0]
                _, obstacle = self._operations(of, known)
                if obstacle is not None and of.shape.rank:  # of outputs: they have the rows' number
                    start, stop = self._range(None)
                    rows = tf.cast(tf.stack([self._samples, stop - start]), latest.dtype)
                    first = latest[:1] * rows[0] // tf.maximum(rows[1], 1)
                    is_fixed = of.shape[0] is not None
                    known[latest.ref()] = latest if is_fixed else tf.concat([first, latest[1:]], 0)
                    continue
            found[operation.name] = operation
            waiting.extend(operation.inputs)
        return found, None

    @property
    def _have_own_lengths(self) -> bool:
        """Whether samples may have different numbers of values."""
        leaves = tf.nest.flatten(self._rows)
        return any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves)

    def size_of_share(self, size: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        """Return how many values the share has, given a part's number, alike for all samples."""
        if self._have_own_lengths:
            self.refuse(
                "a loss is a mean over values whose number differs between samples",
                'Pad the samples and mask them, or use reduction="sum".',
            )
        own, all_samples = tf.cast(samples, size.dtype), tf.cast(self._samples, size.dtype)
        return tf.math.divide_no_nan(size * all_samples, own)

    def add_up(
        self,
        first: Nest,
        join_of: Callable[[tf.Tensor], Join],
        compute: Callable[[tf.Tensor], Nest],
    ) -> Nest:
        """Join what the first part adds to sums over replicas, and `compute`'s of the others."""
        # Slices of tables are put one after the other, as with replicas, and so are
        # outputs.
        leaves = tf.nest.flatten(first)
        joins = [None if each is None else _join(each, join_of) for each in leaves]

        def body(number: tf.Tensor, sums: list[Nest]) -> list[Nest]:
            own = tf.nest.flatten(compute(number))
            if [type(each) for each in own] != [type(each) for each in leaves]:
                self.refuse(
                    "its parts do not change the same state",
                    "Let the layers and metrics of your own do the same in every call.",
                )
            joined = [
                sums_so_far if join is None else join(sums_so_far, _parts_of(each))
                for join, sums_so_far, each in zip(joins, sums, own, strict=True)
            ]
            with tf.device("CPU:0"):
                return [number + 1, joined]

        def goes_on(number: tf.Tensor, _: list[Nest]) -> tf.Tensor:
            with tf.device("CPU:0"):
                return number < self._count

        start = [_start_of(each) for each in leaves]
        # Otherwise the second part would begin beside the first one, in twice the memory.
        with tf.control_dependencies(tf.nest.flatten(start)), tf.device("CPU:0"):
            one = tf.identity(tf.constant(1))
        shapes = [_shapes(each) for each in leaves]
        _, sums = tf.while_loop(
            goes_on, body, [one, start], [one.shape, shapes], parallel_iterations=1
        )
        made = [_made_of(*each) for each in zip(leaves, sums, strict=True)]
        return tf.nest.pack_sequence_as(first, made)

    def _range(self, number: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device("CPU:0"):
            count = tf.cast(self._count, self._samples.dtype)
            first = tf.zeros_like(count) if number is None else tf.cast(number, count.dtype)
            return first * self._samples // count, (first + 1) * self._samples // count


def _parts_of(value: _OfPart) -> tuple[tf.Tensor, ...]:
    if value is None:
        return ()
    if isinstance(value, Appended):
        return (value.rows,)
    return (value.values, value.indices) if isinstance(value, tf.IndexedSlices) else (value,)


def _start_of(value: _OfPart) -> tuple[tf.Tensor, ...]:
    if not isinstance(value, Appended):
        return _parts_of(value)
    # A list copies each row once, when it ends.
    empty = tf.raw_ops.EmptyTensorList(
        element_shape=-1, max_num_elements=-1, element_dtype=value.rows.dtype
    )
    return (_push(empty, value.rows),)


def _push(rows: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.TensorListPushBack(input_handle=rows, tensor=own)


def _shapes(value: _OfPart) -> tuple[tf.TensorShape, ...]:
    if isinstance(value, tf.IndexedSlices):
        return tf.TensorShape([None, *value.values.shape[1:]]), tf.TensorShape([None])
    if isinstance(value, Appended):
        return (tf.TensorShape([]),)
    return () if value is None else (value.shape,)


def _join(
    first: tf.Tensor | tf.IndexedSlices | Appended, join_of: Callable[[tf.Tensor], Join]
) -> Callable[[Nest, Nest], Nest]:
    if isinstance(first, Appended):
        return lambda sums, own: (_push(sums[0], own[0]),)
    if isinstance(first, tf.IndexedSlices):
        return lambda sums, own: tuple(
            tf.concat(pair, axis=0) for pair in zip(sums, own, strict=True)
        )
    join = join_of(first)

    def joined(sums: tuple[tf.Tensor], own: tuple[tf.Tensor]) -> tuple[tf.Tensor]:
        result = join(sums[0], own[0])
        result.set_shape(first.shape)
        return (result,)

    return joined


def _made_of(first: _OfPart, parts: tuple[tf.Tensor, ...]) -> tf.Tensor | tf.IndexedSlices | None:
    if isinstance(first, Appended):
        rows, _ = tf.raw_ops.TensorListConcatV2(
            input_handle=parts[0],
            element_shape=-1,
            leading_dims=tf.constant([], tf.int64),
            element_dtype=first.rows.dtype,
        )
        if first.rows.shape.rank:
            rows.set_shape([None, *first.rows.shape[1:]])
        return rows
    if isinstance(first, tf.IndexedSlices):
        return tf.IndexedSlices(*parts, dense_shape=first.dense_shape)
    return parts[0] if parts else None
