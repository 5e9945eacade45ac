"""This process among those of a pipeline, and what a step adds up over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_het.strategy.cluster.stop_request import StopRequest
from keras_het.strategy.pipeline.step.transport import CollectiveTransport
from keras_het.value_types import Summand

# numbers of messages that no edge of a plan reaches
_SPARSE, _OUTPUTS = 1_600_000, 2_000_000
_MOST_WEIGHTS = 2_000


class ProcessGroup:
    """The processes of a pipeline."""

    def __init__(
        self,
        transport: CollectiveTransport,
        sum_over_all: Callable[[tf.Tensor], tf.Tensor],
        stop_request: StopRequest,
    ) -> None:
        self.transport, self._sum_over_all = transport, sum_over_all
        self._stop_request = stop_request

    @property
    def process(self) -> int:
        """Number of this process."""
        return self.transport.process

    def sum_of_step(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up what a step has to, and tell all processes who wants to stop; in the graph."""
        wish = self._stop_request.contribution(True, tf.float64)
        *sums, wishes = self.sum_over_all([*values, wish])
        self._stop_request.record(wishes)
        return sums

    def sum_over_all(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up tensors of static shapes over all processes; in the graph."""
        result = list(values)
        for dtype in sorted({value.dtype for value in values}, key=lambda dtype: dtype.name):
            places = [i for i, value in enumerate(values) if value.dtype == dtype]
            with tf.device("CPU:0"):
                flat = tf.concat([tf.reshape(values[i], [-1]) for i in places], 0)
                sizes = [values[i].shape.num_elements() for i in places]
                parts = tf.split(self._sum_over_all(flat), sizes)
                for i, part in zip(places, parts, strict=True):
                    result[i] = tf.reshape(part, values[i].shape)
        return result

    def sum_gradients(
        self, gradients: list[Summand | None], group: Sequence[int], stage: int
    ) -> list[Summand | None]:
        """Add up the gradients of a stage over the processes that hold it; in the graph."""
        dense = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)]
        result = list(gradients)
        if dense:
            sums = self.transport.sum([gradients[i] for i in dense], group, stage, 0)
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
                self.transport.send(gradient.values, process, number),
                self.transport.send(gradient.indices, process, number + 1),
            ]
            rank, dtype = gradient.values.shape.rank, gradient.indices.dtype
            received = self.transport.receive(rank, gradient.values.dtype, process, number)
            rows = self.transport.receive(1, dtype, process, number + 1)
            with tf.control_dependencies(sends):
                values.append(tf.identity(received))
                indices.append(tf.identity(rows))
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), gradient.dense_shape)

    def share_outputs(
        self, outputs: list[tf.Tensor] | None, like: Sequence[tf.TensorSpec], source: int
    ) -> list[tf.Tensor]:
        """Give all processes the model's outputs; in the graph."""
        if outputs is None:
            return [
                self.transport.receive(spec.shape.rank, spec.dtype, source, _OUTPUTS + i)
                for i, spec in enumerate(like)
            ]
        sends = [
            self.transport.send(value, process, _OUTPUTS + i)
            for i, value in enumerate(outputs)
            for process in range(self.transport.processes)
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
