"""A replica's compute time: from its batch to its gradients, without any wait for other replicas.

An all-reduce is a barrier: it makes the steps of all replicas equally long, so step times say
nothing about a device. The clock therefore stops before the collective. Collectives inside the
forward or backward pass (SyncBatchNormalization) are subtracted.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.measure import emulated_device
from keras_het.strategy.measure.compute_times import ComputeTimes
from keras_het.value_types import Leaf, Nest, Summand

if TYPE_CHECKING:
    from keras_het.strategy.exact.step import StepSpec


class StepClock:
    """Timer of one replica's part of one step, in the graph."""

    def __init__(self, inputs: Nest, on_accelerator: bool, queue: int | None = None) -> None:
        self._on_accelerator, self._queue = on_accelerator, queue
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
        ready = self._time_when_ready(_tensors(results))
        with tf.device(self._host):
            return ready - self._end_time

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
        if self._queue is not None:
            values = [emulated_device.copied_to_host(self._queue, values)]
        return time_when_ready(values, self._on_accelerator)


# An asynchronous emulated device needs no clock.
class Measurement:
    """Clock of a step, and what it tells all workers with the sums of the step."""

    def __init__(self, spec: StepSpec, times: ComputeTimes, data: Nest) -> None:
        self._spec, self._times = spec, times
        is_asynchronous = spec.emulated_device is not None and spec.emulated_device.asynchronous
        self._queue = spec.replica_id if is_asynchronous else None
        self.clock: StepClock | None = None
        self.rows: Nest = data
        """The batch, not before the clock has started."""
        if spec.is_timed or not is_asynchronous:
            self.clock = StepClock(data, spec.is_on_gpu, self._queue)
            self.rows, self._start_time = self.clock.inputs, self.clock.start_time
        else:
            self._start_time = time_when_ready(_tensors(data), on_accelerator=False)
        self._waited: tf.Tensor | None = None
        # Squared norms of this replica's own mean gradients and of the global ones, on request.
        self.own_squares: list[tf.Tensor] = []
        self.global_squares: list[tf.Tensor] = []
        self._sends_times = self._sends_phases = False

    def held(self, values: Sequence[Leaf]) -> list[Leaf]:
        """Return values when the emulated device would have computed them, or queued their step."""
        spec, is_queued = self._spec, self._queue is not None and self._waited is not None
        if spec.emulated_device is None or is_queued:
            return list(values)
        held, self._waited = emulated_device.held(
            spec.emulated_device, spec.replica_id, spec.samples, self._start_time, values
        )
        return held

    def gradients_are_computed(self, gradients: Sequence[Leaf]) -> list[Leaf]:
        """Stop the clock, and return the gradients when an emulated device has computed them."""
        present = [gradient for gradient in gradients if gradient is not None]
        held = iter(self.held(present))
        if self.clock is not None:
            self.clock.stop(present if self._waited is None else [self._waited])
        return [None if gradient is None else next(held) for gradient in gradients]

    @property
    def measures_squares(self) -> bool:
        return self._spec.is_timed and self._times.is_measuring_gradients

    def summands(self) -> list[tf.Tensor]:
        """What this replica measured, to be summed over all; nothing without gradients."""
        spec, seconds = self._spec, self.clock.seconds if self.clock else None
        summands = []
        if self._queue is not None and self._waited is not None:
            busy = emulated_device.busy_until(self._queue, self._waited)
            summands.append(busy * tf.one_hot(spec.position, spec.num_replicas, dtype=tf.float64))
        if not spec.is_timed or seconds is None:
            return summands
        self._sends_times = self._times.is_measuring
        self._sends_phases = self._times.phases.is_measuring
        if self._sends_times:
            own = (spec.replica_id, spec.sizes, seconds, _total(self.own_squares))
            summands.append(self._times.contribution(*own))
        if self._sends_phases:
            phases = self._times.phases
            summands.append(phases.contribution(spec.replica_id, spec.local_position))
        return summands

    def record(self, sums: Sequence[tf.Tensor]) -> None:
        spec, clock, phases = self._spec, self.clock, self._times.phases
        is_first = spec.local_position == 0
        if self._queue is not None and self._waited is not None:
            busy, *sums = sums
            if self._spec.num_replicas > 1:
                emulated_device.meet(self._queue, tf.reduce_max(busy))
        if clock is None:
            return
        if self._sends_times and is_first:
            waited = clock.seconds_since_stop(sums[:1])
            self._times.record(spec.sizes, sums[0], waited, _total(self.global_squares))
        if self._sends_phases:
            if is_first:
                phases.record(sums[-1])
            phases.finish_step(
                spec.local_position,
                spec.samples,
                clock.seconds,
                clock.seconds_in_collectives(),
                clock.end_of_collectives,
            )


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


def _total(squares: Sequence[tf.Tensor]) -> tf.Tensor | None:
    return functools.reduce(operator.add, squares) if squares else None
