"""A replica's compute time: from its batch to its gradients, without any wait for other replicas.

An all-reduce is a barrier: it makes the steps of all replicas equally long, so step times say
nothing about a device. The clock therefore stops before the collective. Collectives inside the
forward or backward pass (SyncBatchNormalization) are subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_het import private_api
from keras_het.value_types import Leaf, Nest, Summand


class StepClock:
    """Timer of one replica's part of one step, in the graph."""

    def __init__(self, inputs: Nest, on_accelerator: bool) -> None:
        self._on_accelerator = on_accelerator
        # elsewhere, values would have to be sent to the clock, and the batch would wait for that
        self._host = "CPU:0" if on_accelerator else ""
        self.start_time = self._time_when_ready(_tensors(inputs))
        self.inputs = _after(self.start_time, inputs)
        self._graph = getattr(self.start_time, "graph", None)
        self._waits: list[tf.Tensor] = []
        self.seconds: tf.Tensor | None = None
        """Compute time in seconds, float64 scalar; None before `stop`."""
        self._end_time: tf.Tensor | None = None
        self.end_of_collectives: tf.Tensor | None = None
        """When the latest collective ended, in seconds since the epoch, float64 scalar."""

    def stop(self, values: Sequence[Leaf]) -> None:
        """Record the time at which values are computed; if called again, the later time counts."""
        end = self._end_time = self._time_when_ready(_tensors(values))
        with tf.device(self._host):
            seconds = end - self.start_time
            if self._waits:
                seconds -= self.seconds_in_collectives()
            self.seconds = tf.maximum(seconds, 0)

    def seconds_since_stop(self, results: Sequence[Leaf]) -> tf.Tensor:
        """Time from `stop` until other values are available, float64 scalar."""
        return self._time_when_ready(_tensors(results)) - self._end_time

    def seconds_in_collectives(self) -> tf.Tensor:
        """Time that the step's collectives took so far, float64 scalar: waits and transfers."""
        with tf.device(self._host):
            return tf.add_n(self._waits) if self._waits else tf.constant(0, tf.float64)

    def collective_starts(self, values: Sequence[Summand]) -> tuple[tf.Tensor, list[Summand]]:
        """Record when a collective inside the step has the values that it sums."""
        started = self._time_when_ready(_tensors(values))
        return started, _after(started, list(values))

    def collective_ends(self, started: tf.Tensor, results: Sequence[Summand]) -> None:
        """Subtract the time of a collective inside the step from the compute time."""
        ended = self._time_when_ready(_tensors(results))
        # A collective in a branch or a loop belongs to another graph, unreadable from here.
        if getattr(ended, "graph", None) is self._graph:
            with tf.device(self._host):
                self._waits.append(ended - started)
            self.end_of_collectives = ended

    def _time_when_ready(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        return time_when_ready(values, self._on_accelerator)


def time_when_ready(values: Sequence[tf.Tensor], on_accelerator: bool) -> tf.Tensor:
    """Return the time at which values are available, float64 scalar; in the graph."""
    try:
        with tf.init_scope():
            tf.raw_ops.Timestamp()
    except tf.errors.FailedPreconditionError as error:
        raise RuntimeError(
            "Steps cannot be timed while op determinism is enabled: TensorFlow refuses to read the "
            "clock. Received: tf.config.experimental.enable_op_determinism() together "
            "with BatchBalancer, Telemetry, another callback that measures, or emulated devices. "
            "Leave one of them out."
        ) from error
    if on_accelerator:
        values = _on_host(values)
    with (
        tf.control_dependencies(list(values)),
        tf.device("CPU:0" if on_accelerator else ""),
    ):
        # Independently: otherwise a replica would have to delay its start until another one ends.
        return private_api.run_independently(tf.timestamp())


def _after(time: tf.Tensor, structure: Nest) -> Nest:
    """Return the same values, but not before `time` was read."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    with tf.control_dependencies([time]):
        gated = [tf.identity(leaf) if tf.is_tensor(leaf) else leaf for leaf in leaves]
    return tf.nest.pack_sequence_as(structure, gated, expand_composites=True)


def _tensors(structure: Nest) -> list[tf.Tensor]:
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]


def _on_host(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return one element of each device, copied to the host once all values are computed."""
    # A device computes in the order in which its host queues, and a copy waits for all before it.
    # One copy for each of hundreds of gradients would take longer than some steps.
    numbers = [value for value in values if value.dtype != tf.string]
    # Integers of a GPU may lie on the host, and times do.
    surely = [v for v in numbers if v.dtype.is_floating and "CPU" not in v.device.upper()]
    # A batch that is still on the host goes to the device that the step computes on.
    chosen = {value.device: value for value in surely}
    copies = []
    for device, value in chosen.items() or [("", value) for value in numbers[-1:]]:
        with tf.control_dependencies(list(values)), tf.device(device):
            last = tf.identity(value)
        with tf.device(device):
            first = tf.reshape(last, [-1])[:1]
        with tf.device("CPU:0"):
            copies.append(tf.identity(first))
    return copies or list(values)
