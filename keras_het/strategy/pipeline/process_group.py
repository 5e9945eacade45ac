"""The processes of a pipeline: tensors from one to another, and what a step adds up over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.keras_graphs_adapter import collective_ops
from keras_het.strategy.cluster.stop_request import StopRequest
from keras_het.value_types import Summand

_HOST = "CPU:0"
_GROUPS_OF_STAGES = 10_000
GROUPS = 20_000
"""How many groups of collectives the processes of a pipeline may use."""
_MOST_PROCESSES = 90
_MOST_TYPES = 10
_MOST_BUCKETS = 1024
_EXACT, _STEPS = 64, 32
# numbers of messages that no edge of a plan reaches
_SPARSE, _OUTPUTS = 1_600_000, 2_000_000
_MOST_WEIGHTS = 2_000


# By broadcasts in groups of two, which need not start in any order.
class ProcessGroup:
    """The processes of a pipeline."""

    def __init__(
        self,
        process: int,
        processes: int,
        first_group: int,
        sum_over_all: Callable[[tf.Tensor], tf.Tensor],
        stop_request: StopRequest,
    ) -> None:
        if processes > _MOST_PROCESSES:
            raise ValueError(
                f"A pipeline has at most {_MOST_PROCESSES} processes. Received: {processes}. Give "
                "each process several devices."
            )
        self.process, self.processes = process, processes
        self._first_group = first_group
        self._sum_over_all, self._stop_request = sum_over_all, stop_request

    def _pair(self, source: int, target: int) -> tf.Tensor:
        return tf.constant(self._first_group + _MOST_PROCESSES * source + target)

    def send(self, value: tf.Tensor, target: int, number: int) -> tf.Operation:
        """Send a tensor to a process that calls `receive`; in the graph."""
        with tf.device(_HOST):
            value = tf.identity(tf.cast(value, _on_wire(value.dtype)))
            shape, pair = tf.shape(value), self._pair(self.process, target)
            size, bucket = _bucket(tf.reduce_prod(shape))
            flat = tf.pad(tf.reshape(value, [-1]), [[0, size - tf.reduce_prod(shape)]])
            first = _MOST_BUCKETS * number
            return tf.group(
                self._send(shape, pair, tf.constant(first)), self._send(flat, pair, first + bucket)
            )

    def _send(self, value: tf.Tensor, pair: tf.Tensor, instance: tf.Tensor) -> tf.Operation:
        sent = collective_ops.broadcast_send_v2(value, tf.constant(2), pair, instance)
        return private_api.run_independently(sent).op

    def receive(self, rank: int, dtype: tf.DType, source: int, number: int) -> tf.Tensor:
        with tf.device(_HOST):
            first, pair = _MOST_BUCKETS * number, self._pair(source, self.process)
            shape = self._receive([rank], tf.int32, pair, tf.constant(first))
            shape.set_shape([rank])
            size, bucket = _bucket(tf.reduce_prod(shape))
            flat = self._receive([size], _on_wire(dtype), pair, first + bucket)
            value = tf.reshape(flat[: tf.reduce_prod(shape)], shape)
            value.set_shape([None] * rank)
            return tf.cast(value, dtype)

    def _receive(
        self, shape: object, dtype: tf.DType, pair: tf.Tensor, instance: tf.Tensor
    ) -> tf.Tensor:
        received = collective_ops.broadcast_recv_v2(shape, dtype, tf.constant(2), pair, instance)
        return private_api.run_independently(received)

    def sum(
        self, values: list[tf.Tensor], group: Sequence[int], stage: int, number: int
    ) -> list[tf.Tensor]:
        def add(flat: tf.Tensor, place: int) -> tf.Tensor:
            return private_api.run_independently(
                collective_ops.all_reduce_v2(
                    flat,
                    tf.constant(len(group)),
                    tf.constant(self._first_group + _GROUPS_OF_STAGES + stage),
                    tf.constant(_MOST_TYPES * number + place),
                    communication_hint="ring",
                )
            )

        return _sum_by_type(values, add)

    def sum_of_step(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up what a step has to, and tell all processes who wants to stop; in the graph."""
        flag = self._stop_request.contribution(True, tf.float64)
        *sums, flags = self.sum_over_all([*values, flag])
        self._stop_request.record(flags)
        return sums

    def sum_over_all(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return _sum_by_type(values, lambda flat, _: self._sum_over_all(flat))

    def sum_gradients(
        self, gradients: list[Summand | None], group: Sequence[int], stage: int
    ) -> list[Summand | None]:
        dense = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)]
        result = list(gradients)
        if dense:
            sums = self.sum([gradients[i] for i in dense], group, stage, 0)
            result = [sums.pop(0) if i in dense else g for i, g in enumerate(gradients)]
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                number = _SPARSE + _MOST_WEIGHTS * stage + 2 * i
                result[i] = self._gather(gradient, group, number)
        return result

    def _gather(
        self, gradient: tf.IndexedSlices, group: Sequence[int], number: int
    ) -> tf.IndexedSlices:
        """Put the rows of all processes one after the other, in the order of the group."""
        values, indices = [], []
        for process in group:
            if process == self.process:
                values.append(gradient.values)
                indices.append(gradient.indices)
                continue
            sends = [
                self.send(gradient.values, process, number),
                self.send(gradient.indices, process, number + 1),
            ]
            rank, dtype = gradient.values.shape.rank, gradient.indices.dtype
            received = self.receive(rank, gradient.values.dtype, process, number)
            rows = self.receive(1, dtype, process, number + 1)
            with tf.control_dependencies(sends):
                values.append(tf.identity(received))
                indices.append(tf.identity(rows))
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), gradient.dense_shape)

    def share_outputs(
        self, outputs: list[tf.Tensor] | None, like: Sequence[tf.TensorSpec], source: int
    ) -> list[tf.Tensor]:
        if outputs is None:
            return [
                self.receive(spec.shape.rank, spec.dtype, source, _OUTPUTS + i)
                for i, spec in enumerate(like)
            ]
        sends = [
            self.send(value, process, _OUTPUTS + i)
            for i, value in enumerate(outputs)
            for process in range(self.processes)
            if process != self.process
        ]
        with tf.control_dependencies(sends):
            return [tf.identity(value) for value in outputs]

    def share_state(self, variables: Sequence[keras.Variable], source: int) -> None:
        """Give all processes the values that variables have on one; in the graph."""
        if not variables:
            return
        values = [tf.convert_to_tensor(variable.value) for variable in variables]
        wire = [tf.cast(v, tf.int32) if v.dtype == tf.bool else v for v in values]
        if self.process != source:
            wire = [tf.zeros_like(value) for value in wire]
        for variable, value in zip(variables, self.sum_over_all(wire), strict=True):
            variable.assign(tf.cast(value, variable.dtype))


def _sum_by_type(
    values: Sequence[tf.Tensor], add: Callable[[tf.Tensor, int], tf.Tensor]
) -> list[tf.Tensor]:
    """Add up tensors of static shapes: `add` gets all of a type as one vector, and its number."""
    result = list(values)
    dtypes = sorted({value.dtype for value in values}, key=lambda dtype: dtype.name)
    for place, dtype in enumerate(dtypes):
        places = [i for i, value in enumerate(values) if value.dtype == dtype]
        with tf.device(_HOST):
            total = add(tf.concat([tf.reshape(values[i], [-1]) for i in places], 0), place)
            sizes = [values[i].shape.num_elements() for i in places]
            for i, part in zip(places, tf.split(total, sizes), strict=True):
                result[i] = tf.reshape(part, values[i].shape)
    return result


def _on_wire(dtype: tf.DType) -> tf.DType:
    return tf.int32 if dtype == tf.bool else dtype


def _bucket(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Round a number of elements up by at most a 32nd."""
    # TensorFlow remembers an instance of a collective for each shape: not each length can have one.
    size = tf.maximum(size, 1)
    exponent = tf.reduce_sum(tf.cast(size >= tf.constant([2**i for i in range(1, 31)]), tf.int32))
    step = tf.maximum(tf.bitwise.left_shift(1, tf.maximum(exponent, 5) - 5), 1)
    steps = (size + step - 1) // step
    bucket = _EXACT + 1 + (exponent - 6) * (_STEPS + 1) + steps - _STEPS
    return tf.where(size < _EXACT, size, steps * step), tf.where(size < _EXACT, size, bucket)
