"""When each pass of a step begins and ends: measured, or made as long as on emulated devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.planning.pipeline import Event, PipelinePlan, Timeline
from keras_het.planning.pipeline.plan import Stage, stage_order
from keras_het.planning.shares import FloatArray
from keras_het.strategy.measure.emulated_device import EmulatedDevice
from keras_het.strategy.measure.phase_times import PhaseTimes
from keras_het.strategy.measure.step_clock import time_when_ready
from keras_het.strategy.pipeline.edges import Place
from keras_het.strategy.pipeline.micro_batches import MicroBatches

_HOST = "CPU:0"


class Pass(NamedTuple):
    """A pass of a plan."""

    stage: int
    kind: str
    micro_batch: int


class PassClock:
    """Reads the clock in one step's graph, for the passes of this process."""

    def __init__(self, inputs: Sequence[tf.Tensor]) -> None:
        with tf.device(_HOST):
            self.step_begin = time_when_ready(inputs, False)
        with tf.control_dependencies([self.step_begin]):
            self.inputs = [tf.identity(value) for value in inputs]
        self._begins: dict[Pass, tf.Tensor] = {}
        self.times: dict[Pass, tuple[tf.Tensor, tf.Tensor]] = {}

    def begin(
        self, which: Pass, device: str, taken: Sequence[tf.Tensor], after: Sequence[tf.Operation]
    ) -> list[tf.Operation]:
        """Note when a pass can begin; the pass must come after the operations that it returns."""
        with tf.control_dependencies(list(after)):
            begin = time_when_ready([self.step_begin, *taken], "CPU" not in device)
        self._begins[which] = begin
        return [begin.op]

    def end(self, which: Pass, device: str, made: Sequence[tf.Tensor]) -> tf.Operation:
        """Note when a pass has ended; its device's next one must come after what it returns."""
        end = time_when_ready(made, "CPU" not in device)
        self.times[which] = self._begins.pop(which), end
        return end.op


# They travel with the sum of the step after, as `PhaseTimes` does, counted from the step's begin on
# the process's own clock.
class PassTimes:
    """The passes of the latest step, and where the time of each device went."""

    def __init__(
        self, plan: PipelinePlan, places: Sequence[Place], process: int, phases: PhaseTimes
    ) -> None:
        self.phases = phases
        phases.stages = len(plan.stages)
        self._device_of: dict[Pass, int] = {}
        for number, stage in enumerate(plan.stages):
            for replica, device in enumerate(stage.devices):
                for each in stage_order(plan.stages, number, replica, plan.schedule):
                    self._device_of[Pass(number, *each)] = device
        self._slots = {each: slot for slot, each in enumerate(self._device_of)}
        self._on_accelerator = any("CPU" not in p.device for p in places if p.process == process)
        self._own = [i for i, place in enumerate(places) if place.process == process]
        self._process = process
        self._lengths = 2 * len(self._slots)  # after the passes: of each process's step
        self._size = self._lengths + 1 + max(place.process for place in places)
        with tf.device(_HOST):
            # the passes of this process, and of all processes, after the number of the step
            self._latest_own = tf.Variable(tf.zeros([self._size], tf.float64), trainable=False)
            self._latest = tf.Variable(
                tf.fill([1 + self._size], tf.constant(-1.0, tf.float64)), trainable=False
            )

    def contribution(self) -> tf.Tensor:
        """Return what this process adds to the step's sum, float64 [K]; in the graph."""
        with tf.device(_HOST):
            parts = [self.phases.contribution(d, i) for i, d in enumerate(self._own)]
            rows = tf.cast(tf.add_n(parts), tf.float64)
            return tf.concat([rows, self._latest_own.value()], 0)

    def record(self, summed: tf.Tensor) -> None:
        with tf.device(_HOST):
            step = tf.cast(self.phases.latest_step(), tf.float64)
            rows, passes = summed[: -self._size], summed[-self._size :]
            self._latest.assign(tf.concat([step[None], passes], 0), read_value=False)
            self.phases.record(tf.cast(rows, tf.float32))

    def finish_step(
        self, clock: PassClock, results: Sequence[tf.Tensor], batches: MicroBatches
    ) -> None:
        """Note this process's passes when the step's sum is there; in the graph."""
        # few operations for all passes together: each would cost as much as reading the clock
        done, owners = list(clock.times), [self._device_of[each] for each in clock.times]
        ends = [end for _, end in clock.times.values()]
        with tf.device(_HOST):
            step_end = time_when_ready([*results, *ends], self._on_accelerator)
            length = step_end - clock.step_begin
            # a process may have no pass
            flat = [clock.step_begin, *(time for pair in clock.times.values() for time in pair)]
            times = tf.reshape(tf.stack(flat)[1:] - clock.step_begin, [len(done), 2])
            seconds = times[:, 1] - times[:, 0]
            sizes = batches.sizes()
            for position, device in enumerate(self._own):
                mine = np.array([owner == device for owner in owners], np.float64)
                taken = np.zeros(batches.count)
                for each, owner in zip(done, owners, strict=True):
                    taken[each.micro_batch] += owner == device and each.kind == "forward"
                compute = tf.tensordot(mine, seconds, 1)
                share = tf.tensordot(taken, tf.cast(sizes, tf.float64), 1)
                wait = tf.maximum(length - compute, 0)
                self.phases.finish_step(position, share, compute, wait, step_end)
            slots = [2 * self._slots[each] + i for each in done for i in range(2)]
            slots.append(self._lengths + self._process)
            values = tf.concat([tf.reshape(times, [-1]), length[None]], 0)
            places = np.array(slots, np.int32)[:, None]
            own = tf.scatter_nd(places, values, [self._size])
            self._latest_own.assign(own, read_value=False)

    def latest(self) -> tuple[int, Timeline] | None:
        """Return the latest step that all know, numbered as in `PhaseTimes`; None before it."""
        values = self._latest.numpy()
        if values[0] < 0:
            return None
        step, times = int(values[0]), values[1:]
        events: list[list[Event]] = [[] for _ in range(self.phases.layout.num_replicas)]
        for which, slot in self._slots.items():
            begin, end = map(float, times[2 * slot : 2 * slot + 2])
            events[self._device_of[which]].append(
                Event(which.kind, which.micro_batch, which.stage, begin, end)
            )
        ordered = (tuple(sorted(of_device, key=lambda e: e.begin)) for of_device in events)
        return step, Timeline(tuple(ordered), float(np.max(times[self._lengths :])))


# A device's time for a sample is divided over the layer calls in proportion to measured times.
class Emulation:
    """How long the emulated devices of this process take for each pass."""

    def __init__(
        self,
        devices: dict[str, EmulatedDevice],
        forward_seconds: FloatArray,
        backward_seconds: FloatArray,
    ) -> None:
        self._devices = devices
        total = float(np.sum(forward_seconds) + np.sum(backward_seconds))
        self._forward, self._backward = forward_seconds / total, backward_seconds / total

    def seconds_per_sample(self, device: str) -> tuple[FloatArray, FloatArray]:
        """Return the times of each layer call for a sample, forward and backward, float64 [L]."""
        each = self._devices[device].time_model.seconds_per_sample
        return self._forward * each, self._backward * each

    def begin(
        self,
        device: str,
        stage: Stage,
        kind: str,
        rows: tf.Tensor,
        inputs: Sequence[tf.Tensor],
        after: Sequence[tf.Operation],
    ) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
        """Begin a pass, and return the function that gives its results back when it may end."""
        forward, backward = self.seconds_per_sample(device)
        own = slice(stage.first, stage.end)
        seconds = forward[own].sum() if kind == "forward" else backward[own].sum()
        if kind == "backward":
            seconds += forward[list(stage.recomputed)].sum()
        wanted = tf.cast(rows, tf.float64) * seconds
        with tf.control_dependencies([*inputs, *after]), tf.device("CPU:0"):
            start = private_api.run_independently(tf.timestamp())

        def end(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            with tf.control_dependencies(list(values)), tf.device("CPU:0"):
                wait = tf.numpy_function(_wait, [start, wanted], tf.float64)
                waited = private_api.run_independently(wait)
            with tf.control_dependencies([waited]):
                return [tf.identity(value) for value in values]

        return end


def _wait(start: np.ndarray, seconds: np.ndarray) -> np.float64:
    left = float(start) + float(seconds) - time.time()
    if left > 0:
        time.sleep(left)
    return np.float64(max(left, 0.0))
